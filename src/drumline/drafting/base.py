"""The contract between a worker and a drafter.

In every step, after the target has run and tokens were accepted, the worker calls `propose` once
with all rows of the step: those that decode, those still in prefill, and those that may not draft
(``k`` 0). The drafter first takes in what was committed, then makes exactly
``traits.passes(draft_k)`` passes, whatever the rows are, none at all included; rows beyond their
``k`` are masked, never called with a position outside its range.

    position     0 ....... start ......... start + count - 1 | n - 1 | n  n + 1 ..  n + k - 1
                 before    computed by the target just now   | new   | drafts to propose
    committed    [...................................................]
    hidden rows            offset ......... offset + count - 1

A row that finished nothing (prefill goes on) has no new token: its n - 1 is the prompt token after
the last computed one, and its ``k`` is 0. In both cases the pair (hidden at p, token at p + 1) is
there for every computed p: that is what EAGLE-like drafters learn from, and they keep the entry
made of it at slot p + 1 of the target's own block ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from drumline.core.request import Request
from drumline.core.traits import DrafterTraits
from drumline.models.layers import ModelOutput
from drumline.sampling.history import SamplingRow


@dataclass(frozen=True, slots=True)
class DraftRow:
    """One sequence of the step as a drafter sees it.

    ``committed`` holds all committed ids up to and with position n - 1 (only read during a call).
    ``block_ids`` may end before slot n - 1 when blocks are short: what has no slot is not written
    (``k`` is 0 then, and respects the slots of drafts). ``fresh`` says that the row's
    ``start`` came from the prefix cache, or is 0: the drafter sees the sequence for the first time.
    """

    request: Request
    committed: Sequence[int]
    start: int
    count: int
    offset: int
    block_ids: tuple[int, ...]
    k: int
    fresh: bool = False

    @property
    def length(self) -> int:
        """n: committed tokens, and the position of the first draft."""
        return self.start + self.count + 1

    def sampling_row(self, drafts: tuple[int, ...]) -> SamplingRow:
        """The history of the next draft: everything committed and the drafts before it."""
        return SamplingRow(self.request, self.committed, drafts)


@dataclass(frozen=True, slots=True)
class Proposal:
    """Per row of the call, in its order: at most ``k`` target token ids each."""

    drafts: tuple[tuple[int, ...], ...]


class Drafter(Protocol):
    """One drafter of one rank."""

    @property
    def traits(self) -> DrafterTraits: ...

    @property
    def taps(self) -> tuple[int, ...]:
        """Residual streams of the target it reads: tap k is the stream after k layers."""
        ...

    def propose(
        self, rows: Sequence[DraftRow], output: ModelOutput | None, draft_k: int
    ) -> Proposal:
        """Takes in the step and drafts. ``output`` holds the target's hidden states and taps of
        this step's flat tokens; None in a step without target tokens (a dummy step)."""
        ...

    def forget(self, number: int) -> None:
        """The request has ended or was preempted; what is kept beside its blocks may go."""
        ...

    def close(self) -> None:
        """Releases what outlives a step, as files."""
        ...
