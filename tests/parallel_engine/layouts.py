"""One batch on one layout of ranks, held against one rank alone.

A case names a layout, whether experts are spread, a drafter and how its length is chosen. The
covering array of the suite and the whole matrix run their cases here, so that both mean the same.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from drumline.core.ledger import CAPACITY
from drumline.engine.core import EngineCore
from drumline.engine.fleet_core import FleetCore
from drumline.engine.loading import Core
from drumline.models import tiny_drafts
from drumline.models.tiny import write_tiny
from parallel_engine.fleet import Job, bits, config, logs, run

K = 3
LOGPROB_TOLERANCE = 1e-4  # over tp, where sums are added in another order
GAP = 1e-3  # between the best two of a position: below it tokens may differ over tp
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


def combinations(factors: Mapping[str, Sequence[Any]]) -> Iterator[Case]:
    for values in itertools.product(*factors.values()):
        case = dict(zip(factors, values, strict=True))
        if case["method"] != "none" or case["length"] == "static":
            yield case


def name_of(case: Case) -> str:
    dp, tp = case["layout"]
    experts = "spread" if case["experts"] else "whole"
    return f"layout dp={dp} tp={tp} experts={experts} {case['method']} {case['length']}"


def write_model(path: Path, **sizes: Any) -> Path:
    """A tiny model with experts and every drafter of it."""
    write_tiny("qwen3_moe", path, 3, **sizes)
    tiny_drafts.add_mtp(path, 0)
    tiny_drafts.write_eagle3(path, path / "eagle3", 0, layer="qwen3_moe")
    tiny_drafts.write_dflash(path, path / "dflash", 0)
    return path


def speculation(model: Path, method: str, length: str = "static") -> dict[str, Any]:
    """Settings for a drafter by its name here. It lies in a folder of its own beside the weights;
    where there is none the target drafts itself, or with the module in its checkpoint."""
    if method == "none":
        return {}
    asked: dict[str, Any] = {"method": method, "num_speculative_tokens": K}
    if (model / method).is_dir():
        asked["model"] = str(model / method)
    elif method == "draft_model":
        asked["model"] = str(model)
    if length == "table":
        asked["num_speculative_tokens_per_batch_size"] = [[1, 1, 3], [2, 2, 0], [3, 4, 2]]
    elif length == "adaptive":
        asked["draft_length"] = "adaptive"
    return {"speculative_config": json.dumps(asked)}


class Layouts:
    """``start``: as `Fleets.start`. ``shared``: what ranks that share layers gave first, by tp and
    experts, because over dp they must give it again, bit for bit."""

    def __init__(
        self,
        model: Path,
        start: Callable[..., FleetCore],
        jobs: Sequence[Job] = JOBS,
        **settings: Any,
    ) -> None:
        self.model = model
        self.start = start
        self.jobs = jobs
        self.settings = {"max_num_batched_tokens": 16, **settings}
        core = EngineCore.load(config(model, **self.settings))
        self.alone = bits(run(core, jobs))  # the truth: one rank without speculation
        self.shared: dict[tuple[int, bool], str] = {}
        self.found = ""  # a digest of what the last case gave

    def check(self, case: Case) -> Core:
        """Runs the batch; `AssertionError` where a bit, a log or a count is not what it must be."""
        dp, tp = case["layout"]
        core = self._load(dp, tp, case)
        outputs = run(core, self.jobs)
        found = bits(outputs)
        self.found = hashlib.sha256(repr(found).encode()).hexdigest()
        if tp == 1:
            assert found == self.alone
        else:
            check_close(found, self.alone, [job.temperature == 0 for job in self.jobs])
            assert self.found == self.shared.setdefault((tp, case["experts"]), self.found)
        assert {out.replica for out in outputs} == set(range(dp))
        itself = not (self.model / "draft_model").is_dir()
        if case["method"] == "draft_model" and tp == 1 and itself:  # its state is right
            assert core.speculation.accepted == core.speculation.drafted
        if isinstance(core, FleetCore):
            core.pause()  # nobody is in an exchange now
            check_exchanges(core, len(self.jobs))
            check_groups(core)
        return core

    def _load(self, dp: int, tp: int, case: Case) -> Core:
        settings = {
            "enable_expert_parallel": case["experts"],
            **speculation(self.model, case["method"], case["length"]),
            **self.settings,
        }
        if dp * tp == 1:
            return EngineCore.load(config(self.model, **settings))
        return self.start(self.model, data_parallel_size=dp, tensor_parallel_size=tp, **settings)


def check_close(found: list[Any], truth: list[Any], greedy: Sequence[bool]) -> None:
    """Log-probabilities within `LOGPROB_TOLERANCE`; the same tokens, but where the best two of a
    greedy position are nearer to each other than `GAP`: from there on the texts are two."""
    for one, other, choosy in zip(found, truth, greedy, strict=True):
        assert len(one[0]) == len(other[0])
        for left, right in zip(one[1], other[1], strict=True):
            if left.token.token_id != right.token.token_id:
                best, second = right.top[:2]
                assert choosy, "a drawn token differs"
                assert best.logprob - second.logprob <= GAP, "tokens differ, and not by a tie"
                break
            assert abs(left.token.logprob - right.token.logprob) < LOGPROB_TOLERANCE


def check_exchanges(core: FleetCore, arrivals: int) -> None:
    """Exactly one before each step, numbered without a gap, equal on all leaders."""
    if not core.mesh.agrees:
        return
    told = core.told()
    assert len({one.exchanges for one in told.values()}) == 1
    (steps,) = {one.steps for one in told.values()}
    # Beyond the steps: those that decided to sleep or to pause, at first, at last, perhaps between
    # two arrivals.
    assert steps + 2 <= told[0].exchanges <= steps + 3 + arrivals
    agreement = logs(core, "agreement", core.mesh.leaders)
    assert all(log == agreement[0] for log in agreement)
    numbers = [entry[0] for entry in agreement[0]]
    assert len(numbers) == told[0].exchanges
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def check_groups(core: FleetCore) -> None:
    """The members of every group issued the same, in order."""
    if core.mesh.expert_parallel:
        check_alike(core, "ep", core.mesh.ranks)
    for leader in core.mesh.leaders:
        check_alike(core, "tp", core.mesh.replica(leader))


def check_alike(core: FleetCore, group: str, ranks: range | tuple[int, ...]) -> None:
    """Ledgers keep the last records of all groups: where one is full, what all still hold."""
    found = logs(core, group, ranks)
    least = min(map(len, found))
    if not any(is_full(core, rank) for rank in ranks):
        assert all(len(log) == least for log in found), f"logs over {group} differ in length"
    assert least > 0 or len(ranks) == 1, f"nothing over {group}"
    last = [log[-least:] for log in found]
    assert all(log == last[0] for log in last), f"logs over {group} differ"


def is_full(core: FleetCore, rank: int) -> bool:
    ring = core.ranks.ring(rank)
    assert ring is not None
    return bool(ring.records) and ring.records[-1].sequence >= CAPACITY - 1
