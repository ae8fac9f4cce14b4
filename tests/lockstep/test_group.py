"""Replicas that agree: nobody waits for ever, whatever comes when. Every run is one of a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from drumline.core.errors import Diverged, EngineError, RankLost
from drumline.core.plan import StepPlan
from drumline.core.request import FinishReason
from drumline.core.traits import DrafterTraits
from drumline.fleet.leader import Leader, Life
from drumline.fleet.replica import Replica
from drumline.lockstep.conductor import SoloConductor
from drumline.lockstep.mutants import input_fits_in_drafter
from drumline.scheduler import DraftLength, TableDraftLength, TokenFinish, dynamic_sd_lookup
from drumline.scheduler.draft_length import AdaptiveDraftLength

from ..scheduler.world import costs_of, make_request
from .world import BLOCK, DENSE, MTP, NGRAM, STATELESS, World


def table(entries: list[list[int]], k: int = 3) -> DraftLength:
    return TableDraftLength(k, dynamic_sd_lookup(entries, k))


def adaptive(k: int = 3) -> DraftLength:
    return AdaptiveDraftLength(k, costs_of(4, k))


def busy(world: World, rank: int, number: int, *, prompt: int = 5, tokens: int = 8) -> None:
    world.send(rank, make_request(number, [number % 100 + 1] * prompt, tokens))


LENGTHS: list[dict[str, Any]] = [
    {},
    {"length": lambda: table([[1, 1, 3], [2, 3, 1], [4, 4, 0]])},
    {"length": adaptive, "adaptive": True},
    {"k": 1, "length": lambda: table([[1, 2, 1], [3, 4, 0]], 1)},
    {"k": 0, "drafter": None},
]
DRAFTERS = (MTP, STATELESS, DENSE, NGRAM)


def some_world(seed: int, **more: Any) -> World:
    """Two or three replicas with one drafter and one rule of draft length, by the seed."""
    options = {"drafter": DRAFTERS[seed % 4], **LENGTHS[seed % 5], **more}
    buckets = (4, 8, 16) if seed % 3 == 0 else ()
    return World(seed, dp=2 + seed % 2, buckets=buckets, **options)


# ---------------------------------------------------------------- one busy, one idle


@pytest.mark.parametrize("k", [1, 2, 5])
def test_case_18_an_idle_rank_runs_the_same_script(k: int) -> None:
    world = World(k=k)
    world.play(lambda w: busy(w, 1, 0))
    world.check()
    idle, worked = world.members
    assert all(not plan.rows for plan in idle.plans)
    assert all(plan.rows for plan in worked.plans)
    assert [plan.draft_sizes for plan in idle.plans] == [p.draft_sizes for p in worked.plans]
    for plan in idle.plans:  # one target pass, and the passes that the plan says
        parts = [(entry.phase, entry.part) for entry in idle.log[plan.step]]
        passes = MTP.passes(plan.draft_k)
        assert parts == [("target", 0)] * 2 + [("draft", part) for part in range(passes)]
    assert {plan.draft_k for plan in idle.plans} == {0, k}  # 0 where the last token is near
    rests = idle.conductor.exchange_count - len(idle.plans)
    assert rests in (2, 3)  # perhaps before it; after it; and left


def test_a_drafter_that_shares_nothing_has_no_dummy_pass() -> None:
    """Case 02: n-gram runs no model, a dense drafter shares no collective; both draft freely."""
    for drafter in (NGRAM, DENSE):
        world = World(drafter=drafter, skill=1.0)
        world.play(lambda w: busy(w, 1, 0, tokens=20))
        world.check()
        assert all(plan.draft_sizes == () for m in world.members for plan in m.plans)
        entries = [entry for member in world.members for e in member.log.values() for entry in e]
        assert {entry.phase for entry in entries} == {"target"}
        assert world.members[1].worker.accepted > 10


def test_case_13_work_that_cannot_run_does_not_stop_the_others() -> None:
    """A rank whose only request waits for blocks executes full dummy steps, draft passes included,
    and its request starts as soon as it can."""
    world = World(block_count=24)
    blocked = world.members[1]
    held = blocked.pool.allocate(blocked.pool.available_count)
    assert held is not None

    def script(w: World) -> None:
        busy(w, 0, 0, tokens=30)
        busy(w, 1, 1, tokens=6)
        w.baton.until(lambda: len(blocked.plans) >= 5, "five steps")
        blocked.pool.release(held)

    world.play(script)
    world.check()
    waiting = [plan for plan in blocked.plans if not plan.rows][:5]
    assert len(waiting) == 5
    assert all(plan.draft_sizes for plan in waiting)
    assert not blocked.scheduler.has_work


# ---------------------------------------------------------------- anything, any time


def arrivals(world: World, rng: random.Random) -> None:
    number = 0
    for _ in range(rng.randint(2, 5)):
        for _ in range(rng.randint(0, 3)):
            rank = rng.randrange(world.options.dp)
            busy(world, rank, number, prompt=rng.randint(1, 20), tokens=rng.randint(1, 8))
            number += 1
        for _ in range(rng.randint(0, 12)):
            world.baton.pass_on()
        if rng.random() < 0.3:
            world.quiet()


def test_case_12_two_hundred_random_traces_complete() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        some_world(seed).play(lambda world, rng=rng: arrivals(world, rng)).check()


def anything(world: World, rng: random.Random) -> None:
    """Requests, cancellations, pauses with requests in them, and rests, in any order."""
    ranks = list(range(world.options.dp))
    for _ in range(rng.randint(2, 5)):
        action = rng.random()
        number = len(world.sent)
        if action < 0.55:
            busy(world, rng.choice(ranks), number, prompt=rng.randint(1, 6), tokens=2)
        elif action < 0.65 and number:
            world.cancel(rng.randrange(number))
        elif action < 0.9:
            rng.shuffle(ranks)
            world.pause(ranks)
            stand_still(world, rng)
            rng.shuffle(ranks)
            world.tell_all(Leader.resume, ranks)
        else:
            world.quiet()
        for _ in range(rng.randint(0, 6)):
            world.baton.pass_on()


def stand_still(world: World, rng: random.Random) -> None:
    """Case 14: nobody is in a step, none starts, all stand before the same exchange."""

    def steps() -> list[tuple[int, int, bool]]:
        found = [(m.conductor.next_step, len(m.plans), m.inside) for m in world.members]
        assert len({(step, inside) for step, _, inside in found}) == 1
        return found

    before = steps()
    assert not before[0][2]
    if rng.random() < 0.7:
        busy(world, rng.randrange(world.options.dp), len(world.sent), prompt=2, tokens=2)
    for _ in range(rng.randint(0, 4)):
        world.baton.pass_on()
    assert steps() == before


def test_a_thousand_interleavings_complete() -> None:
    paused = slept = 0
    for seed in range(1000):
        rng = random.Random(seed)
        world = some_world(seed)
        world.play(lambda w, rng=rng: anything(w, rng)).check()
        steps = len(world.members[0].plans)
        slept += world.members[0].conductor.exchange_count - steps
        paused += steps
    assert paused > 1000 < slept


def test_an_idle_pause_costs_one_exchange_and_no_step() -> None:
    world = World()

    def script(w: World) -> None:
        w.quiet()
        before = [member.conductor.next_step for member in w.members]
        w.pause()
        assert [member.conductor.next_step for member in w.members] == [n + 1 for n in before]
        w.tell_all(Leader.resume)

    world.play(script)
    world.check()
    assert all(not member.plans for member in world.members)


def test_one_run_is_one_seed() -> None:
    def log(seed: int) -> list[Any]:
        world = World(seed, dp=3)
        world.play(lambda w: anything(w, random.Random(5)))
        return [(m.plans, m.events, m.log) for m in world.members]

    assert log(3) == log(3)


def test_a_drain_lets_everything_end_and_then_all_leave() -> None:
    world = World()

    def script(w: World) -> None:
        busy(w, 0, 0, tokens=20)
        w.baton.until(lambda: bool(w.members[0].plans), "a step")
        w.tell(1, Leader.drain)

    world.play(script, stops=False)
    world.check()
    assert all(member.leader.life is Life.GONE for member in world.members)


def test_a_stop_ends_what_is_unfinished_with_abort() -> None:
    """Also on the rank that is told last, and after at most one more step."""
    world = World()
    counts = []

    def script(w: World) -> None:
        for number in range(4):
            busy(w, number % 2, number, tokens=40)
        w.baton.until(lambda: len(w.members[1].plans) > 3, "steps")
        counts.extend(len(member.plans) for member in w.members)
        w.tell(0, Leader.stop)

    world.play(script, stops=False)
    for number in range(4):
        assert world.members[number % 2].reasons(number) == [FinishReason.ABORT]
    assert [len(member.plans) for member in world.members] <= [max(counts) + 2] * 2
    assert all(member.pool.used_count == 0 for member in world.members)
    assert world.baton.timeouts == 0


def test_a_stop_ends_a_pause() -> None:
    world = World()

    def script(w: World) -> None:
        busy(w, 0, 0, tokens=40)
        w.pause()
        w.tell_all(Leader.stop)

    world.play(script, stops=False)
    assert world.members[0].reasons(0) in ([FinishReason.ABORT], [])
    assert all(member.leader.life is Life.GONE for member in world.members)


# ---------------------------------------------------------------- draft length


def plans_by_step(world: World) -> list[tuple[int, int, int]]:
    """(rows of rank 0, rows of rank 1, K) in each step."""
    pairs = zip(world.members[0].plans, world.members[1].plans, strict=True)
    return [(len(one.rows), len(other.rows), one.draft_k) for one, other in pairs]


def decoding(plan: Any) -> int:
    return sum(row.samples and len(row.tokens) == 1 for row in plan.rows)


def test_case_09_the_length_is_agreed_and_changes() -> None:
    world = World(length=lambda: table([[1, 2, 3], [3, 4, 1]]), skill=0.0)

    def script(w: World) -> None:
        busy(w, 0, 0, prompt=2, tokens=40)
        for number in range(1, 5):
            busy(w, 1, number, prompt=2, tokens=9)

    world.play(script)
    world.check()
    lone, crowd = world.members
    wanted = []
    for one, other in zip(lone.plans, crowd.plans, strict=True):
        assert one.draft_k == other.draft_k == one.num_spec_tokens_to_schedule
        counts = [decoding(one), decoding(other)]
        wishes = [1 if count > 2 else 3 for count in counts if count]
        wanted.append(min(wishes, default=3))
        if one.draft_k != wanted[-1]:  # but where the last token is near
            assert one.draft_k == 0
            assert len(one.rows) + len(other.rows) == 1
    lengths = [plan.draft_k for plan in lone.plans]
    busy_steps = [k for k, plan in zip(lengths, crowd.plans, strict=True) if decoding(plan) == 4]
    alone_steps = [k for k, plan in zip(lengths, crowd.plans, strict=True) if not plan.rows]
    assert set(busy_steps) == {1}
    assert len(busy_steps) >= 5
    assert set(alone_steps[:-2]) == {3}  # and the last token has no draft
    assert len(alone_steps) >= 5
    histogram = lone.replica.draft_length_histogram
    assert histogram == crowd.replica.draft_length_histogram
    assert histogram[1] >= 5 <= histogram[3]
    exchanges = lone.conductor.exchange_count
    assert 2 <= exchanges - len(lone.plans) <= 3  # one for each step, and for each rest


def test_case_11_prompts_do_not_vote() -> None:
    """The length changes no more often than the number of *decoding* requests crosses the table."""
    world = World(length=lambda: table([[1, 2, 2], [3, 4, 0]], 3), skill=0.0)

    def script(w: World) -> None:
        for number in range(4):
            busy(w, 0, number, prompt=20, tokens=12)
            goal = len(w.members[0].plans) + 3
            w.baton.until(lambda goal=goal: len(w.members[0].plans) >= goal, "three steps")

    world.play(script)
    world.check()
    for plan in world.members[0].plans:
        count = decoding(plan)
        if count:
            wish = 2 if count <= 2 else 0
            assert plan.draft_k == wish or (plan.draft_k == 0 and plan.group_rows == 1)


@pytest.mark.parametrize(
    ("length", "is_adaptive"),
    [(None, False), (lambda: table([[1, 1, 3], [2, 4, 1]]), False), (adaptive, True)],
)
def test_a_group_of_one_decides_as_a_replica_alone(
    length: Callable[[], DraftLength] | None, is_adaptive: bool
) -> None:
    """The same lengths and rows, step by step: agreement is no other rule."""
    requests = [make_request(number, [number + 1] * 5, 4 + 5 * number) for number in range(7)]
    group = World(dp=1, length=length, adaptive=is_adaptive)
    member = group.members[0]
    member.requests = list(requests)
    group.play(lambda w: None)

    alone = World(dp=1, length=length, adaptive=is_adaptive)
    solo = alone.members[0]
    solo.requests = list(requests)
    replica = Replica(
        scheduler=solo.scheduler,
        conductor=SoloConductor(),
        executor=solo,
        intake=solo,
        emitter=solo,
        finish=TokenFinish(),
        clock=alone.baton,
    )

    def run() -> None:
        while replica.step() is not None:
            pass

    alone.baton.spawn("replica", run)
    alone.baton.run()

    def decided(plans: list[StepPlan]) -> list[Any]:
        return [(plan.draft_k, plan.verify_width, plan.rows) for plan in plans]

    assert decided(member.plans) == decided(solo.plans)
    assert len(solo.plans) > 10
    assert all(plan.target_size == 0 for plan in solo.plans)
    assert group.baton.timeouts == 0


def test_adaptive_replicas_sum_what_they_expect() -> None:
    """One rank's drafts are always right, the other's never: both take one length in each step,
    and it changes with who is there."""
    world = World(length=adaptive, adaptive=True, seats=4)
    world.members[0].worker.skill = 1.0
    world.members[1].worker.skill = 0.0

    def script(w: World) -> None:
        busy(w, 0, 0, prompt=2, tokens=60)
        w.quiet()
        for number in range(1, 9):
            busy(w, 1, number, prompt=2, tokens=40)

    world.play(script)
    world.check()
    rows = plans_by_step(world)
    good = [k for one, _, k in rows if one]
    bad = [k for _, other, k in rows if other]
    assert max(set(good), key=good.count) == 3
    assert max(set(bad), key=bad.count) == 0


# ---------------------------------------------------------------- execution mode


def test_case_21_the_last_rows_drain_in_one_mode() -> None:
    """Sizes from the list are used by busy and idle alike, in every order of finishing."""
    for order in range(6):
        world = World(order, buckets=(4, 8, 16))

        def script(w: World, order: int = order) -> None:
            for number in range(5):
                busy(w, (number + order) % 2, number, prompt=3, tokens=2 + number * (order + 1))

        world.play(script)
        world.check()
        for member in world.members:
            assert {plan.mode for plan in member.plans} == {"fixed"}
            assert {plan.target_size for plan in member.plans} <= {4, 8, 16}
            assert {size for plan in member.plans for size in plan.draft_sizes} <= {4, 8, 16}


def test_case_31_one_rank_that_is_not_ready_decides_the_mode_for_all_while_it_has_rows() -> None:
    world = World(buckets=(4, 8, 16))
    world.members[0].conductor.mode_ready = False

    def script(w: World) -> None:
        busy(w, 0, 0, prompt=3, tokens=6)
        busy(w, 1, 1, prompt=3, tokens=25)

    world.play(script)
    world.check()
    modes = {
        (bool(one.rows), one.mode, other.mode)
        for one, other in zip(world.members[0].plans, world.members[1].plans, strict=True)
    }
    assert modes == {(True, "live", "live"), (False, "fixed", "fixed")}


# ---------------------------------------------------------------- when something breaks


def broken(script: Callable[[World], None], **options: Any) -> World:
    world = World(expects_errors=True, **options)
    world.play(script)
    for number, (rank, _) in world.sent.items():
        assert world.members[rank].reasons(number) == [FinishReason.ERROR]
    assert all(member.leader.life is Life.GONE for member in world.members)
    assert all(member.pool.used_count == 0 for member in world.members)
    return world


def work_for_all(world: World) -> None:
    for rank in range(world.options.dp):
        busy(world, rank, rank, tokens=40)


def test_case_17_trouble_before_the_seal_is_told_and_all_leave_together() -> None:
    trouble = EngineError("rank 1: no memory left")
    world = World(expects_errors=True, dp=3)
    sick = world.members[1]
    sick.trouble = lambda: trouble if len(sick.plans) == 4 else None  # type: ignore[method-assign]
    sick.replica._trouble = sick.trouble
    world.play(work_for_all)
    assert [len(member.plans) for member in world.members] == [4, 4, 4]
    assert world.baton.timeouts == 0
    assert world.errors[1] is trouble
    for rank in (0, 2):
        lost = world.errors[rank]
        assert isinstance(lost, RankLost)
        assert (lost.rank, lost.phase) == (1, "agree")
        assert world.members[rank].reasons(rank) == [FinishReason.ERROR]


def test_case_17_an_error_after_the_seal_ends_the_others_waits() -> None:
    world = World(expects_errors=True, dp=3)
    world.members[2].faults[4] = RuntimeError("disk on fire")
    world.play(work_for_all)
    assert world.baton.timeouts == 0  # told, not waited for
    assert isinstance(world.errors[2], EngineError)
    assert "step 4: RuntimeError: disk on fire" in str(world.errors[2])
    for rank in (0, 1):
        lost = world.errors[rank]
        assert isinstance(lost, RankLost)
        assert (lost.rank, lost.step, lost.phase) == (2, 4, "target")
        assert "disk on fire" in lost.reason
    assert all(member.reasons(member.rank) == [FinishReason.ERROR] for member in world.members)


def test_a_rank_that_does_not_come_is_named_when_the_deadline_passes() -> None:
    world = World(expects_errors=True, dp=3)
    sleeper = world.members[1]
    turn = sleeper.leader.turn

    def stall() -> Any:
        if len(sleeper.plans) == 3:
            world.baton.until(lambda: len(world.errors) == 2, "for ever")
            raise EngineError("woke up too late")
        return turn()

    sleeper.leader.turn = stall  # type: ignore[method-assign]
    world.play(work_for_all)
    assert world.baton.timeouts == 2
    for rank in (0, 2):
        lost = world.errors[rank]
        assert isinstance(lost, RankLost)
        assert (lost.rank, lost.phase, lost.operation) == (1, "agree", "exchange")
        assert lost.step == sleeper.conductor.next_step
        assert lost.reason == "has not come within 2 s"


def test_ranks_with_other_configurations_are_named() -> None:
    world = broken(work_for_all, dp=3, digests={2: 8})
    for error in world.errors.values():
        assert isinstance(error, Diverged)
        assert error.what == "config digest"
        assert error.values == ((0, 7), (1, 7), (2, 8))
    assert all(not member.plans for member in world.members)


def test_a_rank_that_issued_something_else_is_named_one_step_later() -> None:
    """The same operations, but for a word that nobody can see from outside: the digest tells."""
    world = World(expects_errors=True, dp=2)
    odd = world.members[1]
    issue = odd.ledger.issue

    def issue_otherwise(operation: str, group: str, shape: Any, dtype: str) -> int:
        wrong = "bfloat16" if odd.ledger.step == 3 else dtype
        ticket = issue(operation, group, shape, wrong)
        odd.ledger._issued[-1] = (*odd.ledger._issued[-1][:5], dtype)  # nobody sees it here
        return ticket

    odd.ledger.issue = issue_otherwise  # type: ignore[method-assign]
    world.play(work_for_all)
    for error in world.errors.values():
        assert isinstance(error, Diverged)
        assert (error.what, error.step) == ("ledger digest", 4)
        assert [rank for rank, _ in error.values] == [0, 1]
    assert len(world.errors) == 2


# ---------------------------------------------------------------- near the limits


@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("dp", [2, 4])
def test_case_04_rows_stop_drafting_at_their_limit_and_nobody_else_does(k: int, dp: int) -> None:
    """Rank 0 ends at 58 to 64 of 64 positions; the others are far away, at the edge with it, or in
    prefill. The old gate would have failed on rank 0 while others draft."""
    gate_failed = 0
    for end in range(58, 65):
        for other in ("far", "edge", "prefill") if dp == 2 else ("far",):
            world = World(end, dp=dp, k=k, skill=0.0)

            def script(w: World, end: int = end, other: str = other) -> None:
                w.send(0, make_request(0, [9] * 50, end - 50))
                if other == "edge":
                    w.send(1, make_request(1, [8] * 50, 14))
                elif other == "far":
                    w.send(1, make_request(1, [8] * 10, 30))
                else:
                    w.baton.until(lambda: len(w.members[0].plans) > 4, "the edge")
                    w.send(1, make_request(1, [8] * 45, 5))

            world.play(script)
            world.check()
            edge = world.members[0]
            for plan in edge.plans:
                assert all(row.draft_limit <= 63 for row in plan.rows)
                fits = input_fits_in_drafter(plan.rows, plan.verify_width - 1, plan.draft_k, 64)
                gate_failed += not fits and len(plan.draft_sizes) == k
    assert gate_failed > 0, "nobody came near the old gate"


@pytest.mark.parametrize(
    ("drafter", "ahead"),
    [(MTP, 0), (BLOCK, 1), (NGRAM, 0)],
)
def test_case_02_beyond_the_drafters_range_a_row_goes_on_without(
    drafter: DrafterTraits, ahead: int
) -> None:
    """Range 32, one position less for a block drafter; rank 0 grows past it, rank 1 stays below:
    there acceptance stays whole, and rank 0 verifies no draft beyond."""
    world = World(drafter=drafter, drafter_range=32 - ahead, skill=1.0)

    def script(w: World) -> None:
        w.send(0, make_request(0, [5] * 20, 30))
        w.send(1, make_request(1, [6] * 3, 20))

    world.play(script)
    world.check()
    grows, short = world.members
    for plan in grows.plans:
        for row in plan.rows:
            assert row.start + row.width <= 32 - ahead or not row.drafts
            if row.start + len(row.tokens) >= 32 - ahead:
                assert row.drafts == ()
    assert any(row.start >= 32 for plan in grows.plans for row in plan.rows)
    assert short.worker.accepted == short.worker.drafted > 0
    past = [plan for plan in short.plans if not plan.rows and plan.draft_k]
    assert not past, "nobody can draft, and the idle rank has dummy drafts"


def test_case_23_the_same_request_is_drafted_alike_beside_others() -> None:
    """One request and three on two ranks: accepted counts are those of one rank with all."""

    def accepted(dp: int, ranks: list[int]) -> dict[int, int]:
        world = World(dp=dp, skill=1.0)

        for number, rank in enumerate(ranks):
            world.send(rank, make_request(number, [number + 1] * 3, 15))
        world.play(lambda w: None)
        world.check()
        events = [event for member in world.members for event in member.events]
        return {e.number: e.speculation.accepted for e in events if e.speculation is not None}

    assert accepted(1, [0, 0, 0, 0]) == accepted(2, [0, 1, 1, 1])


# ---------------------------------------------------------------- replicas of several ranks


def test_followers_issue_what_their_leaders_do() -> None:
    """Two replicas of two ranks (and one of three): equal logs within each, equal wide ones over
    all; the accepted and drafted tokens are told within a replica."""
    for seed in range(30):
        rng = random.Random(seed)
        dp, tp = ((2, 2), (1, 3), (3, 2))[seed % 3]
        options = {**LENGTHS[seed % 5], "drafter": (MTP, STATELESS)[seed % 2]}
        world = World(seed, dp=dp, tp=tp, **options)
        world.play(lambda w, rng=rng: anything(w, rng)).check()
        told = [e for e in world.hands[0].log.values() for e in e if e.operation == "broadcast"]
        assert bool(told) == any(
            row.samples for plan in world.members[0].plans for row in plan.rows
        )


def test_case_17_a_follower_that_breaks_ends_the_whole_group() -> None:
    world = World(expects_errors=True, tp=2)
    world.hands[1].faults[4] = RuntimeError("disk on fire")  # rank 3
    world.play(work_for_all)
    assert world.baton.timeouts == 0
    assert sorted(world.errors) == [0, 1, 2, 3]
    assert str(world.errors[3]) == "disk on fire"
    assert world.hands[1].ledger.ring().error == (4, "RuntimeError: disk on fire")
    for rank in (0, 1, 2):
        lost = world.errors[rank]
        assert isinstance(lost, RankLost)
        assert (lost.rank, lost.step, lost.reason) == (3, 4, "disk on fire")
    for member in world.members:
        assert member.reasons(member.index) == [FinishReason.ERROR]


def test_a_follower_that_issued_something_else_is_named_by_its_leader() -> None:
    world = World(expects_errors=True, tp=2)
    odd = world.hands[0]  # rank 1
    issue = odd.ledger.issue

    def issue_otherwise(operation: str, group: str, shape: Any, dtype: str) -> int:
        wrong = "bfloat16" if odd.ledger.step == 3 and group == "tp" else dtype
        ticket = issue(operation, group, shape, wrong)
        odd.ledger._issued[-1] = (*odd.ledger._issued[-1][:5], dtype)
        return ticket

    odd.ledger.issue = issue_otherwise  # type: ignore[method-assign]
    world.play(work_for_all)
    named = world.errors[0]
    assert isinstance(named, Diverged)
    assert (named.what, named.step) == ("ledger digest", 3)
    assert [rank for rank, _ in named.values] == [0, 1]
    other = world.errors[2]
    assert isinstance(other, RankLost)
    assert (other.rank, other.phase) == (0, "agree")
    assert all(member.reasons(member.index) == [FinishReason.ERROR] for member in world.members)
