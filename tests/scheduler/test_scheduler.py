"""The scheduler's rules, one by one."""

from __future__ import annotations

import random
from typing import Any

import pytest

from drumline.core.errors import PromptTooLong, Refused, RequestError
from drumline.core.params import SamplingParams
from drumline.core.plan import RowResult, StepResult
from drumline.core.request import FinishReason, Verdict
from drumline.scheduler import Limits, SchedulerSettings, TokenFinish, check_fits

from .world import PROMPT_LOGPROBS, World, alone, make_request

STOP = 99


def settings_of(**changes: Any) -> SchedulerSettings:
    base: dict[str, Any] = {
        "max_model_len": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
    }
    return SchedulerSettings(**{**base, **changes})


def world_of(block_count: int = 64, skill: float = 0.0, seed: int = 0, **changes: Any) -> World:
    return World(settings_of(**changes), block_count=block_count, skill=skill, seed=seed)


def rows(world: World) -> list[tuple[int, int, int, int]]:
    """The last plan as (number, start, tokens, drafts)."""
    return [
        (row.number, row.start, len(row.tokens), len(row.drafts)) for row in world.plans[-1].rows
    ]


# ---- who may come in -----------------------------------------------------------------------


def test_what_can_never_run_is_refused_by_name() -> None:
    limits = Limits(max_model_len=16, block_count=3, block_size=4)
    with pytest.raises(PromptTooLong, match=r"prompt: 16 tokens .* max_model_len=16"):
        check_fits(make_request(0, [1] * 16, 1), limits)
    with pytest.raises(RequestError, match="max_tokens: 15 prompt tokens"):
        check_fits(make_request(0, [1] * 15, 2), limits)
    with pytest.raises(RequestError, match="need 4 KV blocks of 4 tokens; the whole cache has 3"):
        check_fits(make_request(0, [1] * 8, 5), limits)
    with pytest.raises(RequestError, match="no tokens"):
        check_fits(make_request(0, [], 1), limits)
    with pytest.raises(RequestError, match="max_tokens: 0"):
        check_fits(make_request(0, [1], 0), limits)
    check_fits(make_request(0, [1] * 8, 4), limits)


def test_a_full_queue_refuses_at_once_and_running_ones_do_not_count() -> None:
    world = world_of(max_waiting=2, max_num_seqs=1)
    world.add(make_request(0, [1], 4))
    world.step()
    world.add(make_request(1, [1], 4))
    world.add(make_request(2, [1], 4))
    assert world.scheduler.waiting_room == 0
    with pytest.raises(Refused, match="max_waiting=2"):
        world.add(make_request(3, [1], 4))
    world.run()
    assert sorted(world.told) == [0, 1, 2]


def test_settings_hold_their_relations() -> None:
    with pytest.raises(AssertionError):
        settings_of(enable_chunked_prefill=False, max_num_batched_tokens=63)
    assert settings_of(max_num_seqs=8, max_num_batched_tokens=3).seat_count == 3


# ---- batching ------------------------------------------------------------------------------


def test_decodes_come_first_and_prompts_fill_the_budget() -> None:
    world = world_of(max_num_batched_tokens=8)
    world.add(make_request(0, [1] * 5, 8))
    world.add(make_request(1, [2] * 20, 8))
    world.step()
    assert rows(world) == [(0, 0, 5, 0), (1, 0, 3, 0)]
    world.step()
    assert rows(world) == [(0, 5, 1, 0), (1, 3, 7, 0)]
    world.step()
    assert rows(world) == [(0, 6, 1, 0), (1, 10, 7, 0)]
    world.step()
    assert rows(world) == [(0, 7, 1, 0), (1, 17, 3, 0)]
    assert [row.samples for row in world.plans[-1].rows] == [True, True]


def test_without_chunks_a_prompt_runs_whole_or_waits() -> None:
    world = world_of(max_model_len=32, max_num_batched_tokens=32, enable_chunked_prefill=False)
    world.add(make_request(0, [1] * 20, 3))
    world.add(make_request(1, [2] * 13, 3))
    world.step()
    assert rows(world) == [(0, 0, 20, 0)]
    world.step()
    assert rows(world) == [(0, 20, 1, 0), (1, 0, 13, 0)]


