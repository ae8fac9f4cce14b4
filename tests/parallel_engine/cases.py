"""What tests of docs/cases.md share: prompts, drafters, lasting engines, and ways to break them.

`test_cases.py` runs each case as it must be, `test_case_faults.py` the same requests with the
reported decision switched on.
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

from drumline.core.errors import Diverged, EngineError, RankLost
from drumline.core.request import FinishReason
from drumline.engine.fleet_core import FleetCore
from drumline.engine.messages import Trial
from drumline.engine.outputs import CompletionOutput, RequestRecord
from drumline.lockstep.mutants import Mutant
from parallel_engine.fleet import (
    Fleets,
    Job,
    alive,
    config,
    drive,
    sizes,
    submissions,
    take,
    until,
)

GLOO = Trial(gloo=True)
BUCKETS = (4, 8, 16, 32, 64)
STEP_SECONDS = 2.0  # the deadline of ranks that are to break
NAMED_SECONDS = 10.0
Placed = list[tuple[int, Job]]  # (replica, request)


def mtp(k: int = 3, **more: Any) -> dict[str, Any]:
    return {"method": "mtp", "num_speculative_tokens": k, **more}


def same(moe: Path, k: int = 3, **more: Any) -> dict[str, Any]:
    """The target itself drafts: everything is accepted while its state is right."""
    return {"method": "draft_model", "model": str(moe), "num_speculative_tokens": k, **more}


def method(name: str, moe: Path) -> dict[str, Any]:
    asked: dict[str, Any] = {"method": name, "num_speculative_tokens": 3}
    return {**asked, "model": str(moe / name)} if name == "dflash" else asked


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    draw = random.Random(length * 1000 + seed)
    return tuple(draw.randrange(3, 128) for _ in range(length))


def tokens(outputs: list[CompletionOutput]) -> list[tuple[int, ...]]:
    return [out.token_ids for out in outputs]


# ---------------------------------------------------------------- the requests of the cases

BEYOND_RANGE = [(0, Job(prompt(20), 30)), (0, Job(prompt(6), 16)), (1, Job(prompt(7), 16))]
SKIPS_NEAR_LIMIT = [(0, Job(prompt(56), 8)), (1, Job(prompt(5), 12))]
NEAR_LIMIT = [(0, Job(prompt(50), 14)), (1, Job(prompt(10), 40))]
ONE_AND_THREE = [(0, Job(prompt(8), 10)), *((1, Job(prompt(9, i), 6 + i)) for i in range(3))]
ONE_AND_FOUR = [(0, Job(prompt(4), 30)), *((1, Job(prompt(4, i), 9)) for i in range(1, 5))]
PRUNED = [
    (0, Job(prompt(5), 8, fields=(("num_speculative_tokens", 1),))),
    (1, Job(prompt(6), 8)),
]
NOT_READY = [(1, Job(prompt(5), 6)), (0, Job(prompt(6), 30))]
THREE_AND_FOUR = [(0, Job(prompt(3, i), 6)) for i in range(3)]
THREE_AND_FOUR += [(1, Job(prompt(3, 7 + i), 6)) for i in range(4)]
UNEVEN = [(0, Job(prompt(5), 20)), *((1, Job(prompt(5, i), 20)) for i in range(1, 4))]
REPEATING = [(0, Job((5, 6, 7) * 3, 40)), (0, Job(prompt(7), 9))]
DRAINING = [(0, Job(prompt(5), 4)), (1, Job(prompt(5, 1), 12))]
FILLS_BLOCKS = [(0, Job(prompt(12, i), 16)) for i in range(4)]
PREFILL_BESIDE = [(1, Job(prompt(4), 16)), (0, Job(prompt(40), 2))]


def random_arrivals(draw: random.Random) -> Placed:
    return [
        (draw.randrange(2), Job(prompt(draw.randrange(2, 20), draw.randrange(9)), 8))
        for _ in range(draw.randrange(1, 7))
    ]


# ---------------------------------------------------------------- engines


def settings_of(asked: dict[str, Any]) -> dict[str, Any]:
    """Those of two replicas that share experts, but for what is asked."""
    speculation = asked.pop("speculation", None)
    settings = {"data_parallel_size": 2, "enable_expert_parallel": True, **asked}
    if speculation is not None:
        settings["speculative_config"] = json.dumps(speculation)
    return settings


class Lasting:
    """Engines that live as long as the module's tests, by their settings."""

    def __init__(self, fleets: Fleets, moe: Path) -> None:
        self.fleets = fleets
        self.moe = moe
        self.cores: dict[str, FleetCore] = {}

    def __call__(self, trial: Trial = GLOO, model: Path | None = None, **asked: Any) -> FleetCore:
        settings, path = settings_of(asked), model or self.moe
        key = repr((trial, path, settings))
        if key not in self.cores:
            while len(self.cores) > 2:  # few at a time: they share two cores
                self.cores.pop(next(iter(self.cores))).close()
            made = config(path, **settings)
            self.cores[key] = FleetCore.load(made, trial, self.fleets.nursery)
        return self.cores[key]

    def close(self) -> None:
        while self.cores:
            self.cores.popitem()[1].close()


