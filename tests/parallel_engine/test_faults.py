"""Ranks that break, die or stand still: named in every request, all end, a restart works."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drumline.core.errors import DeadlineExceeded, EngineDead, EngineError, RankLost
from drumline.core.request import FinishReason
from drumline.engine.fleet_core import FleetCore
from drumline.engine.messages import Trial
from drumline.engine.outputs import RequestRecord
from drumline.models import tiny_drafts
from parallel_engine.fleet import Fleets, Job, alive, config, drive, run, submissions, until

TinyPath = Callable[..., Path]
JOBS = [Job((1 + index, 2, 5), 40) for index in range(4)]
MTP = {
    "enable_expert_parallel": True,
    "step_timeout_seconds": 2.0,
    "speculative_config": json.dumps({"method": "mtp", "num_speculative_tokens": 3}),
}


@pytest.fixture(scope="module")
def moe(tiny_path: TinyPath) -> Path:
    path = tiny_path("qwen3_moe", 8)
    tiny_drafts.add_mtp(path, 0)
    return path


def break_down(core: FleetCore, seconds: float = 20.0) -> tuple[RankLost, float]:
    """Runs until it breaks: the error, which every request must have been told, and when it was
    known after the last token of anybody."""
    made = submissions(core, JOBS)
    records = [RequestRecord.of(one) for one in made]
    for one in made:
        core.submit(one.requests)
    with pytest.raises(RankLost) as caught:
        drive(core, records)
    now = time.monotonic()
    for record in records:
        output = record.output().outputs[0]
        assert output.finish_reason is FinishReason.ERROR
        assert output.error == str(caught.value)
    with pytest.raises(EngineDead):
        core.submit(made[0].requests)
    for process in core.ranks.processes.values():
        until(lambda process=process: not alive(process), f"process {process} is left")  # type: ignore[misc]
    return caught.value, now


PLACES = ("agree", "draft 0", "draft 1", "end")
LEGS = [(place, tp, True) for place in PLACES for tp in (1, 2)]


@pytest.mark.parametrize(
    ("place", "tp", "gloo"), [*LEGS, ("agree", 1, False), ("draft 1", 2, False)]
)
def test_case_17_an_exception_ends_all_ranks_and_is_named(
    fleets: Fleets, moe: Path, place: str, tp: int, gloo: bool
) -> None:
    """Legs a to d: before the exchange of counts, between target and draft, inside the second of
    three draft passes, after everything was drawn."""
    rank = 0 if place == "agree" and tp == 2 else 1  # a follower takes no part in the exchange
    trial = Trial(gloo=gloo, faults=((rank, 3, place),))
    settings = {**MTP, "data_parallel_size": 2, "tensor_parallel_size": tp}
    core = fleets.start(moe, trial, **settings)
    began = time.monotonic()
    error, _ = break_down(core)
    assert error.rank == rank
    assert error.step == 3
    assert "injected" in error.reason
    if place.startswith("draft"):
        assert error.phase == place.replace("draft", "draft pass")
    assert time.monotonic() - began < 15


def test_a_killed_rank_of_a_group_is_named_and_a_restart_works(fleets: Fleets, moe: Path) -> None:
    settings = {**MTP, "data_parallel_size": 2, "tensor_parallel_size": 2}
    core = fleets.start(moe, **settings)
    run(core, JOBS[:1])  # asleep again: it is woken to be killed at work
    os.kill(core.ranks.processes[3], signal.SIGKILL)
    error, _ = break_down(core)
    assert error.rank == 3
    assert "was ended by signal 9 (SIGKILL)" in error.reason
    again = fleets.start(moe, **settings)
    assert [out.finish_reason for out in run(again, JOBS)] == [FinishReason.LENGTH] * len(JOBS)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_a_group_that_stands_still_is_named(fleets: Fleets, moe: Path, rank: int) -> None:
    settings = {**MTP, "step_timeout_seconds": 0.5, "data_parallel_size": 2}
    core = fleets.start(moe, **settings)
    os.kill(core.ranks.processes[rank], signal.SIGSTOP)
    error, _ = break_down(core)
    assert error.rank == rank


def step_until_broken(core: FleetCore) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        core.step()


def test_cycles_half_of_them_killed_leave_nothing(fleets: Fleets, moe: Path) -> None:
    """As many as CYCLES says (`make cycles`: 50), killed at random moments."""
    count = int(os.environ.get("CYCLES", "4"))
    draw = random.Random(5)
    for cycle in range(count):
        before = set(os.listdir("/dev/shm")), set(os.listdir("/proc/self/fd"))
        settings = {**MTP, "data_parallel_size": 2, "startup_timeout_seconds": 30.0}
        processes: dict[int, int] = {}
        core: Any = None
        try:
            core = FleetCore.load(config(moe, **settings), nursery=fleets.nursery)
            processes = dict(core.ranks.processes)
            for one in submissions(core, JOBS):
                core.submit(one.requests)
            until_step = draw.randrange(20)
            for _ in range(until_step):
                core.step()
            if cycle % 2:
                os.kill(processes[draw.randrange(2)], signal.SIGKILL)
                with pytest.raises(EngineError):
                    step_until_broken(core)
        finally:
            if core is not None:
                core.close()
        for process in processes.values():
            until(lambda process=process: not alive(process), f"process {process}")  # type: ignore[misc]
        assert (set(os.listdir("/dev/shm")), set(os.listdir("/proc/self/fd"))) == before


def test_a_rank_that_breaks_while_loading_says_why(fleets: Fleets, moe: Path) -> None:
    trial = Trial(faults=((1, -1, "load"),))
    with pytest.raises(DeadlineExceeded, match="rank 1 .* has not loaded"):
        fleets.start(moe, trial, **{**MTP, "data_parallel_size": 2, "startup_timeout_seconds": 2.0})
