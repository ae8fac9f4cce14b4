"""Noise, sums, order, history and the vocabulary check, each against its definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.core.params import SamplingParams
from drumline.core.random import MASK, Purpose, philox, seed_key, uniform_bits
from drumline.sampling.draw import _bits_needed, _from_all
from drumline.sampling.history import SamplingState, common_prefix
from drumline.sampling.noise import (
    GUMBEL_MAX,
    GUMBEL_MIN,
    chosen_bits,
    gumbel,
    gumbel_from_bits,
    philox_words,
    token_bits,
    uniform_from_bits,
)
from drumline.sampling.order import best_ids, rank_of, sorted_ids
from drumline.sampling.processors import edit, truncate
from drumline.sampling.reduce import log_sum_exp, tree_sum
from sampling.rows import make_logits, make_row

words = st.integers(0, MASK)
seeds = st.integers(-(2**63), 2**64 - 1)


@settings(deadline=None)
@given(
    counters=st.lists(st.tuples(words, words, words, words), min_size=1, max_size=9),
    key=st.tuples(words, words),
)
def test_array_philox_gives_the_scalar_integers(
    counters: list[tuple[int, int, int, int]], key: tuple[int, int]
) -> None:
    columns = np.array(counters, dtype=np.uint64).T
    lanes = philox_words((columns[0], columns[1], columns[2], columns[3]), key, len(counters))
    assert [tuple(map(int, lane)) for lane in lanes.T] == [philox(c, key) for c in counters]


@settings(deadline=None, max_examples=50)
@given(
    seed=seeds,
    sample=st.integers(0, 127),
    position=words,
    purpose=st.sampled_from(list(Purpose)),
    vocab=st.integers(1, 41),
)
def test_both_ways_to_token_bits_give_the_scalar_integers(
    seed: int, sample: int, position: int, purpose: Purpose, vocab: int
) -> None:
    expected = [uniform_bits(seed, sample, position, purpose, token) for token in range(vocab)]
    assert token_bits(seed, sample, position, purpose, vocab).tolist() == expected
    ids = np.arange(vocab)[::-1]
    other = np.array([vocab + 5])
    bits = chosen_bits([9, seed], [0, sample], [1, position], purpose, [other, ids])
    assert bits[0].tolist() == [uniform_bits(9, 0, 1, purpose, vocab + 5)]
    assert bits[1].tolist() == expected[::-1]


def test_purposes_share_no_numbers() -> None:
    drawn = [token_bits(3, 0, 8, purpose, 100).tolist() for purpose in Purpose]
    assert len({bits for row in drawn for bits in row}) == 100 * len(Purpose)


def test_uniforms_and_noise_at_the_extremes() -> None:
    """Strictly inside (0, 1), finite, monotonic in the bits, and within the stated bounds."""
    bits = np.array([0, 1, 2**31, MASK - 1, MASK], dtype=np.uint64)
    uniform = uniform_from_bits(bits)
    assert uniform[0] == 0.5 / 2**32
    assert uniform[-1] == 1 - 0.5 / 2**32 < 1
    noise = gumbel_from_bits(bits)
    assert noise.dtype == np.float32
    assert (np.diff(noise) > 0).all()
    assert (float(noise[0]), float(noise[-1])) == (GUMBEL_MIN, GUMBEL_MAX)
    assert math.isclose(GUMBEL_MAX, 33 * math.log(2), rel_tol=1e-6)


def test_noise_is_that_of_the_key_wherever_it_stands() -> None:
    table = gumbel([1, 2, 1], [0, 0, 5], [7, 8, 9], Purpose.TARGET, 1001)
    assert table.shape == (3, 1001)
    for row, key in enumerate([(1, 0, 7), (2, 0, 8), (1, 5, 9)]):
        alone = gumbel([key[0]], [key[1]], [key[2]], Purpose.TARGET, 1001)
        assert np.array_equal(table[row], alone[0])
        start = gumbel([key[0]], [key[1]], [key[2]], Purpose.TARGET, 17)
        assert np.array_equal(table[row, :17], start[0])
    assert abs(float(table.mean()) - 0.5772) < 0.1  # five standard errors


@given(noise=st.floats(-4, 30))
def test_no_token_is_left_out_that_has_the_noise(noise: float) -> None:
    """Just below the threshold on the bits the noise is smaller than asked."""
    needed = _bits_needed(noise)
    if needed > 0:
        below = gumbel_from_bits(np.array([int(needed) - 1], dtype=np.uint64))
        assert float(below[0]) < noise


def test_tokens_far_below_the_maximum_win_as_often_as_they_should() -> None:
    """One token at the top, 20,000 that trail by 9 to 10 nats and together outweigh it: the
    shortcut on the bits against the noise of every token."""
    scaled = -9 - np.random.default_rng(0).random(20_000)
    scaled[0] = 0.0
    winners = []
    for seed in range(40):
        bits = token_bits(seed, 0, 0, Purpose.TARGET, 20_000)
        winners.append(_from_all(scaled, bits))
        assert winners[-1] == int(np.argmax(scaled + gumbel_from_bits(bits)))
    assert sum(winner > 0 for winner in winners) > 10


@pytest.mark.parametrize(("top_p", "count"), [(0.25, 1), (0.26, 2), (0.5, 2), (0.75, 3), (0.9, 4)])
def test_top_p_stops_as_soon_as_p_is_reached(top_p: float, count: int) -> None:
    logits = np.array([-50.0, 2.0, 2.0, 2.0, 2.0], dtype=np.float32)
    kept = truncate(logits, (logits - 2.0).astype(np.float64), SamplingParams(top_p=top_p))
    assert kept is not None
    assert kept.tolist() == list(range(1, 1 + count))


@settings(deadline=None)
@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=70),
    st.integers(1, 4),
)
def test_the_tree_adds_in_its_pinned_order(values: list[float], rows: int) -> None:
    size = 1 << max(len(values) - 1, 0).bit_length()
    level = values + [0.0] * (size - len(values))
    while len(level) > 1:
        half = len(level) // 2
        level = [one + other for one, other in zip(level[:half], level[half:], strict=True)]
    table = np.tile(np.array(values), (rows, 1))
    assert tree_sum(table).tolist() == level * rows


@pytest.mark.parametrize("size", [1, 7, 8, 9, 1000, 4099])
def test_exponentials_do_not_depend_on_length_or_place(size: int) -> None:
    """The library functions that stand under every result: elementwise to the bit."""
    values = make_logits(1, size + 16, size).numpy()[0].astype(np.float64)
    for function in (np.exp, lambda one: np.log(np.abs(one) + 1e-9)):
        whole = function(values)
        for start in range(9):
            assert np.array_equal(
                function(values[start : start + size].copy()), whole[start:][:size]
            )
            assert np.array_equal(function(values[start : start + size]), whole[start:][:size])
    assert math.isclose(
        log_sum_exp(values - values.max()),
        math.log(math.fsum(map(math.exp, values - values.max()))),
        rel_tol=1e-12,
    )


@settings(deadline=None)
@given(
    size=st.integers(1, 700),
    count=st.integers(0, 800),
    levels=st.sampled_from([None, 1, 8]),
    banned=st.booleans(),
    double=st.booleans(),
)
def test_best_ids_and_ranks_follow_the_one_order(
    size: int, count: int, levels: int | None, banned: bool, double: bool
) -> None:
    values = make_logits(1, size, count, levels).numpy()[0]
    if banned:
        values[::3] = -np.inf
    values[values == 0] *= -1  # zeros of either sign are equal
    values = values.astype(np.float64) if double else values
    order = sorted(range(size), key=lambda token: (-values[token], token))
    assert best_ids(values, count).tolist() == order[:count]
    assert [rank_of(values, token) for token in order[:5]] == list(range(1, min(size, 5) + 1))


def test_long_lists_are_ordered_like_short_ones() -> None:
    """The radix order of long rows against the comparing one, ties and both zeros included."""
    values = make_logits(1, 20_000, 1, levels=50).numpy()[0]
    values[:100] = np.float32(-0.0)
    ids = np.arange(20_000)
    expected = np.argsort(-values, kind="stable")
    assert np.array_equal(sorted_ids(values, ids), expected)


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_common_prefix(one: list[int], other: list[int]) -> None:
    expected = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        expected += 1
    assert common_prefix(one, other) == expected
    assert common_prefix(one, one + other) == len(one)


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), max_size=40), min_size=1, max_size=8))
def test_counts_follow_any_sequence_of_histories(histories: list[list[int]]) -> None:
    """Rewinds, rejected drafts, re-admission: the kept state equals one built afresh."""
    state = SamplingState()
    for outputs in histories:
        row = make_row(prompt=(1, 1, 50), outputs=tuple(outputs[:3]), drafts=tuple(outputs[3:]))
        ids, times = state.counts(row).output_ids()
        assert dict(zip(ids.tolist(), times.tolist(), strict=True)) == {
            token: outputs.count(token) for token in set(outputs)
        }
        assert state.counts(row).seen_ids().tolist() == sorted({1, 50, *outputs})
        fresh = SamplingState()
        wish = {"frequency_penalty": 0.3, "presence_penalty": 0.2, "repetition_penalty": 1.1}
        penalised = make_row(0, row.request.prompt_token_ids, tuple(outputs), **wish)
        logits = make_logits(1, 64).numpy()[0]
        assert np.array_equal(edit(logits, penalised, state), edit(logits, penalised, fresh))
    state.forget(0)
    state.forget(0)
    assert len(state) == 0


def test_a_number_used_again_starts_afresh() -> None:
    state = SamplingState()
    state.counts(make_row(prompt=(1, 2), outputs=(9,)))
    assert state.counts(make_row(prompt=(3,), outputs=(8,))).seen_ids().tolist() == [3, 8]


@given(
    st.lists(st.integers(0, 9), max_size=6),
    st.lists(st.integers(0, 9), max_size=6),
    st.integers(0, 14),
)
def test_last_outputs_reach_back_through_drafts_but_not_into_the_prompt(
    outputs: list[int], drafts: list[int], count: int
) -> None:
    row = make_row(outputs=tuple(outputs), drafts=tuple(drafts))
    everything = outputs + drafts
    assert row.outputs() == everything
    assert row.output_count == len(everything)
    assert row.position == 3 + len(everything)
    assert row.last_outputs(count) == tuple(everything[max(len(everything) - count, 0) :])


def test_a_row_that_asks_for_nothing_is_not_copied() -> None:
    logits = make_logits(1, 64).numpy()[0]
    assert edit(logits, make_row(temperature=0.0), SamplingState()) is logits


def test_negative_seeds_are_taken_modulo_2_64() -> None:
    assert seed_key(-1) == (MASK, MASK)
    assert token_bits(-5, 0, 0, Purpose.TARGET, 8).tolist() == (
        token_bits(2**64 - 5, 0, 0, Purpose.TARGET, 8).tolist()
    )
