"""The reference operations: plain torch, any device, float32, batch-invariant by construction.

This is the oracle, and every fast backend is held to it. It is written to be read, and to keep
promise P1 rather than to be quick. What makes a row's bits independent of its neighbours:

- matrix products run at a pinned shape: `ROW_TILE` rows per library call, zeros for missing rows,
  because a GEMM library picks its kernel, and with it the order of summation, by shape;
- attention is cut into pinned items of (`QUERY_TILE` queries) x (one KV block); the items of a
  query are added by `tree_sum`, whose result does not change when zeros are appended;
- sums along an axis are trees of elementwise additions, never a library reduction, which splits
  by thread count; maxima are exact in any order;
- exponentials see contiguous tensors only: elsewhere vectorised bodies and scalar tails round
  differently (measured: ``silu`` and ``sigmoid`` do even on contiguous ones, so they are composed).

It refuses to know requests, schedules and ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drumline.ops import blocks
from drumline.ops.base import (
    DecoderWeights,
    Experts,
    KVCache,
    LayerWeights,
    Linear,
    PagedBatch,
    RopeTable,
    Routing,
    Stack,
)
from drumline.ops.blocks import ComposedStack
from drumline.ops.reference_attention import ReferenceAttention, ReferenceKV
from drumline.ops.sums import tree_sum_last
from drumline.ops.weights import WeightTensor

__all__ = ["ReferenceKV", "ReferenceOps"]

ROW_TILE = 16  # rows per matrix product; on the CPUs measured 16 rows cost what 4 cost


@dataclass(frozen=True)
class ReferenceLinear:
    """A dense float32 weight ``[out, in]`` and an optional bias ``[out]``."""

    weight: Tensor
    bias: Tensor | None = None

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True)
class ReferenceExperts:
    """Per expert, by ascending id: gate over up ``[2 * width, hidden]``, and down."""

    gate_up: tuple[ReferenceLinear, ...]
    down: tuple[ReferenceLinear, ...]

    @property
    def count(self) -> int:
        return len(self.down)

    @property
    def nbytes(self) -> int:
        return sum(linear.nbytes for linear in (*self.gate_up, *self.down))


class ReferenceOps(ReferenceAttention):
    """`drumline.ops.base.Ops` in plain torch. See there for shapes."""

    name = "reference"

    # ---- loading -------------------------------------------------------------------------

    def load_linear(
        self, weights: Sequence[WeightTensor], bias: Tensor | None = None
    ) -> ReferenceLinear:
        dense = [weight.to_float() for weight in weights]
        stacked = dense[0] if len(dense) == 1 else torch.cat(dense)
        return ReferenceLinear(
            stacked.to(self.device).contiguous(),
            None if bias is None else bias.to(self.device, torch.float32).contiguous(),
        )

    def load_embedding(self, weight: WeightTensor) -> ReferenceLinear:
        return self.load_linear([weight])

    def load_vector(self, weight: WeightTensor) -> Tensor:
        return weight.to_float().to(self.device)

    def load_experts(
        self, gate_up: Sequence[Sequence[WeightTensor]], down: Sequence[WeightTensor]
    ) -> ReferenceExperts:
        assert len(gate_up) == len(down) > 0
        return ReferenceExperts(
            tuple(self.load_linear(weights) for weights in gate_up),
            tuple(self.load_linear([weight]) for weight in down),
        )

    # ---- rows ----------------------------------------------------------------------------

    def embedding(self, ids: Tensor, table: Linear) -> Tensor:
        assert isinstance(table, ReferenceLinear)
        return table.weight.index_select(0, ids)  # [tokens, hidden]

    def linear(self, x: Tensor, weight: Linear) -> Tensor:
        assert isinstance(weight, ReferenceLinear)
        rows = x.shape[0]
        padded = -(-rows // ROW_TILE) * ROW_TILE
        # A fresh buffer in any case: its alignment is pinned too, whatever x was a view of.
        tiles = x.new_zeros((padded, x.shape[1]))
        tiles[:rows] = x
        out = x.new_empty((padded, weight.out_features))
        for start in range(0, padded, ROW_TILE):
            tile = slice(start, start + ROW_TILE)
            torch.mm(tiles[tile], weight.weight.t(), out=out[tile])
        if weight.bias is not None:
            out += weight.bias
        return out[:rows]  # [tokens, out]

    def norm_linear(self, x: Tensor, norm: Tensor, eps: float, weight: Linear) -> Tensor:
        return self.linear(self.rms_norm(x, norm, eps), weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        mean = tree_sum_last(x * x).div_(x.shape[-1])  # [..., 1]
        return x * (1.0 / torch.sqrt(mean + eps)) * weight

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        width = gate_up.shape[-1] // 2
        gate = gate_up[..., :width].contiguous()  # [tokens, width]
        return gate / (1.0 + torch.exp(-gate)) * gate_up[..., width:]

    def rope(self, x: Tensor, positions: Tensor, table: RopeTable) -> Tensor:
        cos = table.cos.index_select(0, positions).unsqueeze(1)  # [tokens, 1, rope_dim / 2]
        sin = table.sin.index_select(0, positions).unsqueeze(1)
        half = cos.shape[-1]
        low, high = x[..., :half], x[..., half : 2 * half]
        return torch.cat((low * cos - high * sin, high * cos + low * sin, x[..., 2 * half :]), -1)

    # ---- experts -------------------------------------------------------------------------

    def route(self, logits: Tensor, per_token: int, normalize: bool) -> Routing:
        # A stable sort, since `topk` leaves open which of two equals it takes.
        order = torch.sort(logits, dim=1, descending=True, stable=True).indices
        chosen = order[:, :per_token].sort(dim=1).values  # [tokens, k], ascending
        odds = torch.exp((logits - logits.amax(dim=1, keepdim=True)).contiguous())
        picked = odds.gather(1, chosen)
        return Routing(chosen, picked / tree_sum_last(picked if normalize else odds))

    def expert_outputs(self, x: Tensor, routing: Routing, experts: Experts) -> Tensor:
        assert isinstance(experts, ReferenceExperts)
        tokens, per_token = routing.experts.shape
        out = x.new_empty((tokens * per_token, x.shape[1]))
        # Pairs (token, expert) grouped by expert; `linear` keeps the rows of a group apart.
        chosen, pairs = torch.sort(routing.experts.reshape(-1), stable=True)
        ends = torch.searchsorted(chosen, torch.arange(experts.count + 1, device=x.device))
        bounds: list[int] = ends.tolist()
        for expert in range(experts.count):
            mine = pairs[bounds[expert] : bounds[expert + 1]]
            if mine.shape[0]:
                gate_up = self.linear(x.index_select(0, mine // per_token), experts.gate_up[expert])
                out[mine] = self.linear(self.silu_and_mul(gate_up), experts.down[expert])
        return out.view(tokens, per_token, x.shape[1])

    def combine(self, outputs: Tensor, weights: Tensor) -> Tensor:
        weighted = outputs * weights.unsqueeze(-1)  # [tokens, k, hidden]
        total = weighted[:, 0]
        for at in range(1, weighted.shape[1]):
            total = total + weighted[:, at]
        return total

    # ---- layers --------------------------------------------------------------------------

    def load_stack(self, layers: Sequence[LayerWeights], rope: RopeTable) -> Stack:
        return ComposedStack(tuple(layers), rope)

    def attend(
        self,
        x: Tensor,
        stack: Stack,
        index: int,
        batch: PagedBatch,
        cache: KVCache,
        residual: Tensor | None = None,
    ) -> Tensor:
        return blocks.attend(self, x, stack, index, batch, cache, residual)

    def feed_forward(
        self, x: Tensor, stack: Stack, index: int, residual: Tensor | None = None
    ) -> Tensor:
        return blocks.feed_forward(self, x, stack, index, residual)

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
        return blocks.run_stack(self, x, stack, batch, cache, taps, entry)

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

    # ---- logits --------------------------------------------------------------------------

    def argmax(self, logits: Tensor) -> Tensor:
        best = logits.max(dim=1, keepdim=True).values  # not a number if there is one
        wanted = torch.where(best.isnan(), logits.isnan(), logits == best)
        ids = torch.arange(logits.shape[1], device=logits.device)
        return torch.where(wanted, ids, logits.shape[1]).min(dim=1).values

    def top_k(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        # A stable sort, since `topk` leaves open which of two equals comes first.
        values, ids = torch.sort(logits, dim=1, descending=True, stable=True)
        return values[:, :k].contiguous(), ids[:, :k].contiguous()
