"""The seams within one process, between threads; plans on their way to followers."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from msgspec import structs

from drumline.core.errors import Diverged, EngineError, RankLost
from drumline.core.ledger import Ledger
from drumline.core.params import SamplingParams
from drumline.core.plan import Admission, Row, StepPlan
from drumline.core.request import Request
from drumline.lockstep.channel import Acknowledgement, Wake
from drumline.lockstep.follower import Follower, Shipper, decode_plan, encode_plan
from drumline.lockstep.local import LocalGroup, LocalPlans, LocalWakes, ThreadWaiter

PLAN = StepPlan(
    epoch=1,
    step=7,
    rows=(Row(3, 4, (5, 6), (0, 2), True, (7,), 9, 2),),
    admitted=(
        Admission(
            Request(
                3,
                (1, 2),
                SamplingParams(temperature=0.5, stop=("x",), logit_bias={4: -1.5}, logprobs=2),
                max_tokens=8,
                seed=2**63 + 5,
                stop_token_ids=frozenset({2, 9}),
                bad_words=((1, 2), (3,)),
            ),
            (1, 2, 5, 6),
        ),
    ),
    released=(1, 2),
    draft_k=2,
    verify_width=3,
    mode="fixed",
    target_size=16,
    draft_sizes=(16, 4),
    group_rows=2,
)


def together(*bodies: Callable[[], None]) -> None:
    threads = [threading.Thread(target=body, daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
        assert not thread.is_alive()


def test_threads_exchange_in_rank_order_round_by_round() -> None:
    group = LocalGroup((0, 2, 4), ThreadWaiter())
    got: dict[int, list[object]] = {}

    def body(rank: int) -> Callable[[], None]:
        channel = group.member(rank)

        def run() -> None:
            got[rank] = [list(channel.exchange((1, n, rank), 10.0)) for n in range(50)]

        return run

    together(*[body(rank) for rank in (4, 0, 2)])
    wanted = [[(1, n, rank) for rank in (0, 2, 4)] for n in range(50)]
    assert got == dict.fromkeys((0, 2, 4), wanted)
    assert not group.rounds, "what all have read is forgotten"


def test_who_does_not_come_is_named_and_who_is_gone_at_once() -> None:
    group = LocalGroup((0, 1), ThreadWaiter())
    channel = group.member(0)
    with pytest.raises(RankLost) as late:
        channel.exchange((1, 9), 0.01)
    assert (late.value.rank, late.value.step, late.value.phase) == (1, 9, "agree")
    assert late.value.reason == "has not come within 0.01 s"
    group.leave(1, "killed")
    with pytest.raises(RankLost, match="rank 1 lost in step 9, agree, exchange: killed"):
        channel.exchange((1, 9), 60.0)


def test_wakes_reach_everybody_else() -> None:
    one, two, three = LocalWakes.connect(3, ThreadWaiter())
    one.send(Wake(0, 4))
    three.send(Wake(0, 5))
    assert one.receive() == [Wake(0, 5)]
    assert two.receive() == [Wake(0, 4), Wake(0, 5)]
    assert two.receive() == []
    assert three.receive() == [Wake(0, 4)]


# ---------------------------------------------------------------- plans


def test_a_plan_survives_its_way() -> None:
    assert decode_plan(encode_plan(PLAN)) == PLAN
    assert decode_plan(encode_plan(StepPlan(0, 0, ()))) == StepPlan(0, 0, ())


class Crew:
    """A leader and two followers; ``shapes`` are what each rank's step issues."""

    def __init__(self, *, timeout: float = 10.0) -> None:
        self.plans = LocalPlans((1, 2), ThreadWaiter())
        self.ledgers = [Ledger.in_memory(rank) for rank in range(3)]
        self.shapes = {0: 4, 1: 4, 2: 4}
        self.executed: dict[int, list[int]] = {0: [], 1: [], 2: []}
        self.shipper = Shipper(self.plans, self.ledgers[0], lambda plan: timeout)
        self.followers = [
            Follower(self.plans.sources[rank], self.execute(rank), self.ledgers[rank])
            for rank in (1, 2)
        ]

    def execute(self, rank: int) -> Callable[[StepPlan], None]:
        def run(plan: StepPlan) -> None:
            ledger = self.ledgers[rank]
            if self.shapes[rank] < 0:
                raise RuntimeError("no memory")
            ledger.enter("target")
            ledger.complete(ledger.issue("all_reduce", "tp", (self.shapes[rank],), "float32"))
            ledger.end()
            self.executed[rank].append(plan.step)

        return run

    def lead(self, step: int) -> EngineError | None:
        plan = structs.replace(PLAN, step=step)
        self.shipper.ship(plan)
        self.ledgers[0].begin(plan.epoch, step)
        self.execute(0)(plan)
        for follower in self.followers:
            try:
                follower.step()
            except RuntimeError as error:
                assert str(error) == "no memory"
        return self.shipper.settle()


def test_followers_execute_every_plan_once_and_in_order() -> None:
    crew = Crew()
    assert crew.shipper.settle() is None  # nothing was shipped
    for step in (0, 3, 4):  # steps have gaps where the group slept, plans have none
        assert crew.lead(step) is None
    crew.plans.close()
    assert [follower.step() for follower in crew.followers] == [False, False]
    assert crew.executed == {rank: [0, 3, 4] for rank in range(3)}


def test_a_follower_that_issued_something_else_is_named() -> None:
    crew = Crew()
    assert crew.lead(0) is None
    crew.shapes[2] = 5
    error = crew.lead(1)
    assert isinstance(error, Diverged)
    assert (error.what, error.step) == ("ledger digest", 1)
    (zero, own), (one, same), (two, other) = error.values
    assert (zero, one, two) == (0, 1, 2)
    assert own == same != other


def test_a_follower_that_breaks_says_why_before_it_leaves() -> None:
    crew = Crew()
    crew.shapes[1] = -1
    error = crew.lead(6)
    assert isinstance(error, RankLost)
    assert (error.rank, error.step, error.reason) == (1, 6, "RuntimeError: no memory")
    assert crew.ledgers[1].ring().error == (6, "RuntimeError: no memory")


def test_a_follower_that_does_not_answer_is_named() -> None:
    crew = Crew(timeout=0.01)
    crew.followers.pop()
    error = crew.lead(2)
    assert isinstance(error, RankLost)
    assert (error.rank, error.reason) == (2, "has not acknowledged within 0.01 s")


def test_a_plan_out_of_sequence_is_refused() -> None:
    crew = Crew()
    crew.plans.send(1, encode_plan(PLAN))
    with pytest.raises(EngineError, match="rank 1: plan 1 came, 0 is next"):
        crew.followers[0].step()
    assert crew.executed[1] == []


def test_a_step_left_unsettled_is_our_mistake() -> None:
    crew = Crew()
    crew.shipper.ship(PLAN)
    with pytest.raises(AssertionError, match="was not settled"):
        crew.shipper.ship(PLAN)


def test_words_of_another_plan_do_not_count() -> None:
    crew = Crew(timeout=0.01)
    crew.shipper.ship(PLAN)
    for rank in (1, 2):
        crew.plans.take(Acknowledgement(rank, 5, 0))
    assert isinstance(crew.shipper.settle(), RankLost)
