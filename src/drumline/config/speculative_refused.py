"""What people know from vLLM's speculative config and this release does not do, with a sentence.

A key or method that arrives leaves these tables. Whatever would let speculation change an answer
is refused for good.
"""

from __future__ import annotations

_LOSSY = "it accepts tokens the model would not have chosen; speculation changes no token here"
_INHERITED = "a drafter computes with the target's ops, numbers and cache format"
_SYNTHETIC = "acceptance is measured, never made up"

REFUSED_METHODS: dict[str, str] = {
    "ngram_gpu": "method ngram drafts on the host",
    "dspark": "not in this release; dflash drafts blocks in one pass",
    "mlp_speculator": "not in this release; medusa heads are",
    "peagle": "not in this release; eagle3 drafts step by step",
    "deepseek_mtp": "write mtp: the module's spelling is read from the checkpoint",
    "qwen3_next_mtp": "write mtp: the module's spelling is read from the checkpoint",
}

REFUSED_REJECTION: dict[str, str] = {
    "synthetic": _SYNTHETIC,
    "typical_acceptance_sampler": _LOSSY,
    "strict": "write standard for rejection sampling, or match for equal tokens",
    "probabilistic": "write standard for rejection sampling, or match for equal tokens",
}

REFUSED_KEYS: dict[str, str] = {
    "code_revision": "code from a checkpoint is never run",
    "quantization": "draft weights run as their checkpoint stores them",
    "draft_load_config": "the format is recognised from the files",
    "tensor_parallel_size": "write draft_tensor_parallel_size",
    "enforce_eager": "there are no graphs to switch off",
    "moe_backend": _INHERITED,
    "attention_backend": _INHERITED,
    "kv_cache_dtype": _INHERITED,
    "parallel_drafting": "the method says it: dflash and medusa draft in one pass",
    "speculative_token_tree": "drafts are chains",
    "synthetic_acceptance_rates": _SYNTHETIC,
    "synthetic_acceptance_length": _SYNTHETIC,
    "enable_adaptive_verification": 'write "draft_length": "adaptive"',
    "disable_by_batch_size": "write num_speculative_tokens_per_batch_size with a K of 0",
    "disable_eagle_block_drop": "no block is dropped: one position is computed again",
    "use_local_argmax_reduction": "this release runs one rank",
    "index_share_for_mtp_iteration": "not in this release",
    "dspark_draft_topk": "not in this release",
    "disable_logprobs": "log-probabilities are always those of the model",
    "disable_mqa_scorer": "there is one way of scoring drafts",
    "acceptance_method": "write rejection_sample_method",
    "draft_token_acceptor": "write rejection_sample_method",
    "posterior_threshold": _LOSSY,
    "posterior_alpha": _LOSSY,
    "typical_acceptance_sampler_posterior_threshold": _LOSSY,
    "typical_acceptance_sampler_posterior_alpha": _LOSSY,
    "accept_tolerance": _LOSSY,
    "verifier_accept_k": _LOSSY,
}
