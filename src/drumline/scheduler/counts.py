"""Sums of what drafts brought, for one request or for all. Knows no clock and no probability."""

from __future__ import annotations

from drumline.core.plan import SpeculationStats


class SpeculationCounts:
    """Counts verify passes with drafts; see `SpeculationStats` for the words."""

    __slots__ = ("_accepted_per_position", "_drafted", "_drafts")

    def __init__(self, num_speculative_tokens: int) -> None:
        self._drafts = 0
        self._drafted = 0
        self._accepted_per_position = [0] * num_speculative_tokens

    def note(self, drafted_count: int, accepted_count: int) -> None:
        """One row was verified; the first ``accepted_count`` of its drafts were kept."""
        assert 0 <= accepted_count <= drafted_count
        if not drafted_count:
            return
        self._drafts += 1
        self._drafted += drafted_count
        for position in range(accepted_count):
            self._accepted_per_position[position] += 1

    def stats(self) -> SpeculationStats:
        """The sums so far."""
        per_position = tuple(self._accepted_per_position)
        return SpeculationStats(self._drafts, self._drafted, sum(per_position), per_position)
