"""Drafts in the scheduler: limits row by row, lengths step by step, and what is reported."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from drumline.core.plan import Row, RowResult, SpeculationStats, StepPlan, StepResult
from drumline.lockstep.conductor import may_draft
from drumline.scheduler import (
    AdaptiveDraftLength,
    DraftLength,
    SchedulerSettings,
    TableDraftLength,
    dynamic_sd_lookup,
)

from .world import World, alone, costs_of, make_request

STOP = 99


def world_of(
    block_count: int = 96,
    skill: float = 1.0,
    seed: int = 0,
    draft_length: DraftLength | None = None,
    **changes: Any,
) -> World:
    settings: dict[str, Any] = {
        "max_model_len": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "num_speculative_tokens": 3,
    }
    return World(
        SchedulerSettings(**{**settings, **changes}),
        block_count=block_count,
        skill=skill,
        seed=seed,
        draft_length=draft_length,
    )


def rows_of(world: World, number: int) -> list[tuple[StepPlan, Row]]:
    return [(plan, row) for plan in world.plans for row in plan.rows if row.number == number]


def by_table(k: int, table: Sequence[Sequence[int]]) -> TableDraftLength:
    return TableDraftLength(k, dynamic_sd_lookup(table, k))


def check_tokens(world: World, *requests: Any) -> None:
    for request in requests:
        assert tuple(world.told[request.number].tokens) == alone(request)[0]


# ---- near the limits (DESIGN 1 A, CASES 01, 03, 06) ------------------------------------------


@pytest.mark.parametrize("k", [1, 3, 5, 8, 16])
@pytest.mark.parametrize("drafter_range", [None, 32, 30, 27])
def test_the_rule_per_row_at_every_length_near_the_limit(k: int, drafter_range: int | None) -> None:
    """k = min(K, L - n - 1, max_tokens left - 1, range - n - 1), and an oracle takes all of it."""
    length = 32
    for prompt_count in range(length - 9, length):
        for max_tokens in range(1, length - prompt_count + 1):
            world = world_of(
                max_model_len=length, num_speculative_tokens=k, drafter_range=drafter_range
            )
            request = make_request(0, [5] * prompt_count, max_tokens)
            world.add(request)
            world.run()
            check_tokens(world, request)
            drafted = 0
            for _, row in rows_of(world, 0)[1:]:
                n = row.start + 1
                left = max_tokens - (n - prompt_count)
                room = k if drafter_range is None else drafter_range - n - 1
                assert len(row.drafts) == max(0, min(k, length - n - 1, left - 1, room))
                drafted += len(row.drafts)
            stats = world.told[0].speculation
            assert stats is not None
            assert stats.drafted == stats.accepted == drafted


@pytest.mark.parametrize("k", [1, 3, 5, 8])
@pytest.mark.parametrize("budget", [1, 2, 4, 6])
def test_the_token_budget_and_the_blocks_limit_drafts_and_nothing_else(k: int, budget: int) -> None:
    for spare in (0, 1, 2):
        world = world_of(
            block_count=2 * 6 + spare,
            max_num_batched_tokens=budget,
            num_speculative_tokens=k,
            max_num_seqs=2,
            enable_prefix_caching=False,
        )
        requests = [make_request(number, [number + 1] * 6, 18) for number in range(2)]
        for request in requests:
            world.add(request)
        world.run()
        check_tokens(world, *requests)
        assert world.scheduler.preemption_count == 0
        for plan in world.plans:
            decoding = sum(row.samples for row in plan.rows)
            assert sum(len(row.drafts) for row in plan.rows) <= max(0, budget - decoding)


def test_case_01_one_past_the_drafters_range_costs_its_neighbour_nothing() -> None:
    world = world_of(drafter_range=32)
    x, y = make_request(0, [1] * 20, 30), make_request(1, [2] * 4, 20)
    world.add(x)
    world.add(y)
    world.run()
    check_tokens(world, x, y)
    stats = world.told[1].speculation
    assert stats is not None
    assert stats.drafted == stats.accepted > 0
    assert all(len(row.drafts) == 3 for _, row in rows_of(world, 1)[1:-1])
    past = [row for _, row in rows_of(world, 0) if row.start >= 32]
    assert len(past) >= 15
    assert not any(row.drafts for row in past), "one target token per step"
    drafted = sum(len(row.drafts) for _, row in rows_of(world, 0) if row.start < 32)
    assert world.told[0].speculation == SpeculationStats(
        drafts=sum(bool(row.drafts) for _, row in rows_of(world, 0)),
        drafted=drafted,
        accepted=drafted,
        accepted_per_position=tuple(
            sum(len(row.drafts) > position for _, row in rows_of(world, 0)) for position in range(3)
        ),
    )


def test_case_03_no_slot_is_verified_past_the_limit() -> None:
    world = world_of(drafter_range=32, num_speculative_tokens=2)
    request = make_request(0, [1] * 26, 22)
    world.add(request)
    world.run()
    check_tokens(world, request)
    for plan, row in rows_of(world, 0):
        if row.start >= 32:
            assert row.width == 1
            assert plan.draft_k == 0, "on one rank nobody drafts for nobody"


def test_case_06_a_full_draft_context_is_plain_decoding() -> None:
    for drafter_range in (None, 16):
        world = world_of(max_model_len=32, num_speculative_tokens=16, drafter_range=drafter_range)
        request = make_request(0, [1, 2, 3] * 3, 23)
        world.add(request)
        world.run()
        check_tokens(world, request)
        for _, row in rows_of(world, 0)[1:]:
            assert len(row.drafts) <= (drafter_range or 32) - (row.start + 1) - 1 or not row.drafts
        assert max(len(row.drafts) for _, row in rows_of(world, 0)) >= (5 if drafter_range else 16)


# ---- a length per request --------------------------------------------------------------------


def test_each_request_has_its_own_length_and_limits_no_other() -> None:
    world = world_of(max_num_seqs=5)
    asked = [0, 1, 2, None, 9]
    requests = [make_request(n, [n + 1] * 4, 24, k=k) for n, k in enumerate(asked)]
    for request in requests:
        world.add(request)
    world.run()
    check_tokens(world, *requests)
    for number, k in enumerate([0, 1, 2, 3, 3]):
        middle = [len(row.drafts) for _, row in rows_of(world, number)[1:-1]]
        assert set(middle) == {k}
        stats = world.told[number].speculation
        assert stats is not None
        assert len(stats.accepted_per_position) == 3
        assert [count > 0 for count in stats.accepted_per_position] == [p < k for p in range(3)]


def test_requests_that_want_no_drafts_cost_no_passes() -> None:
    world = world_of()
    world.add(make_request(0, [1] * 4, 12, k=0))
    world.run()
    assert {plan.draft_k for plan in world.plans} == {0}
    assert world.told[0].speculation == SpeculationStats(accepted_per_position=(0, 0, 0))
    assert world.told[0].speculation.mean_acceptance_length == 1.0


def test_a_drafter_with_state_has_a_slot_for_each_new_token_even_where_it_may_not_draft() -> None:
    for keeps in (False, True):
        world = world_of(drafter_keeps_state=keeps)
        world.add(make_request(0, [1] * 4, 12, k=0))
        world.run()
        slots = [
            len(row.block_ids) * 4 > row.start + row.width
            for _, row in rows_of(world, 0)
            if row.start + row.width + 1 < 16
        ]
        assert all(slots) == keeps


# ---- the step's length -----------------------------------------------------------------------


def test_a_request_drafts_as_the_step_says_and_the_histogram_can_be_made_of_it() -> None:
    world = world_of(draft_length=by_table(3, [[1, 1, 3], [2, 2, 1], [3, 4, 0]]))
    requests = [make_request(number, [number + 1] * 4, 20 + 4 * number) for number in range(3)]
    for request in requests:
        world.add(request)
    world.run()
    check_tokens(world, *requests)
    for plan, following in pairwise(world.plans):
        decoding = sum(row.samples and len(row.tokens) == 1 for row in plan.rows)
        if decoding:
            drafting = any(may_draft(row) for row in plan.rows)
            assert plan.draft_k == ({1: 3, 2: 1, 3: 0}[decoding] if drafting else 0)
        assert following.verify_width == 1 + plan.draft_k
        assert all(len(row.drafts) <= plan.draft_k for row in following.rows)


def test_case_10_a_request_that_began_at_zero_drafts_like_the_others_later() -> None:
    world = world_of(
        max_num_seqs=6,
        max_num_batched_tokens=64,
        draft_length=by_table(3, [[1, 2, 3], [3, 4, 1], [5, 6, 0]]),
    )
    first = make_request(0, [1] * 4, 56)
    world.add(first)
    for _ in range(3):
        world.step()
    crowd = [make_request(number, [number + 1] * 4, 14) for number in range(1, 5)]
    for request in crowd:
        world.add(request)
    for _ in range(3):
        world.step()
    assert world.plans[-1].draft_k == 0
    late = make_request(5, [9] * 6, 40)
    world.add(late)  # prefilled while nobody drafts
    world.step()
    assert world.plans[-1].draft_k == 0
    world.run()
    check_tokens(world, first, late, *crowd)
    pairs = [plan for plan in world.plans if {row.number for row in plan.rows} <= {0, 5}]
    tail = [row for plan, row in rows_of(world, 5) if plan in pairs][1:-1]
    assert len(tail) >= 3
    assert [len(row.drafts) for row in tail] == [3] * len(tail)
    stats = world.told[5].speculation
    assert stats is not None
    assert stats.accepted == stats.drafted


def test_case_11_the_length_changes_when_the_decoding_requests_do() -> None:
    def forwarded(length: DraftLength | None, k: int) -> tuple[int, World]:
        world = world_of(max_num_batched_tokens=8, num_speculative_tokens=k, draft_length=length)
        requests = [make_request(number, [number + 1] * 20, 40) for number in range(4)]
        for request in requests:
            world.add(request)
            for _ in range(3):
                world.step()
        world.run()
        check_tokens(world, *requests)
        return sum(row.width for plan in world.plans for row in plan.rows), world

    tokens, world = forwarded(by_table(2, [[1, 2, 2], [3, 4, 0]]), 2)
    decoding = [
        (plan, sum(row.samples and row.start >= 20 for row in plan.rows)) for plan in world.plans
    ]
    seen = [(plan.draft_k, count > 2) for plan, count in decoding if count]
    changes = sum(a[0] != b[0] for a, b in pairwise(seen))
    crossings = sum(a[1] != b[1] for a, b in pairwise(seen))
    assert crossings >= 1
    assert changes <= crossings + 1  # the last step of all drafts for nobody
    best = min(forwarded(None, 0)[0], forwarded(None, 2)[0])
    assert tokens <= 1.1 * best


@pytest.mark.parametrize("skill", [0.0, 0.5, 1.0])
def test_adaptive_changes_the_number_of_steps_and_no_token(skill: float) -> None:
    for seed in range(6):
        rng = random.Random(seed)
        k = rng.choice([1, 3, 5, 8])
        length = AdaptiveDraftLength(k, costs_of(4, k))
        world = world_of(
            skill=skill,
            seed=seed,
            num_speculative_tokens=k,
            draft_length=length,
            block_count=rng.choice([16, 24, 96]),
            max_num_batched_tokens=rng.choice([5, 16, 64]),
        )
        requests = [
            make_request(n, [rng.randrange(128) for _ in range(rng.randint(1, 12))], 40)
            for n in range(6)
        ]
        for request in requests:
            world.add(request)
        world.run()
        check_tokens(world, *requests)
        assert not length.acceptance._each, "something is kept of requests that ended"


def test_adaptive_drafts_much_for_an_oracle_and_little_for_a_liar() -> None:
    def mean_k(skill: float) -> float:
        world = world_of(
            skill=skill,
            block_count=2000,
            max_model_len=1024,
            num_speculative_tokens=5,
            draft_length=AdaptiveDraftLength(5, costs_of(4, 5)),
        )
        for number in range(2):
            world.add(make_request(number, [number + 1] * 3, 240))
        world.run()
        lengths = [plan.draft_k for plan in world.plans[10:-5]]
        return sum(lengths) / len(lengths)

    assert mean_k(1.0) >= 4.5
    assert mean_k(0.0) <= 0.5


def test_prompts_in_pieces_do_not_vote() -> None:
    world = world_of(max_num_batched_tokens=8, draft_length=by_table(3, [[1, 1, 3], [2, 4, 0]]))
    world.add(make_request(0, [1] * 4, 40))
    world.step()
    world.add(make_request(1, [2] * 30, 4))
    for _ in range(4):
        world.step()
        assert [row.samples for row in world.plans[-1].rows] == [True, False]
        assert world.plans[-1].draft_k == 3
    world.run()


@pytest.mark.parametrize(
    ("free", "least", "most"), [(False, 0.0, 0.4), (True, 2.8, 3.0)], ids=["drafter", "lookup"]
)
def test_a_drafter_that_finds_nothing_is_asked_less(free: bool, least: float, most: float) -> None:
    """What was asked for and not proposed counts: a step was planned for it. Not of a lookup,
    where asking costs nothing: it finds something later, and is asked for as much as pays then."""
    world = world_of(
        max_model_len=512,
        block_count=400,
        draft_length=AdaptiveDraftLength(3, costs_of(4, 3), only_proposed=free),
    )
    execute = world.worker.execute

    def silent(plan: StepPlan) -> StepResult:
        result = execute(plan)
        rows = (RowResult(r.number, r.tokens, r.logprobs, r.prompt_logprobs) for r in result.rows)
        return StepResult(result.step, tuple(rows))

    world.worker.execute = silent  # type: ignore[method-assign]
    world.add(make_request(0, [1], 200))
    world.run()
    lengths = [plan.draft_k for plan in world.plans[20:-1]]
    assert least * len(lengths) <= sum(lengths) <= most * len(lengths)


def test_a_lookups_step_says_what_a_length_costs_if_it_has_the_drafts() -> None:
    length = AdaptiveDraftLength(3, costs_of(4, 3), only_proposed=True)
    scheduler = world_of(draft_length=length).scheduler
    bare = Row(0, 9, (1,), (0,), True)
    few = Row(0, 9, (1,), (0, 1, 2), True, drafts=(5,))
    most = Row(0, 9, (1,), (0, 1, 2), True, drafts=(5, 6))
    found = Row(0, 9, (1,), (0, 1, 2), True, drafts=(5, 6, 7))
    for row, told in ((bare, False), (few, False), (most, True), (found, True)):
        before = length.costs.micros(1)
        scheduler.note_seconds(StepPlan(0, 0, (row,), draft_k=3, verify_width=4), 9.0)
        assert (length.costs.micros(1)[3] > before[3]) is told


def test_only_a_steady_step_says_what_a_length_costs() -> None:
    length = AdaptiveDraftLength(3, costs_of(4, 3))
    scheduler = world_of(draft_length=length).scheduler
    before = length.costs.micros(1)
    decode = Row(0, 9, (1,), (0,), True)
    prefill = Row(1, 0, (1, 2), (0,), True)
    for rows, draft_k, width in (((decode,), 3, 1), ((decode,), 0, 4), ((decode, prefill), 3, 4)):
        scheduler.note_seconds(StepPlan(0, 0, rows, draft_k=draft_k, verify_width=width), 9.0)
        assert length.costs.micros(1) == before
    scheduler.note_seconds(StepPlan(0, 0, (decode,), draft_k=3, verify_width=4), 9.0)
    assert length.costs.micros(1)[3] > before[3]


# ---- what is reported ------------------------------------------------------------------------


class Scripted(World):
    """Hands over drafts of which exactly the first few of a list of counts are right."""

    def __init__(self, counts: Sequence[int], **changes: Any) -> None:
        settings = SchedulerSettings(
            max_model_len=64, max_num_seqs=2, max_num_batched_tokens=32, **changes
        )
        super().__init__(settings, block_count=64, skill=1.0)
        left = list(counts)
        execute = self.worker.execute

        def spoil(row: RowResult) -> RowResult:
            if not row.drafts:
                return row
            right = left.pop(0) if left else len(row.drafts)
            drafts = row.drafts[:right] + tuple((d + 1) % 128 for d in row.drafts[right:])
            return RowResult(row.number, row.tokens, row.logprobs, row.prompt_logprobs, drafts)

        def scripted(plan: StepPlan) -> StepResult:
            result = execute(plan)
            return StepResult(result.step, tuple(map(spoil, result.rows)))

        self.worker.execute = scripted  # type: ignore[method-assign]


def test_each_number_of_the_stats() -> None:
    world = Scripted([3, 0, 1, 2], num_speculative_tokens=3)
    request = make_request(0, [1, 2], 11)
    world.add(request)
    world.run()
    check_tokens(world, request)
    # 1 token by the prefill, then 4, 1, 2, 3: that is 11.
    assert len(world.plans) == 5
    stats = SpeculationStats(drafts=4, drafted=11, accepted=6, accepted_per_position=(3, 2, 1))
    assert [len(row.drafts) for _, row in rows_of(world, 0)] == [0, 3, 3, 3, 2]
    assert world.told[0].speculation == stats
    assert world.scheduler.speculation == stats
    assert stats.mean_acceptance_length == 1 + 6 / 4


def test_case_43_accepted_counts_what_is_kept() -> None:
    world = world_of(num_speculative_tokens=5)
    world.worker.script(0, [10, 11, STOP, 20, 21, 22, 23, 24, 25])
    world.add(make_request(0, [1, 2, 3], 9, stops=[STOP]))
    world.run()
    assert world.told[0].tokens == [10, 11, STOP]
    assert world.told[0].speculation == SpeculationStats(
        drafts=1, drafted=5, accepted=2, accepted_per_position=(1, 1, 0, 0, 0)
    )


def test_the_sum_of_all_requests_is_the_sum() -> None:
    world = world_of(skill=0.6, block_count=20, max_num_batched_tokens=9)
    for number in range(7):
        world.add(make_request(number, [number + 1] * 5, 16, k=[None, 1, 0][number % 3]))
    world.run()
    each = [told.speculation for told in world.told.values()]
    total = world.scheduler.speculation
    assert None not in each
    found = [stats for stats in each if stats is not None]
    assert total.drafts == sum(stats.drafts for stats in found)
    assert total.drafted == sum(stats.drafted for stats in found) == world.worker.drafted
    assert 0 < total.accepted == sum(stats.accepted for stats in found) == world.worker.accepted
    for position in range(3):
        column = [stats.accepted_per_position[position] for stats in found]
        assert total.accepted_per_position[position] == sum(column)


def test_without_speculation_nothing_is_reported() -> None:
    world = world_of(num_speculative_tokens=0)
    world.add(make_request(0, [1], 3))
    world.run()
    assert world.told[0].speculation is None
    assert world.scheduler.speculation == SpeculationStats()


def test_more_drafts_than_the_row_may_have_are_our_mistake() -> None:
    world = world_of()
    world.add(make_request(0, [1] * 4, 12, k=1))
    plan = world.conductor.seal(world.scheduler.propose())
    (good,) = world.worker.execute(plan).rows
    bad = RowResult(0, good.tokens, drafts=(1, 2))
    with pytest.raises(AssertionError, match="more drafts"):
        world.scheduler.commit(plan, StepResult(plan.step, (bad,)), world.finish)


def test_slots_ahead_go_back_when_a_more_urgent_request_takes_the_row_s_share() -> None:
    world = world_of(policy="priority", max_num_batched_tokens=8, block_count=32)
    slow, urgent = make_request(0, [1] * 6, 8), make_request(1, [2] * 20, 4, priority=-1)
    world.add(slow)
    assert world.scheduler.propose().rows[0].samples  # not executed, but slots ahead are held
    world.add(urgent)
    world.scheduler.propose()
    world.step()  # asserts that no slot is held that nobody will fill
    assert [(row.number, row.width) for row in world.plans[-1].rows] == [(1, 7), (0, 1)]
    world.run()
    check_tokens(world, slow, urgent)


# ---- the prefix cache ------------------------------------------------------------------------


@pytest.mark.parametrize("tail", [0, 1, 3, 4])
@pytest.mark.parametrize("budget", [1, 2, 5, 64])
def test_case_34_one_position_is_computed_again_by_rows_that_share_its_block(
    tail: int, budget: int
) -> None:
    """Both sharers are in one step; the world's memory says that the bits stay."""
    world = world_of(
        drafter_recomputes_one=True, drafter_keeps_state=True, max_num_batched_tokens=budget
    )
    head = list(range(16))
    world.add(make_request(0, [*head, 70], 3))
    world.run()
    requests = [make_request(n, [*head, n, *[n] * tail], 8) for n in (1, 2)]
    for request in requests:
        world.add(request)
    world.run()
    check_tokens(world, *requests)
    for number in (1, 2):
        assert world.told[number].cached_token_count == 15
        assert rows_of(world, number)[0][1].start == 15
    assert world.worker.recomputed == 2
    world.check_empty()
