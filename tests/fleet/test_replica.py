"""The loop over steps, with everything around it handed in."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import pytest

from drumline.core.clock import ManualClock
from drumline.core.errors import DeadlineExceeded, EngineError
from drumline.core.plan import Event, StepPlan, StepResult
from drumline.core.request import FinishReason, Request
from drumline.fleet import Arrivals, Replica
from drumline.kvcache import BlockPool
from drumline.lockstep.conductor import SoloConductor
from drumline.scheduler import (
    AdaptiveDraftLength,
    CostCurve,
    DraftLength,
    Scheduler,
    SchedulerSettings,
    TokenFinish,
)

from ..scheduler.world import HashWorker, alone, make_request


class Queue:
    """An intake that hands over what a test has put in."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.cancelled: list[int] = []
        self.limits: list[int] = []

    def take(self, limit: int) -> Arrivals:
        self.limits.append(limit)
        requests, self.requests = self.requests[:limit], self.requests[limit:]
        cancelled, self.cancelled = self.cancelled, []
        return Arrivals(tuple(requests), tuple(cancelled))


class Listener:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, events: Sequence[Event]) -> None:
        self.events.extend(events)

    def tokens(self, number: int) -> tuple[int, ...]:
        return tuple(token for e in self.events if e.number == number for token in e.tokens)

    def reasons(self, number: int) -> list[FinishReason]:
        return [e.finish_reason for e in self.events if e.number == number and e.finish_reason]


class Fragile:
    """Breaks in one step, after the worker has done its part or before."""

    def __init__(self, worker: HashWorker, step: int, error: Exception) -> None:
        self.worker = worker
        self.step = step
        self.error = error

    def execute(self, plan: StepPlan) -> StepResult:
        if plan.step == self.step:
            raise self.error
        return self.worker.execute(plan)


class Rig:
    def __init__(
        self, *, k: int = 0, max_waiting: int = 8, draft_length: DraftLength | None = None
    ) -> None:
        settings = SchedulerSettings(
            max_model_len=64,
            max_num_seqs=4,
            max_num_batched_tokens=16,
            max_waiting=max_waiting,
            num_speculative_tokens=k,
        )
        self.pool = BlockPool(48, 4)
        self.worker = HashWorker(self.pool, skill=1.0)
        self.intake = Queue()
        self.listener = Listener()
        self.clock = ManualClock()
        self.scheduler = Scheduler(settings, self.pool, draft_length)

    def replica(self, breaks_at: int = -1, error: Exception | None = None) -> Replica:
        return Replica(
            scheduler=self.scheduler,
            conductor=SoloConductor(),
            executor=Fragile(self.worker, breaks_at, error or RuntimeError("no")),
            intake=self.intake,
            emitter=self.listener,
            finish=TokenFinish(),
            clock=self.clock,
        )


def test_the_loop_fits_on_one_screen() -> None:
    assert len(inspect.getsource(Replica.step).splitlines()) <= 25


def test_requests_come_in_and_tokens_go_out() -> None:
    rig = Rig(k=3)
    replica = rig.replica()
    requests = [make_request(number, [number + 1] * 5, 9) for number in range(6)]
    rig.intake.requests = list(requests)
    stats = [replica.step()]
    while replica.has_work:
        stats.append(replica.step())
    for request in requests:
        assert (
            rig.listener.tokens(request.number),
            *rig.listener.reasons(request.number),
        ) == alone(request)
    ran = [entry for entry in stats if entry is not None]
    assert [entry.step for entry in ran] == list(range(len(ran)))
    assert sum(len(event.tokens) for event in rig.listener.events) == 54
    assert rig.scheduler.pool.usage == 0.0
    assert replica.step_count == len(ran)
    assert sum(replica.draft_length_histogram.values()) == len(ran)
    assert set(replica.draft_length_histogram) <= {0, 3}


def test_an_idle_step_executes_nothing() -> None:
    rig = Rig()
    replica = rig.replica()
    assert replica.step() is None
    assert replica.step_count == 0
    assert rig.listener.events == []


def test_a_request_cancelled_in_the_step_that_brings_it_is_told_so() -> None:
    rig = Rig()
    replica = rig.replica()
    rig.intake.requests = [make_request(0, [1], 4)]
    rig.intake.cancelled = [0, 99]
    assert replica.step() is None
    assert rig.listener.reasons(0) == [FinishReason.ABORT]
    assert not replica.has_work


