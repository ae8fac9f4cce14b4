"""From a resolved configuration and an opened checkpoint to a worker that is warm."""

from __future__ import annotations

import time
from functools import partial

import torch
from numpy.typing import ArrayLike

from drumline.config import Resolved
from drumline.config.speculative_methods import HOST_METHODS
from drumline.core.errors import ConfigError
from drumline.core.ledger import Ledger
from drumline.drafting.base import DrafterContext, PassLedger, TargetModel
from drumline.drafting.registry import load_drafter
from drumline.models.checkpoint import Checkpoint
from drumline.models.registry import model_module
from drumline.models.sharding import WHOLE, ShardedTensors, Share, shard_config
from drumline.ops import load_ops
from drumline.ops.base import Ops
from drumline.ops.sharded import ShardedOps
from drumline.parallel.groups import RankComms
from drumline.sampling.accept import Verifier
from drumline.sampling.draft import DraftSampler
from drumline.sampling.sampler import Sampler
from drumline.worker.inputs import build_inputs
from drumline.worker.script import ScriptedPasses, StepScript
from drumline.worker.sharing import SharedDraftSampler, SharedVerifier
from drumline.worker.speculator import Speculator
from drumline.worker.worker import Worker

WARMUP_TOKENS = 32
WARMUP_PASSES = 3

# Whose errors cost drafts and nothing else: they share no pass with anybody.
CONTAINED = (*HOST_METHODS, "custom_class")

# Which the first rank of a replica runs alone: the others have no part in them.
LEADERS_OWN = (*HOST_METHODS, "extract_hidden_states")


def load_worker(
    resolved: Resolved,
    checkpoint: Checkpoint,
    comms: RankComms | None = None,
    ledger: Ledger | None = None,
) -> Worker:
    """Loads weights and allocates the caches, ``resolved.kv_cache_bytes`` of them in all.

    ``comms``: the groups of this rank, if there are others; what is issued in them goes to
    ``ledger``, and the worker has a script to be surveyed."""
    torch.set_num_threads(resolved.threads)
    backend = load_ops(resolved.ops_backend, resolved.device, resolved.threads)
    mode = resolved.config.model.logprobs_mode
    sampler = make_sampler(backend, checkpoint.config.vocab_size, mode, resolved.threads)
    ops: Ops = backend
    config, tensors = checkpoint.config, checkpoint.tensors
    script = None
    if comms is not None and ledger is not None and shares_passes(comms):
        script = StepScript(ledger, comms.tp)
        ops = ShardedOps(backend, comms.tp, comms.ep)
        share = Share(comms.tp.rank, comms.tp.size, spread_experts=comms.ep is not None)
        config = shard_config(checkpoint.config, checkpoint.tensors, share)
        tensors = ShardedTensors(checkpoint.config, checkpoint.tensors, share)
    with torch.inference_mode():
        module = model_module(checkpoint.config.model_type)
        model: TargetModel = module.Model(config, tensors, ops, resolved.max_model_len)
        spec = model.kv_spec
        cache = ops.allocate_kv(
            spec.layers,
            resolved.num_kv_blocks,
            resolved.block_size,
            spec.kv_heads,
            spec.head_dim,
            resolved.kv_cache_dtype,
        )
        method = "match"
        speculator = None
        if resolved.speculation is not None:
            method = resolved.speculation.rejection_sample_method
            if script is None or script.leads or resolved.speculation.method not in LEADERS_OWN:
                speculator = load_speculator(resolved, checkpoint, model, ops, sampler, script)
    verifier = Verifier(sampler, method)
    if script is not None and script.tp.size > 1:
        verifier = SharedVerifier(sampler, method, script)
    # After an operation that they share, torch's threads spin for milliseconds for the next one, on
    # the cores that native operations want (16 requests: a fifth of a step). Attention over latents
    # is torch's own and wants them.
    alone = backend.name == "native" and checkpoint.config.latent is None
    threads = 1 if alone else resolved.threads
    return Worker(model, ops, cache, verifier, speculator, script, threads)


