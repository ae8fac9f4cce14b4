"""Failures that users of other engines met, between real processes over gloo.

Each engine starts once and serves several tests. Every test runs the standard checks: tokens are
those of one rank without speculation, collective logs are equal on all members of each group, no
block stays held. `test_case_faults.py` switches each reported decision on; docs/cases.md is the
table of both.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from drumline.config import EngineConfig
from drumline.core.errors import ConfigError
from drumline.core.request import FinishReason
from drumline.engine.core import EngineCore
from drumline.engine.fleet_core import FleetCore
from drumline.engine.messages import Trial
from parallel_engine.cases import (
    BEYOND_RANGE,
    BUCKETS,
    DRAINING,
    FILLS_BLOCKS,
    GLOO,
    NOT_READY,
    ONE_AND_FOUR,
    ONE_AND_THREE,
    PREFILL_BESIDE,
    PRUNED,
    SKIPS_NEAR_LIMIT,
    THREE_AND_FOUR,
    UNEVEN,
    Lasting,
    Placed,
    bucket_misses,
    draft_passes,
    last_step,
    method,
    mtp,
    prompt,
    random_arrivals,
    same,
    sizes_since,
    tokens,
)
from parallel_engine.fleet import Job, check_logs, config, logs, placed, run, sizes

Truth = Callable[[Placed], list[tuple[int, ...]]]


# ---------------------------------------------------------------- near a limit


@pytest.mark.parametrize("dp", [1, 2])
def test_case_01_a_row_beyond_the_drafters_range_goes_on_alone(
    lasting: Lasting, case_model: Path, truth: Truth, dp: int
) -> None:
    asked = same(case_model, max_model_len=32)
    jobs = BEYOND_RANGE if dp == 2 else BEYOND_RANGE[:2]
    if dp == 2:
        core: FleetCore | EngineCore = lasting(speculation=asked)
        outputs = placed(lasting(speculation=asked), jobs)
        check_logs(lasting(speculation=asked))
    else:
        core = EngineCore.load(config(case_model, speculative_config=json.dumps(asked)))
        outputs = run(core, [job for _, job in jobs])
    assert tokens(outputs) == truth(jobs)
    for within in outputs[1:]:
        assert within.speculation is not None
        assert within.speculation.accepted == within.speculation.drafted > 0
    beyond = outputs[0].speculation
    assert beyond is not None
    # Drafts up to position 31, each accepted; the 18 tokens after it come one a step.
    assert beyond.accepted == beyond.drafted <= 32 - 20
    rows = {name: value for name, value, _ in core.facts.startup_rows}
    assert rows["max_model_len"] == "64"
    assert "32" in "".join(value for name, value in rows.items() if name.startswith("speculative"))


@pytest.mark.parametrize("name", ["mtp", "dflash", "ngram"])
def test_case_02_who_skips_near_the_limit_publishes_no_drafts(
    lasting: Lasting, case_model: Path, name: str, truth: Truth
) -> None:
    """Near its limit a row drafts as it does alone: what was skipped is verified by nobody."""
    asked = method(name, case_model)
    core = lasting(speculation=asked)
    jobs = SKIPS_NEAR_LIMIT
    outputs = placed(core, jobs)
    assert tokens(outputs) == truth(jobs)
    assert outputs[0].finish_reason is FinishReason.LENGTH
    alone = EngineCore.load(config(case_model, speculative_config=json.dumps(asked)))
    assert [out.speculation for out in outputs] == [
        out.speculation for _, job in jobs for out in run(alone, [job])
    ]
    if name == "mtp":  # nothing is right: 4 × 3, 2 and 1 drafts, and a last step without any
        near = outputs[0].speculation
        assert near is not None
        assert (near.drafts, near.drafted, near.accepted) == (6, 15, 0)
    passes = set(draft_passes(core).values())
    assert passes == ({1, 3} if name == "mtp" else {0})  # those without experts share none
    check_logs(core)


def test_stages_are_refused_by_name(case_model: Path) -> None:
    """Legs of cases 02, 27, 28 and 46."""
    for more in ({}, {"speculative_config": json.dumps(mtp())}):
        with pytest.raises(ConfigError, match="pipeline_parallel_size=2: not supported"):
            FleetCore.load(
                config(case_model, data_parallel_size=2, pipeline_parallel_size=2, **more)
            )


@pytest.mark.parametrize("name", ["async_scheduling", "kv_transfer_config"])
def test_what_other_engines_overlap_is_refused_by_name(case_model: Path, name: str) -> None:
    """Legs of cases 03, 13, 30, 31 and 36."""
    with pytest.raises(ConfigError, match=name):
        EngineConfig.from_kwargs(model=str(case_model), **{name: True})


@pytest.mark.parametrize(("dp", "k"), [(2, 1), (2, 3), (2, 5), (4, 3)])
def test_case_04_every_end_near_the_limit(lasting: Lasting, dp: int, k: int, truth: Truth) -> None:
    core = lasting(data_parallel_size=dp, speculation=mtp(k))
    for end in range(58, 65):
        both = dp - 1 if end % 2 else 0  # the edge together with another replica, too
        jobs = [
            (0, Job(prompt(50), end - 50)),
            (1, Job(prompt(10), 12)),
            (both, Job(prompt(52), 12)),
            (dp - 1, Job(prompt(30), 2)),  # in prefill while another is at the edge
        ]
        outputs = placed(core, jobs)
        assert tokens(outputs) == truth(jobs)
        assert len(outputs[0].token_ids) == end - 50
        assert {out.finish_reason for out in outputs} == {FinishReason.LENGTH}
    assert len(set(draft_passes(core).values())) <= 2
    check_logs(core)


# ---------------------------------------------------------------- draft length


def test_case_07_a_table_leaves_no_bucket(lasting: Lasting, truth: Truth) -> None:
    """dp=2 tp=2: with a table, steps fall into the same sizes as with a static length, and it
    forwards no more than the longer one."""
    trial = Trial(gloo=True, buckets=BUCKETS)
    table = [[1, 2, 3], [3, 4, 0]]
    seen, forwarded = [], []
    for speculation in (mtp(num_speculative_tokens_per_batch_size=table), mtp()):
        core = lasting(trial, tensor_parallel_size=2, speculation=speculation)
        before = last_step(core)
        assert tokens(placed(core, ONE_AND_THREE)) == truth(ONE_AND_THREE)
        found = [size for places in sizes_since(core, before) for size in places.values()]
        seen.append(set(found))
        forwarded.append(sum(found))
        assert not bucket_misses(core)
        check_logs(core)
    assert seen[0] <= seen[1]
    assert forwarded[0] <= forwarded[1]


def test_case_09_the_lesser_wish_counts_while_its_replica_works(
    lasting: Lasting, truth: Truth
) -> None:
    core = lasting(speculation=mtp(num_speculative_tokens_per_batch_size=[[1, 2, 3], [3, 4, 1]]))
    outputs = placed(core, ONE_AND_FOUR)
    assert tokens(outputs) == truth(ONE_AND_FOUR)
    passes = list(draft_passes(core).values())[2:]  # after prefill, which has no wish
    busy = next(index for index, count in enumerate(passes) if count == 3)
    assert busy >= 4
    assert set(passes[:busy]) == {1}
    assert set(passes[busy:-2]) == {3}  # the last ones may have nothing left to draft
    check_logs(core)


def test_case_09_rows_that_keep_fewer_drafts_share_a_size(lasting: Lasting, truth: Truth) -> None:
    """One draft on one side, three on the other: both verify in passes of 1 + 3 tokens."""
    core = lasting(speculation=mtp())
    before = last_step(core)
    assert tokens(placed(core, PRUNED)) == truth(PRUNED)
    assert {"target 0": 4, "draft 0": 5, "draft 1": 1, "draft 2": 1} in sizes_since(core, before)
    assert [sizes(core, rank) for rank in (0, 1)] == [sizes(core)] * 2
    check_logs(core)


def test_case_12_random_arrivals_under_a_table(lasting: Lasting, truth: Truth) -> None:
    core = lasting(speculation=mtp(num_speculative_tokens_per_batch_size=[[1, 2, 3], [3, 4, 1]]))
    draw = random.Random(12)
    for _ in range(6):
        jobs = random_arrivals(draw)
        assert tokens(placed(core, jobs)) == truth(jobs)
    assert {1, 3} <= core.draft_lengths.keys()
    check_logs(core)


# ---------------------------------------------------------------- idle beside busy


def test_case_13_work_that_cannot_run_yet_makes_whole_steps(lasting: Lasting, truth: Truth) -> None:
    """Rank 1 has a request that is not ready for eight steps: it makes every pass meanwhile, and
    the request starts at once when it is."""
    core = lasting(Trial(gloo=True, held=((1, 8),)), speculation=mtp())
    assert tokens(placed(core, NOT_READY)) == truth(NOT_READY)
    core.pause()
    both = logs(core, "ep", (0, 1))
    assert both[0] == both[1]
    core.resume()
    assert list(draft_passes(core).values())[1:8] == [3] * 7  # while it is held
    check_logs(core)


def test_case_16_one_request_alone_and_then_another(lasting: Lasting, truth: Truth) -> None:
    core = lasting(data_parallel_size=4, speculation=mtp())
    for job in [(2, Job(prompt(12), 5)), (0, Job(prompt(12, 1), 5))]:
        assert tokens(placed(core, [job])) == truth([job])
    for log in logs(core, "ep", tuple(core.mesh.ranks)):
        warm = [entry for entry in log if entry[1] == "warmup"]
        assert warm, "no group is used for the first time by a request"
    check_logs(core)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_case_18_idle_ranks_make_all_passes(lasting: Lasting, truth: Truth, k: int) -> None:
    """Rank 1 has nothing, joins, and leaves: one target pass and K draft passes in each step, on
    both; one draft pass where nobody can bring a draft."""
    core = lasting(Trial(gloo=True, held=((1, 10),)), speculation=mtp(k))
    jobs = [(0, Job(prompt(6), 30)), (1, Job(prompt(5, 1), 10))]
    assert tokens(placed(core, jobs)) == truth(jobs)
    core.pause()
    busy, idle = (draft_passes(core, rank) for rank in (0, 1))
    core.resume()
    assert busy == idle
    assert len(busy) > 20
    assert set(list(busy.values())[1:-2]) == {k}
    assert set(busy.values()) <= {1, k}
    check_logs(core)


# ---------------------------------------------------------------- sizes and modes


def test_case_19_each_pass_has_its_own_size(lasting: Lasting, truth: Truth) -> None:
    """Zero to four requests on each of two replicas; decoding alone, a later draft pass is as wide
    as the busier replica has rows."""
    core = lasting(speculation=mtp())
    for left in range(5):
        for right in range(5):
            jobs = [(0, Job(prompt(3, i), 4)) for i in range(left)]
            jobs += [(1, Job(prompt(3, 7 + i), 4)) for i in range(right)]
            if not jobs:
                continue
            before = last_step(core)
            assert tokens(placed(core, jobs)) == truth(jobs)
            found = sizes_since(core, before)
            later = {places["draft 1"] for places in found if "draft 1" in places}
            assert later <= set(range(1, max(left, right) + 1))
            assert max(left, right) in later
    before = last_step(core)
    assert tokens(placed(core, THREE_AND_FOUR)) == truth(THREE_AND_FOUR)
    # 12 and 16 tokens in the target, the new one of each row more in the first draft pass, then a
    # token of each row.
    whole = {"target 0": 16, "draft 0": 20, "draft 1": 4, "draft 2": 4}
    assert whole in sizes_since(core, before)
    check_logs(core)


@pytest.mark.parametrize("jobs", [DRAINING, [(1 - replica, job) for replica, job in DRAINING]])
def test_case_21_the_last_rows_drain_in_one_mode(
    lasting: Lasting, truth: Truth, jobs: Placed
) -> None:
    core = lasting(Trial(gloo=True, buckets=BUCKETS), speculation=mtp())
    assert tokens(placed(core, jobs)) == truth(jobs)
    assert not bucket_misses(core)
    check_logs(core)


@pytest.mark.parametrize("k", [0, 1, 3])
def test_case_22_busy_and_idle_pad_alike(lasting: Lasting, truth: Truth, k: int) -> None:
    """Zero to four rows on either side: one size from the list on both, and an idle rank never
    makes it another."""
    speculation = mtp(k) if k else None
    core = lasting(Trial(gloo=True, buckets=BUCKETS), speculation=speculation)
    for left, right in itertools.product(range(5), repeat=2):
        # All pairs of the longest; of the others either order, to be done in time.
        if left + right and (k == 3 or (left <= right) == (k == 0)):
            jobs = [(0, Job(prompt(2, i), 3)) for i in range(left)]
            jobs += [(1, Job(prompt(2, 7 + i), 3)) for i in range(right)]
            assert tokens(placed(core, jobs)) == truth(jobs)
    assert not bucket_misses(core)
    check_logs(core)


def test_case_23_acceptance_is_that_of_one_replica(lasting: Lasting, case_model: Path) -> None:
    asked = same(case_model, 2)
    alone = EngineCore.load(config(case_model, speculative_config=json.dumps(asked)))
    wanted = [out.speculation for out in run(alone, [job for _, job in UNEVEN])]
    core = lasting(speculation=asked)
    outputs = placed(core, UNEVEN)
    assert [out.speculation for out in outputs] == wanted
    assert all(out.speculation and out.speculation.accepted >= 12 for out in outputs)
    check_logs(core)


def test_case_31_the_lowest_mode_wins(lasting: Lasting, truth: Truth) -> None:
    """One leader that is not ready for fixed sizes makes them live on all, while it has rows. All
    of the group vote."""
    core = lasting(Trial(gloo=True, buckets=BUCKETS, mode_not_ready=(0,)), speculation=mtp())
    for jobs in (
        [(0, Job(prompt(5), 4)), (1, Job(prompt(5, 1), 12))],
        [(1, Job(prompt(5, 2), 4)), (0, Job(prompt(5, 3), 12))],
        [(1, Job(prompt(7, 4), 9))],
    ):
        before = last_step(core)
        assert tokens(placed(core, jobs)) == truth(jobs)
        seen = {size for places in sizes_since(core, before) for size in places.values()}
        if all(replica == 1 for replica, _ in jobs):
            assert seen <= set(BUCKETS)  # who is idle holds nobody back
        else:
            assert not seen <= set(BUCKETS)
    core.pause()
    votes = logs(core, "agreement", (0, 1))
    core.resume()
    assert {entry[4][0] for log in votes for entry in log} == {core.mesh.size}
    check_logs(core)


# ---------------------------------------------------------------- capacity and prefill


def test_case_33_capacity_is_settled_at_the_start(lasting: Lasting, truth: Truth) -> None:
    core = lasting(
        Trial(gloo=True, kv_blocks=(24, 12)), speculation=mtp(), max_num_batched_tokens=16
    )
    assert core.formed is not None
    assert core.formed.kv_blocks == (24, 12)
    assert core.facts.limits.kv_token_capacity == 48
    jobs = [(r, Job(prompt(12, i), 12)) for r in range(2) for i in range(4)]
    assert tokens(placed(core, jobs)) == truth(jobs)
    check_logs(core)
    shared = lasting(
        Trial(gloo=True, kv_blocks=(24, 23)),
        data_parallel_size=1,
        tensor_parallel_size=2,
        max_num_batched_tokens=16,
    )
    assert shared.formed is not None
    assert shared.formed.kv_blocks == (23,)
    assert "rank 0: 24, rank 1: 23" in shared.formed.table()
    assert tokens(placed(shared, FILLS_BLOCKS)) == truth(FILLS_BLOCKS)
    check_logs(shared)


@pytest.mark.parametrize("name", ["ngram", "mtp"])
def test_case_37_a_long_prefill_starves_nobody(
    lasting: Lasting, case_model: Path, name: str, truth: Truth
) -> None:
    core = lasting(GLOO, speculation=method(name, case_model), max_num_batched_tokens=8)
    before = core.counters.steps
    assert tokens(placed(core, PREFILL_BESIDE)) == truth(PREFILL_BESIDE)
    # 5 chunks of 8 and two tokens on one side, a token a step at least on the other.
    assert core.counters.steps - before <= 1 + 16 + 1
    check_logs(core)