def test_intake_gives_no_more_than_the_queue_takes() -> None:
    rig = Rig(max_waiting=2)
    replica = rig.replica()
    rig.intake.requests = [make_request(number, [1], 3) for number in range(12)]
    replica.step()
    while replica.has_work or rig.intake.requests:
        replica.step()
    assert max(rig.intake.limits) == 2
    assert all(rig.listener.reasons(number) == [FinishReason.LENGTH] for number in range(12))


def test_a_request_that_slips_through_intake_ends_alone() -> None:
    rig = Rig()
    replica = rig.replica()
    rig.intake.requests = [make_request(0, [1] * 64, 1), make_request(1, [1], 2)]
    while replica.step() is not None:
        pass
    assert rig.listener.reasons(0) == [FinishReason.ERROR]
    assert rig.listener.reasons(1) == [FinishReason.LENGTH]


def test_when_the_executor_breaks_everybody_ends_with_error_once() -> None:
    rig = Rig()
    replica = rig.replica(breaks_at=2, error=RuntimeError("disk on fire"))
    rig.intake.requests = [make_request(number, [1, number], 1 + number) for number in range(6)]
    replica.step()
    replica.step()
    with pytest.raises(EngineError, match="step 2: RuntimeError: disk on fire"):
        replica.step()
    reasons = [rig.listener.reasons(number) for number in range(6)]
    assert reasons == [[FinishReason.LENGTH]] * 2 + [[FinishReason.ERROR]] * 4
    assert not replica.has_work
    assert rig.pool.used_count == 0


def test_an_engine_error_keeps_its_type() -> None:
    rig = Rig()
    replica = rig.replica(breaks_at=0, error=DeadlineExceeded("target pass", 5.0))
    rig.intake.requests = [make_request(0, [1], 2)]
    with pytest.raises(DeadlineExceeded, match="target pass"):
        replica.step()
    assert rig.listener.reasons(0) == [FinishReason.ERROR]


def test_seconds_come_from_the_clock_that_was_handed_in() -> None:
    rig = Rig()
    replica = rig.replica()
    rig.intake.requests = [make_request(0, [1], 2)]
    execute = rig.worker.execute

    def slow(plan: StepPlan) -> StepResult:
        rig.clock.advance(0.25)
        return execute(plan)

    rig.worker.execute = slow  # type: ignore[method-assign]
    stats = replica.step()
    assert stats is not None
    assert stats.seconds == 0.25


def test_what_drafts_brought_is_summed_over_steps() -> None:
    rig = Rig(k=3)
    replica = rig.replica()
    rig.intake.requests = [make_request(number, [number + 1] * 5, 9) for number in range(3)]
    replica.step()
    drafts = [rig.scheduler.speculation.drafts]
    while replica.has_work:
        replica.step()
        drafts.append(rig.scheduler.speculation.drafts)
    brought = rig.scheduler.speculation
    assert brought.drafted == rig.worker.drafted > 0
    assert brought.accepted == rig.worker.accepted
    ends = [event.speculation for event in rig.listener.events if event.finish_reason]
    assert sum(end.accepted for end in ends if end is not None) == brought.accepted
    assert drafts == sorted(drafts)


def test_an_adaptive_length_hears_what_steps_cost() -> None:
    """Only steps without prefill, whose drafts were as many as those they verified."""
    costs = CostCurve([[1000, 1100, 1200, 1300]] * 3)
    length = AdaptiveDraftLength(3, costs)
    rig = Rig(k=3, draft_length=length)
    replica = rig.replica()
    rig.intake.requests = [make_request(0, [1] * 5, 55)]
    execute = rig.worker.execute
    seen: list[StepPlan] = []

    def slow(plan: StepPlan) -> StepResult:
        rig.clock.advance(0.002)
        seen.append(plan)
        return execute(plan)

    rig.worker.execute = slow  # type: ignore[method-assign]
    replica.step()
    replica.step()
    assert [(plan.verify_width, plan.draft_k) for plan in seen] == [(1, 3), (4, 3)]
    told = costs.micros(1)
    assert told[3] == 1300 + 700 // 3
    while replica.has_work:
        replica.step()
    assert costs.micros(1)[3] > 1800
