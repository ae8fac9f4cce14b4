"""Compiled operations for the CPU.

Quantized weights are multiplied straight from repacked blocks, with activations quantized per row
and block of 32 columns to integers of 8 bits, of 12 in the four columns that hold the block's
largest. Sums in a block are exact, blocks are added in ascending order in float32. Plain weights
(float32, float16, bfloat16) are multiplied in float32, columns in ascending order. Attention goes
over the keys in ascending position. Either way a row's bits depend on the row alone (promise P1),
within one instruction-set path. All layers of a pass are one call. It refuses to know requests,
schedules and ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import drumline._native as _native
from drumline._native import available_paths
from drumline.core.errors import ConfigError
from drumline.ops.base import (
    Experts,
    KVCache,
    Linear,
    PagedBatch,
    RopeTable,
    Routing,
)
from drumline.ops.native_layers import NativeLayers
from drumline.ops.native_weights import (
    NativeExperts,
    NativeKV,
    NativeLinear,
    address,
    load_experts,
    load_linear,
)
from drumline.ops.weights import WeightTensor

# 8 bits for every activation cost 2.7e-3 of mean KL divergence from the reference and 3% of greedy
# tokens (SmolLM2); 16 bits for all are as good as equal (6e-8) and cost half as much again for 16
# rows. Most of the error is what one large column costs the other 31, whose steps it widens: four
# columns that reach 16 times as far, a ninth product, leave 4e-4 and 1%. `drumline bench quality`
# measures it.
FINE = True


class NativeOps(NativeLayers):
    """`drumline.ops.base.Ops` for the CPU. ``path`` names an instruction set, best by default;
    ``threads`` are torch's, unless said otherwise."""

    name = "native"

    def __init__(
        self,
        device: str | torch.device = "cpu",
        path: str | None = None,
        threads: int | None = None,
    ) -> None:
        super().__init__(device)
        if self.device.type != "cpu":
            raise ConfigError("ops_backend", "native", f"computes on the CPU, not on {device}")
        paths = available_paths()
        if path is not None and path not in paths:
            raise ConfigError("path", path, f"this processor has {', '.join(paths)}")
        self.path = path or paths[0]
        self.space = _native.Workspace(self.path, FINE)
        self._threads = threads

    @property
    def threads(self) -> int:
        return torch.get_num_threads() if self._threads is None else self._threads

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
            self.threads,
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
            self.threads,
        )
        return out

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty((rows, width))
        threads = self.threads
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
            self.threads,
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
            self.threads,
        )
        return out

    # ---- attention -----------------------------------------------------------------------

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
            self.threads,
        )
        return out

    # ---- logits --------------------------------------------------------------------------

    def argmax(self, logits: Tensor) -> Tensor:
        rows, width = logits.shape
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        out = torch.empty(rows, dtype=torch.int64)
        threads = self.threads
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
            self.threads,
        )
        return values, ids


def _by_token(x: Tensor) -> Tensor:
    """``[tokens, heads, head_dim]`` with the heads of a token end to end."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
