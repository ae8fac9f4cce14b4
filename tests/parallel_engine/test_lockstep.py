"""Ranks that share collectives: bits of one rank, one exchange per step, equal logs on all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drumline.core.errors import ConfigError
from drumline.engine.core import EngineCore
from drumline.engine.fleet_core import FleetCore
from drumline.models import tiny_drafts
from engine.covering import covering_array
from parallel_engine.fleet import Fleets, Job, bits, config, logs, run

TinyPath = Callable[..., Path]
K = 3
JOBS = [
    *(Job((5 + index, 9, 2 * index + 1), 4 + 2 * index) for index in range(6)),
    *(Job((7, 3 + index) * 3, 6, temperature=0.9) for index in range(3)),
    Job(tuple(range(3, 40)), 9),  # its prefill takes several steps beside the others' decoding
]
METHODS = ("none", "ngram", "draft_model", "eagle3", "eagle3-moe", "mtp", "dflash")
FACTORS = {
    "layout": ((1, 1), (2, 1), (4, 1), (2, 2), (1, 2)),  # dp, tp
    "experts": (False, True),
    "method": METHODS,
    "length": ("static", "table", "adaptive"),
}
CASES = covering_array(FACTORS)[:24]


@pytest.fixture(scope="module")
def moe(tiny_path: TinyPath) -> Path:
    """A tiny model with experts and every drafter of it."""
    path = tiny_path("qwen3_moe", 3)
    if not (path / "dflash").exists():
        tiny_drafts.add_mtp(path, 0)
        tiny_drafts.write_eagle3(path, path / "eagle3", 0, layer="llama")
        tiny_drafts.write_eagle3(path, path / "eagle3-moe", 0, layer="qwen3_moe")
        tiny_drafts.write_dflash(path, path / "dflash", 0)
    return path


@pytest.fixture(scope="module")
def alone(moe: Path) -> list[Any]:
    return bits(run(EngineCore.load(config(moe, max_num_batched_tokens=16)), JOBS))


def speculation(moe: Path, method: str, length: str = "static") -> dict[str, Any]:
    """Settings for a drafter by its name here."""
    if method == "none":
        return {}
    asked: dict[str, Any] = {"method": method.removesuffix("-moe"), "num_speculative_tokens": K}
    if method == "draft_model":
        asked["model"] = str(moe)
    elif method not in ("ngram", "mtp"):
        asked["model"] = str(moe / method)
    if length == "table":
        asked["num_speculative_tokens_per_batch_size"] = [[1, 1, 3], [2, 2, 0], [3, 4, 2]]
    elif length == "adaptive":
        asked["draft_length"] = "adaptive"
    return {"speculative_config": json.dumps(asked)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_every_layout_gives_the_bits_of_one_rank(
    fleets: Fleets, moe: Path, alone: list[Any], case: dict[str, Any]
) -> None:
    dp, tp = case["layout"]
    if dp * tp == 1:
        core: Any = EngineCore.load(
            config(moe, max_num_batched_tokens=16, **speculation(moe, case["method"]))
        )
        assert bits(run(core, JOBS)) == alone
        return
    core = fleets.start(
        moe,
        data_parallel_size=dp,
        tensor_parallel_size=tp,
        enable_expert_parallel=case["experts"],
        max_num_batched_tokens=16,
        **speculation(moe, case["method"], case["length"]),
    )
    found = run(core, JOBS)
    if tp == 1:
        assert bits(found) == alone
    else:
        assert [out.token_ids for out in found] == [one[0] for one in alone]
        for out, (_, logprobs, *_) in zip(found, alone, strict=True):
            pairs = zip(out.logprobs or (), logprobs, strict=True)
            assert all(abs(a.token.logprob - b.token.logprob) < 1e-4 for a, b in pairs)
    assert {out.replica for out in found} == set(range(dp))
    if case["method"] == "draft_model":  # the target itself drafts, so its state is right if all is
        assert core.speculation.accepted == core.speculation.drafted or tp > 1
    core.pause()  # nobody is in an exchange now
    told = core.told()
    if core.mesh.agrees:
        assert len({one.exchanges for one in told.values()}) == 1
        (steps,) = {one.steps for one in told.values()}
        # One exchange per step, and those that decided to sleep or to pause: at first, at last,
        # perhaps between two arrivals.
        assert steps + 2 <= told[0].exchanges <= steps + 3 + len(JOBS)
        agreement = logs(core, "agreement", core.mesh.leaders)
        assert all(log == agreement[0] for log in agreement)
        numbers = [entry[0] for entry in agreement[0]]
        assert len(numbers) == told[0].exchanges
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    if case["experts"]:
        spread = logs(core, "ep", core.mesh.ranks)
        assert spread[0]
        assert all(log == spread[0] for log in spread)
    for leader in core.mesh.leaders:
        shared = logs(core, "tp", core.mesh.replica(leader))
        assert all(log == shared[0] for log in shared)


def test_what_does_not_draft_over_tp_is_refused_by_name(moe: Path) -> None:
    asked = {"method": "drumline.drafting.testing.Liar", "num_speculative_tokens": 2}
    with pytest.raises(ConfigError, match=r"drafts with tensor_parallel_size=1 only, not 2"):
        FleetCore.load(config(moe, tensor_parallel_size=2, speculative_config=json.dumps(asked)))
