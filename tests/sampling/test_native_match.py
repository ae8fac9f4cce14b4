"""Compiled match acceptance against the step-by-step form: verified windows, and drafts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("drumline._native", reason="the native module was not built")

from drumline._native import available_paths
from drumline.core.request import Request
from drumline.sampling.accept import Accepted, Verifier
from drumline.sampling.draft import DraftSampler
from drumline.sampling.history import SamplingRow
from drumline.sampling.match import MakeMatcher
from drumline.sampling.native_match import NativeMatcher
from drumline.sampling.sampler import LogprobsMode, Sampler
from drumline.sampling.window import Window
from sampling.rows import VOCAB, make_logits, make_row, sampling_rows

PATHS = available_paths()


def quick(path: str = PATHS[0], threads: int = 1) -> MakeMatcher:
    return partial(NativeMatcher, path, threads)


def taken(row: SamplingRow) -> SamplingRow:
    """The row with such of its parameters as the matcher takes."""
    request = row.request
    names = ("temperature", "top_p", "top_k", "min_p")
    plain = make_row(
        prompt=request.prompt_token_ids,
        seed=request.seed,
        sample_index=request.sample_index,
        **{name: getattr(request.params, name) for name in names},
    )
    return replace(row, request=plain.request)


def spoil(logits: torch.Tensor, rng: np.random.Generator) -> None:
    """Some rows with what is no number, and some without a token."""
    for row in logits:
        kind = int(rng.integers(12))
        if kind == 0:
            row[int(rng.integers(row.shape[0]))] = float("nan")
        elif kind == 1:
            row[int(rng.integers(row.shape[0]))] = float("inf")
        elif kind == 2:
            row[:] = -float("inf")
        elif kind == 3:
            row[: row.shape[0] // 2] = -float("inf")


def make_windows(
    rows: list[SamplingRow], logits: torch.Tensor, widths: list[int], rng: np.random.Generator
) -> list[Window]:
    """Drafts that are right for a while, as the windows' own tokens one by one say."""
    windows, start = [], 0
    for number, (row, width) in enumerate(zip(rows, widths, strict=True)):
        request = replace(row.request, number=number)
        drafts: tuple[int, ...] = ()
        for at in range(width - 1):
            window = Window(request, row.committed, drafts)
            (own,) = Verifier(Sampler(VOCAB)).verify(logits[start : start + at + 1], [window])
            right = len(own.tokens) > at and rng.random() < 0.7
            drafts += (own.tokens[at].token_id if right else int(rng.integers(VOCAB)),)
        windows.append(Window(request, row.committed, drafts))
        start += width
    return windows


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(sampling_rows(), min_size=1, max_size=5),
    seed=st.integers(0, 10**6),
    levels=st.sampled_from([None, 2]),
    mode=st.sampled_from(list(LogprobsMode)),
    method=st.sampled_from(["match", "match", "standard", "block"]),
    plain=st.booleans(),
)
def test_windows_have_the_tokens_of_the_step_by_step_form(
    path: str,
    rows: list[SamplingRow],
    seed: int,
    levels: int | None,
    mode: LogprobsMode,
    method: str,
    plain: bool,
) -> None:
    rng = np.random.default_rng(seed)
    if plain:
        rows = [taken(row) for row in rows]
    widths = [int(rng.integers(1, 6)) for _ in rows]
    logits = make_logits(sum(widths), VOCAB, seed, levels)
    spoil(logits, rng)
    windows = make_windows(rows, logits, widths, rng)
    untouched = logits.clone()
    expected = Verifier(Sampler(VOCAB, mode), method).verify(logits, windows)
    for threads in (1, 2):
        verifier = Verifier(Sampler(VOCAB, mode, make_matcher=quick(path, threads)), method)
        assert verifier.verify(logits, windows) == expected
        assert verifier.verify(logits, windows) == expected  # recipes known
    assert torch.equal(logits.nan_to_num(7.5), untouched.nan_to_num(7.5))


