"""Attention of the reference operations: plain torch, cut into pinned shapes.

Queries are cut into tiles of `QUERY_TILE`, keys into the cache's blocks; the items of a query are
added by `tree_sum`, whose result does not change when zeros are appended. So a query's bits do not
depend on its neighbours. Knows caches and places, no weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from msgspec import field
from torch import Tensor

from drumline.core.errors import ConfigError
from drumline.ops.base import KVCache, PagedBatch
from drumline.ops.sums import tree_sum, tree_sum_last

QUERY_TILE = 4  # queries of one sequence that share a gathered KV block
ITEMS_MAX = 2048  # (query tile, block) pairs held in memory at once
KV_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
}
INT8_MAX = 127.0
INT8_LARGEST = 3.4e38  # beyond it 127 times the scale may be infinite


@dataclass(frozen=True)
class ReferenceKV:
    """Keys and values ``[layers, blocks, kv_heads, block_size, head_dim]``; of int8 also what they
    are multiplied by, one scale per token and head ``[layers, blocks, kv_heads, block_size]``.

    All layers of a block lie together, so that memory is taken as blocks come into use, also where
    the system hands it out in large pages."""

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    @property
    def block_size(self) -> int:
        return self.keys.shape[3]

    @property
    def block_count(self) -> int:
        return self.keys.shape[1]

    @property
    def nbytes(self) -> int:
        scales = (self.key_scales, self.value_scales)
        own = sum(part.nbytes for part in scales if part is not None)
        return self.keys.nbytes + self.values.nbytes + own


@dataclass(frozen=True)
class Plane:
    """One layer's keys or values: how they are stored, and read back as float32."""

    cells: Tensor  # [blocks, kv_heads, block_size, head_dim]
    scales: Tensor | None  # [blocks, kv_heads, block_size]

    def put(self, at: tuple[Tensor, slice, Tensor], x: Tensor) -> None:
        """``x`` ``[tokens, kv_heads, head_dim]``. Finite entries only: a masked key has weight 0,
        and 0 * inf would reach its neighbours in the block, which after a block is freed belong to
        other requests."""
        if self.scales is None:
            self.cells[at] = torch.nan_to_num(x.to(self.cells.dtype))
            return
        x = torch.nan_to_num(x).clamp(-INT8_LARGEST, INT8_LARGEST)
        scale = x.abs().amax(dim=-1) / INT8_MAX  # [tokens, kv_heads]
        quotient = x / torch.where(scale > 0, scale, torch.inf).unsqueeze(-1)
        self.cells[at] = quotient.round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8)
        self.scales[at] = scale

    def take(self, block_ids: Tensor) -> Tensor:
        """``[blocks * kv_heads, block_size, head_dim]``"""
        taken = self.cells.index_select(0, block_ids).float()
        if self.scales is not None:
            taken = taken * self.scales.index_select(0, block_ids).unsqueeze(-1)
        return taken.flatten(0, 1)


def _planes(cache: ReferenceKV, layer: int) -> tuple[Plane, Plane]:
    """The layer's keys and values."""
    key_scales, value_scales = cache.key_scales, cache.value_scales
    return (
        Plane(cache.keys[layer], None if key_scales is None else key_scales[layer]),
        Plane(cache.values[layer], None if value_scales is None else value_scales[layer]),
    )


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


class ReferenceBatch(PagedBatch, frozen=True):
    """A `PagedBatch` with what every layer needs of it worked out once."""

    write_rows: Tensor | None = None  # tokens that have a slot; None if all have
    write_blocks: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    write_offsets: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    groups: tuple[TileGroup, ...] = ()


class ReferenceAttention:
    """The operations of `drumline.ops.base.Ops` that know a cache. See there for shapes."""

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self.device = torch.device(device)

    def allocate_kv(
        self, layers: int, blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: str
    ) -> ReferenceKV:
        if dtype not in KV_DTYPES:
            raise ConfigError("kv_cache_dtype", dtype, f"reference ops have {', '.join(KV_DTYPES)}")
        by_token = (layers, blocks, kv_heads, block_size)
        kind = KV_DTYPES[dtype]
        keys, values = (self._zeros((*by_token, head_dim), kind) for _ in range(2))
        if dtype != "int8":
            return ReferenceKV(keys, values)
        return ReferenceKV(keys, values, *(self._zeros(by_token, torch.float32) for _ in range(2)))

    def _zeros(self, shape: tuple[int, ...], kind: torch.dtype) -> Tensor:
        """Zeros ``[layers, blocks, ...]``, block after block; on the CPU memory is taken page by
        page as blocks come into use, which `torch.zeros` would touch at once."""
        layers, blocks, *rest = shape
        by_block = (blocks, layers, *rest)
        if self.device.type != "cpu":
            return torch.zeros(by_block, dtype=kind, device=self.device).transpose(0, 1)
        bits = {4: np.int32, 2: np.int16, 1: np.int8}[kind.itemsize]
        return torch.from_numpy(np.zeros(by_block, dtype=bits)).view(kind).transpose(0, 1)

    def write_kv(
        self, key: Tensor, value: Tensor, cache: KVCache, layer: int, slots: Tensor
    ) -> None:
        assert isinstance(cache, ReferenceKV)
        rows = torch.nonzero(slots >= 0).squeeze(1)
        slots = slots.index_select(0, rows)
        at = (slots // cache.block_size, slice(None), slots % cache.block_size)
        for plane, x in zip(_planes(cache, layer), (key, value), strict=True):
            plane.put(at, x.index_select(0, rows))

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
        keys, values = _planes(cache, layer)
        if ready.write_rows is not None:
            key, value = key[ready.write_rows], value[ready.write_rows]
        at = (ready.write_blocks, slice(None), ready.write_offsets)
        keys.put(at, key)
        values.put(at, value)
        tokens, heads, head_dim = query.shape
        grouped = query.reshape(tokens, key.shape[1], heads // key.shape[1], head_dim)
        out = query.new_zeros((tokens, heads * head_dim))
        for group in ready.groups:
            tiles = self._attend(grouped, keys, values, group, scale)
            out[group.target] = tiles.view(-1, heads * head_dim)[group.live]
        return out

    def _attend(
        self, query: Tensor, keys: Plane, values: Plane, group: TileGroup, scale: float
    ) -> Tensor:
        """One group of tiles; returns ``[t, QUERY_TILE, kv_heads, group, head_dim]``."""
        _, kv_heads, per_kv, head_dim = query.shape
        t, m, block_size = group.hidden.shape[0], group.hidden.shape[1], keys.cells.shape[2]
        rows = QUERY_TILE * per_kv
        q = query.index_select(0, group.source).view(t, 1, QUERY_TILE, kv_heads, per_kv, head_dim)
        q = q.permute(0, 1, 3, 2, 4, 5).expand(t, m, kv_heads, QUERY_TILE, per_kv, head_dim)
        q = q.reshape(t * m * kv_heads, rows, head_dim)
        scores = torch.bmm(q, keys.take(group.block_ids).transpose(1, 2)).mul_(scale)
        scores = scores.view(t, m, kv_heads, QUERY_TILE, per_kv, block_size)
        scores.masked_fill_(group.hidden, -torch.inf)
        peak = scores.amax(dim=(1, 5), keepdim=True)  # [t, 1, kv_heads, QUERY_TILE, per_kv, 1]
        weights = torch.exp(scores.sub_(peak))
        partial = torch.bmm(weights.view(-1, rows, block_size), values.take(group.block_ids))
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
