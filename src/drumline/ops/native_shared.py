"""All layers of a pass in one native call, sums over tp included: for shares over shared memory.

The same operations in the same order as `ShardedOps` makes one by one, and so the same bits. The
ledger has all sums of the pass when the call is entered, and marks those that came to their end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drumline import _native
from drumline.ops.base import KVCache, PagedBatch
from drumline.ops.native import NativeOps
from drumline.ops.native_weights import NativeKV, NativeStack, address
from drumline.parallel.comm import Comm, Failure, RecordedComm
from drumline.parallel.shm import ShmCarrier, microseconds, tag_of


class FusedLayers:
    """`NativeOps` over a group whose members share memory."""

    def __init__(self, ops: NativeOps, comm: RecordedComm, carrier: ShmCarrier) -> None:
        self._ops = ops
        self._comm = comm
        self._carrier = carrier

    def run(
        self,
        x: Tensor,
        stack: NativeStack,
        batch: PagedBatch,
        cache: KVCache,
        taps: Sequence[int],
        entry: Tensor | None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """See `Ops.run_stack`; every block of ``stack`` is a share."""
        assert isinstance(cache, NativeKV)
        ready = self._ops.prepare(batch, cache.block_size)
        out = x.clone(memory_format=torch.contiguous_format)
        share = torch.empty_like(out)
        if entry is not None and entry.stride(1) != 1:
            entry = entry.contiguous()
        tapped = {tap: torch.empty_like(out) for tap in taps}

        def call(seconds: float) -> tuple[int, Failure | None]:
            done, found = _native.run_shared(
                stack.native,
                self._ops.space,
                cache.native,
                ready.places,
                out.data_ptr(),
                address(entry),
                0 if entry is None else entry.stride(0),
                [(tap, copy.data_ptr()) for tap, copy in tapped.items()],
                torch.get_num_threads(),
                self._carrier.group,
                tag_of("all_reduce", share),
                microseconds(seconds),
                share.data_ptr(),
            )
            return done, None if found is None else self._carrier.failure(found, seconds)

        self._comm.all_reduce_within(share, 2 * len(stack), call)
        return out, tapped


def fused_layers(ops: object, comm: Comm) -> FusedLayers | None:
    """The one call, where backend and group have it."""
    if not isinstance(ops, NativeOps) or not isinstance(comm, RecordedComm):
        return None
    if not isinstance(comm.carrier, ShmCarrier):
        return None
    return FusedLayers(ops, comm, comm.carrier)
