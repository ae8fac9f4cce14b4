"""Decoder layers, composed of the primitive operations: what fused ones are held to.

    x = x + o(attention(rope(q), rope(k), v))    q, k, v = qkv(norm(x)), a norm per head if given
    x = x + down(silu(gate) * up)                gate, up = gate_up(norm(x))
    x = x + sum of weight * expert(norm(x))      in layers with experts

Works on any `Ops`; keeps nothing and knows no backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from drumline.ops.base import (
    DecoderWeights,
    KVCache,
    LayerWeights,
    MoeWeights,
    Ops,
    PagedBatch,
    RopeTable,
    Stack,
)
from drumline.ops.indices import pick_rows


@dataclass(frozen=True)
class ComposedStack:
    """Layers as they were given."""

    layers: tuple[LayerWeights, ...]
    rope: RopeTable

    def __len__(self) -> int:
        return len(self.layers)


def attend(
    ops: Ops,
    x: Tensor,
    stack: Stack,
    index: int,
    batch: PagedBatch,
    cache: KVCache,
    residual: Tensor | None,
) -> Tensor:
    """See `Ops.attend`."""
    assert isinstance(stack, ComposedStack)
    weights = stack.layers[index].attention
    tokens, head_dim, eps = x.shape[0], weights.head_dim, weights.eps
    normed = x if weights.norm is None else ops.rms_norm(x, weights.norm, eps)
    ends = (weights.heads * head_dim, (weights.heads + weights.kv_heads) * head_dim)
    qkv = ops.linear(normed, weights.qkv)  # [tokens, (heads + 2 * kv_heads) * head_dim]
    q = qkv[:, : ends[0]].reshape(tokens, weights.heads, head_dim)
    k = qkv[:, ends[0] : ends[1]].reshape(tokens, weights.kv_heads, head_dim)
    v = qkv[:, ends[1] :].reshape(tokens, weights.kv_heads, head_dim)
    q = q if weights.q_norm is None else ops.rms_norm(q, weights.q_norm, eps)
    k = k if weights.k_norm is None else ops.rms_norm(k, weights.k_norm, eps)
    q = ops.rope(q, batch.positions, stack.rope)
    k = ops.rope(k, batch.positions, stack.rope)
    mixed = ops.attention(q, k, v, cache, index, batch, head_dim**-0.5)
    out = ops.linear(mixed, weights.o)  # [tokens, hidden]
    return out if residual is None else ops.add(residual, out)


def feed_forward(ops: Ops, x: Tensor, stack: Stack, index: int, residual: Tensor | None) -> Tensor:
    """See `Ops.feed_forward`."""
    assert isinstance(stack, ComposedStack)
    weights = stack.layers[index].feed_forward
    normed = ops.rms_norm(x, weights.norm, weights.eps)
    if isinstance(weights, MoeWeights):
        logits = ops.linear(normed, weights.router)
        routing = ops.route(logits, weights.per_token, weights.normalize)
        out = ops.combine(ops.expert_outputs(normed, routing, weights.experts), routing.weights)
    else:
        out = ops.linear(ops.silu_and_mul(ops.linear(normed, weights.gate_up)), weights.down)
    return out if residual is None else ops.add(residual, out)


def run_stack(
    ops: Ops,
    x: Tensor,
    stack: Stack,
    batch: PagedBatch,
    cache: KVCache,
    taps: Sequence[int],
    entry: Tensor | None,
) -> tuple[Tensor, dict[int, Tensor]]:
    """See `Ops.run_stack`."""
    batch = ops.prepare(batch, cache.block_size)
    tapped = {0: x} if 0 in taps else {}
    for index in range(len(stack)):
        source = entry if entry is not None and index == 0 else x
        x = ops.attend(source, stack, index, batch, cache, x)
        x = ops.feed_forward(x, stack, index, x)
        if index + 1 in taps:
            tapped[index + 1] = x
    return x, tapped


def run_decoder(
    ops: Ops,
    ids: Tensor,
    weights: DecoderWeights,
    batch: PagedBatch,
    cache: KVCache,
    taps: Sequence[int],
    logits_at: Sequence[int],
) -> tuple[Tensor, dict[int, Tensor], Tensor | None]:
    """See `Ops.run_decoder`."""
    x = ops.embedding(ids, weights.embedding)
    hidden, tapped = ops.run_stack(x, weights.stack, batch, cache, taps)
    if not logits_at:
        return hidden, tapped, None
    rows = pick_rows(hidden, logits_at)
    return hidden, tapped, ops.norm_linear(rows, weights.norm, weights.eps, weights.head)
