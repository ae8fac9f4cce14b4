"""What native operations hold: repacked weights, layers, caches, and the places of a batch.

Each value keeps the memory alive whose addresses its native twin was given. Computes nothing.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import drumline._native as _native
from drumline._native import Dense, PackedLinear
from drumline.ops.base import (
    AttentionWeights,
    FeedForwardWeights,
    LayerWeights,
    MoeWeights,
    PagedBatch,
    RopeTable,
)
from drumline.ops.reference_attention import ReferenceKV
from drumline.ops.weights import WeightTensor

PACKED_KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")


def address(tensor: Tensor | None) -> int:
    """Where its memory begins; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


@dataclass(frozen=True)
class NativeLinear:
    """Repacked weights that are stacked along the output, and an optional bias ``[out]``. Whoever
    stacks weights of several kinds has several parts."""

    parts: tuple[PackedLinear, ...]
    dense: Dense
    in_features: int
    out_features: int
    bias: Tensor | None = None

    @property
    def nbytes(self) -> int:
        packed = sum(part.nbytes for part in self.parts)
        return packed + (0 if self.bias is None else self.bias.nbytes)


def load_linear(weights: Sequence[WeightTensor], bias: Tensor | None = None) -> NativeLinear:
    """Repacks ``[out_i, in]`` weights; kinds without a kernel of their own become float32."""
    parts = tuple(
        _pack(kind, list(run)) for kind, run in itertools.groupby(weights, key=_packed_kind)
    )
    bias = None if bias is None else bias.to(torch.float32).contiguous()
    return NativeLinear(
        parts=parts,
        dense=Dense(list(parts), address(bias)),
        in_features=weights[0].shape[1],
        out_features=sum(weight.shape[0] for weight in weights),
        bias=bias,
    )


def _packed_kind(weight: WeightTensor) -> str:
    return weight.kind if weight.kind in PACKED_KINDS else "F32"


def _pack(kind: str, weights: Sequence[WeightTensor]) -> PackedLinear:
    stored = [
        weight.data.contiguous() if weight.kind == kind else weight.to_float() for weight in weights
    ]
    addresses = [data.data_ptr() for data in stored]
    outputs = [weight.shape[0] for weight in weights]
    return PackedLinear.stack(kind, addresses, outputs, weights[0].shape[1])


@dataclass(frozen=True)
class NativeExperts:
    """Per expert, by ascending id: gate over up ``[2 * width, hidden]``, and down."""

    gate_up: tuple[NativeLinear, ...]
    down: tuple[NativeLinear, ...]
    native: _native.Experts

    @property
    def count(self) -> int:
        return len(self.down)

    @property
    def nbytes(self) -> int:
        return sum(linear.nbytes for linear in (*self.gate_up, *self.down))


def load_experts(
    gate_up: Sequence[Sequence[WeightTensor]], down: Sequence[WeightTensor]
) -> NativeExperts:
    assert len(gate_up) == len(down) > 0
    first = tuple(load_linear(weights) for weights in gate_up)
    second = tuple(load_linear([weight]) for weight in down)
    pairs = [(one.dense, other.dense) for one, other in zip(first, second, strict=True)]
    return NativeExperts(first, second, _native.Experts(pairs))


@dataclass(frozen=True)
class NativeStack:
    """Layers, and their native twin, which holds addresses of norms and biases in them."""

    layers: tuple[LayerWeights, ...]
    rope: RopeTable
    native: _native.Stack

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def hidden(self) -> int:
        return self.layers[0].attention.o.out_features

    def columns(self, index: int) -> int:
        """Width of what layer ``index`` attends to."""
        return self.layers[index].attention.qkv.in_features


def load_stack(layers: Sequence[LayerWeights], rope: RopeTable) -> NativeStack:
    native = _native.Stack(rope.cos.data_ptr(), rope.sin.data_ptr(), rope.cos.shape[1])
    for layer in layers:
        attention = _attention(layer.attention)
        if isinstance(layer.feed_forward, MoeWeights):
            native.add_experts(attention, _mixture(layer.feed_forward))
        else:
            native.add_dense(attention, _feed_forward(layer.feed_forward))
    return NativeStack(tuple(layers), rope, native)


def _attention(weights: AttentionWeights) -> _native.Attention:
    assert isinstance(weights.qkv, NativeLinear)
    assert isinstance(weights.o, NativeLinear)
    return _native.Attention(
        address(weights.norm),
        weights.qkv.dense,
        address(weights.q_norm),
        address(weights.k_norm),
        weights.o.dense,
        weights.heads,
        weights.kv_heads,
        weights.head_dim,
        weights.eps,
    )


def _feed_forward(weights: FeedForwardWeights) -> _native.FeedForward:
    assert isinstance(weights.gate_up, NativeLinear)
    assert isinstance(weights.down, NativeLinear)
    return _native.FeedForward(
        address(weights.norm), weights.gate_up.dense, weights.down.dense, weights.eps
    )


def _mixture(weights: MoeWeights) -> _native.MixtureOfExperts:
    assert isinstance(weights.router, NativeLinear)
    assert isinstance(weights.experts, NativeExperts)
    return _native.MixtureOfExperts(
        address(weights.norm),
        weights.router.dense,
        weights.experts.native,
        weights.per_token,
        weights.normalize,
        weights.eps,
    )


@dataclass(frozen=True, kw_only=True)
class NativeKV(ReferenceKV):
    """Keys ``[layers, blocks, kv_heads, head_dim, block_size]``, channel by channel within a block,
    so that 8 keys are one vector; values as the reference has them."""

    native: _native.KVCache

    @property
    def block_size(self) -> int:
        return self.values.shape[3]

    @classmethod
    def of(cls, cache: ReferenceKV, dtype: str) -> NativeKV:
        """The same memory, its keys seen channel by channel."""
        layers, blocks, kv_heads, block_size, head_dim = cache.values.shape
        keys = cache.keys.view(layers, blocks, kv_heads, head_dim, block_size)
        native = _native.KVCache(
            keys.data_ptr(),
            cache.values.data_ptr(),
            address(cache.key_scales),
            address(cache.value_scales),
            dtype,
            layers,
            kv_heads,
            head_dim,
            block_size,
        )
        return cls(
            keys=keys,
            values=cache.values,
            key_scales=cache.key_scales,
            value_scales=cache.value_scales,
            native=native,
        )


class NativeBatch(PagedBatch, frozen=True, kw_only=True):
    """A `PagedBatch` with its block tables end to end, and where each token's table begins."""

    memory: tuple[array[int], ...]
    places: _native.Places

    @classmethod
    def of(cls, batch: PagedBatch, starts: array[int], tables: array[int]) -> NativeBatch:
        """``starts`` ``[tokens]``: where in ``tables`` the token's sequence begins."""
        positions, slots = batch.positions.contiguous(), batch.slots.contiguous()
        places = _native.Places(
            batch.token_count,
            positions.data_ptr(),
            slots.data_ptr(),
            tables.buffer_info()[0],
            starts.buffer_info()[0],
            batch.first_key,
        )
        return cls(
            positions=positions,
            slots=slots,
            query_start=batch.query_start,
            block_tables=batch.block_tables,
            first_key=batch.first_key,
            memory=(starts, tables),
            places=places,
        )
