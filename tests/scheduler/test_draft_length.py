"""Draft lengths alone: the table against a brute-force reading, and what adaptive settles on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.config import SpeculativeConfig
from drumline.core.errors import ConfigError
from drumline.core.plan import StepPlan
from drumline.lockstep.decide import most_per_time
from drumline.scheduler import (
    AdaptiveDraftLength,
    CostCurve,
    DraftLength,
    StaticDraftLength,
    TableDraftLength,
    dynamic_sd_lookup,
    make_draft_length,
)
from drumline.scheduler.acceptance import UNIT, Acceptance
from drumline.scheduler.testing import create_scheduler

from .world import make_request

# ---------------------------------------------------------------- the table


@st.composite
def tables(draw: st.DrawFn) -> list[list[int]]:
    """Disjoint ranges from 1 on, with gaps, in any order."""
    start, entries = 1, []
    for _ in range(draw(st.integers(1, 5))):
        end = start + draw(st.integers(0, 6))
        entries.append([start, end, draw(st.integers(0, 9))])
        start = end + 1 + draw(st.integers(0, 4))
    return draw(st.permutations(entries))


def brute_force(table: list[list[int]], k: int, batch_size: int) -> int:
    """Size by size from 1 on, as the rule is told: a gap carries the previous K on."""
    length = -1
    for size in range(1, batch_size + 1):
        for start, end, entry in table:
            if start <= size <= end:
                length = entry
    return min(length, k)


@given(table=tables(), k=st.integers(0, 9))
def test_the_lookup_is_the_table(table: list[list[int]], k: int) -> None:
    lookup = dynamic_sd_lookup(table, k)
    for batch_size in range(1, 60):
        assert lookup(batch_size) == lookup[batch_size] == brute_force(table, k, batch_size)


def test_gaps_and_the_tail_carry_on() -> None:
    lookup = dynamic_sd_lookup([(1, 16, 3), (32, 128, 2), (256, 2048, 0)], 3)
    sizes = (1, 16, 17, 31, 32, 128, 129, 255, 256, 2048, 10**6)
    assert [lookup(size) for size in sizes] == [3, 3, 3, 3, 2, 2, 2, 2, 0, 0, 0]
    with pytest.raises(AssertionError):
        lookup(0)


@pytest.mark.parametrize("table", ["x", None, [], [[1, 2]], [[2, 3, 1]], [[1, 1, -1]], [[3, 1, 1]]])
def test_what_is_no_table_is_a_value_error(table: Any) -> None:
    with pytest.raises(ValueError, match="."):
        dynamic_sd_lookup(table, 3)


def test_the_table_counts_who_decodes_and_nobody_is_neutral() -> None:
    length = TableDraftLength(5, dynamic_sd_lookup([[1, 2, 2], [3, 4, 0]], 5))
    assert [wish(length, range(count)) for count in range(6)] == [5, 2, 2, 0, 0, 0]


def wish(length: DraftLength, decoding: Sequence[int]) -> int:
    """What is chosen where nobody else has a say."""
    return length.choose(length.vote(decoding))


def spec(**keys: Any) -> SpeculativeConfig:
    return SpeculativeConfig.from_mapping({"method": "ngram", "num_speculative_tokens": 3, **keys})


def test_what_a_config_asks_for() -> None:
    table = {"num_speculative_tokens_per_batch_size": [[1, 4, 1]]}
    assert make_draft_length(None) == StaticDraftLength(0)
    assert make_draft_length(spec()) == StaticDraftLength(3)
    assert isinstance(make_draft_length(spec(**table)), TableDraftLength)
    adaptive = make_draft_length(spec(draft_length="adaptive"), flat_costs(3))
    assert isinstance(adaptive, AdaptiveDraftLength)
    assert adaptive.only_proposed, "a lookup that finds nothing costs nothing"
    lookup = {"prompt_lookup_min": 2, "draft_length": "adaptive"}
    for keys, free in (({}, False), ({"lookup_miss_tokens": 1}, True)):
        made = make_draft_length(spec(method="mtp", **lookup, **keys), flat_costs(3))
        assert made.only_proposed is free
    own = make_draft_length(spec(method="a.Class", draft_length="adaptive"), flat_costs(3))
    assert not own.only_proposed, "of which nobody knows what asking costs"
    # Several replicas keep the table and agree, unless they are told to take the static length.
    assert isinstance(make_draft_length(spec(**table), None, 2), TableDraftLength)
    told = spec(**table, dp_draft_length="static")
    assert make_draft_length(told, None, 2) == StaticDraftLength(3)
    assert isinstance(make_draft_length(told, None, 1), TableDraftLength)


def test_the_test_constructor() -> None:
    scheduler = create_scheduler(
        max_num_seqs=8,
        max_num_batched_tokens=64,
        num_speculative_tokens=3,
        num_speculative_tokens_per_batch_size=[[1, 1, 3], [2, 4, 1], [5, 8, 0]],
    )
    for number in range(3):
        scheduler.add(make_request(number, [1, 2, 3], 8))
    proposal = scheduler.propose()
    assert proposal.draft_wish == scheduler.num_spec_tokens_to_schedule == 3  # nobody decodes yet
    assert StepPlan(0, 0, (), draft_k=2).num_spec_tokens_to_schedule == 2
    assert create_scheduler().settings.num_speculative_tokens == 0
    with pytest.raises(ConfigError, match="must start at 1"):
        create_scheduler(
            num_speculative_tokens=3, num_speculative_tokens_per_batch_size=[[2, 4, 1]]
        )
    with pytest.raises(ConfigError, match="must be given"):
        create_scheduler(num_speculative_tokens_per_batch_size=[[1, 4, 1]])
    with pytest.raises(ConfigError, match="must be at most 128"):
        create_scheduler(num_speculative_tokens=500)


# ---------------------------------------------------------------- adaptive


def flat_costs(k: int, rows: int = 4, base: int = 1000, step: int = 100) -> CostCurve:
    classes = (rows - 1).bit_length() + 1
    return CostCurve([[base + step * length for length in range(k + 1)] for _ in range(classes)])


class Stage:
    """Scripted acceptance and cost around an adaptive length; time and chance are the stage's."""

    def __init__(self, k: int, rows: int, costs: list[int], guess: CostCurve) -> None:
        self.k = k
        self.costs = costs  # true microseconds by K
        self.length = AdaptiveDraftLength(k, guess)
        self.numbers = range(rows)
        self.rng = random.Random(5)
        self.chosen: list[int] = []

    def play(self, rates: list[float], steps: int) -> list[int]:
        """``rates``: the true chance per position; returns the lengths chosen."""
        before = len(self.chosen)
        for _ in range(steps):
            k = wish(self.length, self.numbers)
            for number in self.numbers:
                right = 0
                while right < k and self.rng.random() < rates[right]:
                    right += 1
                self.length.observe(number, k, right)
            rows = len(self.numbers)
            self.length.observe_seconds(rows, k, rows * k, self.costs[k] / 1_000_000)
            self.length.executed()
            self.chosen.append(k)
        return self.chosen[before:]

    def speeds(self, rates: list[float]) -> list[float]:
        """True tokens per microsecond by K."""
        speeds = []
        for k in range(self.k + 1):
            chance, tokens = 1.0, 1.0
            for rate in rates[:k]:
                chance *= rate
                tokens += chance
            speeds.append(tokens * len(self.numbers) / self.costs[k])
        return speeds


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize(
    ("rates", "step_cost"),
    [
        ([0.9] * 8, 30),
        ([0.9] * 8, 300),
        ([0.8, 0.6, 0.4, 0.2, 0.1, 0.0, 0.0, 0.0], 100),
        ([0.5] * 8, 100),
        ([0.2] * 8, 400),
        ([0.05] * 8, 200),
        ([0.0] * 8, 50),
    ],
)
def test_adaptive_comes_to_what_pays(rates: list[float], step_cost: int, rows: int) -> None:
    stage = Stage(8, rows, [1000 + step_cost * k for k in range(9)], flat_costs(8, rows))
    stage.play(rates, 300)
    speeds = stage.speeds(rates)
    last = stage.play(rates, 300)
    assert sum(speeds[k] for k in last) / len(last) >= 0.95 * max(speeds)


