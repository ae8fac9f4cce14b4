"""The loop: take in, propose, seal, execute, commit, emit.

`Replica.step` is the only body of a loop over steps; the engine and the simulator drive the same
one. Executor, intake, emitter, conductor, finish and clock are handed in, so nothing here knows a
device, a network or the time of day.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from drumline.core.clock import Clock
from drumline.core.errors import EngineError, Refused, RequestError
from drumline.core.plan import Event, SpeculationStats, StepPlan, StepResult
from drumline.core.request import Finish, FinishReason, Request
from drumline.lockstep.conductor import Conductor
from drumline.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Arrivals:
    """What came since the last step. A request may be cancelled in the step that brings it."""

    requests: tuple[Request, ...] = ()
    cancelled: tuple[int, ...] = ()


class Intake(Protocol):
    def take(self, limit: int) -> Arrivals:
        """At most ``limit`` requests and every cancellation that have come; never waits."""
        ...


class Executor(Protocol):
    def execute(self, plan: StepPlan) -> StepResult: ...


class Emitter(Protocol):
    def emit(self, events: Sequence[Event]) -> None: ...


@dataclass(frozen=True, slots=True)
class StepStats:
    """One executed step in numbers. ``usage`` is the share of KV blocks held after it."""

    step: int
    row_count: int
    token_count: int  # rows' tokens and drafts that went through the target
    kept_count: int  # tokens that were kept
    preemption_count: int
    draft_k: int
    usage: float
    seconds: float
    speculation: SpeculationStats  # of all steps up to and with this one


class Replica:
    """One scheduler with what executes its plans, and the sums for a summary."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        conductor: Conductor,
        executor: Executor,
        intake: Intake,
        emitter: Emitter,
        finish: Finish,
        clock: Clock,
    ) -> None:
        self.scheduler = scheduler
        self.step_count = 0
        self.draft_length_histogram: dict[int, int] = {}  # draft_k: steps with a live row
        self._conductor = conductor
        self._executor = executor
        self._intake = intake
        self._emitter = emitter
        self._finish = finish
        self._clock = clock
        self._preemptions_before = 0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> StepStats | None:
        """One turn of the loop; None if there was nothing to execute."""
        began = self._clock.now()
        self._take_in()
        proposal = self.scheduler.propose()
        if not proposal.rows:
            self._emitter.emit(self.scheduler.take_events())
            return None
        plan = self._conductor.seal(proposal)
        try:
            result = self._executor.execute(plan)
            events = self.scheduler.commit(plan, result, self._finish)
        except Exception as error:
            self.scheduler.fail_all()
            self._emitter.emit(self.scheduler.take_events())
            if isinstance(error, EngineError):
                raise
            raise EngineError(f"step {plan.step}: {type(error).__name__}: {error}") from error
        self._emitter.emit(events)
        return self._count(plan, events, self._clock.now() - began)

    def _take_in(self) -> None:
        arrivals = self._intake.take(self.scheduler.waiting_room)
        for request in arrivals.requests:
            try:
                self.scheduler.add(request)
            except (Refused, RequestError):
                # Intake checks before it hands over; what slips through ends alone.
                self._emitter.emit([Event(request.number, finish_reason=FinishReason.ERROR)])
        for number in arrivals.cancelled:
            self.scheduler.cancel(number)

    def _count(self, plan: StepPlan, events: Sequence[Event], seconds: float) -> StepStats:
        self.step_count += 1
        self.scheduler.note_seconds(plan, seconds)
        histogram = self.draft_length_histogram
        histogram[plan.draft_k] = histogram.get(plan.draft_k, 0) + 1
        preemption_count = self.scheduler.preemption_count - self._preemptions_before
        self._preemptions_before = self.scheduler.preemption_count
        return StepStats(
            step=plan.step,
            row_count=len(plan.rows),
            token_count=sum(row.width for row in plan.rows),
            kept_count=sum(len(event.tokens) for event in events),
            preemption_count=preemption_count,
            draft_k=plan.draft_k,
            usage=self.scheduler.pool.usage,
            seconds=seconds,
            speculation=self.scheduler.speculation,
        )
