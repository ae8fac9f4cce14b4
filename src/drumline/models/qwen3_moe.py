"""Qwen3-MoE (Yang et al. 2025): qwen3 with experts in place of some feed-forwards.

    x = embedding(ids)
    per layer   x += o(attention(rope(q), rope(k), v)) with q, k, v = qkv(norm(x)),
                                                       q = norm(q), k = norm(k) per head
                x += experts(norm(x))                  or down(silu(gate) * up), as in qwen3
    logits = head(norm(x))

Layers listed in `mlp_only_layers`, and those that `decoder_sparse_step` skips, are dense.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from drumline.models.config import ArchitectureConfig
from drumline.models.layers import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    KVSpec,
    ModelOutput,
    check_length,
    common_shapes,
    stack,
    with_biases,
)
from drumline.models.moe import MoeBlock, expert_shapes
from drumline.models.rope import build_rope
from drumline.ops.base import KVCache, Ops, PagedBatch, RopeTable
from drumline.ops.weights import WeightTensor


def tensor_shapes(config: ArchitectureConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor a checkpoint of this architecture must have, with its shape."""
    shapes = common_shapes(config)
    if config.attention_bias:
        shapes = with_biases(shapes, ("q_proj", "k_proj", "v_proj", "o_proj"))
    experts = config.experts
    assert experts is not None
    for layer in config.expert_layers:
        mlp = f"model.layers.{layer}.mlp"
        for name in ("gate_proj", "up_proj", "down_proj"):
            del shapes[f"{mlp}.{name}.weight"]
        shapes |= expert_shapes(mlp, config.hidden_size, experts)
    for layer in range(config.num_hidden_layers):
        attn = f"model.layers.{layer}.self_attn"
        shapes |= {f"{attn}.{name}_norm.weight": (config.head_dim,) for name in ("q", "k")}
    return shapes


class Layer:
    """One transformer block."""

    def __init__(
        self, config: ArchitectureConfig, weights: Mapping[str, WeightTensor], ops: Ops, index: int
    ) -> None:
        prefix = f"model.layers.{index}"
        attn, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        self.ops = ops
        self.index = index
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        self.eps = config.rms_norm_eps
        self.scale = config.head_dim**-0.5
        self.input_norm = ops.load_vector(weights[f"{prefix}.input_layernorm.weight"])
        projections = [f"{attn}.q_proj", f"{attn}.k_proj", f"{attn}.v_proj"]
        self.qkv = stack(ops, weights, projections, config.attention_bias)
        self.q_norm = ops.load_vector(weights[f"{attn}.q_norm.weight"])
        self.k_norm = ops.load_vector(weights[f"{attn}.k_norm.weight"])
        self.o = stack(ops, weights, [f"{attn}.o_proj"], config.attention_bias)
        self.post_norm = ops.load_vector(weights[f"{prefix}.post_attention_layernorm.weight"])
        self.moe: MoeBlock | None = None
        if index in config.expert_layers:
            assert config.experts is not None
            self.moe = MoeBlock(config.experts, weights, ops, mlp)
        else:
            self.gate_up = stack(ops, weights, [f"{mlp}.gate_proj", f"{mlp}.up_proj"], bias=False)
            self.down = stack(ops, weights, [f"{mlp}.down_proj"], bias=False)

    def forward(self, x: Tensor, batch: PagedBatch, cache: KVCache, rope: RopeTable) -> Tensor:
        """``[tokens, hidden]`` residual stream → the same, after this block."""
        ops = self.ops
        x = ops.add(x, self.attend(ops.rms_norm(x, self.input_norm, self.eps), batch, cache, rope))
        return ops.add(x, self.feed_forward(ops.rms_norm(x, self.post_norm, self.eps)))

    def attend(self, x: Tensor, batch: PagedBatch, cache: KVCache, rope: RopeTable) -> Tensor:
        ops, tokens = self.ops, x.shape[0]
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        qkv = ops.linear(x, self.qkv)
        q, k, v = qkv[:, :width], qkv[:, width : width + kv_width], qkv[:, width + kv_width :]
        q = ops.rms_norm(q.reshape(tokens, self.heads, self.head_dim), self.q_norm, self.eps)
        k = ops.rms_norm(k.reshape(tokens, self.kv_heads, self.head_dim), self.k_norm, self.eps)
        q, k = ops.rope(q, batch.positions, rope), ops.rope(k, batch.positions, rope)
        v = v.reshape(tokens, self.kv_heads, self.head_dim)
        return ops.linear(ops.attention(q, k, v, cache, self.index, batch, self.scale), self.o)

    def feed_forward(self, x: Tensor) -> Tensor:
        if self.moe is not None:
            return self.moe.forward(x)
        return self.ops.linear(self.ops.silu_and_mul(self.ops.linear(x, self.gate_up)), self.down)


class Model:
    """Weights on a backend and the forward pass. Holds no state of any sequence."""

    def __init__(
        self,
        config: ArchitectureConfig,
        weights: Mapping[str, WeightTensor],
        ops: Ops,
        max_model_len: int,
    ) -> None:
        """``weights`` as `open_checkpoint` gives them; positions stay below ``max_model_len``."""
        check_length(config, max_model_len)
        self.config = config
        self.ops = ops
        self.rope = build_rope(config, max_model_len, ops.device)
        self.embedding = ops.load_embedding(weights[EMBEDDING])
        self.layers = [Layer(config, weights, ops, i) for i in range(config.num_hidden_layers)]
        self.final_norm = ops.load_vector(weights[FINAL_NORM])
        tied = config.tie_word_embeddings
        self.head = self.embedding if tied else ops.load_linear([weights[HEAD]])

    @property
    def kv_spec(self) -> KVSpec:
        return KVSpec(len(self.layers), self.config.num_key_value_heads, self.config.head_dim)

    def forward(
        self, ids: Tensor, batch: PagedBatch, cache: KVCache, taps: tuple[int, ...] = ()
    ) -> ModelOutput:
        """``[tokens]`` int64 → hidden states, and the residual stream after each of ``taps``."""
        assert all(0 <= tap <= len(self.layers) for tap in taps), taps
        batch = self.ops.prepare(batch, cache.block_size)
        x = self.ops.embedding(ids, self.embedding)
        tapped = {0: x} if 0 in taps else {}
        for layer in self.layers:
            x = layer.forward(x, batch, cache, self.rope)
            if layer.index + 1 in taps:
                tapped[layer.index + 1] = x
        return ModelOutput(x, tapped)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """``[rows, hidden]`` before the final norm → ``[rows, vocab]``."""
        normed = self.ops.rms_norm(hidden, self.final_norm, self.config.rms_norm_eps)
        return self.ops.linear(normed, self.head)
