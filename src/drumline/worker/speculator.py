"""Between a worker and its drafter: what became of a step goes in, checked drafts come out.

The drafter is called once in every step, also where nobody may draft. What it returns is checked
like input from outside: a token that is no token would reach an embedding, a draft too many a slot
that is not there. Distributions of probabilistic drafts are kept for one executed step, beside the
drafts themselves. Knows no acceptance rule and decides no draft length.

A drafter that shares passes with nobody may fail: its step goes on without drafts, the log says
so, and after `FAILURES_MAX` steps in a row it is left out for good. One that runs passes of its
own in step with others may not: its error is the worker's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from msgspec import Struct

from drumline.core.errors import EngineError
from drumline.core.plan import Row, StepPlan
from drumline.core.request import Request
from drumline.drafting.base import Drafter, DraftRow, PassLedger, Proposal
from drumline.lockstep.script import draft_pass_sizes
from drumline.models.layers import ModelOutput
from drumline.sampling.distribution import Distribution

FAILURES_MAX = 3

logger = logging.getLogger("drumline.worker")

Probs = tuple[Distribution | None, ...]
Result = TypeVar("Result")


class Outcome(Struct, frozen=True):
    """What became of a plan's row: how many of its drafts stand, and all tokens committed now.

    ``fresh``: the first row since the sequence was admitted."""

    row: Row
    request: Request
    committed: Sequence[int]
    accepted_count: int
    fresh: bool


class Speculator:
    """Drives one drafter. ``positions_max``: what the configuration allows it, if that is less
    than it can. ``contained``: its errors cost drafts, nothing else."""

    def __init__(
        self,
        drafter: Drafter,
        ledger: PassLedger,
        vocab_size: int,
        positions_max: int | None = None,
        contained: bool = False,
    ) -> None:
        self.drafter = drafter
        bounds = [n for n in (positions_max, drafter.traits.positions_max) if n is not None]
        self.traits = replace(drafter.traits, positions_max=min(bounds, default=None))
        self.ledger = ledger
        self.vocab_size = vocab_size
        self.contained = contained
        self.failure_count = 0
        self.disabled: str | None = None  # why the drafter is left out for good
        self._failures_in_a_row = 0
        self._probs: dict[int, Probs] = {}

    @property
    def taps(self) -> tuple[int, ...]:
        return self.drafter.taps

    def take_probs(self, row: Row) -> Probs:
        """What the row's drafts were drawn from; empty if they were not drawn."""
        return self._probs.get(row.number, ())[: len(row.drafts)]

    def draft(
        self,
        plan: StepPlan,
        outcomes: Sequence[Outcome],
        offsets: Sequence[int],
        output: ModelOutput,
    ) -> list[tuple[int, ...]]:
        """The next drafts of each outcome, whose hidden rows begin at ``offsets``."""
        self._probs = {}
        rows = [
            _draft_row(outcome, offset, plan.draft_k)
            for outcome, offset in zip(outcomes, offsets, strict=True)
        ]
        sizes = draft_pass_sizes(plan, self.traits)
        self.ledger.begin(sizes, exact=bool(self.traits.groups))
        if self.traits.passes(plan.draft_k) and not sizes:
            return [()] * len(rows)  # a plan that leaves the drafter out; see `lockstep.mutants`
        proposal = self._guarded(
            plan.step,
            lambda: self._propose(rows, output, plan.draft_k),
            Proposal(((),) * len(rows)),
        )
        for row, probs in zip(rows, proposal.probs, strict=False):
            self._probs[row.number] = probs
        return [tuple(drafts) for drafts in proposal.drafts]

    def forget(self, number: int, step: int) -> None:
        self._probs.pop(number, None)
        self._guarded(step, lambda: self.drafter.forget(number), None)

    def _propose(
        self, rows: Sequence[DraftRow], output: ModelOutput | None, draft_k: int
    ) -> Proposal:
        proposal = self.drafter.propose(rows, output, draft_k)
        self._check(proposal, rows)
        self.ledger.end()
        return proposal

    def _guarded(self, step: int, call: Callable[[], Result], otherwise: Result) -> Result:
        """The call's result; ``otherwise`` if the drafter failed and may."""
        if self.disabled is not None:
            return otherwise
        try:
            found = call()
        except Exception as error:
            if not self.contained:
                raise
            self._note_failure(step, error)
            return otherwise
        self._failures_in_a_row = 0
        return found

    def _note_failure(self, step: int, error: Exception) -> None:
        method = self.traits.method
        what = f"{type(error).__name__}: {error}"
        self.failure_count += 1
        self._failures_in_a_row += 1
        logger.error(
            "drafter %s failed in step %d, which gets no drafts; tokens are not affected: %s",
            method,
            step,
            what,
            exc_info=error,
        )
        if self._failures_in_a_row == FAILURES_MAX:
            self.disabled = f"failed in {FAILURES_MAX} steps in a row, the last one {step}: {what}"
            logger.warning("drafter %s is disabled: %s", method, self.disabled)

    def _check(self, proposal: object, rows: Sequence[DraftRow]) -> None:
        """Raises `EngineError` that names what a drafter may not return."""
        if not isinstance(proposal, Proposal):
            raise self._refused(f"a {type(proposal).__name__}, expected a Proposal")
        if len(proposal.drafts) != len(rows):
            raise self._refused(f"drafts for {len(proposal.drafts)} rows, expected {len(rows)}")
        for row, drafts in zip(rows, proposal.drafts, strict=True):
            where = f"for request {row.number}"
            if len(drafts) > row.k:
                raise self._refused(f"{len(drafts)} drafts {where}, allowed are {row.k}")
            for token in drafts:
                if type(token) is not int:
                    kind = type(token).__name__
                    raise self._refused(f"{token!r} {where}, a {kind}, expected an int")
                if not 0 <= token < self.vocab_size:
                    last = self.vocab_size - 1
                    raise self._refused(f"token id {token} {where}, allowed are 0..{last}")
        if proposal.probs and [*map(len, proposal.probs)] != [*map(len, proposal.drafts)]:
            raise self._refused("probs that do not match its drafts one for one")

    def _refused(self, what: str) -> EngineError:
        return EngineError(f"drafter {self.traits.method} returned {what}")


def _draft_row(outcome: Outcome, offset: int, draft_k: int) -> DraftRow:
    row = outcome.row
    count = len(row.tokens) + outcome.accepted_count
    room = row.draft_limit - (row.start + count + 1) if row.samples else 0
    return DraftRow(
        request=outcome.request,
        committed=outcome.committed,
        start=row.start,
        count=count,
        offset=offset,
        block_ids=row.block_ids,
        k=max(0, min(room, draft_k, row.draft_max)),
        fresh=outcome.fresh,
        width=row.width,
        samples=row.samples,
    )
