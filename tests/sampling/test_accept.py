"""Verification: match against sampling one by one, and what holds for every method."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.sampling.accept import Accepted, Verifier
from drumline.sampling.history import SamplingRow
from drumline.sampling.sampler import LogprobsMode, SampledToken, Sampler
from drumline.sampling.window import Window
from sampling import scalar
from sampling.rows import EOS, VOCAB, make_logits, make_row, sampling_rows

METHODS = ("match", "standard", "block")


def one_by_one(
    logits: torch.Tensor, row: SamplingRow, mode: LogprobsMode = LogprobsMode.RAW
) -> list[SampledToken]:
    """What comes without speculation if the model says ``logits`` at the next positions."""
    tokens: list[SampledToken] = []
    for at in range(len(logits)):
        committed = [*row.committed, *row.drafts, *(token.token_id for token in tokens)]
        plain = SamplingRow(row.request, committed)
        tokens += Sampler(VOCAB, mode).sample(logits[at : at + 1], [plain])
    return tokens


def ids(tokens: list[SampledToken] | tuple[SampledToken, ...]) -> tuple[int, ...]:
    return tuple(token.token_id for token in tokens)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(sampling_rows(), min_size=1, max_size=4),
    seed=st.integers(0, 10**6),
    right=st.lists(st.integers(0, 4), min_size=4, max_size=4),
    levels=st.sampled_from([None, 2]),
    mode=st.sampled_from(list(LogprobsMode)),
)
def test_what_match_returns_does_not_depend_on_drafts(
    rows: list[SamplingRow], seed: int, right: list[int], levels: int | None, mode: LogprobsMode
) -> None:
    """Right for a while, then random: the tokens and log-probabilities are the leading ones of
    those that come without speculation, bit for bit, and go on past the last right draft."""
    rng = np.random.default_rng(seed)
    parts, windows, plain = [], [], []
    for number, row in enumerate(rows):
        row = replace(row, request=replace(row.request, number=number))
        count = int(rng.integers(0, 5))
        part = make_logits(count + 1, VOCAB, seed + number, levels)
        expected = one_by_one(part, row, mode)
        drafts = ids(expected)[: min(right[number], count)]
        drafts += tuple(rng.integers(0, VOCAB, count - len(drafts)).tolist())
        windows.append(Window(row.request, [*row.committed, *row.drafts], drafts))
        plain.append(expected)
        parts.append(part)
    logits = torch.cat(parts)
    untouched = logits.clone()
    accepted = Verifier(Sampler(VOCAB, mode), "match").verify(logits, windows)
    assert torch.equal(logits, untouched)
    for window, expected, got in zip(windows, plain, accepted, strict=True):
        agree = [one == two for one, two in zip(window.drafts, ids(expected), strict=False)]
        count = (*agree, False).index(False)
        assert got == Accepted(tuple(expected[: count + 1]), count)


OPTIONS: dict[str, dict[str, Any]] = {
    "frequency": {"frequency_penalty": 1.0},
    "presence": {"presence_penalty": 0.5},
    "repetition": {"repetition_penalty": 1.2},
    "min_tokens": {"min_tokens": 12},
    "min_p": {"min_p": 0.02},
    "bias": {"logit_bias": {4: 3.0, 9: -5.0}},
    "allowed": {"allowed_token_ids": tuple(range(3, 30))},
    "bad_words": {"bad_words": ((EOS,), (9, 11))},
}
OPTIONS["together"] = {name: value for one in OPTIONS.values() for name, value in one.items()}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_acts_on_every_position_of_a_window(
    option: str, temperature: float, method: str
) -> None:
    """CASES 41: an oracle's window under each option. A few favourites close together, so that
    penalties matter within it: under match all four tokens equal the run without speculation."""
    logits = make_logits(4, VOCAB, 7) / 100
    logits[:, [EOS, 4, 11, 9]] += torch.tensor([6.1, 6.0, 5.9, 5.7])
    row = make_row(outputs=(4, 9), temperature=temperature, seed=3, **OPTIONS[option])
    expected = one_by_one(logits, row)
    if temperature == 0.0 and option not in ("bias", "min_p"):
        plain = make_row(outputs=(4, 9), temperature=temperature, seed=3)
        assert ids(expected) != ids(one_by_one(logits, plain))  # the option has an effect
    window = Window(row.request, row.committed, ids(expected)[:3])
    (got,) = Verifier(Sampler(VOCAB), method).verify(logits, [window])
    if method == "match" or temperature == 0.0:
        assert got == Accepted(tuple(expected), 3)
    for at, token in enumerate(ids(got.tokens)):
        history = [*row.committed, *ids(got.tokens)[:at]]
        possible = scalar.processed(logits[at].tolist(), row.request, history)
        assert temperature == 0.0 or possible[token] > -math.inf


def test_a_minimum_reached_inside_a_window_lets_the_end_token_through_there() -> None:
    logits = make_logits(4, VOCAB, 7)
    logits[:, EOS] += 30.0
    row = make_row(outputs=(4,), temperature=0.0, min_tokens=3)
    expected = ids(one_by_one(logits, row))
    assert [token == EOS for token in expected] == [False, False, True, True]
    for method in METHODS:
        window = Window(row.request, row.committed, (*expected[:2], EOS))
        (got,) = Verifier(Sampler(VOCAB), method).verify(logits, [window])
        assert ids(got.tokens) == expected


@pytest.mark.parametrize("mode", list(LogprobsMode))
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("right", [0, 2, 3])
def test_every_returned_token_has_its_logprobs(
    method: str, temperature: float, mode: LogprobsMode, right: int
) -> None:
    """CASES 40: accepted, corrected and bonus tokens, raw and processed, with a penalty: one
    entry per token, the values of the scalar log-softmax at the position's true history."""
    logits = make_logits(4, VOCAB, 2)
    row = make_row(
        outputs=(4,), temperature=temperature, frequency_penalty=0.8, logprobs=3, top_p=0.95
    )
    expected = one_by_one(logits, row, mode)
    drafts = ids(expected)[:right] + (60,) * (3 - right)
    window = Window(row.request, row.committed, drafts)
    (got,) = Verifier(Sampler(VOCAB, mode), method).verify(logits, [window])
    if method == "match":
        assert list(got.tokens) == expected[: right + 1]
    for at, token in enumerate(got.tokens):
        history = [*row.committed, *ids(got.tokens)[:at]]
        values = logits[at].tolist()
        if mode is LogprobsMode.PROCESSED:
            values = scalar.processed(values, row.request, history)
        assert token.logprobs is not None
        assert token.logprobs.token.token_id == token.token_id
        assert token.logprobs.token.rank == scalar.rank(values, token.token_id)
        assert len(token.logprobs.top) == 3
        known = scalar.log_softmax(values)
        for one in (token.logprobs.token, *token.logprobs.top):
            assert one.logprob == pytest.approx(known[one.token_id], abs=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_greedy_requests_are_matched_whatever_the_method(method: str) -> None:
    logits = make_logits(4, VOCAB, 4)
    row = make_row(temperature=0.0, logprobs=2)
    expected = one_by_one(logits, row)
    for right in range(4):
        drafts = ids(expected)[:right] + (60,) * (3 - right)
        window = Window(row.request, row.committed, drafts)
        (got,) = Verifier(Sampler(VOCAB), method).verify(logits, [window])
        assert got == Accepted(tuple(expected[: right + 1]), right)


@pytest.mark.parametrize("method", METHODS)
def test_without_drafts_every_method_samples_as_ever(method: str) -> None:
    logits = make_logits(8, VOCAB, 4)
    rows = [make_row(number=n, seed=n, top_p=0.9, logprobs=1) for n in range(8)]
    got = Verifier(Sampler(VOCAB), method).verify(
        logits, [Window(row.request, row.committed) for row in rows]
    )
    assert got == [Accepted((token,), 0) for token in Sampler(VOCAB).sample(logits, rows)]


# ---- numbers that are not finite -----------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bad", range(4))
def test_a_window_ends_before_logits_that_are_no_numbers(
    bad: int, method: str, temperature: float, value: float
) -> None:
    """At the first position the request fails, alone; later, what stands before it stands."""
    logits = make_logits(12, VOCAB, 5)
    logits[:, 4] += 50.0  # the token of every position, by any rule
    rows = [make_row(number=n, seed=n, temperature=temperature) for n in range(3)]
    windows = [Window(row.request, row.committed, (4, 4, 4)) for row in rows]
    logits[4 + bad, :] = value
    got = Verifier(Sampler(VOCAB), method).verify(logits, windows)
    assert [ids(one.tokens) for one in got] == [(4,) * 4, (4,) * bad, (4,) * 4]
    assert [one.draft_count for one in got] == [3, bad, 3]
    problem = "the model's logits for position 3 are not finite numbers"
    assert [one.error for one in got] == [None, problem if bad == 0 else None, None]


def test_a_nan_behind_a_ban_ends_a_window_too() -> None:
    """It would not be drawn, but log-probabilities are of all logits."""
    logits = make_logits(1, VOCAB)
    logits[0, 9] = math.nan
    row = make_row(allowed_token_ids=(3, 4), logprobs=1)
    (got,) = Verifier(Sampler(VOCAB)).verify(logits, [Window(row.request, row.committed)])
    assert got.error is not None


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_behind_a_rejection_is_looked_at(method: str, temperature: float) -> None:
    """A liar's window costs one position: what comes after may be anything."""
    logits = make_logits(4, VOCAB, 5)
    logits[1:] = math.nan
    logits[0, 4] = -math.inf  # the draft is impossible
    row = make_row(temperature=temperature)
    sampler = Sampler(VOCAB)
    looked: list[int] = []
    target = sampler.target
    sampler.target = lambda raw, row: looked.append(len(row.drafts)) or target(raw, row)  # type: ignore[method-assign, func-returns-value]
    (got,) = Verifier(sampler, method).verify(
        logits, [Window(row.request, row.committed, (4, 5, 6))]
    )
    assert (len(got.tokens), got.draft_count, looked) == (1, 0, [0])


def test_probabilities_come_for_each_draft_or_for_none() -> None:
    row = make_row()
    with pytest.raises(AssertionError, match="probabilities for each draft"):
        Window(row.request, row.committed, (4, 5), (None,))
