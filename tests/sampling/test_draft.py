"""Drafts: against the scalar twin, and what coupling is for."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.core.errors import UsageError
from drumline.core.random import Purpose
from drumline.sampling.draft import DraftSampler, DraftToken
from drumline.sampling.history import SamplingRow
from drumline.sampling.sampler import Sampler
from sampling import scalar_rules
from sampling.chain import quantile
from sampling.rows import VOCAB, make_logits, make_row, sampling_rows

METHODS = ("coupled", "greedy", "probabilistic")
TABLE = np.sort(np.random.default_rng(3).permutation(VOCAB)[:23])


def history(row: SamplingRow) -> list[int]:
    return [*row.committed, *row.drafts]


def spread(logits: torch.Tensor, table: np.ndarray | None) -> list[float]:
    """One row over the target's vocabulary: what the draft vocabulary lacks cannot come."""
    if table is None:
        return logits.tolist()
    wide = [-math.inf] * VOCAB
    for token, value in zip(table.tolist(), logits.tolist(), strict=True):
        wide[token] = value
    return wide


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(sampling_rows(), min_size=1, max_size=4),
    seed=st.integers(0, 10**6),
    beta=st.sampled_from([1.0, 1.4, 5.0]),
    reduced=st.booleans(),
    method=st.sampled_from(METHODS),
    levels=st.sampled_from([None, 2]),
)
def test_equals_the_scalar_drafts(
    rows: list[SamplingRow], seed: int, beta: float, reduced: bool, method: str, levels: int | None
) -> None:
    """Every parameter, under the whole and a reduced vocabulary, in company."""
    rows = [
        replace(row, request=replace(row.request, number=number)) for number, row in enumerate(rows)
    ]
    table = TABLE if reduced else None
    sampler = DraftSampler(VOCAB, method, beta, table)
    logits = make_logits(len(rows), sampler.draft_vocab_size, seed, levels)
    for row, values, got in zip(rows, logits, sampler.draw(logits, rows), strict=True):
        wide = spread(values, table)
        edited = scalar_rules.scalar.edit(wide, row.request, history(row))
        if max(edited) == -math.inf:
            assert got is None  # nothing that is allowed is in the draft vocabulary
            continue
        assert got is not None
        greedy = method == "greedy" or row.request.params.temperature == 0
        if greedy:
            assert got == DraftToken(edited.index(max(edited)))
        elif method == "coupled":
            token = scalar_rules.coupled(wide, row.request, history(row), beta)
            assert got == DraftToken(token)
        else:
            check_probabilistic(
                got, scalar_rules.draft_scores(wide, row.request, history(row), beta), row
            )


def check_probabilistic(got: DraftToken, scores: list[float], row: SamplingRow) -> None:
    def noise(token: int) -> float:
        return scalar_rules.noise(row.request, row.position, token, Purpose.DRAFT, len(row.drafts))

    best = max(range(VOCAB), key=lambda token: (scores[token] + noise(token), -token))
    assert got.token_id == best
    assert got.probs is not None
    probs = got.probs.at_ids(np.arange(VOCAB))
    assert probs == pytest.approx(scalar_rules.softmax(scores), abs=1e-12)
    assert [got.probs.at(token) for token in range(VOCAB + 2)] == [*probs.tolist(), 0.0, 0.0]


@pytest.mark.parametrize("vocab", [1001, 9001])
def test_a_drafter_that_is_the_target_always_agrees(vocab: int) -> None:
    """The same logits give the target's own token: the noise is shared to the bit."""
    wishes = ({}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.5, "top_k": 40})
    rows = [make_row(number=n, outputs=(7,) * (n % 5), seed=n, **wishes[n % 3]) for n in range(30)]
    logits = make_logits(30, vocab, 1)
    tokens = [one.token_id for one in Sampler(vocab).sample(logits, rows)]
    assert len(set(tokens)) > 15
    drafts = DraftSampler(vocab).draw(logits, rows)
    assert [draft and draft.token_id for draft in drafts] == tokens
    other = DraftSampler(vocab, "probabilistic").draw(logits, rows)
    assert [draft and draft.token_id for draft in other] != tokens


def test_a_reduced_vocabulary_reads_the_noise_of_the_targets_ids() -> None:
    """Against a target that can say nothing else; few candidates and many."""
    vocab = 9001
    table = np.sort(np.random.default_rng(0).permutation(vocab)[:3000])
    wishes = ({}, {"top_p": 0.5}, {"top_k": 2000}, {"presence_penalty": 0.5})
    rows = [make_row(number=n, outputs=(7, 8), seed=n, **wishes[n % 4]) for n in range(32)]
    narrow = make_logits(32, 3000, 1)
    wide = torch.full((32, vocab), -math.inf)
    wide[:, torch.from_numpy(table)] = narrow
    tokens = [one.token_id for one in Sampler(vocab).sample(wide, rows)]
    drafts = DraftSampler(vocab, token_table=torch.from_numpy(table)).draw(narrow, rows)
    assert [draft and draft.token_id for draft in drafts] == tokens