def test_a_long_prompt_takes_at_most_the_threshold() -> None:
    world = world_of(long_prefill_token_threshold=4)
    world.add(make_request(0, [1] * 10, 2))
    world.add(make_request(1, [2] * 3, 2))
    world.step()
    assert rows(world) == [(0, 0, 4, 0), (1, 0, 3, 0)]
    world.step()
    assert rows(world) == [(1, 3, 1, 0), (0, 4, 4, 0)]


def test_nobody_passes_the_one_who_waits_before_him() -> None:
    world = world_of(block_count=6)
    world.add(make_request(0, [1] * 11, 5))
    world.add(make_request(1, [2] * 16, 5))  # has no room beside 0
    world.add(make_request(2, [3], 2))  # would have
    world.step()
    assert [row[0] for row in rows(world)] == [0]
    world.run()
    ends = [plan.step for plan in world.plans for row in plan.rows if row.number == 2]
    starts = [plan.step for plan in world.plans for row in plan.rows if row.number == 1]
    assert min(starts) <= min(ends)


def test_priority_orders_those_who_wait_lower_first() -> None:
    world = world_of(policy="priority", max_num_seqs=1)
    for number, priority in enumerate([5, 1, 3, 1]):
        world.add(make_request(number, [number], 1, priority=priority))
    world.run()
    assert [plan.rows[0].number for plan in world.plans] == [1, 3, 2, 0]


def test_fcfs_looks_at_no_priority() -> None:
    world = world_of(max_num_seqs=1)
    for number, priority in enumerate([5, 1, 3]):
        world.add(make_request(number, [number], 1, priority=priority))
    world.run()
    assert [plan.rows[0].number for plan in world.plans] == [0, 1, 2]


# ---- preemption ----------------------------------------------------------------------------


def test_the_last_in_the_order_is_preempted_and_comes_back_with_all_its_tokens() -> None:
    world = world_of(block_count=6, enable_prefix_caching=False)
    for number in range(2):
        world.add(make_request(number, [number + 1] * 7, 14))
    world.run()
    assert world.scheduler.preemption_count >= 1
    released = [number for plan in world.plans for number in plan.released]
    assert released[0] == 1, "the later one is the victim"
    again = [a for plan in world.plans for a in plan.admitted if a.request.number == 1]
    assert len(again) >= 2
    assert len(again[1].token_ids) > 7
    assert again[1].token_ids[:7] == (2,) * 7
    first_life = [plan for plan in world.plans if any(row.number == 0 for row in plan.rows)]
    assert all(a.request.number != 0 for plan in first_life[1:] for a in plan.admitted)
    for number in range(2):
        assert (
            tuple(world.told[number].tokens) == alone(make_request(number, [number + 1] * 7, 14))[0]
        )


def test_under_priority_the_victim_is_the_least_urgent_not_the_latest() -> None:
    world = world_of(block_count=6, policy="priority", enable_prefix_caching=False)
    world.add(make_request(0, [1] * 7, 14, priority=9))
    world.add(make_request(1, [2] * 7, 14, priority=0))
    world.run()
    assert world.scheduler.preemption_count >= 1
    again = [a.request.number for plan in world.plans for a in plan.admitted]
    assert again.count(1) == 1
    assert again.count(0) >= 2


def test_nobody_is_preempted_for_drafts() -> None:
    """Two requests fill the cache to the last slot: drafts give way, and nobody is thrown out."""
    for block_count in range(8, 12):
        plain = world_of(block_count=block_count)
        drafting = world_of(block_count=block_count, skill=1.0, num_speculative_tokens=3)
        for world in (plain, drafting):
            for number in range(2):
                world.add(make_request(number, [number + 1] * 4, 12))
            world.run()
        assert plain.scheduler.preemption_count == 0
        assert drafting.scheduler.preemption_count == 0
        assert drafting.worker.accepted > 0


