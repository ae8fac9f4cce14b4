"""Gumbel-max: which token has the largest scaled logit plus noise.

A draw is kept as the logits it is made from until somebody wants more: whoever draws natively
never works out scaled logits and kept tokens as arrays.

Making noise for a whole vocabulary is what costs, so it is made, or finished, only for tokens
that can still win. Every shortcut here is exact: it leaves out only tokens whose noise would have
to lie beyond what the generator can give, or beyond the bits already drawn. Ties go to the lowest
id. Knows scaled logits and keys; not how the logits were made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from drumline.core.random import MASK, Purpose
from drumline.sampling.history import SamplingRow
from drumline.sampling.noise import (
    GUMBEL_MAX,
    GUMBEL_MIN,
    TokenTable,
    Words,
    chosen_bits,
    gumbel_from_bits,
    table_bits,
    token_bits,
)
from drumline.sampling.processors import scale, truncate

Logits = NDArray[np.float32]
Ids = NDArray[np.int64]
Scaled = NDArray[np.float64]  # [vocab], maximum 0

_FEW_SHARE, _FEW_MIN = 32, 256  # up to 1/32 of the vocabulary draws its bits one by one
_MARGIN = 1e-3  # far above any rounding of noise and sums at their size
_REACH = GUMBEL_MAX - GUMBEL_MIN + _MARGIN  # who trails the maximum by more cannot win
_NEAR = 3.0  # tokens this close to the maximum set the score to beat
_DEEP = 8.0  # tokens below this need noise that one draw in thousands has


@dataclass(frozen=True, slots=True)
class Draw:
    """A row that waits for its noise.

    ``scaled`` stands over places: token ids, or under a ``table`` the ids it holds, in its order.
    ``kept`` places are ascending; None keeps every place. ``purpose`` is a counter word.
    """

    row: SamplingRow
    scaled: Scaled
    kept: Ids | None
    purpose: int = Purpose.TARGET
    table: TokenTable | None = None

    @property
    def processed(self) -> Scaled:
        """Scaled logits with everything that is not kept at -inf: ``[vocab]``."""
        if self.kept is None:
            return self.scaled
        masked = np.full_like(self.scaled, -np.inf)
        masked[self.kept] = self.scaled[self.kept]
        return masked

    def bits(self) -> Words:
        """The bits of every place."""
        request, position = self.row.request, self.row.position
        if self.table is not None:
            return table_bits(
                request.seed, request.sample_index, position, self.purpose, self.table
            )
        return token_bits(
            request.seed, request.sample_index, position, self.purpose, len(self.scaled)
        )

    def ids(self, places: Ids) -> Ids:
        """The token ids of some places."""
        return places if self.table is None else self.table.ids[places]


@dataclass(frozen=True, eq=False)
class LogitDraw:
    """A draw by its request's temperature, min_p, top_k and top_p, from logits ``[n]`` that bans
    and penalties have left; ``maximum`` is their largest, a finite number.

    Scaled logits are multiplied by ``sharpening`` after truncation. ``purpose`` and ``table`` as
    in `Draw`, which ``plain`` is.
    """

    row: SamplingRow
    logits: Logits
    maximum: float
    purpose: int = Purpose.TARGET
    table: TokenTable | None = None
    sharpening: float = 1.0

    @cached_property
    def plain(self) -> Draw:
        params = self.row.request.params
        scaled = scale(self.logits, self.maximum, params.temperature)
        kept = truncate(self.logits, scaled, params)
        if self.sharpening != 1.0:
            with np.errstate(over="ignore"):
                scaled *= self.sharpening
        return Draw(self.row, scaled, kept, self.purpose, self.table)

    @property
    def scaled(self) -> Scaled:
        return self.plain.scaled

    @property
    def kept(self) -> Ids | None:
        return self.plain.kept

    @property
    def processed(self) -> Scaled:
        return self.plain.processed

    def ids(self, places: Ids) -> Ids:
        return self.plain.ids(places)


Waiting = Draw | LogitDraw
Drawer = Callable[[Sequence[Waiting]], list[int]]


def draw_tokens(waiting: Sequence[Waiting]) -> list[int]:
    """The place of each draw's token. Rows with few candidates share one pass of Philox."""
    draws = [draw.plain if isinstance(draw, LogitDraw) else draw for draw in waiting]
    tokens = [-1] * len(draws)
    few: list[tuple[int, Ids]] = []
    for index, draw in enumerate(draws):
        places = _candidates(draw)
        if places is None:
            tokens[index] = _from_all(draw.scaled, draw.bits())
        elif len(places) == 1:
            tokens[index] = int(places[0])
        elif len(places) > _few(len(draw.scaled)):
            tokens[index] = _winner(draw.scaled, places, draw.bits()[places])[0]
        else:
            few.append((index, places))
    rows = [draws[index].row for index, _ in few]
    bits = chosen_bits(
        [row.request.seed for row in rows],
        [row.request.sample_index for row in rows],
        [row.position for row in rows],
        [draws[index].purpose for index, _ in few],
        [draws[index].ids(places) for index, places in few],
    )
    for (index, places), words in zip(few, bits, strict=True):
        tokens[index] = _winner(draws[index].scaled, places, words)[0]
    return tokens


def _candidates(draw: Draw) -> Ids | None:
    """The places that can win at all, ascending; None where that is a large part of them all."""
    if draw.kept is not None:
        return draw.kept[draw.scaled[draw.kept] >= -_REACH]
    reachable = draw.scaled >= -_REACH
    if np.count_nonzero(reachable) > _few(len(reachable)):
        return None
    return np.flatnonzero(reachable)


def _few(vocab: int) -> int:
    return max(vocab // _FEW_SHARE, _FEW_MIN)


def _winner(scaled: Scaled, ids: Ids, bits: Words) -> tuple[int, float]:
    """The best of ``ids``, whose bits are given beside them, and its score."""
    scores = scaled[ids] + gumbel_from_bits(bits)
    best = int(np.argmax(scores))
    return int(ids[best]), float(scores[best])


def _from_all(scaled: Scaled, bits: Words) -> int:
    """The winner of the whole vocabulary, with logarithms only where they can matter.

    A token wins over score s only if its noise g >= s - scaled. As g = -log(-log u) and
    1 - u <= -log u, that needs 1 - u <= exp(scaled - s): a threshold on the bits.
    """
    near = np.flatnonzero(scaled >= -_NEAR)
    _, score = _winner(scaled, near, bits[near])
    likely = (scaled >= -_DEEP) & (bits >= _bits_needed(score))
    likely |= bits >= _bits_needed(score + _DEEP)
    return _winner(scaled, np.flatnonzero(likely), bits[likely])[0]


def _bits_needed(noise: float) -> np.uint64:
    """Bits below this give less than ``noise``."""
    tail = math.exp(min(_MARGIN - noise, 0.0)) * 2.0**32  # 1 - u is at most this, scaled up
    return np.uint64(max(MASK - math.ceil(tail), 0))
