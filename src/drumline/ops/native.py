"""Compiled operations for the CPU.

Quantized weights are multiplied straight from repacked blocks, with activations quantized per row
and block of 32 columns to int8, and what that leaves over once more. Sums within a block are exact
integers, blocks are added in ascending order in float32. Plain weights (float32, float16, bfloat16)
are multiplied in float32, columns in ascending order. Attention goes over the keys in ascending
position. Either way a row's bits depend on the row alone (promise P1), within one instruction-set
path. It refuses to know requests, schedules and ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from drumline._native import (
    PackedLinear,
    attention,
    available_paths,
    rms_norm,
    rope,
    silu_and_mul,
    write_kv,
)
from drumline.core.errors import ConfigError
from drumline.ops.base import KVCache, Linear, PagedBatch, RopeTable
from drumline.ops.reference import KV_DTYPES, ReferenceKV, ReferenceOps
from drumline.ops.weights import WeightTensor

KV_NAMES = {kind: name for name, kind in KV_DTYPES.items()}
# Activations as one int8 row cost 2.7e-3 of mean KL divergence from the reference and 3% of
# greedy tokens (SmolLM2). With the second row 722 of 722 positions agree, at 6e-8. It is free for
# one token, whose time goes into reading weights, and costs a third of a step for 16.
FINE = True
PACKED_KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")


@dataclass(frozen=True)
class NativeBatch(PagedBatch):
    """A `PagedBatch` with its block tables end to end, and where each token's table begins."""

    tables: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    table_start: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))


class NativeKV(ReferenceKV):
    """Keys ``[layers, blocks, kv_heads, head_dim, block_size]``, channel by channel within a block,
    so that 8 keys are one vector; values as the reference has them."""

    @property
    def block_size(self) -> int:
        return self.values.shape[3]


@dataclass(frozen=True)
class NativeLinear:
    """Repacked weights that are stacked along the output, and an optional bias ``[out]``.

    ``rows`` is the table as the checkpoint stores it, kept only for embeddings.
    """

    parts: tuple[PackedLinear, ...]
    in_features: int
    out_features: int
    bias: Tensor | None = None
    rows: WeightTensor | None = None

    @property
    def nbytes(self) -> int:
        packed = sum(part.nbytes for part in self.parts)
        return packed + (0 if self.bias is None else self.bias.nbytes)


