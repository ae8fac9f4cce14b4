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

import numpy as np
import torch
from torch import Tensor

from drumline.core.errors import ConfigError
from drumline.ops.base import Experts, KVCache, Linear, PagedBatch, RopeTable, Routing
from drumline.ops.sums import tree_sum, tree_sum_last
from drumline.ops.weights import WeightTensor

ROW_TILE = 16  # rows per matrix product; on the CPUs measured 16 rows cost what 4 cost
QUERY_TILE = 4  # queries of one sequence that share a gathered KV block
ITEMS_MAX = 2048  # (query tile, block) pairs held in memory at once
KV_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


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


@dataclass(frozen=True)
class ReferenceKV:
    """Keys and values ``[layers, blocks, kv_heads, block_size, head_dim]``."""

    keys: Tensor
    values: Tensor

    @property
    def block_size(self) -> int:
        return self.keys.shape[3]

    @property
    def block_count(self) -> int:
        return self.keys.shape[1]

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


@dataclass(frozen=True)
class TileGroup:
    """Query tiles that are attended together; ``t`` tiles over at most ``m`` blocks each.

    ``source`` picks tokens into tile slots, ``target`` puts the live slots back:
    ``out[source[live]] = tile_out[live]``.
    """

    source: Tensor  # [t * QUERY_TILE] token index, 0 where the slot is empty
    live: Tensor  # [live slots] index into the flattened tile slots
    target: Tensor  # [live slots] token index
    block_ids: Tensor  # [t * m]
    hidden: Tensor  # [t, m, 1, QUERY_TILE, 1, block_size] bool: key is after the query


@dataclass(frozen=True)
class ReferenceBatch(PagedBatch):
    """A `PagedBatch` with what every layer needs of it worked out once."""

    write_rows: Tensor | None = None  # tokens that have a slot; None if all have
    write_blocks: Tensor | None = None
    write_offsets: Tensor | None = None
    groups: tuple[TileGroup, ...] = ()


