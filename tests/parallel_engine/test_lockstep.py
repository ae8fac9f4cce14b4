"""Ranks that share collectives: bits of one rank, one exchange per step, equal logs on all."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drumline.core.errors import ConfigError
from drumline.core.ledger import CAPACITY, Ledger, parse_ring, size_of
from drumline.core.request import PositionLogprobs, TokenLogprob
from drumline.engine.core import EngineCore
from drumline.engine.fleet_core import FleetCore
from engine.covering import covering_array
from parallel_engine.fleet import Fleets, bits, config, run
from parallel_engine.layouts import (
    FACTORS,
    JOBS,
    Case,
    Layouts,
    check_alike,
    check_close,
    name_of,
    write_model,
)

TinyPath = Callable[..., Path]
CASES = covering_array(FACTORS)
assert len(CASES) <= 24


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory, _nursery: Fleets) -> Layouts:
    return Layouts(write_model(tmp_path_factory.mktemp("layouts") / "model"), _nursery.start)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_every_layout_gives_the_bits_of_one_rank(
    fleets: Fleets, layouts: Layouts, case: Case
) -> None:
    layouts.check(case)


def ledgers(*agreements: int, sizes: Sequence[int]) -> Any:
    """An engine as far as its logs go: each rank issued one operation of each size over ep, and
    exchanged as often as said before it."""
    rings = []
    for rank, count in enumerate(agreements):
        memory = bytearray(size_of(CAPACITY))
        ledger = Ledger(memory, rank)
        for step, size in enumerate(sizes):
            ledger.begin(0, step)
            for group in ("agreement",) * count + ("ep",):
                ledger.complete(ledger.issue("all_gather", group, (size,), "float32"))
        if rank == 1 and sizes[-1] == 0:  # one that parts from the others
            ledger.complete(ledger.issue("all_gather", "ep", (5,), "float32"))
        rings.append(parse_ring(bytes(memory)))
    return SimpleNamespace(ranks=SimpleNamespace(ring=rings.__getitem__))


def test_logs_are_compared_also_where_ledgers_have_run_over() -> None:
    check_alike(ledgers(1, 1, sizes=(1, 2, 3)), "ep", (0, 1))
    with pytest.raises(AssertionError, match="differ in length"):
        check_alike(ledgers(1, 1, sizes=(1, 2, 0)), "ep", (0, 1))
    many = [1 + at % 9 for at in range(CAPACITY)]
    check_alike(ledgers(0, 1, sizes=many), "ep", (0, 1))
    with pytest.raises(AssertionError, match="logs over ep differ"):
        check_alike(ledgers(0, 1, sizes=[*many, 0]), "ep", (0, 1))
    with pytest.raises(AssertionError, match="nothing over tp"):
        check_alike(ledgers(0, 0, sizes=many), "tp", (0, 1))


@pytest.mark.parametrize("tp", [3, 4])
def test_uneven_and_many_shares_of_a_layer(fleets: Fleets, tiny_path: TinyPath, tp: int) -> None:
    """Four groups of heads over three ranks, and over four; beside them two replicas of it."""
    path = tiny_path("qwen3_moe", 5, heads=8, kv_heads=4)
    truth = bits(run(EngineCore.load(config(path)), JOBS))
    core = fleets.start(path, tensor_parallel_size=tp)
    found = bits(run(core, JOBS))
    assert [one[0] for one in found] == [one[0] for one in truth]
    check_close(found, truth, [job.temperature == 0 for job in JOBS])


def position(token: int, logprob: float, second: float) -> PositionLogprobs:
    best = TokenLogprob(token, logprob, 1)
    return PositionLogprobs(best, (best, TokenLogprob(token + 1, second, 2)))


def test_over_tp_only_a_tie_may_fall_the_other_way() -> None:
    """What the layouts are held against can fail: by a logprob, a token, a drawn token."""
    truth = [((4, 5), [position(4, -1.0, -1.0005), position(5, -1.0, -2.0)])]

    def with_first(one: PositionLogprobs) -> list[Any]:
        return [((one.token.token_id, 5), [one, truth[0][1][1]])]

    check_close(with_first(position(4, -1.00009, -1.0005)), truth, [True])
    check_close(with_first(position(7, -1.0, -1.0005)), truth, [True])
    with pytest.raises(AssertionError):
        check_close(with_first(position(4, -1.0002, -1.0005)), truth, [True])
    with pytest.raises(AssertionError, match="drawn"):
        check_close(with_first(position(7, -1.0, -1.0005)), truth, [False])
    wide = [((4, 5), [position(4, -1.0, -1.002), truth[0][1][1]])]
    with pytest.raises(AssertionError, match="not by a tie"):
        check_close(with_first(position(7, -1.0, -1.0005)), wide, [True])


def test_what_does_not_draft_over_tp_is_refused_by_name(tiny_path: TinyPath) -> None:
    path = tiny_path("qwen3_moe")
    asked = {"method": "drumline.drafting.testing.Liar", "num_speculative_tokens": 2}
    with pytest.raises(ConfigError, match=r"drafts with tensor_parallel_size=1 only, not 2"):
        FleetCore.load(config(path, tensor_parallel_size=2, speculative_config=json.dumps(asked)))