def pack(weight: WeightTensor) -> PackedLinear:
    """Repacks one ``[out, in]`` weight; kinds without a kernel of their own become float32."""
    if weight.kind in PACKED_KINDS:
        kind, data = weight.kind, weight.data.contiguous()
    else:
        kind, data = "F32", weight.to_float()
    return PackedLinear(kind, data.data_ptr(), weight.shape[0], weight.shape[1])


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

    def load_linear(  # type: ignore[override]
        self, weights: Sequence[WeightTensor], bias: Tensor | None = None
    ) -> NativeLinear:
        return NativeLinear(
            parts=tuple(pack(weight) for weight in weights),
            in_features=weights[0].shape[1],
            out_features=sum(weight.shape[0] for weight in weights),
            bias=None if bias is None else bias.to(torch.float32).contiguous(),
        )

    def load_embedding(self, weight: WeightTensor) -> NativeLinear:  # type: ignore[override]
        return NativeLinear((pack(weight),), weight.shape[1], weight.shape[0], rows=weight)

    def allocate_kv(
        self, layers: int, blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: str
    ) -> NativeKV:
        cache = super().allocate_kv(layers, blocks, block_size, kv_heads, head_dim, dtype)
        shape = (layers, blocks, kv_heads, head_dim, block_size)
        return NativeKV(cache.keys.view(shape), cache.values)

    def embedding(self, ids: Tensor, table: Linear) -> Tensor:
        assert isinstance(table, NativeLinear)
        assert table.rows is not None, "not loaded as an embedding"
        stored = table.rows.data.index_select(0, ids)  # [tokens, bytes or hidden]
        shape = (ids.shape[0], table.in_features)
        return WeightTensor("embedding", shape, table.rows.kind, stored).to_float()

    def linear(self, x: Tensor, weight: Linear) -> Tensor:
        assert isinstance(weight, NativeLinear)
        assert x.shape[1] == weight.in_features, (x.shape, weight.in_features)
        assert x.dtype == torch.float32
        x = x if x.stride(1) == 1 else x.contiguous()
        rows = x.shape[0]
        out = x.new_empty((rows, weight.out_features))
        at, threads = out.data_ptr(), torch.get_num_threads()
        for part in weight.parts:
            part.multiply(
                x.data_ptr(),
                rows,
                x.stride(0),
                at,
                weight.out_features,
                threads,
                self.path,
                FINE,
            )
            at += 4 * part.outputs
        if weight.bias is not None:
            out += weight.bias
        return out  # [tokens, out]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x if x.stride(-1) == 1 and x.dim() == 2 else x.contiguous()
        width = x.shape[-1]
        rows = x.numel() // width
        stride = x.stride(0) if x.dim() == 2 else width
        out = x.new_empty(x.shape)
        rms_norm(
            x.data_ptr(), rows, width, stride, weight.data_ptr(), eps, out.data_ptr(), self.path
        )
        return out

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty((rows, width))
        threads = torch.get_num_threads()
        silu_and_mul(gate_up.data_ptr(), rows, width, out.data_ptr(), threads, self.path)
        return out

    def rope(self, x: Tensor, positions: Tensor, table: RopeTable) -> Tensor:
        tokens, heads, head_dim = x.shape
        if x.stride(2) != 1 or x.stride(1) != head_dim:
            x = x.contiguous()
        out = x.new_empty((tokens, heads, head_dim))
        rope(
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
            self.path,
        )
        return out

    def prepare(self, batch: PagedBatch, block_size: int) -> PagedBatch:  # type: ignore[override]
        if isinstance(batch, NativeBatch):
            return batch
        starts: list[int] = []
        flat: list[int] = []
        for index, block_table in enumerate(batch.block_tables):
            count = batch.query_start[index + 1] - batch.query_start[index]
            starts += [len(flat)] * count
            flat += block_table
        return NativeBatch(
            positions=batch.positions.contiguous(),
            slots=batch.slots.contiguous(),
            query_start=batch.query_start,
            block_tables=batch.block_tables,
            first_key=batch.first_key,
            tables=torch.tensor(flat, dtype=torch.int64),
            table_start=torch.tensor(starts, dtype=torch.int64),
        )

    def write_kv(
        self, key: Tensor, value: Tensor, cache: KVCache, layer: int, slots: Tensor
    ) -> None:
        assert isinstance(cache, NativeKV)
        key, value, slots = _by_token(key), _by_token(value), slots.contiguous()
        write_kv(
            key.data_ptr(),
            value.data_ptr(),
            key.stride(0),
            value.stride(0),
            cache.keys[layer].data_ptr(),
            cache.values[layer].data_ptr(),
            KV_NAMES[cache.keys.dtype],
            slots.data_ptr(),
            key.shape[0],
            key.shape[1],
            key.shape[2],
            cache.block_size,
            self.path,
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
        assert isinstance(ready, NativeBatch)
        tokens, heads, head_dim = query.shape
        kv_heads = key.shape[1]
        key, value = (_by_token(part) for part in (key, value))
        query = query.contiguous()
        out = query.new_empty((tokens, heads * head_dim))
        attention(
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            key.stride(0),
            value.stride(0),
            cache.keys[layer].data_ptr(),
            cache.values[layer].data_ptr(),
            KV_NAMES[cache.keys.dtype],
            ready.positions.data_ptr(),
            ready.slots.data_ptr(),
            ready.tables.data_ptr(),
            ready.table_start.data_ptr(),
            tokens,
            heads,
            kv_heads,
            head_dim,
            cache.block_size,
            ready.first_key,
            scale,
            out.data_ptr(),
            torch.get_num_threads(),
            self.path,
        )
        return out


def _by_token(x: Tensor) -> Tensor:
    """``[tokens, heads, head_dim]`` with the heads of a token end to end."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