def test_adaptive_learns_a_cost_it_was_told_wrong() -> None:
    """Told that drafts are free, it finds that they are dear, and the other way round."""
    rates = [0.6] * 5
    dear, cheap = [1000 + 800 * k for k in range(6)], [1000 + 10 * k for k in range(6)]
    for costs, guess in ((dear, flat_costs(5, step=1)), (cheap, flat_costs(5, step=800))):
        stage = Stage(5, 4, costs, guess)
        stage.play(rates, 1000)
        last = stage.play(rates, 200)
        speeds = stage.speeds(rates)
        # Length by length it climbs or descends; a curve that was measured is never so wrong.
        assert sum(speeds[k] for k in last) / len(last) >= 0.85 * max(speeds)


def test_adaptive_follows_a_machine_that_becomes_slower_as_a_whole() -> None:
    """The cost of every length moves, so that the ones not in use are not taken for cheap."""
    costs = flat_costs(3, rows=1)
    for _ in range(400):
        costs.observe(1, 3, 2600)
    micros = costs.micros(1)
    assert abs(micros[3] - 2600) < 60
    assert 1.2 * 1000 < micros[0] < 2.0 * 1000
    assert micros[0] < micros[1] < micros[2]


def test_adaptive_leaves_zero_again() -> None:
    """CASES 10: at K = 0 nothing is measured; what was bad once fades."""
    stage = Stage(3, 2, [1000 + 150 * k for k in range(4)], flat_costs(3))
    stage.play([0.0] * 3, 300)
    bad = stage.play([0.0] * 3, 300)
    assert sum(k == 0 for k in bad) >= 0.9 * len(bad)
    good = stage.play([0.95] * 3, 300)
    assert 3 in good[:100]
    assert sum(k == 3 for k in good[-128:]) == 120  # two of 32 look aside


