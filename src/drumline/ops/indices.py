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


def pick_rows(x: Tensor, rows: Sequence[int]) -> Tensor:
    """``[n, width]`` → its rows at ``rows``; no copy where those are all of them in order."""
    if len(rows) == x.shape[0] and list(rows) == list(range(len(rows))):
        return x
    return x.index_select(0, index_tensor(rows, x.device))
