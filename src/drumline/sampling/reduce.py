"""Sums in a pinned order.

Library sums split by length, thread count and alignment, and so change bits. Here the vocabulary
is padded to a power of two with the neutral element and halved by elementwise additions, so that
the order of additions follows from the length alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def tree_sum(values: Floats) -> Floats:
    """Sums the last axis: ``[..., n]`` → ``[...]``; element i meets element i + half first."""
    length = values.shape[-1]
    assert length > 0, "an empty sum has no order"
    half = 1 << max(length - 1, 1).bit_length() - 1
    if length <= half:  # only for length 1: nothing to add
        return values[..., 0]
    partial = values[..., :half].copy()
    partial[..., : length - half] += values[..., half:]
    while half > 1:
        half //= 2
        partial = partial[..., :half] + partial[..., half:]
    total: Floats = partial[..., 0]
    return total


def log_sum_exp(shifted: Floats) -> float:
    """Natural logarithm of the summed exponentials of ``[n]`` values whose maximum is 0."""
    return float(np.log(tree_sum(np.exp(shifted))))