def test_coupled_drafts_agree_more_often_than_greedy_ones() -> None:
    """A drafter close to its target, temperature 0.8, 1,500 positions: at least 15 points more.
    The standard error of the difference is below 2 points."""
    count, vocab = 1500, 64
    target = make_logits(count, vocab, 1) * 0.6
    drafter = target + make_logits(count, vocab, 2) * 0.1
    rows = [make_row(number=n, seed=n, temperature=0.8) for n in range(count)]
    tokens = [one.token_id for one in Sampler(vocab).sample(target, rows)]

    def agreement(method: str, sharpening: float = 1.0) -> float:
        drafts = DraftSampler(vocab, method, sharpening).draw(drafter, rows)
        hits = [d is not None and d.token_id == t for d, t in zip(drafts, tokens, strict=True)]
        return sum(hits) / count

    assert agreement("coupled") > agreement("greedy") + 0.15
    assert agreement("coupled") > agreement("probabilistic") + 0.15
    assert agreement("coupled", math.inf) == agreement("greedy")


def test_probabilistic_drafts_follow_the_distribution_they_name() -> None:
    """Chi-square over 4,000 drafts, 1 - 1e-4 quantile, beta 1.5, reduced vocabulary."""
    logits = make_logits(1, len(TABLE), 8) / 2
    rows = [make_row(seed=seed, temperature=1.2, top_p=0.95) for seed in range(4000)]
    sampler = DraftSampler(VOCAB, "probabilistic", 1.5, TABLE)
    drafts = [draft for draft in sampler.draw(logits.expand(4000, -1), rows) if draft is not None]
    probs = drafts[0].probs
    assert probs is not None
    mean = 4000 * probs.at_ids(np.arange(VOCAB))
    assert mean.sum() == pytest.approx(4000)
    counts = np.bincount([draft.token_id for draft in drafts], minlength=VOCAB)
    assert counts[mean == 0].sum() == 0
    cells = mean > 0
    statistic = float(((counts[cells] - mean[cells]) ** 2 / mean[cells]).sum())
    assert statistic < quantile(int(cells.sum()) - 1)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_that_are_no_numbers_give_no_draft(
    value: float, temperature: float, method: str
) -> None:
    """And leave the neighbours alone."""
    logits = make_logits(3, VOCAB)
    rows = [make_row(number=n, seed=n, temperature=temperature) for n in range(3)]
    sampler = DraftSampler(VOCAB, method)
    expected = [draft and draft.token_id for draft in sampler.draw(logits, rows)]
    logits[1, :] = value
    got = [draft and draft.token_id for draft in sampler.draw(logits, rows)]
    assert got == [expected[0], None, expected[2]]
    assert sampler.draw(logits[:0], []) == []


@pytest.mark.parametrize("method", METHODS)
def test_drafts_before_a_position_count_in_its_penalties(method: str) -> None:
    """Each draft is pushed out by its own repetition."""
    logits = torch.zeros(1, VOCAB)
    logits[0, :4] = torch.tensor([31.0, 30.5, 30.0, 29.5])
    row = make_row(temperature=0.01, presence_penalty=2.0)
    sampler = DraftSampler(VOCAB, method)
    drafts: tuple[int, ...] = ()
    for _ in range(4):
        (draft,) = sampler.draw(logits, [SamplingRow(row.request, row.committed, drafts)])
        assert draft is not None
        drafts += (draft.token_id,)
    assert drafts == (0, 1, 2, 3)
    sampler.forget(0)
    assert len(sampler.state) == 0


@pytest.mark.parametrize(
    ("table", "sharpening", "problem"),
    [
        ([3, 3, 5], 1.0, "draft id 1 stands for 3, not above 3"),
        ([3, 9, 5], 1.0, "draft id 2 stands for 5, not above 9"),
        ([-1, 5], 1.0, "not inside the vocabulary of 61"),
        ([3, 61], 1.0, "not inside the vocabulary of 61"),
        ([], 1.0, "shape"),
        (None, 0.5, "sharpening 0.5"),
        (None, math.nan, "sharpening nan"),
    ],
)
def test_tables_and_sharpenings_that_make_no_sense(
    table: list[int] | None, sharpening: float, problem: str
) -> None:
    with pytest.raises(UsageError, match=problem):
        DraftSampler(VOCAB, "coupled", sharpening, table)