def trial(*mutants: Mutant, **more: Any) -> Trial:
    """Over gloo, with decisions switched on."""
    return Trial(gloo=True, mutants=tuple(map(str, mutants)), **more)


def break_down(core: FleetCore, *rounds: Placed) -> EngineError:
    """Runs jobs, round after round, that cannot all come to their end; returns what broke, and
    closes the engine. Every request that has not ended is told, and no process stays."""
    for jobs in rounds:
        made = submissions(core, [job for _, job in jobs])
        records = [RequestRecord.of(one) for one in made]
        error, began = None, time.monotonic()
        try:
            core.pause()
            for (replica, _), one in zip(jobs, made, strict=True):
                core.submit(one.requests, replica)
            core.resume()
            drive(core, records)
        except EngineError as caught:
            error = caught
            break
    assert error is not None, "nothing broke"
    assert time.monotonic() - began < NAMED_SECONDS
    take(records, core.take_deltas())
    outputs = [record.output().outputs[0] for record in records]
    ended = [out for out in outputs if out.finish_reason is not FinishReason.LENGTH]
    assert {out.finish_reason for out in ended} == {FinishReason.ERROR}
    assert str(error) in {out.error for out in ended}
    for process in core.ranks.processes.values():
        until(lambda process=process: not alive(process), f"process {process} is left")  # type: ignore[misc]
    core.close()
    return error


def check_differs(error: EngineError, group: str, said: dict[int, str]) -> int:
    """The error is a difference between members of a group; ``said``: how the value of each rank
    begins. Returns the step."""
    assert isinstance(error, Diverged), error
    assert f"over {group}" in error.what
    values = dict(error.values)
    assert values.keys() == said.keys(), error
    for rank, begin in said.items():
        assert str(values[rank]).startswith(begin), error
    return error.step


def check_lost(error: EngineError, rank: int, reason: str) -> int:
    """The error names the rank and why; returns the step."""
    assert isinstance(error, RankLost), error
    assert error.rank == rank, error
    assert reason in error.reason, error
    return error.step


# ---------------------------------------------------------------- counts


def draft_passes(core: FleetCore, rank: int = 0) -> dict[int, int]:
    """Draft passes of every step."""
    return {
        step: sum(place.startswith("draft") for place in places)
        for step, places in sizes(core, rank).items()
    }


def sizes_since(core: FleetCore, before: int) -> list[dict[str, int]]:
    """Sizes of the passes of every step after ``before``."""
    core.pause()
    found = [places for step, places in sizes(core).items() if step > before]
    core.resume()
    return found


def last_step(core: FleetCore) -> int:
    return max(sizes(core), default=-1)


def bucket_misses(core: FleetCore) -> set[int]:
    """Sizes of any pass on any rank that are not in the list."""
    return {
        size
        for rank in core.mesh.ranks
        for places in sizes(core, rank).values()
        for size in places.values()
    } - set(BUCKETS)
