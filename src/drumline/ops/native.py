"""Compiled operations for the CPU.

Quantized weights are multiplied straight from repacked blocks, with activations quantized per row
and block of 32 columns to int8, and what that leaves over once more. Sums within a block are exact
integers, blocks are added in ascending order in float32. Plain weights (float32, float16, bfloat16)
are multiplied in float32, columns in ascending order. Attention goes over the keys in ascending
position. Either way a row's bits depend on the row alone (promise P1), within one instruction-set
path. All layers of a pass are one call. It refuses to know requests, schedules and ranks.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

import drumline._native as _native
from drumline._native import available_paths
from drumline.core.errors import ConfigError
from drumline.ops.base import (
    Experts,
    KVCache,
    LayerWeights,
    Linear,
    PagedBatch,
    RopeTable,
    Routing,
    Stack,
)
from drumline.ops.native_weights import (
    NativeBatch,
    NativeExperts,
    NativeKV,
    NativeLinear,
    NativeStack,
    address,
    load_experts,
    load_linear,
    load_stack,
)
from drumline.ops.reference import ReferenceOps
from drumline.ops.weights import WeightTensor

# Activations as one int8 row cost 2.7e-3 of mean KL divergence from the reference and 3% of
# greedy tokens (SmolLM2). With the second row 722 of 722 positions agree, at 6e-8. It is free for
# one token, whose time goes into reading weights, and costs a third of a step for 16.
FINE = True


class NativeOps(ReferenceOps):
    """`drumline.ops.base.Ops` for the CPU. ``path`` names an instruction set, best by default."""

    name = "native"

    def __init__(self, device: str | torch.device = "cpu", path: str | None = None) -> None:
        super().__init__(device)
        if self.device.type != "cpu":
            raise ConfigError("ops_backend", "native", f"computes on the CPU, not on {device}")
        paths = available_paths()
        if path is not None and path not in paths:
            raise ConfigError("path", path, f"this processor has {', '.join(paths)}")
        self.path = path or paths[0]
        self.space = _native.Workspace(self.path, FINE)

    # ---- loading -------------------------------------------------------------------------

    def load_linear(  # type: ignore[override]
        self, weights: Sequence[WeightTensor], bias: Tensor | None = None
    ) -> NativeLinear:
        return load_linear(weights, bias)

    def load_embedding(self, weight: WeightTensor) -> NativeLinear:  # type: ignore[override]
        return load_linear([weight])

    def load_experts(  # type: ignore[override]
        self, gate_up: Sequence[Sequence[WeightTensor]], down: Sequence[WeightTensor]
    ) -> NativeExperts:
        return load_experts(gate_up, down)

    def load_stack(self, layers: Sequence[LayerWeights], rope: RopeTable) -> NativeStack:
        return load_stack(layers, rope)

    def allocate_kv(
        self, layers: int, blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: str
    ) -> NativeKV:
        cache = super().allocate_kv(layers, blocks, block_size, kv_heads, head_dim, dtype)
        return NativeKV.of(cache, dtype)

    # ---- rows ----------------------------------------------------------------------------

    def embedding(self, ids: Tensor, table: Linear) -> Tensor:
        assert isinstance(table, NativeLinear)
        assert len(table.parts) == 1, "several kinds of weights are no table"
        ids = ids.contiguous()
        assert ids.dtype == torch.int64
        out = torch.empty((ids.shape[0], table.in_features))
        table.dense.take_rows(ids.data_ptr(), ids.shape[0], out.data_ptr())
        return out  # [tokens, hidden]

    def linear(self, x: Tensor, weight: Linear) -> Tensor:
        return self._linear(x, None, 0.0, weight)

    def norm_linear(self, x: Tensor, norm: Tensor, eps: float, weight: Linear) -> Tensor:
        return self._linear(x, norm, eps, weight)

    def _linear(self, x: Tensor, norm: Tensor | None, eps: float, weight: Linear) -> Tensor:
        assert isinstance(weight, NativeLinear)
        assert x.shape[1] == weight.in_features, (x.shape, weight.in_features)
        assert x.dtype == torch.float32
        x = x if x.stride(1) == 1 else x.contiguous()
        rows = x.shape[0]
        out = x.new_empty((rows, weight.out_features))
        weight.dense.linear(
            self.space,
            address(norm),
            eps,
            x.data_ptr(),
            rows,
            x.stride(0),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out  # [tokens, out]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x if x.stride(-1) == 1 and x.dim() == 2 else x.contiguous()
        width = x.shape[-1]
        out = x.new_empty(x.shape)
        _native.rms_norm(
            self.space,
            x.data_ptr(),
            x.numel() // width,
            width,
            x.stride(0) if x.dim() == 2 else width,
            weight.data_ptr(),
            eps,
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty((rows, width))
        threads = torch.get_num_threads()
        _native.silu_and_mul(self.space, gate_up.data_ptr(), rows, width, out.data_ptr(), threads)
        return out

    def rope(self, x: Tensor, positions: Tensor, table: RopeTable) -> Tensor:
        tokens, heads, head_dim = x.shape
        x = _by_token(x)
        positions = positions.contiguous()
        out = x.new_empty((tokens, heads, head_dim))
        _native.rope(
            self.space,
            x.data_ptr(),
            tokens,
            heads,
            head_dim,
            x.stride(0),
            positions.data_ptr(),
            table.cos.data_ptr(),
            table.sin.data_ptr(),
            table.cos.shape[1],
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    # ---- experts -------------------------------------------------------------------------

    def route(self, logits: Tensor, per_token: int, normalize: bool) -> Routing:
        rows, count = logits.shape
        logits = logits.contiguous()
        ids = torch.empty((rows, per_token), dtype=torch.int64)
        weights = torch.empty((rows, per_token))
        _native.route(
            self.space,
            logits.data_ptr(),
            rows,
            count,
            per_token,
            normalize,
            ids.data_ptr(),
            weights.data_ptr(),
        )
        return Routing(ids, weights)

    def expert_outputs(self, x: Tensor, routing: Routing, experts: Experts) -> Tensor:
        assert isinstance(experts, NativeExperts)
        x, ids = x.contiguous(), routing.experts.contiguous()
        rows, per_token = ids.shape
        out = x.new_empty((rows, per_token, x.shape[1]))
        experts.native.outputs(
            self.space,
            x.data_ptr(),
            rows,
            ids.data_ptr(),
            per_token,
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    # ---- attention -----------------------------------------------------------------------

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

    def write_kv(
        self, key: Tensor, value: Tensor, cache: KVCache, layer: int, slots: Tensor
    ) -> None:
        assert isinstance(cache, NativeKV)
        key, value, slots = _by_token(key), _by_token(value), slots.contiguous()
        _native.write_kv(
            self.space,
            cache.native,
            layer,
            slots.data_ptr(),
            key.shape[0],
            key.data_ptr(),
            value.data_ptr(),
            key.stride(0),
            value.stride(0),
        )

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
        assert isinstance(cache, NativeKV)
        ready = self.prepare(batch, cache.block_size)
        self.write_kv(key, value, cache, layer, ready.slots)
        tokens, heads, head_dim = query.shape
        query = _by_token(query)
        out = query.new_empty((tokens, heads * head_dim))
        _native.attention(
            self.space,
            cache.native,
            ready.places,
            layer,
            query.data_ptr(),
            query.stride(0),
            heads,
            scale,
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out

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
            torch.get_num_threads(),
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
            torch.get_num_threads(),
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
        stack.native.run(
            self.space,
            cache.native,
            ready.places,
            out.data_ptr(),
            address(entry),
            0 if entry is None else entry.stride(0),
            [(tap, copy.data_ptr()) for tap, copy in tapped.items()],
            torch.get_num_threads(),
        )
        return out, tapped

    # ---- logits --------------------------------------------------------------------------

    def argmax(self, logits: Tensor) -> Tensor:
        rows, width = logits.shape
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        out = torch.empty(rows, dtype=torch.int64)
        threads = torch.get_num_threads()
        _native.argmax(
            self.space, logits.data_ptr(), rows, width, logits.stride(0), out.data_ptr(), threads
        )
        return out

    def top_k(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        rows, width = logits.shape
        k = min(k, width)
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        values = torch.empty((rows, k))
        ids = torch.empty((rows, k), dtype=torch.int64)
        _native.top_k(
            self.space,
            logits.data_ptr(),
            rows,
            width,
            logits.stride(0),
            k,
            values.data_ptr(),
            ids.data_ptr(),
            torch.get_num_threads(),
        )
        return values, ids


def _by_token(x: Tensor) -> Tensor:
    """``[tokens, heads, head_dim]`` with the heads of a token end to end."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