def test_a_draft_gives_its_block_to_a_committed_token() -> None:
    """0 holds the last block for drafts alone when 1 needs it for a token that counts."""
    world = world_of(block_count=3, num_speculative_tokens=3)
    world.worker.script(0, [5, 6, STOP])
    world.add(make_request(0, [1] * 2, 10, stops=[STOP]))
    world.add(make_request(1, [2] * 3, 5))
    world.step()
    world.step()
    assert world.pool.available_count == 0
    world.step()
    assert rows(world) == [(0, 3, 1, 0), (1, 4, 1, 0)]
    world.run()
    assert world.scheduler.preemption_count == 0


# ---- prefix cache --------------------------------------------------------------------------


@pytest.mark.parametrize(("again", "hit"), [(False, 16), (True, 15)])
def test_case_34_a_prefix_is_found_again(again: bool, hit: int) -> None:
    """A drafter that needs taps loses one position of 16, n-gram and nobody lose none."""
    world = world_of(
        drafter_recomputes_one=again, drafter_keeps_state=again, num_speculative_tokens=3, skill=1.0
    )
    head = list(range(16))
    world.add(make_request(0, [*head, *range(40, 46)], 4))
    world.run()
    world.add(make_request(1, [*head, *range(50, 56)], 4))
    world.run()
    assert world.told[0].cached_token_count == 0
    assert world.told[1].cached_token_count == hit
    assert (world.pool.prefix_query_tokens, world.pool.prefix_hit_tokens) == (44, hit)
    assert world.worker.recomputed == int(again)
    assert world.told[0].speculation == world.told[1].speculation  # the hit costs no acceptance
    for number, first in enumerate((40, 50)):
        request = make_request(number, [*head, *range(first, first + 6)], 4)
        assert tuple(world.told[number].tokens) == alone(request)[0]


def test_a_prompt_that_is_cached_whole_still_computes_its_end() -> None:
    world = world_of()
    for number in range(2):
        world.add(make_request(number, list(range(16)), 4))
        world.run()
    assert world.told[1].cached_token_count == 12
    assert world.told[0].tokens == world.told[1].tokens


def test_output_is_found_again_by_a_longer_conversation() -> None:
    world = world_of()
    first = make_request(0, list(range(6)), 8)
    world.add(first)
    world.run()
    world.add(make_request(1, [*range(6), *world.told[0].tokens, 5], 4))
    world.run()
    assert world.told[1].cached_token_count == 12  # the 14th token was never computed


def test_prompt_logprobs_bypass_cache_reads_and_are_told_once_across_preemptions() -> None:
    world = world_of(block_count=6, max_num_batched_tokens=5)
    world.add(make_request(0, [1] * 7, 14))
    world.add(make_request(1, [1] * 7, 14, params=PROMPT_LOGPROBS))
    world.run()
    assert world.scheduler.preemption_count >= 1
    told = world.told[1]
    assert told.cached_token_count == 0
    assert [entry.token.logprob for entry in told.prompt_logprobs] == [
        -float(p) for p in range(1, 7)
    ]


def test_finding_its_own_blocks_after_a_preemption_is_no_hit() -> None:
    world = world_of(block_count=6)
    for number in range(2):
        world.add(make_request(number, [number + 1] * 7, 14))
    world.run()
    assert world.scheduler.preemption_count >= 1
    assert any(row.start > 0 for plan in world.plans for row in plan.rows if len(row.tokens) > 1)
    assert (world.pool.prefix_query_tokens, world.pool.prefix_hit_tokens) == (14, 0)
    assert world.told[1].cached_token_count == 0