class ReferenceOps:
    """`drumline.ops.base.Ops` in plain torch. See there for shapes."""

    name = "reference"

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self.device = torch.device(device)

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

    def allocate_kv(
        self, layers: int, blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: str
    ) -> ReferenceKV:
        if dtype not in KV_DTYPES:
            raise ConfigError("kv_cache_dtype", dtype, f"reference ops have {', '.join(KV_DTYPES)}")
        shape = (layers, blocks, kv_heads, block_size, head_dim)
        return ReferenceKV(self._zeros(shape, dtype), self._zeros(shape, dtype))

    def _zeros(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        """Zeros; on the CPU memory is taken page by page as blocks come into use, which
        `torch.zeros` would touch at once."""
        kind = KV_DTYPES[dtype]
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=kind, device=self.device)
        bits = {4: np.int32, 2: np.int16}[kind.itemsize]
        return torch.from_numpy(np.zeros(shape, dtype=bits)).view(kind)

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

    # ---- attention -----------------------------------------------------------------------

    def write_kv(
        self, key: Tensor, value: Tensor, cache: KVCache, layer: int, slots: Tensor
    ) -> None:
        assert isinstance(cache, ReferenceKV)
        keys, values = cache.keys[layer], cache.values[layer]
        rows = torch.nonzero(slots >= 0).squeeze(1)
        slots = slots.index_select(0, rows)
        at = (slots // cache.block_size, slice(None), slots % cache.block_size)
        keys[at] = _stored(key.index_select(0, rows), keys.dtype)
        values[at] = _stored(value.index_select(0, rows), values.dtype)

    def prepare(self, batch: PagedBatch, block_size: int) -> ReferenceBatch:
        """Cuts a batch into query tiles and groups of tiles; once per pass, not per layer."""
        if isinstance(batch, ReferenceBatch):
            return batch
        written = torch.nonzero(batch.slots >= 0).squeeze(1)
        every = written.shape[0] == batch.slots.shape[0]
        slots = batch.slots if every else batch.slots.index_select(0, written)
        return ReferenceBatch(
            positions=batch.positions,
            slots=batch.slots,
            query_start=batch.query_start,
            block_tables=batch.block_tables,
            first_key=batch.first_key,
            write_rows=None if every else written,
            write_blocks=slots // block_size,
            write_offsets=slots % block_size,
            groups=tuple(self._groups(batch, block_size)),
        )

    def attention(
        self,
        query: Tensor,  # [tokens, heads, head_dim]
        key: Tensor,  # [tokens, kv_heads, head_dim]
        value: Tensor,
        cache: KVCache,
        layer: int,
        batch: PagedBatch,
        scale: float,
    ) -> Tensor:
        assert isinstance(cache, ReferenceKV)
        ready = self.prepare(batch, cache.block_size)
        keys, values = cache.keys[layer], cache.values[layer]
        if ready.write_rows is not None:
            key, value = key[ready.write_rows], value[ready.write_rows]
        at = (ready.write_blocks, slice(None), ready.write_offsets)
        keys[at], values[at] = _stored(key, keys.dtype), _stored(value, values.dtype)
        tokens, heads, head_dim = query.shape
        grouped = query.reshape(tokens, key.shape[1], heads // key.shape[1], head_dim)
        out = query.new_zeros((tokens, heads * head_dim))
        for group in ready.groups:
            tiles = self._attend(grouped, keys, values, group, scale)
            out[group.target] = tiles.view(-1, heads * head_dim)[group.live]
        return out

    def _attend(
        self, query: Tensor, keys: Tensor, values: Tensor, group: TileGroup, scale: float
    ) -> Tensor:
        """One group of tiles; returns ``[t, QUERY_TILE, kv_heads, group, head_dim]``."""
        _, kv_heads, per_kv, head_dim = query.shape
        t, m, block_size = group.hidden.shape[0], group.hidden.shape[1], keys.shape[2]
        rows = QUERY_TILE * per_kv
        q = query.index_select(0, group.source).view(t, 1, QUERY_TILE, kv_heads, per_kv, head_dim)
        q = q.permute(0, 1, 3, 2, 4, 5).expand(t, m, kv_heads, QUERY_TILE, per_kv, head_dim)
        q = q.reshape(t * m * kv_heads, rows, head_dim)
        k = keys.index_select(0, group.block_ids).view(-1, block_size, head_dim)
        scores = torch.bmm(q, k.to(q.dtype).transpose(1, 2)).mul_(scale)
        scores = scores.view(t, m, kv_heads, QUERY_TILE, per_kv, block_size)
        scores.masked_fill_(group.hidden, -torch.inf)
        peak = scores.amax(dim=(1, 5), keepdim=True)  # [t, 1, kv_heads, QUERY_TILE, per_kv, 1]
        weights = torch.exp(scores.sub_(peak))
        v = values.index_select(0, group.block_ids).view(-1, block_size, head_dim)
        partial = torch.bmm(weights.view(-1, rows, block_size), v.to(q.dtype))
        partial = partial.view(t, m, kv_heads, QUERY_TILE, per_kv, head_dim)
        total = tree_sum(tree_sum_last(weights), 1)  # [t, kv_heads, QUERY_TILE, per_kv, 1]
        mixed = tree_sum(partial, 1) / total
        return mixed.permute(0, 2, 1, 3, 4).contiguous()

    def _groups(self, batch: PagedBatch, block_size: int) -> list[TileGroup]:
        positions = batch.positions.tolist()
        tiles = []  # (blocks, first token, tokens, block table)
        for index, table in enumerate(batch.block_tables):
            end = batch.query_start[index + 1]
            for first in range(batch.query_start[index], end, QUERY_TILE):
                last = min(first + QUERY_TILE, end) - 1
                tiles.append((positions[last] // block_size + 1, first, last - first + 1, table))
        tiles.sort(key=lambda tile: (-tile[0], tile[1]))  # like lengths share a group
        groups, start = [], 0
        while start < len(tiles):
            count = max(1, ITEMS_MAX // tiles[start][0])
            groups.append(
                self._group(tiles[start : start + count], positions, block_size, batch.first_key)
            )
            start += count
        return groups

    def _group(
        self,
        tiles: Sequence[tuple[int, int, int, tuple[int, ...]]],
        positions: list[int],
        block_size: int,
        first_key: int,
    ) -> TileGroup:
        t, m = len(tiles), tiles[0][0]
        source: list[int] = []
        live: list[int] = []
        target: list[int] = []
        blocks: list[int] = []
        reach: list[int] = []
        for index, (count, first, width, table) in enumerate(tiles):
            for slot in range(QUERY_TILE):
                used = slot < width
                source.append(first + slot if used else first)
                reach.append(positions[first + slot] if used else 0)
                if used:
                    live.append(index * QUERY_TILE + slot)
                    target.append(first + slot)
            blocks += table[:count]
            blocks += (0,) * (m - count)  # masked: their keys lie after every query
        device = self.device
        key_at = torch.arange(m * block_size, device=device).view(1, m, 1, 1, 1, block_size)
        query_at = torch.tensor(reach, device=device).view(t, 1, 1, QUERY_TILE, 1, 1)
        return TileGroup(
            source=torch.tensor(source, device=device),
            live=torch.tensor(live, device=device),
            target=torch.tensor(target, device=device),
            block_ids=torch.tensor(blocks, device=device),
            # An empty query slot sees key 0 whatever first_key says: a softmax needs one.
            hidden=(key_at > query_at) | ((key_at < first_key) & (query_at >= first_key)),
        )


def _stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Finite entries only: a masked key has weight 0, and 0 * inf would reach its neighbours in
    the block, which after a block is freed belong to other requests."""
    return torch.nan_to_num(x.to(dtype))
