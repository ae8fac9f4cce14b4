"""Rows by their numbers, as every step picks them. Knows no operation and no backend."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor


def index_tensor(values: Sequence[int] | array[int], device: torch.device) -> Tensor:
    """``[n]`` int64, at a third of what `torch.tensor` takes. An array of type ``q`` is not copied
    on the CPU, and cannot grow any more."""
    numbers = values if isinstance(values, array) else array("q", values)
    if not numbers:
        return torch.empty(0, dtype=torch.int64, device=device)
    index = torch.frombuffer(numbers, dtype=torch.int64)
    return index if device.type == "cpu" else index.to(device)


Columns = tuple[Tensor, Tensor, Tensor]


class IndexMemory:
    """Room for the ids, positions and slots of a pass, and tensors over it for every size that
    came, so that a step makes none.

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
            return index_columns(self._device, ids, positions, slots)
        found = self._views.get(size)
        if found is None:
            first, second, third = self._whole[: 3 * size].view(3, size)
            found = self._views[size] = (first, second, third)
        self._numbers[: 3 * size] = array("q", ids + positions + slots)
        return found


def index_columns(
    device: torch.device, ids: list[int], positions: list[int], slots: list[int]
) -> Columns:
    """The same in memory of their own."""
    return (
        index_tensor(ids, device),
        index_tensor(positions, device),
        index_tensor(slots, device),
    )


def pick_rows(x: Tensor, rows: Sequence[int]) -> Tensor:
    """``[n, width]`` → its rows at ``rows``; no copy where those are adjacent and ascend."""
    count = len(rows)
    if count:
        first = rows[0]
        if all(row == first + at for at, row in enumerate(rows)):
            return x if count == x.shape[0] else x[first : first + count]
    return x.index_select(0, index_tensor(rows, x.device))
