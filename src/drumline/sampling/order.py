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

_RADIX_MIN = 4096  # from here two passes by 16 bits beat a stable sort by comparison
_BLOCK = 256  # enough blocks to bound the k-th value from below, few enough to be cheap


def sorted_ids(values: Values, ids: Ids) -> Ids:
    """``ids`` (ascending) reordered by (-value, id); ``values`` is ``[vocab]``."""
    chosen = values[ids]
    if chosen.dtype == np.float32 and len(chosen) >= _RADIX_MIN:
        return ids[_radix_order(chosen)]
    ordered: Ids = ids[np.argsort(-chosen, kind="stable")]
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


def _radix_order(values: NDArray[np.float32]) -> Ids:
    """Places of ``[n]`` values in the order, by two stable passes over 16-bit halves of a key
    that ascends as the value descends. Adding 0 makes the two zeros equal."""
    bits = (values + np.float32(0)).view(np.uint32)
    negative = bits >= np.uint32(1 << 31)
    key = np.where(negative, bits, bits ^ np.uint32((1 << 31) - 1))
    by_low = np.argsort((key & np.uint32(0xFFFF)).astype(np.uint16), kind="stable")
    high = (key >> np.uint32(16)).astype(np.uint16)
    ordered: Ids = by_low[np.argsort(high[by_low], kind="stable")]
    return ordered


def _lower_bound(values: Values, count: int) -> float:
    """A value that at least ``count`` values reach: the count-th of the blocks' maxima."""
    blocks = len(values) // _BLOCK
    if count > blocks:
        return -np.inf
    maxima = values[: blocks * _BLOCK].reshape(blocks, _BLOCK).max(axis=1)
    return float(np.partition(maxima, blocks - count)[blocks - count])