def test_the_matcher_is_what_answers_where_it_can() -> None:
    """Bans, biases, penalties and log-probabilities are the others' business; no other window
    waits for them."""
    asked: list[tuple[int, bool]] = []

    class Watched(NativeMatcher):
        def __call__(self, logits, vocab, asks):  # type: ignore[no-untyped-def]
            found = super().__call__(logits, vocab, asks)
            asked.extend(
                (ask[0].number, one is not None) for ask, one in zip(asks, found, strict=True)
            )
            return found

    params = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.5, "min_tokens": 4},
    ]
    rows = [make_row(number=number, **one) for number, one in enumerate(params)]
    windows = [Window(row.request, row.committed) for row in rows]
    logits = make_logits(len(rows), VOCAB, 3)
    sampler = Sampler(VOCAB, make_matcher=partial(Watched, PATHS[0]))
    got = Verifier(sampler).verify(logits, windows)
    assert asked == [(0, True), (1, True), (2, False), (4, False)]
    assert got == Verifier(Sampler(VOCAB)).verify(logits, windows)


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(sampling_rows(), min_size=1, max_size=5),
    seed=st.integers(0, 10**6),
    levels=st.sampled_from([None, 2]),
    method=st.sampled_from(["coupled", "greedy", "probabilistic"]),
    sharpening=st.sampled_from([1.0, 2.5, float("inf")]),
    narrow=st.booleans(),
    plain=st.booleans(),
)
def test_drafts_are_those_of_the_row_by_row_form(
    path: str,
    rows: list[SamplingRow],
    seed: int,
    levels: int | None,
    method: str,
    sharpening: float,
    narrow: bool,
    plain: bool,
) -> None:
    rng = np.random.default_rng(seed)
    if plain:
        rows = [taken(row) for row in rows]
    rows = [
        replace(row, request=replace(row.request, number=number)) for number, row in enumerate(rows)
    ]
    table = np.flatnonzero(rng.random(VOCAB) < 0.5) if narrow else None
    if table is not None and not len(table):
        table = np.array([3])
    width = VOCAB if table is None else len(table)
    logits = make_logits(len(rows), width, seed, levels)
    spoil(logits, rng)
    expected = DraftSampler(VOCAB, method, sharpening, table).draw(logits, rows)
    sampler = DraftSampler(VOCAB, method, sharpening, table, make_matcher=quick(path))
    assert [one and one.token_id for one in sampler.draw(logits, rows)] == [
        one and one.token_id for one in expected
    ]


def test_sharpened_drafts_of_many_seeds() -> None:
    table = np.arange(0, VOCAB, 2)
    rows = [make_row(number=seed, seed=seed, temperature=1.5) for seed in range(64)]
    logits = make_logits(64, len(table), 1)
    drawn = {
        (sharpening, way is None): [
            one and one.token_id
            for one in DraftSampler(
                VOCAB, sharpening=sharpening, token_table=table, make_matcher=way
            ).draw(logits, rows)
        ]
        for sharpening in (1.0, 2.5)
        for way in (None, quick())
    }
    assert drawn[2.5, False] == drawn[2.5, True] != drawn[1.0, True] == drawn[1.0, False]


def test_a_number_that_comes_again_is_read_again() -> None:
    """What is kept of a request is never taken for another's."""
    logits = make_logits(1, VOCAB, 5)
    verifier = Verifier(Sampler(VOCAB, make_matcher=quick()))

    def answer(request: Request) -> Accepted:
        (got,) = verifier.verify(logits, [Window(request, [1, 2, 3])])
        (plain,) = Verifier(Sampler(VOCAB)).verify(logits, [Window(request, [1, 2, 3])])
        assert got == plain
        return got

    first = make_row(temperature=3.0, seed=1).request
    answers = {answer(replace(first, seed=seed)).tokens[0].token_id for seed in range(20)}
    assert len(answers) > 5
    verifier.forget(first.number)
    assert verifier.matcher is not None
    assert verifier.matcher._recipes == {}  # type: ignore[attr-defined]


def test_logits_of_another_size_or_layout_are_refused() -> None:
    verifier = Verifier(Sampler(VOCAB, make_matcher=quick()))
    window = Window(make_row(temperature=0.0).request, [1])
    for wrong in (
        torch.zeros(2, VOCAB),
        torch.zeros(1, VOCAB, dtype=torch.float64),
        torch.zeros(VOCAB, 2).T[:1],
    ):
        with pytest.raises(AssertionError, match="row"):
            verifier.verify(wrong, [window])
