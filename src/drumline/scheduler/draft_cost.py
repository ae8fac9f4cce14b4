"""What a step costs: microseconds for (decoding rows, draft length), measured, in integers.

Made at start from a few timed passes, then corrected by the seconds of real steps. Rows are kept
in classes that double (1, 2, 3-4, 5-8, …), because a step's time follows its row count slowly.
Knows no clock: times are handed in.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping

_STEADY = 8  # a cell moves 1/8 of the way to what is measured, a fresh one 1/3, 1/4, …
_OUTLIER = 4  # one step counts as at most so many times longer or shorter than expected


class CostCurve:
    """Microseconds of a pure decode step, per class of rows and draft length 0..K."""

    def __init__(self, cells: list[list[int]]) -> None:
        """``cells[class][k]``: class c holds 2**(c - 1) + 1 .. 2**c rows."""
        assert cells
        assert all(len(row) == len(cells[0]) for row in cells)
        assert all(micros > 0 for row in cells for micros in row)
        self._cells = [list(row) for row in cells]
        self._visits = [[0] * len(row) for row in cells]

    @classmethod
    def measured(
        cls,
        rows_max: int,
        num_speculative_tokens: int,
        target_micros: Mapping[int, int],
        draft_micros: Mapping[int, int],
        passes: Callable[[int], int],
    ) -> CostCurve:
        """From timed passes: of the target by tokens in it, of the drafter (one pass) by rows.

        ``passes`` is `DrafterTraits.passes`; a host drafter's draft passes cost nothing here.
        Between the measured sizes lines are drawn.
        """
        cells = []
        for index in range(_class_of(rows_max) + 1):
            rows = min(2**index, rows_max)
            one_pass = _line(draft_micros, rows) if draft_micros else 0
            cells.append(
                [
                    max(1, _line(target_micros, rows * (1 + k)) + passes(k) * one_pass)
                    for k in range(num_speculative_tokens + 1)
                ]
            )
        return cls(cells)

    def micros(self, rows: int) -> tuple[int, ...]:
        """Expected microseconds of a step of ``rows`` decoding rows, for each draft length."""
        return tuple(self._cells[self._index(rows)])

    def observe(self, rows: int, draft_k: int, micros: int, draft_count: int | None = None) -> None:
        """A step of ``rows`` decoding rows, in which K was ``draft_k`` before and now, took so.

        ``draft_count``: what it verified, if less than ``draft_k`` of each row; what it took beyond
        a step of no drafts is then held for its part of what all would have taken. The other cells
        follow half as far: a machine slows down as a whole, but not only.
        """
        index = self._index(rows)
        if draft_count is not None and 0 < draft_count < rows * draft_k:
            plain = self._cells[index][0]
            micros += max(0, micros - plain) * (rows * draft_k - draft_count) // draft_count
        expected = self._cells[index][draft_k]
        visits = self._visits[index][draft_k] = self._visits[index][draft_k] + 1
        micros = max(expected // _OUTLIER, min(micros, expected * _OUTLIER), 1)
        change = (micros - expected) // min(visits + 2, _STEADY)
        for row in self._cells:
            for k, cell in enumerate(row):
                row[k] = max(1, cell + cell * change // (2 * expected))
        self._cells[index][draft_k] = max(1, expected + change)

    def _index(self, rows: int) -> int:
        return min(_class_of(rows), len(self._cells) - 1)


def _class_of(rows: int) -> int:
    assert rows >= 1
    return (rows - 1).bit_length()


def _line(points: Mapping[int, int], size: int) -> int:
    """The value at ``size`` on the lines through the points, the last line drawn on."""
    sizes = sorted(points)
    assert sizes, "nothing was measured"
    if len(sizes) == 1 or size <= sizes[0]:
        return points[sizes[0]]
    right = min(max(1, bisect_left(sizes, size)), len(sizes) - 1)
    x0, x1 = sizes[right - 1], sizes[right]
    y0, y1 = points[x0], points[x1]
    return max(1, y0 + (y1 - y0) * (size - x0) // (x1 - x0))
