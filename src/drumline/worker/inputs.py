"""From a plan's rows to the tensors of one target pass. Knows no model and no sampling.

A worker that lays out pass after pass hands in an `InputMemory`, and then makes no tensors for it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from msgspec import Struct
from torch import Tensor

from drumline.core.plan import Row
from drumline.ops.base import PagedBatch
from drumline.ops.indices import index_tensor

Columns = tuple[Tensor, Tensor, Tensor]


class PassInputs(Struct, frozen=True):
    """``ids`` [tokens] int64, and where those tokens sit. ``offsets``: where each row begins in the
    flat batch. ``picked``: tokens whose logits are wanted: of each row that samples, its last
    committed token and its drafts; ascending."""

    ids: Tensor
    batch: PagedBatch
    offsets: list[int]
    picked: list[int]


class InputMemory:
    """Room for ids, positions and slots of a pass, and tensors over it for every size that came.

    What it gives is valid until it is asked again. Passes of more than ``size_max`` tokens, and of
    other devices, get memory of their own."""

    def __init__(self, device: torch.device, size_max: int = 512) -> None:
        self._device = device
        self._size_max = size_max if device.type == "cpu" else 0
        self._numbers = array("q", [0] * max(1, 3 * self._size_max))
        self._whole = torch.frombuffer(self._numbers, dtype=torch.int64)
        self._views: dict[int, Columns] = {}

    def columns(self, ids: list[int], positions: list[int], slots: list[int]) -> Columns:
        """Three tensors ``[tokens]`` int64."""
        size = len(ids)
        if not 0 < size <= self._size_max:
            return _columns(self._device, ids, positions, slots)
        found = self._views.get(size)
        if found is None:
            first, second, third = self._whole[: 3 * size].view(3, size)
            found = self._views[size] = (first, second, third)
        self._numbers[: 3 * size] = array("q", ids + positions + slots)
        return found


def _columns(
    device: torch.device, ids: list[int], positions: list[int], slots: list[int]
) -> Columns:
    return (
        index_tensor(ids, device),
        index_tensor(positions, device),
        index_tensor(slots, device),
    )


def build_inputs(
    rows: Sequence[Row],
    block_size: int,
    device: torch.device,
    size: int = 0,
    memory: InputMemory | None = None,
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
        columns = _columns(device, ids, positions, slots)
    else:
        columns = memory.columns(ids, positions, slots)
    tables = tuple([row.block_ids for row in rows])
    if padding:
        tables += ((0,),) * padding
    batch = PagedBatch(columns[1], columns[2], tuple(query_start), tables)
    return PassInputs(columns[0], batch, offsets, picked)
