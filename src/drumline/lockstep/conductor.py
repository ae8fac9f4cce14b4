"""Turns what a replica wants into what is executed.

    SoloConductor     one replica alone: agreement is a function call
    GroupConductor    leaders exchange their shapes, once per step, and decide alike

Both give the same answers: a plan, or that there is no step now and why. A group that has nothing
to run for this replica gives it a plan without rows, which is executed like any other. Knows no
request beyond its row, and no way to reach another rank but the channel it is handed.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from drumline.core.errors import EngineError, RankLost
from drumline.core.ledger import Ledger
from drumline.core.plan import Row, StepPlan, StepProposal
from drumline.core.traits import DrafterTraits
from drumline.lockstep.channel import AgreementChannel
from drumline.lockstep.decide import Decision, Rules, Turn, decide, next_turn
from drumline.lockstep.script import first_pass_bounds
from drumline.lockstep.shape import MODE_FIXED, MODE_LIVE, StepShape, join_all


class Rest(enum.StrEnum):
    """No step now: nobody has work; a pause was asked for; all leave."""

    SLEEP = "sleep"
    PAUSE = "pause"
    LEAVE = "leave"


Sealed = StepPlan | Rest


@dataclass(frozen=True, slots=True)
class Standing:
    """How a replica stands before a step, beyond its rows. ``work``: any unfinished request,
    whether it can run now or not. ``error``: why it cannot go on; the others are told before it
    is raised."""

    work: bool = True
    pause: bool = False
    drain: bool = False
    stop: bool = False
    error: EngineError | None = None


WORKING = Standing()


class Conductor(Protocol):
    @property
    def epoch(self) -> int: ...

    @property
    def next_step(self) -> int:
        """The number of the next step to be sealed."""
        ...

    @property
    def stop_agreed(self) -> bool:
        """What is unfinished ends with the step that was sealed last."""
        ...

    def seal(self, proposal: StepProposal, standing: Standing = ...) -> Sealed:
        """The plan that every rank of the replica executes next, or why there is none. Raises
        `EngineError` when ranks cannot go on together."""
        ...


def may_draft(row: Row) -> bool:
    """Whether the row can bring a draft, even if all it verifies now is turned down."""
    return row.samples and row.draft_max > 0 and row.draft_limit > row.start + len(row.tokens) + 1


class SoloConductor:
    """Numbers the steps of one rank; every sealed plan is taken to be executed.

    Where no row can bring a draft nothing is drafted: nobody waits for the passes of one rank.
    """

    def __init__(self, epoch: int = 0) -> None:
        self.epoch = epoch
        self.next_step = 0
        self._verify_width = 1  # an epoch's first step has no drafts to verify
        self.stop_agreed = False

    def seal(self, proposal: StepProposal, standing: Standing = WORKING) -> Sealed:
        if standing.error is not None:
            raise standing.error
        turn = next_turn(
            error=False,
            pause=standing.pause,
            work=bool(proposal.rows),
            stop=standing.stop,
            drain=standing.drain and not standing.work,
        )
        if turn is not Turn.STEP:
            return Rest(turn.value)
        self.stop_agreed = standing.stop
        rows = proposal.rows
        _check_drafts(rows, self._verify_width)
        draft_k = proposal.draft_wish
        if draft_k and not any(map(may_draft, rows)):
            draft_k = 0
        plan = StepPlan(
            self.epoch,
            self.next_step,
            rows,
            proposal.admitted,
            proposal.released,
            draft_k,
            self._verify_width,
            group_rows=len(rows),
        )
        self.next_step += 1
        self._verify_width = 1 + draft_k
        return plan


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long a rank waits for the others: ``step_seconds``, and ``token_seconds`` for each token
    of the passes they may still be in, which is that of the slowest rank."""

    step_seconds: float = 5.0
    token_seconds: float = 0.0

    def after(self, tokens: int) -> float:
        return self.step_seconds + self.token_seconds * tokens