# ---- drafts --------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize(("budget", "chunked"), [(7, True), (16, True), (64, False)])
def test_an_oracle_gives_k_plus_one_tokens_per_step(k: int, budget: int, chunked: bool) -> None:
    world = world_of(
        skill=1.0,
        num_speculative_tokens=k,
        max_num_batched_tokens=budget,
        enable_chunked_prefill=chunked,
    )
    request = make_request(0, [1, 2, 3, 4, 5, 6, 7, 8, 9], 50)
    world.add(request)
    world.run()
    assert tuple(world.told[0].tokens) == alone(request)[0]
    decodes = [plan for plan in world.plans if plan.rows[0].start >= 9]
    assert all(len(plan.rows[0].drafts) == k for plan in decodes[:-2])
    # The prefill brings one token; the last drafts are cut by the limit, one each.
    assert len(decodes) == -(-49 // (k + 1))


def test_a_liar_gives_one_token_per_step() -> None:
    world = world_of(skill=0.0, num_speculative_tokens=3)
    world.worker._random = random.Random(1)
    world.add(make_request(0, [1, 2, 3], 30))
    world.run()
    assert world.worker.accepted == 0
    assert world.worker.drafted > 0
    assert len(world.plans) == 30


def test_no_draft_stands_past_a_limit() -> None:
    """CASES 01 and 06: per row; near its limit a row goes on without drafts."""
    for drafter_range in (None, 12, 16):
        furthest = 0
        for prompt_count in range(4, 10):
            world = world_of(skill=1.0, num_speculative_tokens=5, drafter_range=drafter_range)
            request = make_request(0, [1] * prompt_count, 26 - prompt_count)
            world.add(request)
            world.run()
            assert tuple(world.told[0].tokens) == alone(request)[0]
            every = [row for plan in world.plans for row in plan.rows]
            furthest = max(furthest, *(row.start + row.width for row in every if row.drafts))
            if drafter_range:
                past = [row for row in every if row.start >= drafter_range]
                assert past
                assert not any(row.drafts for row in past)
        # The last draft stands one before the limit: the token after it must fit too.
        assert furthest == (drafter_range or request.length_max) - 1


def test_drafts_leave_half_of_what_is_left_to_prompts() -> None:
    world = world_of(skill=1.0, num_speculative_tokens=5, max_num_batched_tokens=8)
    world.add(make_request(0, [1] * 4, 30))
    world.step()
    world.add(make_request(1, [2] * 30, 4))
    world.step()
    assert rows(world) == [(0, 4, 1, 3), (1, 0, 4, 0)]
    world.run()


def test_drafts_live_one_executed_step() -> None:
    world = world_of(skill=1.0, num_speculative_tokens=3, max_num_batched_tokens=4)
    for number in range(3):
        world.add(make_request(number, [number] * 6, 12))
    for _ in range(200):
        before = {row.number for row in world.plans[-1].rows} if world.plans else set()
        world.step()
        for row in world.plans[-1].rows:
            assert not row.drafts or row.number in before
        if not world.scheduler.has_work:
            break
    world.check_empty()


@pytest.mark.parametrize("block", range(4))
def test_case_36_every_id_handed_to_a_model_is_one(block: int) -> None:
    """T=4, K=3, three requests so that one always waits; the worker asserts 0 <= id < 128."""
    for seed in range(block * 50, block * 50 + 50):
        rng = random.Random(seed)
        world = world_of(
            skill=rng.choice([0.3, 0.8]),
            seed=seed,
            num_speculative_tokens=3,
            max_num_batched_tokens=4,
            max_num_seqs=3,
            block_count=rng.choice([16, 24]),
        )
        requests = [
            make_request(n, [rng.randrange(128) for _ in range(rng.randint(1, 9))], 12)
            for n in range(3)
        ]
        for request in rng.sample(requests, 3):
            world.add(request)
            for _ in range(rng.randint(0, 3)):
                world.step()
        world.run()
        for request in requests:
            assert tuple(world.told[request.number].tokens) == alone(request)[0]


# ---- ends ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "max_tokens", "kept", "reason"),
    [
        ([10, 11, STOP, 20, 21, 22], 5, 3, FinishReason.STOP),
        ([10, 11, STOP, 20, 21, 22], 3, 3, FinishReason.STOP),
        ([10, 11, STOP, 20, 21, 22], 2, 2, FinishReason.LENGTH),
        ([STOP, 11, 12, 20, 21, 22], 5, 1, FinishReason.STOP),
        ([STOP, 11, 12, 20, 21, 22], 1, 1, FinishReason.STOP),
        ([10, 11, 12, 20, 21, STOP], 6, 6, FinishReason.STOP),
        ([10, 11, 12, 20, 21, STOP], 5, 5, FinishReason.LENGTH),
        ([10, 11, 12, 20, 21, 22], 4, 4, FinishReason.LENGTH),
    ],
)
@pytest.mark.parametrize("k", [0, 1, 5])
def test_case_43_a_stop_inside_an_accepted_run(
    run: list[int], max_tokens: int, kept: int, reason: FinishReason, k: int
) -> None:
    world = world_of(skill=1.0, num_speculative_tokens=k)
    world.worker.script(0, run)
    world.add(make_request(0, [1, 2, 3, 4, 5], max_tokens, stops=[STOP]))
    world.run()
    told = world.told[0]
    assert told.tokens == run[:kept]
    assert len(told.logprobs) == kept
    assert told.reasons == [reason]
    assert told.stop_reason is None  # an EOS, not one of the user's
    world.check_empty()
    assert world.pool.cached_count <= (5 + kept) // 4, "KV is kept past the end"


