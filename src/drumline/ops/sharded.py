"""One rank's operations where others share the weights: an `Ops` around a backend's.

    embedding           rows of the own ids, added over tp
    linear              of a `ColumnShard`: partial sums, added over tp
                        of a `VocabularyShard`: logits of the own ids, gathered over tp
    layers              each block's share is added over tp before it joins the residual stream
    experts spread      tokens go to every rank of ep, each computes its own experts, and outputs
    over ep             come back unsummed, to be added by their owner in ascending expert id

Weights say themselves whether they are parts (`shard_weights`), so models and drafters are written
as for one rank. Sums over tp are taken in rank order; what experts are spread over never changes a
bit. It decides nothing: sizes are those of its inputs, which all ranks have alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from drumline.ops import blocks
from drumline.ops.base import (
    DecoderWeights,
    Experts,
    FeedForwardWeights,
    KVCache,
    LayerWeights,
    Linear,
    MoeWeights,
    Ops,
    PagedBatch,
    RopeTable,
    Routing,
    Stack,
)
from drumline.ops.shard_weights import ColumnShard, VocabularyShard
from drumline.ops.shares import (
    PartialExperts,
    PartialLinear,
    ShardedStack,
    SpreadExperts,
    VocabularyLinear,
    is_partial_block,
    plain,
    zeros,
)
from drumline.ops.spread import exchange
from drumline.ops.weights import WeightTensor
from drumline.parallel.comm import Comm
from drumline.parallel.shards import expert_split

if TYPE_CHECKING:
    from drumline.ops.native_shared import FusedLayers


class ShardedOps:
    """`drumline.ops.base.Ops` for one rank. See there for shapes."""

    def __init__(self, inner: Ops, tp: Comm, ep: Comm | None = None) -> None:
        """``ep``: the ranks that experts are spread over, tp within each replica; None if every
        rank holds its share of all of them."""
        self.inner = inner
        self.tp = tp
        self.ep = ep
        self._fused: FusedLayers | None = None
        if inner.name == "native":
            from drumline.ops.native_shared import fused_layers  # where the native module is there

            self._fused = fused_layers(inner, tp, ep)

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def device(self) -> torch.device:
        return self.inner.device

    # ---- loading -------------------------------------------------------------------------

    def load_linear(self, weights: Sequence[WeightTensor], bias: Tensor | None = None) -> Linear:
        share = self.inner.load_linear(weights, bias)
        if isinstance(weights[0], VocabularyShard):
            assert len(weights) == 1, "shards of a vocabulary are not stacked"
            return VocabularyLinear(share, weights[0].first, weights[0].vocab, weights[0].width)
        return PartialLinear(share) if isinstance(weights[0], ColumnShard) else share

    def load_embedding(self, weight: WeightTensor) -> Linear:
        share = self.inner.load_embedding(weight)
        if isinstance(weight, VocabularyShard):
            return VocabularyLinear(share, weight.first, weight.vocab, weight.width)
        return share

    def load_vector(self, weight: WeightTensor) -> Tensor:
        return self.inner.load_vector(weight)

    def load_experts(
        self, gate_up: Sequence[Sequence[WeightTensor]], down: Sequence[WeightTensor]
    ) -> Experts:
        if self.ep is not None:
            part = expert_split(len(down), self.ep.size, self.ep.rank)
            own = slice(part.start, part.stop)
            share = self.inner.load_experts(gate_up[own], down[own]) if part else None
            return SpreadExperts(share, part.start, len(down))
        experts = self.inner.load_experts(gate_up, down)
        return PartialExperts(experts) if isinstance(down[0], ColumnShard) else experts

    def load_stack(self, layers: Sequence[LayerWeights], rope: RopeTable) -> Stack:
        inner = self.inner.load_stack([self._share(layer) for layer in layers], rope)
        fused = None if self._fused is None else self._fused.prepare(layers, inner)
        return ShardedStack(tuple(layers), inner, fused)

    def _share(self, layer: LayerWeights) -> LayerWeights:
        """The layer as the backend itself would have loaded it."""
        attention = replace(layer.attention, o=plain(layer.attention.o))
        block = layer.feed_forward
        if isinstance(block, FeedForwardWeights):
            return LayerWeights(attention, replace(block, down=plain(block.down)))
        experts = block.experts
        if isinstance(experts, PartialExperts):
            return LayerWeights(attention, replace(block, experts=experts.share))
        if not isinstance(experts, SpreadExperts):
            return LayerWeights(attention, block)
        hidden = block.norm.shape[0]
        stand_in = FeedForwardWeights(
            norm=block.norm,
            gate_up=self.inner.load_linear([zeros(2, hidden)]),
            down=self.inner.load_linear([zeros(hidden, 1)]),
            eps=block.eps,
        )
        return LayerWeights(attention, stand_in)

    def allocate_kv(
        self, layers: int, blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: str
    ) -> KVCache:
        return self.inner.allocate_kv(layers, blocks, block_size, kv_heads, head_dim, dtype)

    # ---- rows ----------------------------------------------------------------------------

    def embedding(self, ids: Tensor, table: Linear) -> Tensor:
        if not isinstance(table, VocabularyLinear):
            return self.inner.embedding(ids, table)
        rows = table.share.out_features
        local = ids - table.first
        own = (local >= 0) & (local < rows)
        found = self.inner.embedding(local.clamp(0, rows - 1), table.share)
        return self.tp.all_reduce(found.masked_fill(~own.unsqueeze(1), 0.0))

    def linear(self, x: Tensor, weight: Linear) -> Tensor:
        if isinstance(weight, PartialLinear):
            return self.tp.all_reduce(self.inner.linear(x, weight.share))
        if isinstance(weight, VocabularyLinear):
            return self._gathered(self.inner.linear(x, weight.share), weight)
        return self.inner.linear(x, weight)

    def norm_linear(self, x: Tensor, norm: Tensor, eps: float, weight: Linear) -> Tensor:
        if isinstance(weight, VocabularyLinear):
            return self._gathered(self.inner.norm_linear(x, norm, eps, weight.share), weight)
        if isinstance(weight, PartialLinear):
            return self.linear(self.inner.rms_norm(x, norm, eps), weight)
        return self.inner.norm_linear(x, norm, eps, weight)

    def _gathered(self, logits: Tensor, table: VocabularyLinear) -> Tensor:
        """``[rows, own ids]`` → ``[rows, vocab]``."""
        missing = table.width - logits.shape[1]
        if missing:
            logits = torch.cat((logits, logits.new_zeros((logits.shape[0], missing))), dim=1)
        gathered = self.tp.all_gather(logits)  # [ranks, rows, width]
        return gathered.transpose(0, 1).reshape(logits.shape[0], -1)[:, : table.vocab]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self.inner.rms_norm(x, weight, eps)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return self.inner.add(x, y)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return self.inner.silu_and_mul(gate_up)

    def rope(self, x: Tensor, positions: Tensor, table: RopeTable) -> Tensor:
        return self.inner.rope(x, positions, table)

    def argmax(self, logits: Tensor) -> Tensor:
        return self.inner.argmax(logits)

    def top_k(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        return self.inner.top_k(logits, k)

    # ---- experts -------------------------------------------------------------------------

    def route(self, logits: Tensor, per_token: int, normalize: bool) -> Routing:
        return self.inner.route(logits, per_token, normalize)

    def combine(self, outputs: Tensor, weights: Tensor) -> Tensor:
        return self.inner.combine(outputs, weights)

    def expert_outputs(self, x: Tensor, routing: Routing, experts: Experts) -> Tensor:
        """Spread experts skip ids of -1, whose outputs are zeros."""
        if isinstance(experts, PartialExperts):
            return self.tp.all_reduce(self.inner.expert_outputs(x, routing, experts.share))
        if isinstance(experts, SpreadExperts):
            assert self.ep is not None
            return exchange(self.inner, self.ep, self.tp.size, x, routing.experts, experts)
        return self.inner.expert_outputs(x, routing, experts)

    # ---- attention -----------------------------------------------------------------------

    def prepare(self, batch: PagedBatch, block_size: int) -> PagedBatch:
        return self.inner.prepare(batch, block_size)

    def write_kv(
        self, key: Tensor, value: Tensor, cache: KVCache, layer: int, slots: Tensor
    ) -> None:
        self.inner.write_kv(key, value, cache, layer, slots)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: KVCache,
        layer: int,
        batch: PagedBatch,
        scale: float,
    ) -> Tensor:
        return self.inner.attention(query, key, value, cache, layer, batch, scale)

    # ---- layers --------------------------------------------------------------------------

    def attend(
        self,
        x: Tensor,
        stack: Stack,
        index: int,
        batch: PagedBatch,
        cache: KVCache,
        residual: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(stack, ShardedStack)
        if not isinstance(stack.layers[index].attention.o, PartialLinear):
            return self.inner.attend(x, stack.inner, index, batch, cache, residual)
        out = self.tp.all_reduce(self.inner.attend(x, stack.inner, index, batch, cache))
        return out if residual is None else self.add(residual, out)

    def feed_forward(
        self, x: Tensor, stack: Stack, index: int, residual: Tensor | None = None
    ) -> Tensor:
        return self._feed_forward(x, stack, index, residual, None)

    def _feed_forward(
        self,
        x: Tensor,
        stack: Stack,
        index: int,
        residual: Tensor | None,
        batch: PagedBatch | None,
    ) -> Tensor:
        """With a batch, tokens that have no slot cost no expert's time."""
        assert isinstance(stack, ShardedStack)
        block = stack.layers[index].feed_forward
        if isinstance(block, MoeWeights) and isinstance(block.experts, SpreadExperts):
            normed = self.rms_norm(x, block.norm, block.eps)
            logits = self.linear(normed, block.router)
            routing = self.route(logits, block.per_token, block.normalize)
            out = mix_experts(self, normed, routing, block.experts, batch)
        elif is_partial_block(block):
            out = self.tp.all_reduce(self.inner.feed_forward(x, stack.inner, index))
        else:
            return self.inner.feed_forward(x, stack.inner, index, residual)
        return out if residual is None else self.add(residual, out)

    def run_stack(
        self,
        x: Tensor,
        stack: Stack,
        batch: PagedBatch,
        cache: KVCache,
        taps: Sequence[int] = (),
        entry: Tensor | None = None,
        read_at: Sequence[int] | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        assert isinstance(stack, ShardedStack)
        if stack.whole:
            return self.inner.run_stack(x, stack.inner, batch, cache, taps, entry, read_at)
        if self._fused is not None and stack.fused is not None:
            return self._fused.run(x, stack.fused, batch, cache, taps, entry)
        batch = self.prepare(batch, cache.block_size)
        tapped = {0: x} if 0 in taps else {}
        for index in range(len(stack)):
            source = entry if entry is not None and index == 0 else x
            x = self.attend(source, stack, index, batch, cache, x)
            x = self._feed_forward(x, stack, index, x, batch)
            if index + 1 in taps:
                tapped[index + 1] = x
        return x, tapped

    def run_decoder(
        self,
        ids: Tensor,
        weights: DecoderWeights,
        batch: PagedBatch,
        cache: KVCache,
        taps: Sequence[int] = (),
        logits_at: Sequence[int] = (),
        read_at: Sequence[int] | None = None,
    ) -> tuple[Tensor, dict[int, Tensor], Tensor | None]:
        return blocks.run_decoder(self, ids, weights, batch, cache, taps, logits_at)


def mix_experts(
    ops: Ops, x: Tensor, routing: Routing, experts: Experts, batch: PagedBatch | None
) -> Tensor:
    """The weighted sum of the chosen experts' outputs, ``[tokens, hidden]``. Where experts are
    spread, tokens of ``batch`` that have no slot (padding) cost no expert's time."""
    if isinstance(experts, PartialExperts) and isinstance(ops, ShardedOps):
        outputs = ops.inner.expert_outputs(x, routing, experts.share)
        return ops.tp.all_reduce(ops.combine(outputs, routing.weights))
    if isinstance(experts, SpreadExperts) and batch is not None:
        dead = (batch.slots < 0).unsqueeze(1)
        routing = Routing(routing.experts.masked_fill(dead, -1), routing.weights)
    return ops.combine(ops.expert_outputs(x, routing, experts), routing.weights)
