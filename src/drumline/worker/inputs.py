"""From a plan's rows to the tensors of one target pass. Knows no model and no sampling.

A worker that lays out pass after pass hands in an `IndexMemory`, and then makes no tensors for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from msgspec import Struct
from torch import Tensor

from drumline.core.plan import Row
from drumline.ops.base import PagedBatch
from drumline.ops.indices import Columns, IndexMemory, index_columns


class PassInputs(Struct, frozen=True):
    """``ids`` [tokens] int64, and where those tokens sit. ``offsets``: where each row begins in the
    flat batch. ``picked``: tokens whose logits are wanted: of each row that samples, its last
    committed token and its drafts; ascending."""

    ids: Tensor
    batch: PagedBatch
    offsets: list[int]
    picked: list[int]


def build_inputs(
    rows: Sequence[Row],
    block_size: int,
    device: torch.device,
    size: int = 0,
    memory: IndexMemory | None = None,
) -> PassInputs:
    """Lays rows end to end, token-major: committed tokens, then drafts, row after row. Then, up to
    ``size`` tokens, padding: each alone at position 0 of block 0, writing nothing."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    query_start = [0]
    picked: list[int] = []
    for row in rows:
        start, block_ids, offset = row.start, row.block_ids, len(ids)
        ids += row.tokens
        ids += row.drafts
        width = len(ids) - offset
        end = start + width
        assert width > 0, f"row {row.number} has nothing to compute"
        assert end <= len(block_ids) * block_size, f"row {row.number} outgrew its blocks"
        positions += range(start, end)
        for position in range(start, end):
            slots.append(block_ids[position // block_size] * block_size + position % block_size)
        if row.samples:
            picked += range(offset + len(row.tokens) - 1, len(ids))
        query_start.append(len(ids))
    offsets = query_start[:-1]
    padding = max(0, size - len(ids))
    if padding:
        query_start += range(len(ids) + 1, size + 1)
        ids += [0] * padding
        positions += [0] * padding
        slots += [-1] * padding
    assert not size or len(ids) == size, f"{len(ids)} tokens in a pass of {size}"
    if memory is None:
        columns: Columns = index_columns(device, ids, positions, slots)
    else:
        columns = memory.columns(ids, positions, slots)
    tables = tuple([row.block_ids for row in rows])
    if padding:
        tables += ((0,),) * padding
    batch = PagedBatch(columns[1], columns[2], tuple(query_start), tables)
    return PassInputs(columns[0], batch, offsets, picked)
