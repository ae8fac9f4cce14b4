"""The native operations on layers: a block, a stack of them, a whole pass, each in one call.

Addresses and counts go down, results come back in tensors made here. Knows no weights of its own.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

import drumline._native as _native
from drumline.ops.base import (
    DecoderWeights,
    KVCache,
    LayerWeights,
    PagedBatch,
    RopeTable,
    Stack,
)
from drumline.ops.native_weights import (
    NativeBatch,
    NativeKV,
    NativeLinear,
    NativeStack,
    address,
    load_stack,
)
from drumline.ops.reference import ReferenceOps


class NativeLayers(ReferenceOps):
    """See `drumline.ops.base.Ops`. ``space`` and ``threads`` are what every call is made with."""

    space: _native.Workspace

    @property
    def threads(self) -> int:
        raise NotImplementedError

    def load_stack(self, layers: Sequence[LayerWeights], rope: RopeTable) -> NativeStack:
        return load_stack(layers, rope)

    def prepare(self, batch: PagedBatch, block_size: int) -> NativeBatch:  # type: ignore[override]
        if isinstance(batch, NativeBatch):
            return batch
        starts = array("q")
        flat = array("q")
        for index, block_table in enumerate(batch.block_tables):
            count = batch.query_start[index + 1] - batch.query_start[index]
            starts.extend([len(flat)] * count)
            flat.extend(block_table)
        return NativeBatch.of(batch, starts, flat)

    def attend(
        self,
        x: Tensor,
        stack: Stack,
        index: int,
        batch: PagedBatch,
        cache: KVCache,
        residual: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(stack, NativeStack)
        assert isinstance(cache, NativeKV)
        ready = self.prepare(batch, cache.block_size)
        x = x if x.stride(1) == 1 else x.contiguous()
        residual = None if residual is None else residual.contiguous()
        assert x.shape == (ready.token_count, stack.columns(index)), x.shape
        out = x.new_empty((x.shape[0], stack.hidden))
        stack.native.attend(
            index,
            self.space,
            cache.native,
            ready.places,
            x.data_ptr(),
            x.stride(0),
            address(residual),
            out.data_ptr(),
            self.threads,
        )
        return out

    def feed_forward(
        self, x: Tensor, stack: Stack, index: int, residual: Tensor | None = None
    ) -> Tensor:
        assert isinstance(stack, NativeStack)
        assert x.shape[1] == stack.hidden, x.shape
        x = x.contiguous()
        residual = None if residual is None else residual.contiguous()
        out = torch.empty_like(x)
        stack.native.feed_forward(
            index,
            self.space,
            x.data_ptr(),
            x.shape[0],
            address(residual),
            out.data_ptr(),
            self.threads,
        )
        return out

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
        assert isinstance(stack, NativeStack)
        assert isinstance(cache, NativeKV)
        ready = self.prepare(batch, cache.block_size)
        out = x.clone(memory_format=torch.contiguous_format)
        assert out.shape == (ready.token_count, stack.hidden), out.shape
        if entry is not None:
            assert entry.shape == (ready.token_count, stack.columns(0)), entry.shape
            entry = entry if entry.stride(1) == 1 else entry.contiguous()
        tapped = {tap: torch.empty_like(out) for tap in taps}
        read = array("q", () if read_at is None else read_at)
        stack.native.run(
            self.space,
            cache.native,
            ready.places,
            out.data_ptr(),
            address(entry),
            0 if entry is None else entry.stride(0),
            [(tap, copy.data_ptr()) for tap, copy in tapped.items()],
            read.buffer_info()[0],
            -1 if read_at is None else len(read),
            self.threads,
        )
        return out, tapped

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
        stack, table, head = weights.stack, weights.embedding, weights.head
        assert isinstance(stack, NativeStack)
        assert isinstance(cache, NativeKV)
        assert isinstance(table, NativeLinear)
        assert isinstance(head, NativeLinear)
        ready = self.prepare(batch, cache.block_size)
        ids = ids.contiguous()
        assert ids.dtype == torch.int64
        assert ids.shape == (ready.token_count,), ids.shape
        out = torch.empty((ids.shape[0], stack.hidden))
        tapped = {tap: torch.empty_like(out) for tap in taps}
        rows = array("q", logits_at)
        read = rows if read_at is logits_at else array("q", read_at or ())
        logits = torch.empty((len(rows), head.out_features)) if rows else None
        stack.native.decode(
            self.space,
            cache.native,
            ready.places,
            ids.data_ptr(),
            table.dense,
            out.data_ptr(),
            [(tap, copy.data_ptr()) for tap, copy in tapped.items()],
            weights.norm.data_ptr(),
            weights.eps,
            head.dense,
            rows.buffer_info()[0],
            len(rows),
            address(logits),
            read.buffer_info()[0],
            -1 if read_at is None else len(read),
            self.threads,
        )
        return out, tapped, logits