def test_a_request_that_is_never_right_gets_fewer_and_its_neighbour_does_not() -> None:
    length = AdaptiveDraftLength(4, flat_costs(4, step=120))
    for _ in range(60):
        k = wish(length, [0, 1])
        for number in (0, 1):
            most = min(k, length.row_max(number))
            length.observe(number, most, most if number == 0 else 0)
        length.executed()
    assert wish(length, [0, 1]) >= 3
    assert length.row_max(0) == 4
    assert length.row_max(1) <= 1
    length.forget(1)
    wish(length, [0, 1])
    assert length.row_max(1) >= 3, "a new request is what all are"
    assert list(length.acceptance._each) == [0]


def test_a_request_that_was_cut_off_is_tried_again_now_and_then() -> None:
    length = AdaptiveDraftLength(4, flat_costs(4, step=120))
    tries = []
    for _ in range(400):
        k = wish(length, [0, 1])
        tries.append(min(k, length.row_max(1)))
        length.observe(0, k, k)
        length.observe(1, tries[-1], 0)
        length.executed()
    later = tries[100:]
    assert 0 < sum(map(bool, later)) < 0.4 * len(later)


def test_a_draft_that_was_not_proposed_counts_as_wrong() -> None:
    proposed, missing = Acceptance(3), Acceptance(3)
    for _ in range(40):
        proposed.observe(0, 1, 1)
        missing.observe(0, 3, 1)
    assert proposed.rates()[0] == missing.rates()[0] > 900
    assert proposed.rates()[2] == proposed.rates()[1] == proposed.rates()[0]
    assert missing.rates()[1] < 100
    assert missing.rates()[2] == missing.rates()[1]  # nobody came so far


