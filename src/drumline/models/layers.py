"""Small pieces that every architecture shares: values that models return, and shape tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from msgspec import Struct, field
from torch import Tensor

from drumline.core.errors import ConfigError
from drumline.models.config import ArchitectureConfig
from drumline.ops.base import FeedForwardWeights, Linear, Ops
from drumline.ops.weights import WeightTensor

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class KVSpec:
    """What a model keeps per token: `layers` times one key and one value of these sizes."""

    layers: int
    kv_heads: int
    head_dim: int


class ModelOutput(Struct, frozen=True):
    """``hidden``: the residual stream after the last layer, before the final norm,
    ``[tokens, hidden]``. ``taps[k]``: the residual stream after k layers (0 = embeddings).
    ``logits`` ``[rows, vocab]``: of the tokens that were asked for; None if none were."""

    hidden: Tensor
    taps: Mapping[int, Tensor] = field(default_factory=dict)
    logits: Tensor | None = None


def check_length(config: ArchitectureConfig, max_model_len: int) -> None:
    """ConfigError where a sliding window would be active, since attention here is full."""
    window = config.sliding_window
    if window is not None and max_model_len > window:
        raise ConfigError(
            "max_model_len",
            max_model_len,
            f"this checkpoint attends within a sliding window of {window} tokens, which is not "
            f"supported; up to {window} it attends to everything",
        )


def stack(
    ops: Ops, weights: Mapping[str, WeightTensor], prefixes: Sequence[str], bias: bool
) -> Linear:
    """One linear whose outputs are those of ``prefixes``, one after the other."""
    parts = [weights[f"{prefix}.weight"] for prefix in prefixes]
    if not bias:
        return ops.load_linear(parts)
    biases = [ops.load_vector(weights[f"{prefix}.bias"]) for prefix in prefixes]
    return ops.load_linear(parts, torch.cat(biases))


def load_feed_forward(
    config: ArchitectureConfig,
    weights: Mapping[str, WeightTensor],
    ops: Ops,
    prefix: str,
    bias: bool = False,
) -> FeedForwardWeights:
    """The dense feed-forward of the layer named ``prefix``."""
    mlp = f"{prefix}.mlp"
    return FeedForwardWeights(
        norm=ops.load_vector(weights[f"{prefix}.post_attention_layernorm.weight"]),
        gate_up=stack(ops, weights, [f"{mlp}.gate_proj", f"{mlp}.up_proj"], bias),
        down=stack(ops, weights, [f"{mlp}.down_proj"], bias),
        eps=config.rms_norm_eps,
    )


def common_shapes(config: ArchitectureConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that llama, qwen2 and qwen3 have in common."""
    hidden, width = config.hidden_size, config.intermediate_size
    heads = config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (config.vocab_size, hidden),
        FINAL_NORM: (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (heads, hidden),
            f"{prefix}.self_attn.k_proj.weight": (kv, hidden),
            f"{prefix}.self_attn.v_proj.weight": (kv, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, heads),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.mlp.gate_proj.weight": (width, hidden),
            f"{prefix}.mlp.up_proj.weight": (width, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, width),
        }
    return shapes


def with_biases(
    shapes: dict[str, tuple[int, ...]], projections: Sequence[str]
) -> dict[str, tuple[int, ...]]:
    """``shapes`` and a bias for every weight whose projection (``q_proj``) is listed."""
    biases = {
        name.removesuffix("weight") + "bias": shape[:1]
        for name, shape in shapes.items()
        if name.split(".")[-2] in projections
    }
    return shapes | biases
