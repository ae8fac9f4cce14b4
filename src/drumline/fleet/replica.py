"""The loop: take in, propose, seal, execute, commit, emit.

`Replica.step` is the only body of a loop over steps; the engine and the simulator drive the same
one. Executor, intake, emitter, conductor, finish and clock are handed in, so nothing here knows a
device, a network or the time of day.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct

from drumline.core.clock import Clock
from drumline.core.errors import EngineError, Refused, RequestError
from drumline.core.plan import Event, StepPlan, StepResult
from drumline.core.request import Finish, FinishReason, Request
from drumline.lockstep.conductor import WORKING, Conductor, Rest, Standing
from drumline.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Arrivals:
    """What came since the last step. A request may be cancelled in the step that brings it."""

    requests: tuple[Request, ...] = ()
    cancelled: tuple[int, ...] = ()


NOTHING = Arrivals()


class Intake(Protocol):
    def take(self, limit: int) -> Arrivals:
        """At most ``limit`` requests and every cancellation that have come; never waits."""
        ...


class Executor(Protocol):
    def execute(self, plan: StepPlan) -> StepResult: ...


class Emitter(Protocol):
    def emit(self, events: Sequence[Event]) -> None: ...


class StepStats(Struct, frozen=True):
    """One executed step in numbers."""

    step: int
    preemption_count: int
    seconds: float


def no_trouble() -> EngineError | None:
    """Nobody follows, so nobody is in trouble."""
    return None


class Replica:
    """One scheduler with what executes its plans, and the sums for a summary.

    ``trouble``: why those who follow cannot go on, asked before each step. ``pause``, ``drain``
    and ``stop`` are what was asked for from outside and is told to the group; ``rest`` says why
    the last turn had no step.
    """

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
        trouble: Callable[[], EngineError | None] = no_trouble,
    ) -> None:
        self.scheduler = scheduler
        self.pause = self.drain = self.stop = False
        self.rest: Rest | None = None
        self.step_count = 0
        # draft_k: steps in which somebody, here or in another replica it agrees with, had a row
        self.draft_length_histogram: dict[int, int] = {}
        self._conductor = conductor
        self._executor = executor
        self._intake = intake
        self._emitter = emitter
        self._finish = finish
        self._clock = clock
        self._trouble = trouble
        self._preemptions_before = 0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> StepStats | None:
        """One turn of the loop; None if there was nothing to execute, and ``rest`` says why."""
        began = self._clock.now()
        self._take_in()
        proposal = self.scheduler.propose()
        told = self.scheduler.take_events()
        if told:
            self._emitter.emit(told)
        try:
            sealed = self._conductor.seal(proposal, self._standing())
            self.rest = sealed if isinstance(sealed, Rest) else None
            if isinstance(sealed, Rest):
                return None
            result = self._executor.execute(sealed)
            if self._conductor.stop_agreed:
                self.scheduler.cancel_all()
            events = self.scheduler.commit(sealed, result, self._finish)
        except Exception as error:
            self._end_all()
            if isinstance(error, EngineError):
                raise
            where = f"step {self._conductor.next_step - 1}"
            raise EngineError(f"{where}: {type(error).__name__}: {error}") from error
        self._emitter.emit(events)
        return self._count(sealed, self._clock.now() - began)

    def _standing(self) -> Standing:
        error = self._trouble()
        work = self.scheduler.running_count + self.scheduler.waiting_count > 0
        if work and error is None and not (self.pause or self.drain or self.stop):
            return WORKING
        return Standing(work, self.pause, self.drain, self.stop, error)

    def _end_all(self) -> None:
        """Every request ends with ``error``, and is told so."""
        self.scheduler.fail_all()
        self._emitter.emit(self.scheduler.take_events())

    def _take_in(self) -> None:
        arrivals = self._intake.take(self.scheduler.waiting_room)
        if arrivals is not NOTHING:
            for request in arrivals.requests:
                try:
                    self.scheduler.add(request)
                except (Refused, RequestError):
                    # Intake checks before it hands over; what slips through ends alone.
                    self._emitter.emit([Event(request.number, finish_reason=FinishReason.ERROR)])
            for number in arrivals.cancelled:
                self.scheduler.cancel(number)
        if self.stop:
            self.scheduler.cancel_all()

    def _count(self, plan: StepPlan, seconds: float) -> StepStats:
        self.step_count += 1
        self.scheduler.note_seconds(plan, seconds)
        if plan.group_rows:
            histogram = self.draft_length_histogram
            histogram[plan.draft_k] = histogram.get(plan.draft_k, 0) + 1
        preemption_count = self.scheduler.preemption_count - self._preemptions_before
        self._preemptions_before = self.scheduler.preemption_count
        return StepStats(plan.step, preemption_count, seconds)
