"""Engines of several ranks for tests: one nursery for all, requests in, outputs and facts out."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drumline.config import EngineConfig
from drumline.core.errors import EngineError
from drumline.core.ledger import Record
from drumline.core.params import SamplingParams
from drumline.engine.facts import make_intake
from drumline.engine.fleet_core import NO_TRIAL, FleetCore
from drumline.engine.intake import Prompt, Submission
from drumline.engine.loading import Core
from drumline.engine.messages import Trial
from drumline.engine.outputs import CompletionOutput, OutputDelta, RequestRecord
from drumline.engine.ranks import Nursery

SECONDS = 60.0


@dataclass(frozen=True)
class Job:
    """One request: token ids in, so many out; to a replica of its own where one is named."""

    prompt: tuple[int, ...]
    max_tokens: int = 8
    temperature: float = 0.0
    fields: tuple[tuple[str, Any], ...] = ()

    def params(self) -> SamplingParams:
        seed = 7 if self.temperature else None
        return SamplingParams(
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            ignore_eos=True,
            logprobs=2,
            seed=seed,
            **dict(self.fields),
        )


def submissions(core: Core, jobs: Sequence[Job]) -> list[Submission]:
    intake = make_intake(core.facts, core.tokenizer)
    return [intake.admit(Prompt(token_ids=job.prompt), job.params()) for job in jobs]


def drive(core: Core, records: Sequence[RequestRecord]) -> None:
    """Steps until all have ended; raises what breaks, after the last deltas are recorded."""
    deadline = time.monotonic() + SECONDS
    while not all(record.finished for record in records):
        assert time.monotonic() < deadline, "requests do not end"
        try:
            take(records, core.step())
        except EngineError:
            take(records, core.take_deltas())
            raise


def take(records: Sequence[RequestRecord], deltas: Sequence[OutputDelta]) -> None:
    """Hands deltas to those whom they concern."""
    owner = {sample.number: record for record in records for sample in record.samples}
    for delta in deltas:
        owner[delta.number].add(delta)


def run(core: Core, jobs: Sequence[Job]) -> list[CompletionOutput]:
    """All jobs at once; one output each, in their order."""
    made = submissions(core, jobs)
    records = [RequestRecord.of(one) for one in made]
    for one in made:
        core.submit(one.requests)
    drive(core, records)
    return [record.output().outputs[0] for record in records]


def bits(outputs: Sequence[CompletionOutput]) -> list[Any]:
    """What must be equal to the last bit, whoever computed it."""
    return [(out.token_ids, out.logprobs, out.finish_reason, out.text) for out in outputs]


def config(path: Path, **settings: Any) -> EngineConfig:
    fields: dict[str, Any] = {"max_model_len": 64, "threads": 1, "block_size": 4, "max_num_seqs": 4}
    fields["ops_backend"] = "reference"
    return EngineConfig.from_kwargs(model=str(path), **{**fields, **settings})


StartFleet = Callable[..., FleetCore]


class Fleets:
    """Starts engines from one nursery, and closes those that a test leaves."""

    def __init__(self) -> None:
        self.nursery = Nursery()
        self.open: list[FleetCore] = []

    def start(self, path: Path, trial: Trial = NO_TRIAL, **settings: Any) -> FleetCore:
        core = FleetCore.load(config(path, **settings), trial, self.nursery)
        self.open.append(core)
        return core

    def close_all(self) -> None:
        while self.open:
            self.open.pop().close()

    def close(self) -> None:
        self.close_all()
        self.nursery.close()


def alive(process: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return text.rsplit(")", 1)[1].split()[0] != "Z"


def descendants(process: int) -> set[int]:
    """All processes below one, zombies included."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "stat").read_text()
            except OSError:
                continue
            parents[int(entry.name)] = int(text.rsplit(")", 1)[1].split()[1])
    found: set[int] = set()
    grew = True
    while grew:
        below = {child for child, parent in parents.items() if parent in {process, *found}}
        grew = not below <= found
        found |= below
    return found


def until(ready: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    """Looks again and again, since the end of a foreign process cannot be waited for."""
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def shared_names() -> set[str]:
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


def logs(core: FleetCore, group: str, ranks: range | tuple[int, ...]) -> list[list[Any]]:
    """What each rank issued over a group since it began to serve, in order."""

    def what(record: Record) -> Any:
        entry = record.entry
        place = (entry.phase, entry.part, entry.operation, entry.shape, entry.dtype)
        return (record.step, *place)

    found = []
    for rank in ranks:
        ring = core.ranks.ring(rank)
        assert ring is not None
        own = [one for one in ring.records if one.entry.group == group and one.completed]
        found.append([what(one) for one in own])
    return found


def check_logs(core: FleetCore) -> None:
    """Every group's members issued the same, step by step; nothing runs and no block is held."""
    core.pause()
    told = core.told()
    mesh = core.mesh
    groups: list[tuple[str, tuple[int, ...]]] = [("tp", mesh.replica(one)) for one in mesh.leaders]
    if mesh.expert_parallel:
        groups.append(("ep", tuple(mesh.ranks)))
    if mesh.agrees:
        groups.append(("agreement", mesh.leaders))
        assert len({one.exchanges for one in told.values()}) == 1
        assert len({one.steps for one in told.values()}) == 1
    for group, members in groups:
        found = logs(core, group, members)
        assert all(log == found[0] for log in found), f"logs over {group} differ"
    core.resume()
    load = core.load_now()
    assert (load.running, load.waiting, load.kv_usage) == (0, 0, 0.0)


def sizes(core: FleetCore, rank: int = 0) -> dict[int, dict[str, int]]:
    """Per step, the tokens that each pass with experts was padded to, by its place."""
    found: dict[int, dict[str, int]] = {}
    (log,) = logs(core, "ep", (rank,))
    for step, phase, part, operation, shape, _ in log:
        if operation == "all_gather" and phase != "warmup":
            found.setdefault(step, {})[f"{phase} {part}"] = shape[0]
    return found


def placed(core: FleetCore, jobs: Sequence[tuple[int, Job]]) -> list[CompletionOutput]:
    """Runs jobs, each on the replica that it names, all from the same step on."""
    made = submissions(core, [job for _, job in jobs])
    records = [RequestRecord.of(one) for one in made]
    core.pause()
    for (replica, _), one in zip(jobs, made, strict=True):
        core.submit(one.requests, replica)
    core.resume()
    drive(core, records)
    return [record.output().outputs[0] for record in records]