def test_counts_fade_to_the_prior_and_not_below_it() -> None:
    acceptance = Acceptance(2, 512)
    for _ in range(200):
        acceptance.observe(7, 2, 2)
        acceptance.fade()
    assert acceptance.rates()[0] > 0.95 * UNIT
    for _ in range(5000):
        acceptance.fade()
    assert acceptance.rates() == [512, 512]
    assert acceptance.chances(7) == [512, 256]


def test_the_decision_is_the_best_ratio_and_ties_go_to_the_smaller() -> None:
    assert most_per_time([10, 20, 30], [1, 2, 3]) == 0
    assert most_per_time([10, 21, 30], [1, 2, 3]) == 1
    assert most_per_time([10, 20, 31], [1, 2, 3]) == 2
    assert most_per_time([5], [9]) == 0


@given(st.lists(st.tuples(st.integers(1, 10**6), st.integers(1, 10**6)), min_size=1, max_size=9))
def test_the_decision_against_fractions(pairs: list[tuple[int, int]]) -> None:
    from fractions import Fraction

    ratios = [Fraction(tokens, micros) for tokens, micros in pairs]
    best = most_per_time([tokens for tokens, _ in pairs], [micros for _, micros in pairs])
    assert best == ratios.index(max(ratios))


def test_a_wish_is_pure() -> None:
    length = AdaptiveDraftLength(4, flat_costs(4))
    length.observe(3, 4, 2)
    length.executed()
    assert [wish(length, [3, 4]) for _ in range(5)] == [wish(length, [3, 4])] * 5
    assert length.expected_tokens([3, 4]) == length.expected_tokens([3, 4])
    assert all(type(number) is int for number in length.expected_tokens([3, 4]))


# ---------------------------------------------------------------- costs


def test_a_curve_from_timed_passes() -> None:
    costs = CostCurve.measured(
        4, 2, {1: 1000, 4: 1300, 12: 2900}, {1: 100, 4: 160}, lambda k: max(k, 1)
    )
    assert costs.micros(1) == (1100, 1200, 1400)
    assert costs.micros(3) == costs.micros(4) == (1460, 2260, 3220)
    assert costs.micros(99) == costs.micros(4)
    host = CostCurve.measured(4, 2, {1: 1000}, {}, lambda k: 0)
    assert host.micros(2) == (1000, 1000, 1000)


def test_one_odd_step_moves_little_and_nothing_becomes_free() -> None:
    costs = flat_costs(2)
    costs.observe(1, 1, 10**9)
    assert costs.micros(1)[1] <= 2 * 1100
    for _ in range(1000):
        costs.observe(1, 1, 0)
    assert min(costs.micros(1)) >= 1


@pytest.mark.parametrize("count", [8, 11, 16])
def test_a_step_whose_rows_did_not_all_draft_says_what_all_would_have_cost(count: int) -> None:
    """Each draft costs 100 µs: who took a part for the whole would find them cheap."""
    costs = flat_costs(1, rows=16)
    plain = costs.micros(16)[0]
    for _ in range(200):
        costs.observe(16, 0, plain)
        costs.observe(16, 1, plain + 100 * count, count)
    assert abs(costs.micros(16)[1] - (plain + 1600)) < 60


@given(
    st.lists(
        st.tuples(
            st.integers(1, 40),
            st.integers(0, 3),
            st.integers(0, 10**7),
            st.none() | st.integers(0, 120),
        ),
        max_size=60,
    )
)
def test_costs_stay_positive_whole_numbers(seen: list[tuple[int, int, int, int | None]]) -> None:
    costs = flat_costs(3, rows=16)
    for rows, k, micros, count in seen:
        costs.observe(rows, k, micros, count)
    for rows in (1, 2, 16):
        assert all(type(cell) is int and cell > 0 for cell in costs.micros(rows))
