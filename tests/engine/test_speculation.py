"""Whatever speculates, the same tokens and the same bits of every log-probability."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drafting.methods import METHODS
from drafting.world import LENGTH, VOCAB, Signature, jobs, run, truth
from engine.covering import covering_array

TinyPath = Callable[..., Path]

FACTORS: dict[str, list[Any]] = {
    "method": list(METHODS),
    "k": [1, 3, 5, 8],
    "draft_length": ["static", "table", "adaptive"],
    "sampled": [False, True],
    "caching": [True, False],
    "chunk": [5, 256],
    "preempt": [False, True],
    "padded": [True, False],
    "mixed": [False, True],
}
CASES = covering_array(FACTORS)


@pytest.fixture(scope="module")
def target(tiny_path: TinyPath) -> Path:
    return tiny_path(arch="llama", seed=3, vocab=VOCAB)


@pytest.fixture(scope="module")
def alone(target: Path) -> dict[bool, list[Signature]]:
    return {sampled: truth(target, sampled) for sampled in (False, True)}


def test_the_array_is_small_and_meets_every_pair() -> None:
    assert len(CASES) <= 60
    for one, other in itertools.combinations(FACTORS, 2):
        met = {(case[one], case[other]) for case in CASES}
        assert met == set(itertools.product(FACTORS[one], FACTORS[other]))


def test_the_batch_is_worth_comparing(alone: dict[bool, list[Signature]]) -> None:
    assert sum(len(tokens) for tokens, *_ in alone[True]) > 90
    assert all(greedy[0] != sampled[0] for greedy, sampled in zip(*alone.values(), strict=True))
    assert max(len(set(tokens)) for tokens, *_ in alone[False]) > 8


def _id(case: dict[str, Any]) -> str:
    return "-".join(str(value) for value in case.values())


@pytest.mark.parametrize("case", CASES, ids=_id)
def test_same_bits(target: Path, alone: dict[bool, list[Signature]], case: dict[str, Any]) -> None:
    method = METHODS[case["method"]]
    k = min(case["k"], method.k_max)
    settings: dict[str, Any] = {
        "max_num_batched_tokens": case["chunk"],
        "max_num_seqs": min(8, case["chunk"]),
        "enable_prefix_caching": case["caching"],
        "disable_padded_drafter_batch": not case["padded"],
        "draft_length": case["draft_length"],
        "rounds": 2 if case["caching"] else 1,
    }
    if case["draft_length"] == "table":
        table = [[1, 2, k], [3, 4, 0], [5, 6, max(1, k - 2)], [7, 8, k]]
        settings["num_speculative_tokens_per_batch_size"] = table
    if case["preempt"]:
        settings["cache_tokens"] = LENGTH
    llm, found = run(target, method, k, jobs(case["sampled"], case["mixed"] and k > 1), **settings)
    assert found == alone[case["sampled"]]
    speculator = llm.core.worker.speculator
    assert speculator is not None
    assert speculator.failure_count == 0
    if case["preempt"] and case["chunk"] == 256:  # few at a time need few blocks
        assert llm.core.counters.preemptions > 0
    if case["method"] in ("oracle", "brittle"):
        stats = llm.core.speculation
        assert stats.accepted >= 0.6 * stats.drafted > 0, stats  # stops and limits cut the rest
