"""Compiled draws against the numpy form, over parameters, vocabularies and instruction sets."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("drumline._native", reason="the native module was not built")

from drumline._native import available_paths
from drumline.core.params import SamplingParams
from drumline.core.random import Purpose, purpose_word
from drumline.core.request import Request
from drumline.sampling.draw import LogitDraw, draw_tokens
from drumline.sampling.history import SamplingRow
from drumline.sampling.native_draw import NativeDrawer
from drumline.sampling.noise import TokenTable

PATHS = available_paths()

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.01, 0.3, 0.8, 1.0, 1.7, 5.0]),
    top_p=st.sampled_from([1.0, 1.0, 0.99, 0.9, 0.5, 1e-6]),
    top_k=st.sampled_from([0, 0, 1, 2, 17, 300, 100_000]),
    min_p=st.sampled_from([0.0, 0.0, 0.001, 0.3, 1.0]),
)


def make_draw(
    rng: np.random.Generator, params: SamplingParams, count: int, spread: float
) -> LogitDraw:
    logits = (rng.standard_normal(count) * spread).astype(np.float32)
    if rng.random() < 0.5:  # ties, bans and both zeros
        logits = np.round(logits)
        logits[rng.random(count) < 0.2] = -np.inf
        logits[rng.integers(count)] = np.float32(-0.0)
    request = Request(
        number=1,
        prompt_token_ids=(1,),
        params=params,
        max_tokens=10,
        seed=int(rng.integers(2**63)),
        sample_index=int(rng.integers(3)),
    )
    table = None
    if rng.random() < 0.3:
        table = TokenTable.of(np.sort(rng.choice(4 * count, count, replace=False)).astype(np.int64))
    row = SamplingRow(request, [1] * int(rng.integers(1, 900)))
    purpose = [Purpose.TARGET, purpose_word(Purpose.DRAFT, 2)][int(rng.integers(2))]
    sharpening = [1.0, 1.0, 1.5, 8.0][int(rng.integers(4))]
    return LogitDraw(row, logits, float(logits.max()), purpose, table, sharpening)


@pytest.mark.parametrize("path", PATHS)
@given(
    seed=st.integers(0, 2**32),
    params=PARAMS,
    count=st.sampled_from([1, 2, 7, 31, 32, 33, 100, 128, 511, 4099]),
    spread=st.sampled_from([0.0, 0.5, 3.0, 20.0, 1e30]),
)
@settings(max_examples=400, deadline=None)
def test_places_are_those_of_the_numpy_form(
    path: str, seed: int, params: SamplingParams, count: int, spread: float
) -> None:
    rng = np.random.default_rng(seed)
    draws = [make_draw(rng, params, count, spread) for _ in range(3)]
    assert NativeDrawer(path)(draws) == draw_tokens(draws)


def test_a_whole_vocabulary_with_many_rows_and_threads() -> None:
    """A real vocabulary's size, flat enough that thousands of tokens stay in the nucleus."""
    rng = np.random.default_rng(5)
    draws = []
    for temperature, top_p in [(0.8, 0.9), (1.0, 1.0), (2.5, 0.95), (0.7, 0.999), (0.2, 1.0)] * 4:
        params = SamplingParams(temperature=temperature, top_p=top_p)
        draws.append(make_draw(rng, params, 49152, 3.0))
    expected = draw_tokens(draws)
    assert len(set(expected)) > 10
    for path in PATHS:
        assert NativeDrawer(path, threads=2)(draws) == expected
        assert [NativeDrawer(path)([draw])[0] for draw in draws] == expected


def test_places_follow_the_distribution() -> None:
    """Shares of 20,000 draws against softmax after top_k: the noise itself, not the numpy form."""
    logits = np.array([2.0, 1.0, 0.5, 0.0, -1.0, -8.0], dtype=np.float32)
    params = SamplingParams(temperature=0.9, top_k=5)
    request = Request(number=1, prompt_token_ids=(1,), params=params, max_tokens=10, seed=3)
    draws = [
        LogitDraw(SamplingRow(replace(request, seed=seed), [1, 2, 3]), logits, 2.0)
        for seed in range(20_000)
    ]
    counts = np.bincount(NativeDrawer(PATHS[0])(draws), minlength=6)
    weights = np.exp((logits - 2.0) / 0.9)
    weights[5] = 0.0
    wanted = weights / weights.sum() * 20_000
    assert counts[5] == 0
    statistic = float((((counts - wanted) ** 2)[:5] / wanted[:5]).sum())
    assert statistic < 23.5, counts  # 4 degrees of freedom, p = 1e-4


def test_draws_from_given_scores_keep_their_place_in_line() -> None:
    rng = np.random.default_rng(2)
    lazy = [make_draw(rng, SamplingParams(temperature=1.0), 50, 2.0) for _ in range(4)]
    mixed = [lazy[0].plain, lazy[1], lazy[2].plain, lazy[3]]
    assert NativeDrawer(PATHS[0])(mixed) == draw_tokens(lazy)
    assert NativeDrawer(PATHS[0])([]) == []


@pytest.mark.parametrize("path", PATHS)
def test_the_smallest_temperature_takes_the_best(path: str) -> None:
    logits = np.array([1.0, 3.0, 3.0, -math.inf], dtype=np.float32)
    params = SamplingParams(temperature=1e-300)
    request = Request(number=1, prompt_token_ids=(1,), params=params, max_tokens=10, seed=3)
    draw = LogitDraw(SamplingRow(request, [1]), logits, 3.0)
    assert NativeDrawer(path)([draw])[0] in (1, 2)
    assert NativeDrawer(path)([draw]) == draw_tokens([draw])
