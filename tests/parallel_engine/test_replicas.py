"""Independent replicas: the same bits, spread requests, sums, and ends that name the lost rank."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from drumline.core.errors import DeadlineExceeded, EngineDead, RankLost
from drumline.core.request import FinishReason
from drumline.engine.core import EngineCore
from drumline.engine.messages import Trial
from drumline.engine.outputs import RequestRecord
from parallel_engine.fleet import Fleets, Job, alive, bits, config, drive, run, submissions, until

TinyPath = Callable[..., Path]
JOBS = [
    *(Job((5 + index, 9, 2 * index + 1), 4 + index) for index in range(5)),
    *(Job((7, 3 + index), 6, temperature=0.9) for index in range(4)),
]


@pytest.fixture
def alone(tiny_path: TinyPath) -> list[object]:
    return bits(run(EngineCore.load(config(tiny_path())), JOBS))


def test_two_replicas_give_the_bits_of_one_and_share_the_work(
    fleets: Fleets, tiny_path: TinyPath, alone: list[object]
) -> None:
    core = fleets.start(tiny_path(), data_parallel_size=2)
    outputs = run(core, JOBS)
    assert bits(outputs) == alone
    assert {out.replica for out in outputs} == {0, 1}
    counters = core.counters
    assert counters.prompt_tokens == sum(len(job.prompt) for job in JOBS)
    assert counters.completion_tokens == sum(job.max_tokens for job in JOBS)
    assert counters.decode_tokens == sum(job.max_tokens - 1 for job in JOBS)
    assert counters.decode_seconds > 0
    # Replicas that are alone count their own steps: both together need more than the longest.
    assert counters.steps > max(job.max_tokens for job in JOBS)
    assert core.draft_lengths == {0: counters.steps}
    load = core.load_now()
    assert (load.running, load.waiting, load.kv_usage) == (0, 0, 0.0)
    assert not core.has_work


def test_a_cancelled_request_ends_with_abort_and_the_others_go_on(
    fleets: Fleets, tiny_path: TinyPath, alone: list[object]
) -> None:
    core = fleets.start(tiny_path(), data_parallel_size=2)
    made = submissions(core, JOBS)
    records = [RequestRecord.of(one) for one in made]
    for one in made:
        core.submit(one.requests)
    core.cancel(made[4].requests[0].number)
    drive(core, records)
    found = bits([record.output().outputs[0] for record in records])
    assert found[4][2] is FinishReason.ABORT
    assert found[:4] == alone[:4]
    assert found[5:] == alone[5:]


def test_pause_stands_still_and_resume_goes_on(fleets: Fleets, tiny_path: TinyPath) -> None:
    core = fleets.start(tiny_path(), data_parallel_size=2)
    core.pause()
    (made,) = submissions(core, [Job((1, 2, 3), 5)])
    core.submit(made.requests)
    assert core.step() == []
    steps = core.counters.steps
    core.resume()
    record = RequestRecord.of(made)
    drive(core, [record])
    assert steps == 0
    assert core.counters.steps == 5


def test_a_killed_rank_is_named_in_every_request_and_nothing_is_left(
    fleets: Fleets, tiny_path: TinyPath
) -> None:
    core = fleets.start(tiny_path(), data_parallel_size=2)
    made = submissions(core, [Job((1 + index, 2), 60) for index in range(4)])
    records = [RequestRecord.of(one) for one in made]
    for one in made:
        core.submit(one.requests)
    processes = dict(core.ranks.processes)
    os.kill(processes[1], signal.SIGKILL)
    with pytest.raises(RankLost, match=r"rank 1 lost .* ended by signal 9 \(SIGKILL\)") as caught:
        drive(core, records)
    assert caught.value.rank == 1
    for record in records:
        output = record.output().outputs[0]
        assert output.finish_reason is FinishReason.ERROR
        assert output.error == str(caught.value)
    with pytest.raises(EngineDead, match="rank 1 lost"):
        core.submit(made[0].requests)
    for process in processes.values():
        until(lambda process=process: not alive(process), f"process {process} is left")  # type: ignore[misc]


def test_a_rank_that_stands_still_is_named(fleets: Fleets, tiny_path: TinyPath) -> None:
    core = fleets.start(tiny_path(), data_parallel_size=2, step_timeout_seconds=0.5)
    made = submissions(core, [Job((1 + index, 2), 60) for index in range(2)])
    records = [RequestRecord.of(one) for one in made]
    os.kill(core.ranks.processes[0], signal.SIGSTOP)
    for one in made:
        core.submit(one.requests)
    with pytest.raises(RankLost, match="rank 0 lost in step 0, .* does not answer"):
        drive(core, records)
    stuck = [out for record in records if (out := record.output().outputs[0]).replica == 0]
    assert [out.error for out in stuck] == [str(core.failure)]


def test_a_rank_that_does_not_come_up_is_named(fleets: Fleets, tiny_path: TinyPath) -> None:
    trial = Trial(faults=((1, -1, "load"),))
    with pytest.raises(DeadlineExceeded, match=r"rank 1 \(process \d+\) has not loaded: nothing"):
        fleets.start(tiny_path(), trial, data_parallel_size=2, startup_timeout_seconds=2)
