"""A draft window: drafts, what they follow, and the target's logits over them.

    committed ... | draft 1 | draft 2 | draft 3 |
              row 0     row 1     row 2     row 3      logits; row i is of the token after i drafts

Knows requests and logits; not which drafts stand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from drumline.core.errors import EngineError
from drumline.core.request import Request
from drumline.sampling.distribution import Distribution, point_mass
from drumline.sampling.history import SamplingRow
from drumline.sampling.sampler import Sampler, Target

Logits = NDArray[np.float32]


class Window(Struct, frozen=True):
    """One sequence's drafts and what they follow. ``committed`` is only read during a call.

    ``probs`` says what each draft was drawn from, None for one that was not drawn; empty: none
    was. Only standard and block ask.
    """

    request: Request
    committed: Sequence[int]
    drafts: tuple[int, ...] = ()
    probs: tuple[Distribution | None, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.probs) in (0, len(self.drafts)), "probabilities for each draft, or none"

    @property
    def width(self) -> int:
        """Positions of the target: one per draft, and the one after them."""
        return len(self.drafts) + 1

    def row(self, ahead: int) -> SamplingRow:
        """The position after ``ahead`` drafts."""
        return SamplingRow(self.request, self.committed, self.drafts[:ahead])

    def drawn_from(self, ahead: int) -> Distribution:
        """The distribution of the draft after ``ahead`` others."""
        probs = self.probs[ahead] if self.probs else None
        return point_mass(self.drafts[ahead]) if probs is None else probs


@dataclass(frozen=True, slots=True)
class WindowLogits:
    """The target over one window. Positions are worked out as they are asked for."""

    sampler: Sampler
    window: Window
    table: Logits  # [width, vocab]

    def target(self, ahead: int) -> Target | None:
        """The position after ``ahead`` drafts; None where the model gave no finite numbers."""
        raw = self.table[ahead]
        try:
            target = self.sampler.target(raw, self.window.row(ahead))
        except EngineError:
            return None
        if target.edited is not raw and not np.isfinite(raw.max()):
            return None  # a ban hides it from the draw, but not from log-probabilities
        return target
