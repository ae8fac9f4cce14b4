"""Sums in an order that depends on the length of an axis alone.

Trees of elementwise additions, because a library reduction splits by shape and thread count.
"""

from __future__ import annotations

import torch
from torch import Tensor


def tree_sum(x: Tensor, dim: int) -> Tensor:
    """Sums along ``dim`` by adding neighbours pairwise until one is left; the axis goes.

    Appending zeros to the axis leaves every bit of the result as it is: a zero is added to a
    finished subtree. A final ``+ 0.0`` makes that true for the sign of zero too.
    """
    x = x.movedim(dim, 0)
    while x.shape[0] > 1:
        pairs = x.shape[0] // 2
        summed = x[0 : 2 * pairs : 2] + x[1 : 2 * pairs : 2]
        x = torch.cat((summed, x[2 * pairs :])) if x.shape[0] % 2 else summed
    return x[0] + 0.0


def tree_sum_last(x: Tensor) -> Tensor:
    """`tree_sum` along the last axis, which stays with length one. Halves rather than neighbours
    are added, so the slices stay wide; the order depends on the axis length alone."""
    width = x.shape[-1]
    half = 1 << (width - 1).bit_length() >> 1  # largest power of two below width
    while width > 1:
        rest = width - half
        x = (
            torch.cat((x[..., :rest] + x[..., half:width], x[..., rest:half]), -1)
            if (rest < half)
            else x[..., :half] + x[..., half:]
        )
        width, half = half, half // 2
    return x
