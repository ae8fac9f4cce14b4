"""From a plan's rows to the tensors of one target pass. Pure; knows no model and no sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from drumline.core.plan import Row
from drumline.ops.base import PagedBatch


@dataclass(frozen=True)
class PassInputs:
    """``ids`` [tokens] int64, and where those tokens sit."""

    ids: Tensor
    batch: PagedBatch


def row_offsets(rows: Sequence[Row]) -> list[int]:
    """Where each row begins in the flat batch."""
    return [0, *accumulate(row.width for row in rows)][: len(rows)]


def build_inputs(rows: Sequence[Row], block_size: int, device: torch.device) -> PassInputs:
    """Lays rows end to end, token-major: committed tokens, then drafts, row after row."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    query_start = [0]
    for row in rows:
        assert row.width > 0, f"row {row.number} has nothing to compute"
        end = row.start + row.width
        assert end <= len(row.block_ids) * block_size, f"row {row.number} outgrew its blocks"
        ids += row.tokens
        ids += row.drafts
        for position in range(row.start, end):
            positions.append(position)
            slots.append(row.block_ids[position // block_size] * block_size + position % block_size)
        query_start.append(query_start[-1] + row.width)
    return PassInputs(
        ids=torch.tensor(ids, dtype=torch.int64, device=device),
        batch=PagedBatch(
            positions=torch.tensor(positions, dtype=torch.int64, device=device),
            slots=torch.tensor(slots, dtype=torch.int64, device=device),
            query_start=tuple(query_start),
            block_tables=tuple(row.block_ids for row in rows),
        ),
    )
