"""Failures that users of other engines met, between real processes over gloo.

Each engine starts once and serves several tests. Every test runs the standard checks: tokens are
those of one rank without speculation, collective logs are equal on all members of each group, no
block stays held. The faults behind the cases are switched on in `tests/lockstep` and
`test_hang.py`, where each is caught.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from drumline.config import EngineConfig
from drumline.core.errors import ConfigError
from drumline.core.request import FinishReason
from drumline.engine.core import EngineCore
from drumline.engine.fleet_core import FleetCore
from drumline.engine.messages import Trial
from drumline.engine.outputs import CompletionOutput
from drumline.models import tiny_drafts
from parallel_engine.fleet import (
    Fleets,
    Job,
    check_logs,
    config,
    logs,
    placed,
    run,
    sizes,
)

TinyPath = Callable[..., Path]
GLOO = Trial(gloo=True)
Placed = list[tuple[int, Job]]


@pytest.fixture(scope="module")
def moe(tiny_path: TinyPath) -> Path:
    path = tiny_path("qwen3_moe", 21)
    tiny_drafts.add_mtp(path, 0)
    tiny_drafts.write_dflash(path, path / "dflash", 0)
    return path


@pytest.fixture(scope="module")
def truth(moe: Path) -> Callable[[Placed], list[tuple[int, ...]]]:
    core = EngineCore.load(config(moe))
    return lambda jobs: [out.token_ids for out in run(core, [job for _, job in jobs])]


class Lasting:
    """Engines that live as long as the module's tests, by their settings."""

    def __init__(self, fleets: Fleets, moe: Path) -> None:
        self.fleets = fleets
        self.moe = moe
        self.cores: dict[str, FleetCore] = {}

    def __call__(self, trial: Trial = GLOO, **asked: Any) -> FleetCore:
        speculation = asked.pop("speculation", None)
        settings: dict[str, Any] = {
            "data_parallel_size": 2,
            "enable_expert_parallel": True,
            **asked,
        }
        if speculation is not None:
            settings["speculative_config"] = json.dumps(speculation)
        key = repr((trial, settings))
        if key not in self.cores:
            while len(self.cores) > 2:  # few at a time: they share two cores
                self.cores.pop(next(iter(self.cores))).close()
            made = config(self.moe, **settings)
            self.cores[key] = FleetCore.load(made, trial, self.fleets.nursery)
        return self.cores[key]


@pytest.fixture(scope="module")
def lasting(_nursery: Fleets, moe: Path) -> Iterator[Lasting]:
    engines = Lasting(_nursery, moe)
    yield engines
    for core in engines.cores.values():
        core.close()


def mtp(k: int = 3, **more: Any) -> dict[str, Any]:
    return {"method": "mtp", "num_speculative_tokens": k, **more}


def same(moe: Path, k: int = 3, **more: Any) -> dict[str, Any]:
    """The target itself drafts: everything is accepted while its state is right."""
    return {"method": "draft_model", "model": str(moe), "num_speculative_tokens": k, **more}


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    draw = random.Random(length * 1000 + seed)
    return tuple(draw.randrange(3, 128) for _ in range(length))


def tokens(outputs: list[CompletionOutput]) -> list[tuple[int, ...]]:
    return [out.token_ids for out in outputs]


def draft_passes(core: FleetCore) -> dict[int, int]:
    """Draft passes of every step."""
    return {
        step: sum(place.startswith("draft") for place in places)
        for step, places in sizes(core).items()
    }


# ---------------------------------------------------------------- near a limit


def test_case_01_a_row_beyond_the_drafters_range_goes_on_alone(
    lasting: Lasting, moe: Path, truth: Callable[[Placed], list[tuple[int, ...]]]
) -> None:
    core = lasting(speculation=same(moe, max_model_len=32))
    jobs = [(0, Job(prompt(20), 30)), (0, Job(prompt(6), 16)), (1, Job(prompt(7), 16))]
    outputs = placed(core, jobs)
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
    check_logs(core)


@pytest.mark.parametrize("method", ["mtp", "dflash", "ngram"])
def test_case_02_who_skips_near_the_limit_publishes_no_drafts(
    lasting: Lasting, moe: Path, method: str, truth: Callable[[Placed], list[tuple[int, ...]]]
) -> None:
    asked: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    if method == "dflash":
        asked["model"] = str(moe / "dflash")
    core = lasting(speculation=asked)
    jobs = [(0, Job(prompt(56), 8)), (1, Job(prompt(5), 12))]
    outputs = placed(core, jobs)
    assert tokens(outputs) == truth(jobs)
    assert outputs[0].finish_reason is FinishReason.LENGTH
    passes = set(draft_passes(core).values())
    assert passes == ({1, 3} if method == "mtp" else {0})  # those without experts share none
    check_logs(core)


