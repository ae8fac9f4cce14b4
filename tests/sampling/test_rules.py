"""standard and block: against their scalar twins, and against the distribution they must keep.

The statistical tests count the sequences of many requests that differ only in their seed. They
compare with the 1 - 1e-4 quantile of chi-square: with other seeds, correct rules would fail one
run of this file in about 900 (11 comparisons). With these seeds the outcome is always the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from drumline.core.random import Purpose, uniform_bits
from drumline.sampling import draft, rules
from drumline.sampling.accept import Verifier
from drumline.sampling.distribution import Distribution
from drumline.sampling.history import SamplingRow
from drumline.sampling.sampler import Sampler
from drumline.sampling.window import Window, WindowLogits
from sampling import scalar_rules
from sampling.chain import chi_square, expected, speculate
from sampling.rows import VOCAB, make_logits, make_row, sampling_rows

TWINS = {"standard": scalar_rules.standard, "block": scalar_rules.block}


@pytest.mark.parametrize("method", ["standard", "block"])
@settings(max_examples=150, deadline=None)
@given(
    row=sampling_rows(),
    seed=st.integers(0, 10**6),
    count=st.integers(0, 4),
    nearness=st.sampled_from([0.0, 0.3, 1.0, 5.0]),
    drawn=st.booleans(),
)
def test_equals_the_scalar_rule(
    method: str, row: SamplingRow, seed: int, count: int, nearness: float, drawn: bool
) -> None:
    """Any parameters, drafts from anything between the target's own distribution and noise."""
    rng = np.random.default_rng(seed)
    logits = make_logits(count + 1, VOCAB, seed)
    window = Window(row.request, [*row.committed, *row.drafts])
    for ahead in range(count):
        history = [*window.committed, *window.drafts]
        p = scalar_rules.target_probs(logits[ahead].tolist(), row.request, history)
        q = np.array(p) * np.exp(nearness * rng.standard_normal(VOCAB))
        if rng.random() < 0.3:
            q[rng.integers(0, VOCAB)] += 0.1  # a token the target may not have
        q /= q.sum()
        token = int(rng.choice(VOCAB, p=q))
        probs = None
        if drawn:
            ids = np.flatnonzero(q)
            sparse = Distribution(ids, q[ids])
            probs = Distribution(None, q) if rng.random() < 0.5 else sparse
        window = structs.replace(
            window, drafts=(*window.drafts, token), probs=(*window.probs, probs)
        )
    known = [window.drawn_from(ahead).at_ids(np.arange(VOCAB)).tolist() for ahead in range(count)]
    tokens = TWINS[method](
        logits.tolist(), row.request, list(window.committed), list(window.drafts), known
    )
    (got,) = Verifier(Sampler(VOCAB), method).verify(logits, [window])
    assert [token.token_id for token in got.tokens] == tokens
    assert got.draft_count == len(tokens) - 1
    assert got.error is None


def test_a_prefix_stands_where_drafter_and_target_differ_by_rounding_only() -> None:
    """A mass far below the rounding of 1 is a chance of 1, not a division by zero."""
    logits = make_logits(4, VOCAB, 5)
    logits[:, 4] += 50.0
    for seed in range(20):
        window = Window(make_row(seed=seed).request, (5, 6, 7), (4, 4, 4))
        (got,) = Verifier(Sampler(VOCAB), "block").verify(logits, [window])
        assert [token.token_id for token in got.tokens] == [4] * 4


TARGET = make_logits(4, 4, 1) / 2
DRAFTER = TARGET + make_logits(4, 4, 2) / 3
MIDDLE = TARGET + make_logits(4, 4, 2) / 1.5
FAR = make_logits(4, 4, 5) / 2
WISHES: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.6, "top_p": 0.8},
)


@pytest.mark.parametrize(
    ("method", "drafts", "wish"),
    [
        ("standard", "greedy", 0),
        ("standard", "greedy", 1),
        ("standard", "probabilistic", 1),
        ("standard", "probabilistic", 2),
        ("block", "greedy", 1),
        ("block", "greedy", 2),
        ("block", "probabilistic", 0),
        ("block", "probabilistic", 1),
    ],
)
def test_tokens_follow_the_target(method: str, drafts: str, wish: int) -> None:
    """20,000 draws, as 10,000 pairs of tokens; drafts in windows of two."""
    request = make_row(prompt=(1,), **WISHES[wish]).request
    counts, stood = speculate(request, range(10_000), TARGET, DRAFTER, 2, 2, method, drafts)
    assert chi_square(counts, expected(request, TARGET, 2)) < 1
    assert 0.5 < stood < 1.9  # both outcomes are exercised


