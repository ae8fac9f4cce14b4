"""Llama (Touvron et al. 2023), and what shares its computation: SmolLM2, mistral.

    x = embedding(ids)
    per layer   x += o(attention(rope(q), rope(k), v)) with q, k, v = qkv(norm(x))
                x += down(silu(gate) * up)             with gate, up = gate_up(norm(x))
    logits = head(norm(x))

Biases on all four attention projections (`attention_bias`) or on the three of the feed-forward
(`mlp_bias`) where the checkpoint has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
    load_feed_forward,
    stack,
    with_biases,
)
from drumline.models.rope import build_rope
from drumline.ops.base import (
    AttentionWeights,
    DecoderWeights,
    KVCache,
    LayerWeights,
    Ops,
    PagedBatch,
)
from drumline.ops.weights import WeightTensor


def tensor_shapes(config: ArchitectureConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor a checkpoint of this architecture must have, with its shape."""
    shapes = common_shapes(config)
    if config.attention_bias:
        shapes = with_biases(shapes, ("q_proj", "k_proj", "v_proj", "o_proj"))
    if config.mlp_bias:
        shapes = with_biases(shapes, ("gate_proj", "up_proj", "down_proj"))
    return shapes


def load_layer(
    config: ArchitectureConfig, weights: Mapping[str, WeightTensor], ops: Ops, index: int
) -> LayerWeights:
    """One transformer block."""
    prefix = f"model.layers.{index}"
    attn = f"{prefix}.self_attn"
    projections = [f"{attn}.q_proj", f"{attn}.k_proj", f"{attn}.v_proj"]
    attention = AttentionWeights(
        norm=ops.load_vector(weights[f"{prefix}.input_layernorm.weight"]),
        qkv=stack(ops, weights, projections, config.attention_bias),
        o=stack(ops, weights, [f"{attn}.o_proj"], config.attention_bias),
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        eps=config.rms_norm_eps,
    )
    return LayerWeights(attention, load_feed_forward(config, weights, ops, prefix, config.mlp_bias))


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
        self.embedding = ops.load_embedding(weights[EMBEDDING])
        layers = [load_layer(config, weights, ops, i) for i in range(config.num_hidden_layers)]
        self.stack = ops.load_stack(layers, build_rope(config, max_model_len, ops.device))
        self.final_norm = ops.load_vector(weights[FINAL_NORM])
        tied = config.tie_word_embeddings
        self.head = self.embedding if tied else ops.load_linear([weights[HEAD]])
        self.whole = DecoderWeights(
            self.embedding, self.stack, self.final_norm, config.rms_norm_eps, self.head
        )

    @property
    def kv_spec(self) -> KVSpec:
        config = self.config
        return KVSpec(config.num_hidden_layers, config.num_key_value_heads, config.head_dim)

    def forward(
        self,
        ids: Tensor,
        batch: PagedBatch,
        cache: KVCache,
        taps: Sequence[int] = (),
        logits_at: Sequence[int] = (),
        read_at: Sequence[int] | None = None,
    ) -> ModelOutput:
        """``[tokens]`` int64 → hidden states, the residual stream after each of ``taps``, and the
        logits of the tokens at ascending ``logits_at``."""
        assert all(0 <= tap <= len(self.stack) for tap in taps), taps
        return ModelOutput(
            *self.ops.run_decoder(ids, self.whole, batch, cache, taps, logits_at, read_at)
        )

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """``[rows, hidden]`` before the final norm → ``[rows, vocab]``."""
        eps = self.config.rms_norm_eps
        return self.ops.norm_linear(hidden, self.final_norm, eps, self.head)
