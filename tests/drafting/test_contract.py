"""The conformance kit over every drafter; and a ledger that notices what it should."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drafting import kit
from drafting.methods import METHODS, Method
from drafting.world import VOCAB, truth
from drumline.core.traits import DrafterTraits
from drumline.drafting.base import PassLedger
from drumline.lockstep.script import pass_sizes

TinyPath = Callable[..., Path]
ALL = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


@pytest.fixture(scope="module")
def target(tiny_path: TinyPath) -> Path:
    path = tiny_path(arch="llama", seed=3, vocab=VOCAB)
    for sampled in (False, True):
        truth(path, sampled)
    return path


@pytest.mark.parametrize("padded", [True, False])
@ALL
def test_passes(target: Path, method: Method, padded: bool) -> None:
    kit.check_passes(target, method, 3, padded)


@pytest.mark.parametrize("padded", [True, False])
@ALL
def test_range(target: Path, method: Method, padded: bool) -> None:
    kit.check_range(target, method, 3, padded)


def suffix_without_others(target: Path) -> dict[str, Any]:
    return {"method": "suffix", "suffix_decoding_max_cached_requests": 0}


STEADY = {name: method for name, method in METHODS.items() if method.steady} | {
    "suffix": Method("suffix", suffix_without_others)
}


@pytest.mark.parametrize("method", STEADY.values(), ids=STEADY)
def test_steady(target: Path, method: Method) -> None:
    kit.check_steady(target, method, 3)


@ALL
def test_reads(target: Path, method: Method) -> None:
    kit.check_reads(target, method, 3)


@ALL
def test_forgets(target: Path, method: Method) -> None:
    kit.check_forgets(target, method, 3)


# ---- the ledger and the sizes --------------------------------------------------------------------


def test_the_ledger_notices_passes_too_many_too_few_and_too_large() -> None:
    ledger = PassLedger()
    ledger.begin((4, 2))
    assert ledger.issue(3) == 4
    with pytest.raises(AssertionError, match="1 draft passes issued, the script says 2"):
        ledger.end()
    with pytest.raises(AssertionError, match="takes 3 tokens, the script says 2"):
        ledger.issue(3)
    assert ledger.issue(0) == 2
    ledger.end()
    with pytest.raises(AssertionError, match="not in the script"):
        ledger.issue(1)


ROWS = [(4, True), (7, False), (1, True)]  # (target tokens, samples)


@pytest.mark.parametrize(
    ("traits", "by_k"),
    [
        ({}, {0: (), 3: ()}),
        ({"runs_forward": True}, {0: (), 1: (2,), 3: (2, 2, 2)}),
        ({"runs_forward": True, "stateful": True}, {0: (12,), 1: (12,), 3: (12, 2, 2)}),
        ({"runs_forward": True, "stateful": True, "catch_up": 1}, {0: (15,), 3: (15, 2, 2)}),
        ({"runs_forward": True, "in_one_pass": True}, {0: (), 1: (2,), 3: (2,)}),
        (
            {"runs_forward": True, "stateful": True, "in_one_pass": True, "queries_ahead": 1},
            {0: (12,), 1: (12 + 2 * 2,), 3: (12 + 2 * 4,)},
        ),
    ],
)
def test_sizes_follow_from_traits_and_plan(
    traits: dict[str, object], by_k: dict[int, tuple[int, ...]]
) -> None:
    made = DrafterTraits(method="any", **traits)  # type: ignore[arg-type]
    for k, sizes in by_k.items():
        assert pass_sizes(made, ROWS, k) == sizes
        assert len(sizes) == made.passes(k)
