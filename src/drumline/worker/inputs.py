"""From a plan's rows to the tensors of one target pass. Pure; knows no model and no sampling."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from drumline.core.plan import Row
from drumline.ops.base import PagedBatch
from drumline.ops.indices import index_tensor


@dataclass(frozen=True)
class PassInputs:
    """``ids`` [tokens] int64, and where those tokens sit."""

    ids: Tensor
    batch: PagedBatch


def row_offsets(rows: Sequence[Row]) -> list[int]:
    """Where each row begins in the flat batch."""
    return [0, *accumulate(row.width for row in rows)][: len(rows)]


def sampled_rows(rows: Sequence[Row], offsets: Sequence[int]) -> list[int]:
    """Tokens of the flat batch whose logits are wanted: of each row that samples, its last
    committed token and its drafts; ascending."""
    picked: list[int] = []
    for row, offset in zip(rows, offsets, strict=True):
        if row.samples:
            first = offset + len(row.tokens) - 1
            picked += range(first, first + len(row.drafts) + 1)
    return picked


def build_inputs(
    rows: Sequence[Row], block_size: int, device: torch.device, size: int = 0
) -> PassInputs:
    """Lays rows end to end, token-major: committed tokens, then drafts, row after row. Then, up to
    ``size`` tokens, padding: each alone at position 0 of block 0, writing nothing."""
    ids, positions, slots = array("q"), array("q"), array("q")
    query_start = [0]
    for row in rows:
        assert row.width > 0, f"row {row.number} has nothing to compute"
        end = row.start + row.width
        assert end <= len(row.block_ids) * block_size, f"row {row.number} outgrew its blocks"
        ids.extend(row.tokens)
        ids.extend(row.drafts)
        positions.extend(range(row.start, end))
        for position in range(row.start, end):
            block, offset = divmod(position, block_size)
            slots.append(row.block_ids[block] * block_size + offset)
        query_start.append(len(ids))
    padding = max(0, size - len(ids))
    if padding:
        assert len(ids) + padding == size
        query_start.extend(range(len(ids) + 1, size + 1))
        ids.extend([0] * padding)
        positions.extend([0] * padding)
        slots.extend([-1] * padding)
    assert not size or len(ids) == size, f"{len(ids)} tokens in a pass of {size}"
    return PassInputs(
        ids=index_tensor(ids, device),
        batch=PagedBatch(
            positions=index_tensor(positions, device),
            slots=index_tensor(slots, device),
            query_start=tuple(query_start),
            block_tables=(*(row.block_ids for row in rows), *((0,),) * padding),
        ),
    )