def shares_passes(comms: RankComms) -> bool:
    """Whether other ranks take part in this one's passes."""
    return comms.tp.size > 1 or comms.ep is not None


def make_sampler(ops: Ops, vocab_size: int, mode: str, threads: int) -> Sampler:
    """What turns scores and random bits into tokens: compiled where the operations are."""
    if ops.name != "native":
        return Sampler(vocab_size, mode)
    from drumline.ops.native import NativeOps  # only where the native module is there
    from drumline.sampling.native_draw import NativeDrawer
    from drumline.sampling.native_match import NativeMatcher

    assert isinstance(ops, NativeOps)
    drawer = NativeDrawer(ops.path, threads)
    return Sampler(
        vocab_size, mode, drawer=drawer, make_matcher=partial(NativeMatcher, ops.path, threads)
    )


def load_speculator(
    resolved: Resolved,
    checkpoint: Checkpoint,
    model: TargetModel,
    ops: Ops,
    sampler: Sampler,
    script: StepScript | None = None,
) -> Speculator:
    """The drafter that the configuration asks for. Raises `UsageError` if it cannot be had."""
    settings = resolved.speculation
    assert settings is not None
    vocab = checkpoint.config.vocab_size

    def make_draft_sampler(
        sharpening: float = 1.0, token_table: ArrayLike | None = None
    ) -> DraftSampler:
        # One history for drafts and target: it is the same, but for its end.
        method = settings.draft_sample_method
        if script is not None and script.tp.size > 1:
            return SharedDraftSampler(vocab, method, sharpening, token_table, sampler, script)
        return DraftSampler(
            vocab,
            method,
            sharpening,
            token_table,
            sampler.state,
            sampler.drawer,
            sampler.make_matcher,
        )

    ledger = ScriptedPasses(script=script) if script is not None else PassLedger()
    drafter = load_drafter(
        DrafterContext(
            speculative=settings,
            checkpoint=checkpoint,
            target=model,
            ops=ops,
            max_model_len=resolved.max_model_len,
            num_kv_blocks=resolved.num_kv_blocks,
            block_size=resolved.block_size,
            kv_cache_dtype=resolved.kv_cache_dtype,
            ledger=ledger,
            make_draft_sampler=make_draft_sampler,
            share=_drafter_share(ops, settings.draft_tensor_parallel_size),
        )
    )
    depth = checkpoint.config.num_hidden_layers
    for tap in drafter.taps:
        if not 0 <= tap <= depth:
            problem = f"the drafter reads tap {tap}; the target has taps 0..{depth}"
            raise ConfigError("speculative_config", settings.method, problem)
    return Speculator(
        drafter, ledger, vocab, settings.max_model_len, contained=settings.method in CONTAINED
    )


def _drafter_share(ops: Ops, shards: int) -> Share:
    """All of a drafter's layers, or this rank's part where the target's ranks share them."""
    if not isinstance(ops, ShardedOps):
        return WHOLE
    spread = ops.ep is not None
    if shards == 1:
        return Share(spread_experts=spread)
    assert shards == ops.tp.size, "resolve allows 1 and the target's"
    return Share(ops.tp.rank, shards, spread)


def warm_up(worker: Worker, tokens: int = WARMUP_TOKENS) -> float:
    """Runs passes that write nothing, so that no request pays for first calls; returns the seconds
    that one token more takes. The quickest of a few passes counts: what is slower waited for other
    ranks or other programs, and a deadline must not grow with that."""
    with torch.inference_mode():
        single, many = (
            min(_masked_pass(worker, count) for _ in range(WARMUP_PASSES)) for count in (1, tokens)
        )
    return max((many - single) / (tokens - 1), many / (2 * tokens))


def _masked_pass(worker: Worker, count: int) -> float:
    """Seconds of a target pass of padding, with logits of one token."""
    inputs = build_inputs((), worker.cache.block_size, worker.ops.device, count)
    began = time.monotonic()
    output = worker.model.forward(inputs.ids, inputs.batch, worker.cache)
    worker.model.compute_logits(output.hidden[-1:])
    return time.monotonic() - began
