"""Who may draft, by name, and which keys mean something to whom. Knows no value of a key."""

from __future__ import annotations

AUTO = "auto"  # whoever suits the target and the device; `resolve` settles it
METHODS = (
    AUTO,
    "ngram",
    "suffix",
    "draft_model",
    "eagle",
    "eagle3",
    "mtp",
    "dflash",
    "medusa",
    "extract_hidden_states",
    "custom_class",
)
HOST_METHODS = ("ngram", "suffix")  # read tokens and run no model
NEEDS_MODEL = ("draft_model", "eagle", "dflash", "medusa", "custom_class")
WEIGHTED = ("draft_model", "eagle", "eagle3", "mtp", "dflash", "medusa")
MAY_HAVE_MODEL = (*NEEDS_MODEL, "eagle3", "mtp")

# Keys that mean something to some methods only.
KEY_METHODS: dict[str, tuple[str, ...]] = {
    "model": MAY_HAVE_MODEL,
    "revision": WEIGHTED,
    "draft_tensor_parallel_size": (AUTO, *WEIGHTED),
    "prompt_lookup_min": (AUTO, "ngram", *WEIGHTED),
    "prompt_lookup_max": (AUTO, "ngram", *WEIGHTED),
    "lookup_miss_tokens": (AUTO, *WEIGHTED),
    "suffix_decoding_max_tree_depth": ("suffix",),
    "suffix_decoding_max_cached_requests": ("suffix",),
    "suffix_decoding_max_spec_factor": ("suffix",),
    "suffix_decoding_min_token_prob": ("suffix",),
    "use_heterogeneous_vocab": ("draft_model",),
    "hidden_states_dir": ("extract_hidden_states",),
    "hidden_states_taps": ("extract_hidden_states",),
}