def test_the_verdict_on_more_tokens_than_there_is_room_for() -> None:
    request = make_request(0, [1], 5, stops=[STOP])
    judge = TokenFinish().judge
    assert judge(request, 3, (10, 11, STOP)) == Verdict(2, FinishReason.LENGTH)
    assert judge(request, 3, (10, STOP, 12)) == Verdict(2, FinishReason.STOP)
    assert judge(request, 0, (10, 11, 12)) == Verdict(3)


def test_a_stop_token_of_the_users_is_named() -> None:
    world = world_of()
    world.worker.script(0, [5, STOP, 6])
    params = SamplingParams(stop_token_ids=(STOP,))
    world.add(make_request(0, [1], 8, stops=[STOP, 7], params=params))
    world.run()
    assert world.told[0].stop_reason == STOP


def test_a_stop_before_min_tokens_does_not_end() -> None:
    world = world_of()
    world.worker.script(0, [STOP, STOP, STOP, STOP])
    world.add(make_request(0, [1], 8, stops=[STOP], params=SamplingParams(min_tokens=3)))
    world.run()
    assert world.told[0].tokens == [STOP] * 4


@pytest.mark.parametrize("k", [0, 3])
def test_length_is_reached_exactly(k: int) -> None:
    for prompt_count in (1, 50, 63):
        world = world_of(skill=1.0, num_speculative_tokens=k)
        world.add(make_request(0, [3] * prompt_count, 64 - prompt_count))
        world.run()
        assert len(world.told[0].tokens) == 64 - prompt_count
        assert world.told[0].reasons == [FinishReason.LENGTH]


# ---- cancellation (CASES 48) ---------------------------------------------------------------


def busy_world() -> World:
    """0 decodes with drafts, 1 is in the first of several chunks, 2 waits."""
    world = world_of(skill=1.0, num_speculative_tokens=3, max_num_batched_tokens=8, max_num_seqs=2)
    world.add(make_request(0, [1] * 4, 40))
    world.step()
    world.add(make_request(1, [2] * 24, 8))
    world.add(make_request(2, [3] * 4, 8))
    world.step()
    assert rows(world) == [(0, 4, 1, 3), (1, 0, 4, 0)]
    return world


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_cancel_in_each_state(victim: int, in_flight: bool) -> None:
    world = busy_world()
    if in_flight:
        world.step([victim])
    else:
        world.scheduler.cancel(victim)
        world.scheduler.cancel(victim)  # said twice, told once
        world.step()
    assert world.told[victim].reasons == [FinishReason.ABORT]
    assert all(row.number != victim for row in world.plans[-1].rows) or in_flight
    world.step()
    assert all(row.number != victim for row in world.plans[-1].rows)
    if victim != 2:
        released = [number for plan in world.plans for number in plan.released]
        assert released == [victim]
    world.scheduler.cancel(victim)  # finished: passes
    world.scheduler.cancel(77)  # unknown: passes
    world.run()
    for number in {0, 1, 2} - {victim}:
        assert world.told[number].reasons == [FinishReason.LENGTH]
    world.check_empty()


def test_cancel_while_preempted() -> None:
    world = world_of(block_count=6, enable_prefix_caching=False)
    for number in range(2):
        world.add(make_request(number, [number + 1] * 7, 14))
    while not world.scheduler.preemption_count:
        world.step()
    assert world.scheduler.waiting_count == 1
    world.scheduler.cancel(1)
    world.run()
    assert world.told[1].reasons == [FinishReason.ABORT]
    assert world.told[0].reasons == [FinishReason.LENGTH]
    world.check_empty()


