"""One batch on one layout of ranks, held against one rank alone.

A case names a layout, whether experts are spread, a drafter and how its length is chosen. The
covering array of the suite and the whole matrix run their cases here, so that both mean the same.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from drumline.engine.core import EngineCore
from drumline.engine.fleet_core import FleetCore
from drumline.models import tiny_drafts
from drumline.models.tiny import write_tiny
from parallel_engine.fleet import Job, bits, config, logs, run

K = 3
JOBS = [
    *(Job((5 + index, 9, 2 * index + 1), 4 + 2 * index) for index in range(6)),
    *(Job((7, 3 + index) * 3, 6, temperature=0.9) for index in range(3)),
    Job(tuple(range(3, 40)), 9),  # its prefill takes several steps beside the others' decoding
]
FACTORS: dict[str, tuple[Any, ...]] = {
    "layout": ((2, 1), (4, 1), (2, 2), (1, 2)),  # dp, tp
    "experts": (False, True),
    "method": ("none", "ngram", "draft_model", "eagle3", "mtp", "dflash"),
    "length": ("static", "table", "adaptive"),
}
Case = dict[str, Any]


def combinations() -> Iterator[Case]:
    for values in itertools.product(*FACTORS.values()):
        case = dict(zip(FACTORS, values, strict=True))
        if case["method"] != "none" or case["length"] == "static":
            yield case


def name_of(case: Case) -> str:
    dp, tp = case["layout"]
    experts = "spread" if case["experts"] else "whole"
    return f"layout dp={dp} tp={tp} experts={experts} {case['method']} {case['length']}"


def write_model(path: Path) -> Path:
    """A tiny model with experts and every drafter of it."""
    write_tiny("qwen3_moe", path, 3)
    tiny_drafts.add_mtp(path, 0)
    tiny_drafts.write_eagle3(path, path / "eagle3", 0, layer="qwen3_moe")
    tiny_drafts.write_dflash(path, path / "dflash", 0)
    return path


def speculation(model: Path, method: str, length: str = "static") -> dict[str, Any]:
    """Settings for a drafter by its name here."""
    if method == "none":
        return {}
    asked: dict[str, Any] = {"method": method, "num_speculative_tokens": K}
    if method == "draft_model":
        asked["model"] = str(model)
    elif method not in ("ngram", "mtp"):
        asked["model"] = str(model / method)
    if length == "table":
        asked["num_speculative_tokens_per_batch_size"] = [[1, 1, 3], [2, 2, 0], [3, 4, 2]]
    elif length == "adaptive":
        asked["draft_length"] = "adaptive"
    return {"speculative_config": json.dumps(asked)}


def alone(model: Path, **settings: Any) -> list[Any]:
    """The truth: one rank without speculation."""
    return bits(run(EngineCore.load(config(model, max_num_batched_tokens=16, **settings)), JOBS))


class Layouts:
    """``start``: as `Fleets.start`. Keeps what ranks that share layers gave first, because over dp
    they must give it again, bit for bit."""

    def __init__(self, model: Path, start: Callable[..., FleetCore], **settings: Any) -> None:
        self.model = model
        self.start = start
        self.settings = settings
        self.alone = alone(model, **settings)
        self.shared: dict[tuple[int, bool], list[Any]] = {}

    def check(self, case: Case) -> FleetCore:
        """Runs the batch; `AssertionError` where a bit, a log or a count is not what it must be."""
        dp, tp = case["layout"]
        core = self.start(
            self.model,
            data_parallel_size=dp,
            tensor_parallel_size=tp,
            enable_expert_parallel=case["experts"],
            max_num_batched_tokens=16,
            **speculation(self.model, case["method"], case["length"]),
            **self.settings,
        )
        outputs = run(core, JOBS)
        found = bits(outputs)
        if tp == 1:
            assert found == self.alone
        else:
            assert [out.token_ids for out in outputs] == [one[0] for one in self.alone]
            assert largest_difference(found, self.alone) < 1e-4
            assert found == self.shared.setdefault((tp, case["experts"]), found)
        assert {out.replica for out in outputs} == set(range(dp))
        if case["method"] == "draft_model" and tp == 1:  # the target drafts: its state is right
            assert core.speculation.accepted == core.speculation.drafted
        core.pause()  # nobody is in an exchange now
        check_exchanges(core)
        check_groups(core)
        return core


def largest_difference(found: list[Any], truth: list[Any]) -> float:
    """Of the log-probabilities of equal tokens."""
    return max(
        abs(one.token.logprob - other.token.logprob)
        for (_, left, *_), (_, right, *_) in zip(found, truth, strict=True)
        for one, other in zip(left, right, strict=True)
    )


def check_exchanges(core: FleetCore) -> None:
    """Exactly one before each step, numbered without a gap, equal on all leaders."""
    if not core.mesh.agrees:
        return
    told = core.told()
    assert len({one.exchanges for one in told.values()}) == 1
    (steps,) = {one.steps for one in told.values()}
    # Beyond the steps: those that decided to sleep or to pause, at first, at last, perhaps between
    # two arrivals.
    assert steps + 2 <= told[0].exchanges <= steps + 3 + len(JOBS)
    agreement = logs(core, "agreement", core.mesh.leaders)
    assert all(log == agreement[0] for log in agreement)
    numbers = [entry[0] for entry in agreement[0]]
    assert len(numbers) == told[0].exchanges
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def check_groups(core: FleetCore) -> None:
    """The members of every group issued the same, in order."""
    if core.mesh.expert_parallel:
        spread = logs(core, "ep", core.mesh.ranks)
        assert spread[0]
        assert all(log == spread[0] for log in spread)
    for leader in core.mesh.leaders:
        shared = logs(core, "tp", core.mesh.replica(leader))
        assert all(log == shared[0] for log in shared)
