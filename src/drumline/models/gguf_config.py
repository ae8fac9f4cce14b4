"""ArchitectureConfig from the metadata of a GGUF file (keys as the specification lists them)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from drumline.models.config import (
    ArchitectureConfig,
    Fields,
    RopeScaling,
    read_sampling,
    yarn_attention_factor,
)
from drumline.models.registry import GGUF_ARCHITECTURES

_SAMPLING = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}

# Keys of an architecture that change the computation, with the values under which they do not.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (),
    "attn_logit_softcapping": (),
    "embedding_scale": (1,),
    "expert_count": (0,),
    "final_logit_softcapping": (),
    "logit_scale": (1,),
    "pooling_type": (0,),
    "residual_scale": (1,),
    "rope.dimension_sections": (),
    "rope.scale_linear": (1,),
    "rope.scaling.alpha": (),
    "rope.scaling.yarn_ext_factor": (1, -1),
    "rope.scaling.yarn_log_multiplier": (0,),
    "tensor_data_layout": ("reference",),
}

_HARMLESS_PREFIXES = ("general.", "tokenizer.", "quantize.", "GGUF.", "split.")


def read_gguf_config(
    path: Path,
    metadata: dict[str, Any],
    tensor_names: Iterable[str],
    rope_factors: tuple[float, ...] = (),
) -> ArchitectureConfig:
    """Reads metadata; which tensors are there decides tying and biases.

    ``rope_factors`` are the values of ``rope_freqs.weight`` where a file has it. CheckpointError
    names the key that is missing or unsupported.
    """
    names = set(tensor_names)
    fields = Fields(path, metadata)
    arch = fields.text("general.architecture")
    if arch not in GGUF_ARCHITECTURES:
        known = ", ".join(sorted(GGUF_ARCHITECTURES))
        raise fields.fail("general.architecture", f"not supported; supported are {known}")
    if fields.integer("split.count", 1, minimum=0) > 1:
        raise fields.fail("split.count", "GGUF files in several parts are not supported")
    key = f"{arch}.".__add__
    for name, neutral in _NEUTRAL.items():
        value = fields.get(key(name))
        if value is not None and value not in neutral:
            raise fields.fail(key(name), "not supported")

    heads = _same_for_all(fields, key("attention.head_count"))
    kv_heads = _same_for_all(fields, key("attention.head_count_kv"), heads)
    hidden = fields.integer(key("embedding_length"))
    head_dim = fields.integer(key("attention.key_length"), hidden // heads)
    if fields.integer(key("attention.value_length"), head_dim) != head_dim:
        raise fields.fail(key("attention.value_length"), f"must equal the key length {head_dim}")
    rotary_dim = fields.integer(key("rope.dimension_count"), head_dim)
    if arch == "llama" and rotary_dim != head_dim:
        raise fields.fail(key("rope.dimension_count"), f"must equal the head dimension {head_dim}")
    context = fields.integer(key("context_length"))
    tokens = fields.get("tokenizer.ggml.tokens", [])
    token_count = len(tokens) if isinstance(tokens, list) else 0
    eos = [
        fields.optional_integer(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")
    ]
    config = ArchitectureConfig(
        model_type=GGUF_ARCHITECTURES[arch],
        hidden_size=hidden,
        intermediate_size=_same_for_all(fields, key("feed_forward_length")),
        num_hidden_layers=fields.integer(key("block_count")),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        vocab_size=fields.integer(key("vocab_size"), token_count or None),
        max_position_embeddings=context,
        rms_norm_eps=fields.number(key("attention.layer_norm_rms_epsilon")),
        rope_theta=fields.number(key("rope.freq_base"), 10000.0, above=True),
        rope_scaling=_scaling(fields, arch, context, rope_factors),
        tie_word_embeddings="output.weight" not in names,
        attention_bias="blk.0.attn_q.bias" in names,
        mlp_bias="blk.0.ffn_up.bias" in names,
        sliding_window=fields.optional_integer(key("attention.sliding_window"), minimum=0) or None,
        bos_token_id=fields.optional_integer("tokenizer.ggml.bos_token_id"),
        pad_token_id=fields.optional_integer("tokenizer.ggml.padding_token_id"),
        eos_token_ids=tuple(dict.fromkeys(token for token in eos if token is not None)),
        sampling=read_sampling(fields, _SAMPLING),
    )
    ignored = tuple(
        name for name in fields.unread(frozenset()) if not name.startswith(_HARMLESS_PREFIXES)
    )
    return replace(config, ignored_keys=ignored).check(path)


def _same_for_all(fields: Fields, key: str, default: int | None = None) -> int:
    """An integer, or a list with the same one for each layer."""
    value = fields.get(key)
    if isinstance(value, list):
        if not value or any(v != value[0] for v in value):
            raise fields.fail(key, "layers that differ are not supported")
        fields = Fields(fields.path, {key: value[0]})
    return fields.integer(key, default)


def _scaling(
    fields: Fields, arch: str, context: int, rope_factors: tuple[float, ...]
) -> RopeScaling | None:
    prefix = f"{arch}.rope.scaling."
    kind = fields.text(prefix + "type", "none")
    factor = fields.optional_number(prefix + "factor")
    original = fields.integer(prefix + "original_context_length", context)
    attention = fields.number(prefix + "attn_factor", 1.0, above=True)
    attention *= fields.number(prefix + "yarn_attn_factor", 1.0, above=True)
    beta_fast = fields.number(prefix + "yarn_beta_fast", 32.0, above=True)
    beta_slow = fields.number(prefix + "yarn_beta_slow", 1.0, above=True)
    fields.get(prefix + "finetuned")
    if rope_factors:
        if kind != "none":
            raise fields.fail(prefix + "type", "not supported together with rope_freqs.weight")
        return RopeScaling("factors", 1.0, original, factors=rope_factors)
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise fields.fail(prefix + "type", "not supported; supported are none, linear, yarn")
    if not factor:
        raise fields.fail(prefix + "factor", "expected a number above 0")
    if kind == "linear":
        return RopeScaling(kind, factor, original)
    return RopeScaling(
        kind,
        factor,
        original,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        attention_factor=attention * yarn_attention_factor(factor),
    )