@pytest.mark.parametrize("drafter", [DRAFTER, FAR], ids=["near", "far"])
def test_runs_through_several_blocks_follow_the_target(drafter: torch.Tensor) -> None:
    """Triples of tokens over windows of three that overlap, with a penalty on what came before:
    the joint distribution, which shared draws between windows would bend."""
    request = make_row(prompt=(1,), temperature=1.2, frequency_penalty=0.7).request
    counts, _ = speculate(request, range(5_000), TARGET, drafter, 3, 3, "block", "probabilistic")
    assert chi_square(counts, expected(request, TARGET, 3)) < 1


def test_standard_over_several_windows_follows_the_target() -> None:
    request = make_row(prompt=(1,), temperature=1.2, presence_penalty=0.9, min_p=0.05).request
    counts, _ = speculate(request, range(5_000), TARGET, FAR, 2, 3, "standard", "probabilistic")
    assert chi_square(counts, expected(request, TARGET, 3)) < 1


# ---- rules that are wrong ------------------------------------------------------------------

Patch = tuple[Any, str, Callable[..., Any]]


def _target_after_rejection(target: Any, p: Any, q: Any, weight: float) -> Any:
    return target.draw


_EXCESS_DRAW = rules._excess_draw


def _excess_without_weight(target: Any, p: Any, q: Any, weight: float) -> Any:
    return _EXCESS_DRAW(target, p, q, 1.0)


def _acceptance_by_position(view: WindowLogits, ahead: int) -> float:
    window = view.window
    position = len(window.committed) + ahead
    return (uniform_bits(window.request.seed, 0, position, Purpose.ACCEPT) + 0.5) / 2**32


def _all_stand(view: WindowLogits, ahead: int) -> float:
    return 0.0


def _drawn_from_anything(window: Window, ahead: int) -> Distribution:
    return Distribution(None, np.full(4, 0.25))


WRONG = (
    ("standard", "probabilistic", FAR, rules, "_excess_draw", _target_after_rejection),
    ("standard", "probabilistic", FAR, rules, "_uniform", _all_stand),
    ("standard", "probabilistic", FAR, Window, "drawn_from", _drawn_from_anything),
    ("standard", "greedy", DRAFTER, rules, "_excess_draw", _target_after_rejection),
    ("block", "probabilistic", FAR, rules, "_excess_draw", _target_after_rejection),
    ("block", "probabilistic", MIDDLE, rules, "_excess_draw", _excess_without_weight),
    ("block", "probabilistic", FAR, Window, "drawn_from", _drawn_from_anything),
    ("block", "greedy", DRAFTER, rules, "_uniform", _acceptance_by_position),
    ("block", "probabilistic", MIDDLE, draft, "purpose_word", lambda purpose, _: int(purpose)),
)


@pytest.mark.parametrize(("method", "drafts", "drafter", "owner", "name", "wrong"), WRONG)
def test_a_wrong_rule_is_rejected(
    method: str,
    drafts: str,
    drafter: torch.Tensor,
    owner: Any,
    name: str,
    wrong: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Among them draws keyed by position alone, which come again in the next window: what block
    verification has looked at beyond what it kept is then no longer random."""
    monkeypatch.setattr(owner, name, wrong)
    request = make_row(prompt=(1,)).request
    subtle = wrong is _excess_without_weight or owner is draft
    draws = 5_000 if subtle else 2_000
    length = 2 if wrong is _excess_without_weight else 3  # fewer sequences, each counted better
    counts, _ = speculate(request, range(draws), TARGET, drafter, length, length, method, drafts)
    assert chi_square(counts, expected(request, TARGET, length)) > 1.1


def test_block_accepts_more_than_standard() -> None:
    """Over 3,000 windows of four; the margin is two standard errors of the difference."""
    request = make_row(prompt=(1,)).request
    stood = {
        method: speculate(request, range(3_000), TARGET, FAR, 4, 1, method, "probabilistic")[1]
        for method in ("standard", "block")
    }
    assert stood["block"] > stood["standard"] + 0.05