def test_stages_are_refused_by_name(moe: Path) -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel_size=2: not supported"):
        FleetCore.load(config(moe, data_parallel_size=2, pipeline_parallel_size=2))


@pytest.mark.parametrize("name", ["async_scheduling", "kv_transfer_config"])
def test_what_other_engines_overlap_is_refused_by_name(moe: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        EngineConfig.from_kwargs(model=str(moe), **{name: True})


@pytest.mark.parametrize(("dp", "k"), [(2, 1), (2, 3), (2, 5), (4, 3)])
def test_case_04_every_end_near_the_limit(
    lasting: Lasting, dp: int, k: int, truth: Callable[[Placed], list[tuple[int, ...]]]
) -> None:
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


def test_case_07_a_table_leaves_no_bucket(
    lasting: Lasting, truth: Callable[[Placed], list[tuple[int, ...]]]
) -> None:
    """dp=2 tp=2: with a table, steps fall into the same sizes as with a static length."""
    buckets = (4, 8, 16, 32, 64)
    trial = Trial(gloo=True, buckets=buckets)
    table = [[1, 2, 3], [3, 4, 0]]
    jobs = [(0, Job(prompt(8), 10)), *((1, Job(prompt(9, i), 6 + i)) for i in range(3))]
    for asked in (mtp(num_speculative_tokens_per_batch_size=table), mtp()):
        core = lasting(trial, tensor_parallel_size=2, speculation=asked)
        outputs = placed(core, jobs)
        assert tokens(outputs) == truth(jobs)
        seen = {size for places in sizes(core).values() for size in places.values()}
        assert seen <= set(buckets)
        check_logs(core)


def test_case_09_the_lesser_wish_counts_while_its_replica_works(
    lasting: Lasting, truth: Callable[[Placed], list[tuple[int, ...]]]
) -> None:
    core = lasting(speculation=mtp(num_speculative_tokens_per_batch_size=[[1, 2, 3], [3, 4, 1]]))
    jobs = [(0, Job(prompt(4), 30)), *((1, Job(prompt(4, i), 9)) for i in range(1, 5))]
    outputs = placed(core, jobs)
    assert tokens(outputs) == truth(jobs)
    passes = list(draft_passes(core).values())[2:]  # after prefill, which has no wish
    busy = next(index for index, count in enumerate(passes) if count == 3)
    assert busy >= 4
    assert set(passes[:busy]) == {1}
    assert set(passes[busy:-2]) == {3}  # the last ones may have nothing left to draft
    check_logs(core)


def test_case_12_random_arrivals_under_a_table(
    lasting: Lasting, truth: Callable[[Placed], list[tuple[int, ...]]]
) -> None:
    core = lasting(speculation=mtp(num_speculative_tokens_per_batch_size=[[1, 2, 3], [3, 4, 1]]))
    draw = random.Random(12)
    for _ in range(6):
        jobs = [
            (draw.randrange(2), Job(prompt(draw.randrange(2, 20), draw.randrange(9)), 8))
            for _ in range(draw.randrange(1, 7))
        ]
        assert tokens(placed(core, jobs)) == truth(jobs)
    assert {1, 3} <= core.draft_lengths.keys()
    check_logs(core)


# ---------------------------------------------------------------- idle beside busy


def test_case_13_work_that_cannot_run_yet_makes_whole_steps(
    lasting: Lasting, truth: Callable[[Placed], list[tuple[int, ...]]]
) -> None:
    """Rank 1 has a request that is not ready for eight steps: it makes every pass meanwhile, and
    the request starts at once when it is."""
    core = lasting(Trial(gloo=True, held=((1, 8),)), speculation=mtp())
    jobs = [(1, Job(prompt(5), 6)), (0, Job(prompt(6), 30))]
    outputs = placed(core, jobs)
    assert tokens(outputs) == truth(jobs)
    core.pause()
    both = logs(core, "ep", (0, 1))
    assert both[0] == both[1]
    core.resume()
    assert list(draft_passes(core).values())[1:8] == [3] * 7  # while it is held
    check_logs(core)


def test_case_16_and_18_one_request_alone_and_then_another(
    lasting: Lasting, truth: Callable[[Placed], list[tuple[int, ...]]]
) -> None:
    core = lasting(data_parallel_size=4, speculation=mtp())
    for job in [(2, Job(prompt(12), 5)), (0, Job(prompt(12, 1), 5))]:
        assert tokens(placed(core, [job])) == truth([job])
    warm = [
        entry
        for log in logs(core, "ep", tuple(core.mesh.ranks))
        for entry in log
        if entry[1] == "warmup"
    ]
    assert warm, "no group is used for the first time by a request"
    check_logs(core)


def test_case_19_each_pass_has_its_own_size(
    lasting: Lasting, truth: Callable[[Placed], list[tuple[int, ...]]]
) -> None:
    """Zero to four requests on each of two replicas; decoding alone, a later draft pass is as wide
    as the busier replica has rows."""
    core = lasting(speculation=mtp())
    for left in range(5):
        for right in range(5):
            jobs = [(0, Job(prompt(3, i), 4)) for i in range(left)]
            jobs += [(1, Job(prompt(3, 7 + i), 4)) for i in range(right)]
            if not jobs:
                continue
            before = max(sizes(core), default=-1)
            assert tokens(placed(core, jobs)) == truth(jobs)
            core.pause()
            later = {
                places["draft 1"]
                for step, places in sizes(core).items()
                if step > before and "draft 1" in places
            }
            core.resume()
            assert later <= set(range(1, max(left, right) + 1))
            assert max(left, right) in later
    check_logs(core)


def test_case_21_and_31_the_lowest_mode_wins(
    lasting: Lasting, truth: Callable[[Placed], list[tuple[int, ...]]]
) -> None:
    """One leader that is not ready for fixed sizes makes them live on all, while it has rows."""
    buckets = (4, 8, 16, 32, 64)
    trial = Trial(gloo=True, buckets=buckets, mode_not_ready=(0,))
    core = lasting(trial, speculation=mtp())
    for jobs in (
        [(0, Job(prompt(5), 4)), (1, Job(prompt(5, 1), 12))],
        [(1, Job(prompt(5, 2), 4)), (0, Job(prompt(5, 3), 12))],
        [(1, Job(prompt(7, 4), 9))],
    ):
        before = max(sizes(core), default=-1)
        assert tokens(placed(core, jobs)) == truth(jobs)
        core.pause()
        own = [places for step, places in sizes(core).items() if step > before]
        core.resume()
        seen = {size for places in own for size in places.values()}
        if all(replica == 1 for replica, _ in jobs):
            assert seen <= set(buckets)  # who is idle holds nobody back
        else:
            assert not seen <= set(buckets)
    check_logs(core)


def test_case_23_acceptance_is_that_of_one_replica(lasting: Lasting, moe: Path) -> None:
    asked = same(moe, 2)
    jobs = [(0, Job(prompt(5), 9)), *((1, Job(prompt(5, i), 9)) for i in range(1, 4))]
    alone = run(
        EngineCore.load(config(moe, speculative_config=json.dumps(asked))), [job for _, job in jobs]
    )
    outputs = placed(lasting(speculation=asked), jobs)
    assert [out.speculation for out in outputs] == [out.speculation for out in alone]
    assert all(out.speculation and out.speculation.accepted >= 5 for out in outputs)


# ---------------------------------------------------------------- ranks of one replica


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("method", ["mtp", "ngram", "suffix"])
def test_cases_25_and_26_one_rank_samples_and_drafts(
    lasting: Lasting, method: str, temperature: float
) -> None:
    asked = {"method": method, "num_speculative_tokens": 3}
    core = lasting(data_parallel_size=1, tensor_parallel_size=2, speculation=asked)
    jobs = [(0, Job((5, 6, 7) * 3, 12, temperature)), (0, Job(prompt(7), 9, temperature))]
    first, again = placed(core, jobs), placed(core, jobs)
    assert tokens(first) == tokens(again)
    assert [len(out.token_ids) for out in first] == [12, 9]
    # Over tp there is nothing of candidates, votes or counts: what one rank drew is told.
    core.pause()
    (log, other) = logs(core, "tp", (0, 1))
    core.resume()
    assert log == other
    told = [entry for entry in log if entry[3] == "broadcast"]
    assert bool(told) == (method == "mtp")
    check_logs(core)


def test_case_33_capacity_is_settled_at_the_start(
    lasting: Lasting, truth: Callable[[Placed], list[tuple[int, ...]]]
) -> None:
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
    assert tokens(placed(shared, [(0, job) for _, job in jobs[:4]])) == truth(jobs[:4])
    check_logs(shared)


# ---------------------------------------------------------------- prefill beside decoding


@pytest.mark.parametrize("method", ["ngram", "mtp"])
def test_case_37_a_long_prefill_starves_nobody(
    lasting: Lasting, method: str, truth: Callable[[Placed], list[tuple[int, ...]]]
) -> None:
    asked = {"method": method, "num_speculative_tokens": 3}
    core = lasting(speculation=asked, max_num_batched_tokens=8)
    jobs = [(1, Job(prompt(4), 16)), (0, Job(prompt(40), 2))]
    before = core.counters.steps
    assert tokens(placed(core, jobs)) == truth(jobs)
    # 5 chunks of 8 and two tokens on one side, a token a step at least on the other.
    assert core.counters.steps - before <= 1 + 16 + 1
    check_logs(core)