class GroupConductor:
    """One leader of an agreement group. ``next_step`` is the number of its next exchange, of which
    every decision takes exactly one; a plan has the number of the exchange that made it.

    ``config_digest``: 63 bits of what all ranks must have been configured alike. ``mode_ready``:
    whether this rank can run sizes from the list; asked when it has rows.
    """

    def __init__(
        self,
        channel: AgreementChannel,
        rules: Rules,
        ledger: Ledger,
        *,
        config_digest: int = 0,
        drafter: DrafterTraits | None = None,
        deadlines: Deadlines = Deadlines(),
        epoch: int = 0,
    ) -> None:
        self.rules = rules
        self.epoch = epoch
        self.next_step = 0
        self.exchange_count = 0
        self.stop_agreed = False
        self.mode_ready = bool(rules.buckets)
        self._channel = channel
        self._ledger = ledger
        self._config_digest = config_digest
        self._drafter = drafter if any(rules.passes) else None
        self._deadlines = deadlines
        self.last_joined: StepShape | None = None
        self._verify_width = 1
        self._tokens_in_flight = 0  # of the last step, which others may still be executing

    @property
    def rank(self) -> int:
        return self._ledger.rank

    def seal(self, proposal: StepProposal, standing: Standing = WORKING) -> Sealed:
        decision = self._agree(self.shape_of(proposal, standing), standing)
        step = self.next_step
        self.next_step += 1
        if decision.turn is not Turn.STEP:
            self._tokens_in_flight = 0
            return Rest(decision.turn.value)
        self.stop_agreed = decision.stop
        plan = _plan(proposal, self.epoch, step, self._verify_width, decision)
        self.note_executed(plan)
        return plan

    def note_executed(self, plan: StepPlan) -> None:
        """What is executed now, for the step after it; a sealed plan is taken to be."""
        self._verify_width = 1 + plan.draft_k
        self._tokens_in_flight = plan.target_size + sum(plan.draft_sizes)

    def shape_of(self, proposal: StepProposal, standing: Standing) -> StepShape:
        """What this replica tells the others."""
        rows, vote = proposal.rows, proposal.vote
        first: tuple[int, ...] = ()
        if self._drafter is not None and rows:
            shapes = [(row.width, row.samples) for row in rows]
            first = first_pass_bounds(self._drafter, shapes, self.rules.num_speculative_tokens)
        mode = MODE_FIXED if self.mode_ready else MODE_LIVE
        return StepShape(
            step=self.next_step,
            epoch=self.epoch,
            config_digest=self._config_digest,
            ledger_step=self._ledger.last.step,
            ledger_digest=self._ledger.last.wide,
            error=standing.error is not None,
            stop=standing.stop,
            drain=standing.drain,
            pause=standing.pause,
            work=standing.work,
            drafts=any(map(may_draft, rows)),
            rows=len(rows),
            target_tokens=proposal.token_count,
            later_pass_tokens=sum(row.samples for row in rows),
            first_pass_tokens=first,
            micros=vote.micros,
            wish=vote.wish,
            mode=mode if rows else None,
            expected=vote.tokens,
        )

    def _agree(self, shape: StepShape, standing: Standing) -> Decision:
        """The one exchange, and what follows from it. Raises what all ranks raise together."""
        vector = shape.encode(self.rules.num_speculative_tokens)
        ledger, ranks = self._ledger, self._channel.ranks
        ledger.begin(self.epoch, shape.step)
        ticket = ledger.issue("all_gather", "agreement", (len(ranks), len(vector)), "int64")
        timeout = self._deadlines.after(self._tokens_in_flight)
        try:
            vectors = self._channel.exchange(vector, timeout)
        except EngineError as ended:
            # Whoever saw the flag first may have ended the exchange for those still in it.
            raise standing.error or ended from ended
        ledger.complete(ticket)
        self.exchange_count += 1
        self.last_joined = StepShape.decode(join_all(vectors, ranks))
        decision = decide(self.last_joined, self.rules)
        if decision.turn is Turn.FAIL:
            if standing.error is not None:
                raise standing.error
            said = [StepShape.decode(other).error for other in vectors]
            troubled = ranks[said.index(True)]
            raise RankLost(troubled, shape.step, "agree", "exchange", "says it cannot go on")
        return decision


def _plan(
    proposal: StepProposal, epoch: int, step: int, verify_width: int, decision: Decision
) -> StepPlan:
    _check_drafts(proposal.rows, verify_width)
    return StepPlan(
        epoch=epoch,
        step=step,
        rows=proposal.rows,
        admitted=proposal.admitted,
        released=proposal.released,
        draft_k=decision.draft_k,
        verify_width=verify_width,
        mode=decision.mode,
        target_size=decision.target_size,
        draft_sizes=decision.draft_sizes,
        group_rows=max(decision.group_rows, len(proposal.rows)),
    )


def _check_drafts(rows: Sequence[Row], verify_width: int) -> None:
    for row in rows:
        assert len(row.drafts) < verify_width, f"request {row.number} brings drafts of another step"
