"""A distribution over token ids, in the little room that truncation leaves it.

Drafters hand theirs to the acceptance rule, which sets them against the target's. Knows ids and
probabilities; not who drew from them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from drumline.sampling.draw import Waiting
from drumline.sampling.reduce import tree_sum

Ids = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Distribution:
    """``ids`` ascending, ``[n]``, and their probabilities, ``[n]``, which sum to 1; every other
    token has none. ``ids`` None: the ids 0..n-1."""

    ids: Ids | None
    values: Floats

    def at(self, token: int) -> float:
        """The probability of one token."""
        place = token if self.ids is None else int(np.searchsorted(self.ids, token))
        if place >= len(self.values) or (self.ids is not None and self.ids[place] != token):
            return 0.0
        return float(self.values[place])

    def at_ids(self, tokens: Ids) -> Floats:
        """The probabilities of ``[m]`` tokens."""
        if self.ids is None:
            places, known = np.minimum(tokens, len(self.values) - 1), tokens < len(self.values)
        else:
            places = np.minimum(np.searchsorted(self.ids, tokens), len(self.ids) - 1)
            known = self.ids[places] == tokens
        found: Floats = np.where(known, self.values[places], 0.0)
        return found


def point_mass(token: int) -> Distribution:
    """All probability on one token: what a deterministic draft was drawn from."""
    return Distribution(np.array([token]), np.ones(1))


def distribution(draw: Waiting) -> Distribution:
    """softmax over what a draw keeps: what its token is drawn from."""
    scaled = draw.scaled if draw.kept is None else draw.scaled[draw.kept]
    weights = np.exp(scaled)
    values = weights / tree_sum(weights)
    if draw.kept is not None:
        return Distribution(draw.ids(draw.kept), values)
    return Distribution(None if draw.table is None else draw.table.ids, values)
