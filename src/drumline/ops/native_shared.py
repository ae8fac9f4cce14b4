"""All layers of a pass in one native call, whatever ranks tell each other within them included.

The same operations in the same order as `ShardedOps` makes one by one, and so the same bits. The
ledger has all collectives of the pass when the call is entered, and marks those that came to their
end. It is there for native operations whose groups share memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drumline import _native
from drumline.ops.base import KVCache, LayerWeights, MoeWeights, PagedBatch, Stack
from drumline.ops.native import NativeOps
from drumline.ops.native_weights import (
    NativeExperts,
    NativeKV,
    NativeLinear,
    NativeStack,
    address,
)
from drumline.ops.shares import PartialLinear, SpreadExperts, is_partial_block
from drumline.parallel.comm import Comm, Failure, Issued, RecordedComm, launch
from drumline.parallel.shards import experts_max
from drumline.parallel.shm import ShmCarrier, microseconds, tag_of


@dataclass(frozen=True)
class FusedStack:
    """Layers for `FusedLayers.run`. ``issues``: by layer, how often it sums over tp for its
    attention, and what its other block issues: nothing, a sum, or (k, experts) of spread ones."""

    inner: NativeStack
    sharing: list[_native.Sharing]
    sums: tuple[tuple[bool, bool], ...]
    spread: tuple[tuple[int, int] | None, ...]


class FusedLayers:
    """`NativeOps` over groups whose members share memory."""

    def __init__(self, ops: NativeOps, tp: RecordedComm | None, ep: RecordedComm | None) -> None:
        """``tp`` is None where this rank is alone in it, ``ep`` where experts are not spread."""
        self._ops = ops
        self._tp = tp
        self._ep = ep

    def prepare(self, layers: Sequence[LayerWeights], inner: Stack) -> FusedStack:
        """``inner``: the shares as the backend's own layers, see `ShardedStack`."""
        assert isinstance(inner, NativeStack)
        sharing: list[_native.Sharing] = []
        sums: list[tuple[bool, bool]] = []
        spread: list[tuple[int, int] | None] = []
        for layer in layers:
            block = layer.feed_forward
            wide = isinstance(block, MoeWeights) and isinstance(block.experts, SpreadExperts)
            attention = isinstance(layer.attention.o, PartialLinear)
            summed = is_partial_block(block) and not wide
            own = _native.Sharing(attention, summed)
            if wide:
                assert isinstance(block, MoeWeights)
                _spread(own, block)
                assert isinstance(block.experts, SpreadExperts)
                spread.append((block.per_token, block.experts.count))
            else:
                spread.append(None)
            sharing.append(own)
            sums.append((attention, summed))
        return FusedStack(inner, sharing, tuple(sums), tuple(spread))

    def run(
        self,
        x: Tensor,
        stack: FusedStack,
        batch: PagedBatch,
        cache: KVCache,
        taps: Sequence[int],
        entry: Tensor | None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """See `Ops.run_stack`."""
        assert isinstance(cache, NativeKV)
        ready = self._ops.prepare(batch, cache.block_size)
        out = x.clone(memory_format=torch.contiguous_format)
        if entry is not None and entry.stride(1) != 1:
            entry = entry.contiguous()
        tapped = {tap: torch.empty_like(out) for tap in taps}
        issues = self._issues(stack, out)
        sent = {one.operation: one for one in issues}
        sum_tag, gather_tag = _tag(sent.get("all_reduce")), _tag(sent.get("all_gather"))
        exchange_tag = _tag(sent.get("all_to_all"))

        def call(seconds: float) -> tuple[int, Failure | None]:
            done, found = _native.run_shared(
                stack.inner.native,
                stack.sharing,
                self._ops.space,
                cache.native,
                ready.places,
                out.data_ptr(),
                address(entry),
                0 if entry is None else entry.stride(0),
                [(tap, copy.data_ptr()) for tap, copy in tapped.items()],
                self._ops.threads,
                _group(self._tp),
                _group(self._ep),
                1 if self._tp is None else self._tp.size,
                sum_tag,
                gather_tag,
                exchange_tag,
                microseconds(seconds),
            )
            if found is None:
                return done, None
            carrier = issues[done].comm.carrier
            assert isinstance(carrier, ShmCarrier)
            return done, carrier.failure(found, seconds)

        launch(issues, call)
        return out, tapped

    def _issues(self, stack: FusedStack, x: Tensor) -> list[Issued]:
        """What the pass issues, in order."""
        tokens, hidden = x.shape
        found: list[Issued] = []
        for (attention, summed), spread in zip(stack.sums, stack.spread, strict=True):
            if attention:
                found.append(self._sum(x))
            if spread is not None:
                assert self._ep is not None
                k, count = spread
                held = min(k, experts_max(count, self._ep.size))
                found.append(Issued(self._ep, "all_gather", (tokens, hidden + k)))
                back = (self._ep.size, tokens, held, hidden)
                found.append(Issued(self._ep, "all_to_all", back))
            elif summed:
                found.append(self._sum(x))
        return found

    def _sum(self, x: Tensor) -> Issued:
        assert self._tp is not None
        return Issued(self._tp, "all_reduce", tuple(x.shape))


def _spread(sharing: _native.Sharing, block: MoeWeights) -> None:
    experts = block.experts
    assert isinstance(experts, SpreadExperts)
    assert isinstance(block.router, NativeLinear)
    assert experts.share is None or isinstance(experts.share, NativeExperts)
    sharing.spread(
        address(block.norm),
        block.router.dense,
        None if experts.share is None else experts.share.native,
        experts.first,
        experts.count,
        block.per_token,
        block.normalize,
        block.eps,
    )


def _tag(issued: Issued | None) -> int:
    return 0 if issued is None else tag_of(issued.operation, issued.shape, "float32")


def _group(comm: RecordedComm | None) -> _native.ShmGroup | None:
    if comm is None:
        return None
    assert isinstance(comm.carrier, ShmCarrier)
    return comm.carrier.group


def fused_layers(ops: object, tp: Comm, ep: Comm | None) -> FusedLayers | None:
    """The one call, where backend and groups have it."""
    if not isinstance(ops, NativeOps):
        return None
    found: list[RecordedComm | None] = []
    for comm in (tp, ep):
        if comm is None or (comm is tp and comm.size == 1):
            found.append(None)
        elif isinstance(comm, RecordedComm) and isinstance(comm.carrier, ShmCarrier):
            found.append(comm)
        else:
            return None
    return FusedLayers(ops, *found)