def test_cancel_of_everything_needs_no_step() -> None:
    world = busy_world()
    for number in range(3):
        world.scheduler.cancel(number)
    plan_count = len(world.plans)
    world.step()
    assert len(world.plans) == plan_count
    assert [told.reasons for told in world.told.values()] == [[FinishReason.ABORT]] * 3
    world.check_empty()


def test_random_cancellations_100_mixes() -> None:
    for seed in range(100):
        rng = random.Random(seed)
        world = world_of(
            block_count=20, skill=0.7, seed=seed, num_speculative_tokens=3, max_num_batched_tokens=8
        )
        for number in range(5):
            world.add(make_request(number, [number] * rng.randint(1, 20), rng.randint(1, 20)))
        while world.scheduler.has_work:
            victim = rng.randrange(5)
            world.step([victim] if rng.random() < 0.2 else [])
        assert sorted(world.told) == [0, 1, 2, 3, 4]
        world.check_empty()


def test_fail_all_ends_everybody_with_error_once() -> None:
    world = busy_world()
    world.scheduler.cancel(2)
    world.scheduler.fail_all()
    reasons = [(event.number, event.finish_reason) for event in world.scheduler.take_events()]
    assert reasons == [
        (2, FinishReason.ABORT),
        (0, FinishReason.ERROR),
        (1, FinishReason.ERROR),
    ]
    world.check_empty()


# ---- the door to the workers ---------------------------------------------------------------


def test_a_proposal_that_is_not_executed_loses_nothing() -> None:
    world = world_of(skill=1.0, num_speculative_tokens=3)
    world.add(make_request(0, [1] * 4, 12))
    world.step()
    world.add(make_request(1, [2] * 4, 4))
    first = world.scheduler.propose()
    second = world.scheduler.propose()
    assert first == second
    assert [admission.request.number for admission in second.admitted] == [1]
    world.scheduler.cancel(1)
    third = world.scheduler.propose()
    assert [row.number for row in third.rows] == [0]
    assert third.released == ()  # no worker has ever seen it
    assert len(third.rows[0].drafts) == 3
    world.run()


def test_results_that_do_not_match_their_plan_are_our_mistake() -> None:
    def broken(**changes: Any) -> None:
        world = world_of(skill=1.0, num_speculative_tokens=2)
        world.add(make_request(0, [1] * 4, 12))
        world.step()
        plan = world.conductor.seal(world.scheduler.propose())
        (good,) = world.worker.execute(plan).rows
        row = RowResult(**{"number": 0, "tokens": good.tokens, "drafts": good.drafts, **changes})
        world.scheduler.commit(plan, StepResult(plan.step, (row,)), world.finish)

    broken()
    for changes in (
        {"number": 1},
        {"tokens": ()},
        {"tokens": (1, 2, 3, 4)},
        {"tokens": (127, 126, 125), "drafts": ()},
        {"drafts": (1, 1, 1)},
        {"logprobs": (None,)},
    ):
        with pytest.raises(AssertionError):
            broken(**changes)


def test_a_plan_commits_once_and_only_as_proposed() -> None:
    world = world_of()
    world.add(make_request(0, [1] * 4, 12))
    plan = world.conductor.seal(world.scheduler.propose())
    result = world.worker.execute(plan)
    world.scheduler.commit(plan, result, world.finish)
    with pytest.raises(AssertionError, match="not proposed"):
        world.scheduler.commit(plan, result, world.finish)


def test_many_requests_leave_nothing_behind() -> None:
    world = world_of(block_count=32)
    number = 0
    sizes = []
    for _ in range(4):
        for _ in range(1000):
            world.add(make_request(number, [number % 128, number // 128], 1 + number % 2))
            number += 1
            if world.scheduler.waiting_count > 20:
                while world.scheduler.has_work:
                    world.step()
                world.plans.clear()
                world.told.clear()
        world.run(step_limit=10**9)
        scheduler = world.scheduler
        held = vars(scheduler) | vars(world.pool)
        sizes.append(sum(len(value) for value in held.values() if hasattr(value, "__len__")))
        assert len(world.worker.requests) <= scheduler.settings.max_num_seqs
    world.check_empty()
    assert max(sizes) - min(sizes) <= 4, f"something grows: {sizes}"
