"""Draws in compiled code: the same rules and the same random bits as `draw.draw_tokens`.

Exponentials and logarithms are the native module's own, so a token could differ from the numpy
form only where two candidates are equal to within rounding. Knows draws; not what they are for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from drumline._native import draw_places
from drumline.core.random import seed_key
from drumline.sampling.draw import LogitDraw, Waiting, draw_tokens

WORD = 0xFFFFFFFF

# How a draw ended, of which its token is independent. PROVED: the mass of what stands before the
# winner, known to within bounds, says that top_p leaves it. SORTED: the bounds did not tell.
WHOLE, PROVED, SORTED = 0, 1, 2  # WHOLE: no top_p


class NativeDrawer:
    """A `draw.Drawer`. ``path`` names an instruction set of the native module; the rows of a call
    are spread over ``threads``. ``ways``: how each draw of the last call that came here ended."""

    def __init__(self, path: str, threads: int = 1) -> None:
        self.path = path
        self.threads = threads
        self.ways = b""

    def __call__(self, draws: Sequence[Waiting]) -> list[int]:
        """The place of each draw's token. Draws from given scores are left to numpy."""
        places = [-1] * len(draws)
        lazy = [(at, one) for at, one in enumerate(draws) if isinstance(one, LogitDraw)]
        given = [(at, one) for at, one in enumerate(draws) if not isinstance(one, LogitDraw)]
        for (at, _), place in zip(given, draw_tokens([one for _, one in given]), strict=True):
            places[at] = place
        for (at, _), place in zip(lazy, self._draw([one for _, one in lazy]), strict=True):
            places[at] = place
        return places

    def _draw(self, draws: Sequence[LogitDraw]) -> list[int]:
        if not draws:
            return []
        count = len(draws)
        where = np.empty((count, 3), dtype=np.int64)  # logits, how many, table
        reals = np.empty((count, 5), dtype=np.float64)
        words = np.empty((count, 6), dtype=np.int64)
        logits = [np.ascontiguousarray(draw.logits, dtype=np.float32) for draw in draws]
        for at, draw in enumerate(draws):
            request, params = draw.row.request, draw.row.request.params
            table = 0 if draw.table is None else draw.table.ids.ctypes.data
            floor = math.log(params.min_p) if params.min_p > 0.0 else -math.inf
            position, sample = draw.row.position, request.sample_index
            assert 0 <= position <= WORD, "a counter word has 32 bits"
            assert 0 <= sample <= WORD, "a counter word has 32 bits"
            where[at] = (logits[at].ctypes.data, len(logits[at]), table)
            reals[at] = (draw.maximum, params.temperature, floor, params.top_p, draw.sharpening)
            words[at] = (*seed_key(request.seed), position, sample, draw.purpose, params.top_k)
        places = np.empty(count, dtype=np.int64)
        self.ways = draw_places(
            where.ctypes.data,
            reals.ctypes.data,
            words.ctypes.data,
            count,
            places.ctypes.data,
            self.threads,
            self.path,
        )
        found: list[int] = places.tolist()
        return found
