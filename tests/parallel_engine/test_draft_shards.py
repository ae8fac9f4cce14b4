"""Drafters whose layers the target's ranks share: the same tokens, and drafts as good as whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drumline.engine.core import EngineCore
from drumline.engine.fleet_core import FleetCore
from drumline.models import tiny_drafts
from parallel_engine.fleet import Fleets, Job, config, run

K = 3
JOBS = [Job((5 + index, 9, 2 * index + 1), 6 + index) for index in range(4)]
METHODS = ("draft_model", "eagle", "eagle3", "eagle3-moe", "mtp", "dflash")


@pytest.fixture(scope="module")
def moe(tiny_path: Callable[..., Path]) -> Path:
    path = tiny_path("qwen3_moe", 5)
    if not (path / "dflash").exists():
        tiny_drafts.add_mtp(path, 0)
        tiny_drafts.write_eagle(path, path / "eagle", 0)
        tiny_drafts.write_eagle3(path, path / "eagle3", 0, draft_vocab=64)
        tiny_drafts.write_eagle3(path, path / "eagle3-moe", 0, layer="qwen3_moe")
        tiny_drafts.write_dflash(path, path / "dflash", 0)
    return path


@pytest.fixture(scope="module")
def alone(moe: Path) -> list[tuple[int, ...]]:
    return [out.token_ids for out in run(EngineCore.load(config(moe)), JOBS)]


def start(fleets: Fleets, moe: Path, method: str, shards: int, **more: Any) -> FleetCore:
    asked: dict[str, Any] = {"method": method.removesuffix("-moe"), "num_speculative_tokens": K}
    if method == "draft_model":
        asked["model"] = str(moe)
    elif method != "mtp":
        asked["model"] = str(moe / method)
    asked["draft_tensor_parallel_size"] = shards
    return fleets.start(moe, tensor_parallel_size=2, speculative_config=json.dumps(asked), **more)


def shared(core: FleetCore, phase: str) -> int:
    """Sums over tp that a rank issued in draft passes."""
    ring = core.ranks.ring(1)
    assert ring is not None
    entries = [record.entry for record in ring.records if record.completed]
    return sum(
        e.operation == "all_reduce" and e.group == "tp" and e.phase == phase for e in entries
    )


@pytest.mark.parametrize("method", METHODS)
def test_shared_drafters_draft_as_whole_ones(
    method: str, fleets: Fleets, moe: Path, alone: list[tuple[int, ...]]
) -> None:
    """A whole drafter sums embeddings alone, a shared one every block of its layers too."""
    counts, sums = [], []
    for shards in (1, 2):
        core = start(fleets, moe, method, shards)
        assert [out.token_ids for out in run(core, JOBS)] == alone
        counts.append((core.speculation.drafted, core.speculation.accepted))
        core.pause()
        sums.append(shared(core, "draft"))
        core.close()
    assert counts[0][0] > 10
    assert abs(counts[1][1] - counts[0][1]) <= 1  # a near tie may fall to either side
    assert sums[1] > 2 * sums[0] or (sums[0] == 0 and sums[1] > 0)
    if method == "draft_model":  # the target itself, cut alike: the same bits
        assert counts[1][0] == counts[1][1]


def test_shares_of_spread_experts(fleets: Fleets, moe: Path, alone: list[tuple[int, ...]]) -> None:
    core = start(fleets, moe, "mtp", 2, data_parallel_size=2, enable_expert_parallel=True, seed=0)
    assert [out.token_ids for out in run(core, JOBS)] == alone
    core.close()


@pytest.mark.parametrize(
    ("layout", "miss"),
    [
        ({"tensor_parallel_size": 2}, None),
        ({"data_parallel_size": 2, "enable_expert_parallel": True}, 2),
    ],
    ids=["tp", "dp+ep"],
)
def test_shared_passes_are_made_whatever_a_lookup_finds(
    layout: dict[str, Any], miss: int | None, fleets: Fleets, moe: Path
) -> None:
    """One rank's rows are found and another's are not: all make the passes of the script."""
    batch = [Job((5, 9, 5, 9, 5, 9), 8), *JOBS, Job((7, 7, 7), 5)]
    whole = [out.token_ids for out in run(EngineCore.load(config(moe)), batch)]
    asked = {"method": "mtp", "num_speculative_tokens": K, "prompt_lookup_min": 1}
    asked["draft_tensor_parallel_size"] = layout.get("tensor_parallel_size", 1)
    if miss is not None:
        asked["lookup_miss_tokens"] = miss
    core = fleets.start(moe, speculative_config=json.dumps(asked), **layout)
    assert [out.token_ids for out in run(core, batch)] == whole
    assert core.speculation.drafted > 10
    core.pause()
    ring = core.ranks.ring(0)
    assert ring is not None
    parts: dict[int, set[int]] = {}
    for record in ring.records:
        if record.entry.phase == "target":
            parts.setdefault(record.step, set())
        elif record.entry.phase == "draft":
            parts.setdefault(record.step, set()).add(record.entry.part)
    del parts[min(parts)]  # of which the ring may have lost the beginning
    every = set(range(K if miss is None else miss))
    assert all(made in ({0}, every) for made in parts.values())
    assert every in parts.values()
    core.close()
