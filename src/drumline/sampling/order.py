"""The one order of tokens: larger value first, ties to the lowest id.

Argmax, top_k, top_p, ranks and lists of alternatives all stand on it, so that they cannot
disagree. Knows values and ids; not what the values mean.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.floating[Any]]
Ids = NDArray[np.int64]

_BLOCK = 256  # enough blocks to bound the k-th value from below, few enough to be cheap


def sorted_ids(values: Values, ids: Ids) -> Ids:
    """``ids`` (ascending) reordered by (-value, id); ``values`` is ``[vocab]``."""
    ordered: Ids = ids[np.argsort(-values[ids], kind="stable")]
    return ordered


def best_ids(values: Values, count: int) -> Ids:
    """The first ``count`` places of the order over ``[n]`` values."""
    size = len(values)
    count = min(count, size)
    if count == 0:
        return np.empty(0, dtype=np.int64)
    candidates = np.flatnonzero(values >= _lower_bound(values, count))
    kept = values[candidates]
    if len(candidates) > count:
        limit = np.partition(kept, len(kept) - count)[len(kept) - count]
        above = np.flatnonzero(kept > limit)
        level = np.flatnonzero(kept == limit)[: count - len(above)]
        candidates = candidates[np.sort(np.concatenate((above, level)))]
    return sorted_ids(values, candidates)


def rank_of(values: Values, token: int) -> int:
    """The place of ``token`` in the order, counted from 1."""
    value = values[token]
    ahead = np.count_nonzero(values > value) + np.count_nonzero(values[:token] == value)
    return 1 + int(ahead)


def _lower_bound(values: Values, count: int) -> float:
    """A value that at least ``count`` values reach: the count-th of the blocks' maxima."""
    blocks = len(values) // _BLOCK
    if count > blocks:
        return -np.inf
    maxima = values[: blocks * _BLOCK].reshape(blocks, _BLOCK).max(axis=1)
    return float(np.partition(maxima, blocks - count)[blocks - count])
