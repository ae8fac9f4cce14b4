"""Whatever speculates, the same tokens and the same bits of every log-probability."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drafting.methods import METHODS
from drafting.world import VOCAB, truth
from engine.circumstances import CHUNKS, DRAFT_LENGTHS, K, Truth, check
from engine.covering import covering_array

TinyPath = Callable[..., Path]

FACTORS: dict[str, list[Any]] = {
    "method": list(METHODS),
    "k": list(K),
    "draft_length": list(DRAFT_LENGTHS),
    "sampled": [False, True],
    "caching": [True, False],
    "chunk": list(CHUNKS),
    "preempt": [False, True],
    "padded": [True, False],
    "mixed": [False, True],
}
CASES = covering_array(FACTORS)


@pytest.fixture(scope="module")
def target(tiny_path: TinyPath) -> Path:
    return tiny_path(arch="llama", seed=3, vocab=VOCAB)


@pytest.fixture(scope="module")
def alone(target: Path) -> Truth:
    return {sampled: truth(target, sampled) for sampled in (False, True)}


def test_the_array_is_small_and_meets_every_pair() -> None:
    assert len(CASES) <= 60
    for one, other in itertools.combinations(FACTORS, 2):
        met = {(case[one], case[other]) for case in CASES}
        assert met == set(itertools.product(FACTORS[one], FACTORS[other]))


def test_the_batch_is_worth_comparing(alone: Truth) -> None:
    assert sum(len(tokens) for tokens, *_ in alone[True]) > 90
    assert all(greedy[0] != sampled[0] for greedy, sampled in zip(*alone.values(), strict=True))
    assert max(len(set(tokens)) for tokens, *_ in alone[False]) > 8


def _id(case: dict[str, Any]) -> str:
    return "-".join(str(value) for value in case.values())


@pytest.mark.parametrize("case", CASES, ids=_id)
def test_same_bits(target: Path, alone: Truth, case: dict[str, Any]) -> None:
    check(target, alone, METHODS[case["method"]], case)
