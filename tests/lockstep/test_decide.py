"""The decision: its truth table, one padding for all, and lengths that follow from votes alone."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.core.traits import Collective, DrafterTraits, ModelTraits, PerToken
from drumline.lockstep.decide import (
    LOOK_ROUND,
    Rules,
    Turn,
    decide,
    draft_length,
    look_around,
    most_per_time,
    next_turn,
    padded,
)
from drumline.lockstep.shape import MODE_FIXED, MODE_LIVE, StepShape, join_all

SHARED = ModelTraits(body=(Collective("all_gather", "ep", (PerToken(), 4)),))
MTP = DrafterTraits("mtp", True, True, True, first_pass=SHARED, later_pass=SHARED)
BLOCK = DrafterTraits("dflash", True, True, True, True, 1, first_pass=SHARED)
HEAD = {"step": 0, "epoch": 0, "config_digest": 1}
BUCKETS = (4, 8, 16)


@pytest.mark.parametrize("flags", list(product([False, True], repeat=5)))
def test_the_truth_table(flags: tuple[bool, ...]) -> None:
    """error before pause before work before stop or drain before sleep: 32 lines."""
    error, pause, work, stop, drain = flags
    if error:
        wanted = Turn.FAIL
    elif pause:
        wanted = Turn.PAUSE
    elif work:
        wanted = Turn.STEP
    elif stop or drain:
        wanted = Turn.LEAVE
    else:
        wanted = Turn.SLEEP
    assert next_turn(error=error, pause=pause, work=work, stop=stop, drain=drain) is wanted
    shape = StepShape(**HEAD, error=error, pause=pause, work=work, stop=stop, drain=drain)
    decision = decide(shape, Rules())
    assert decision.turn is wanted
    assert decision.stop == stop
    assert (decision.target_size > 0) == (wanted is Turn.STEP)


@pytest.mark.parametrize("mode", ["live", "fixed"])
def test_case_22_one_function_pads_for_all(mode: str) -> None:
    """All pairs of 0..4 rows and K of 0, 1, 3: 75 combinations, equal on both ranks, and an idle
    rank neither shrinks a size nor slows a mode."""
    count = 0
    for k, *rows in product((0, 1, 3), range(5), range(5)):
        count += 1
        rules = Rules.of(k, MTP, buckets=BUCKETS)
        own_mode = MODE_FIXED if mode == "fixed" else MODE_LIVE
        shapes = [
            StepShape(
                **HEAD,
                work=n > 0,
                drafts=n > 0,
                rows=n,
                target_tokens=n * (1 + k),
                later_pass_tokens=n,
                first_pass_tokens=(n * (1 + k),) * (k + 1),
                mode=own_mode if n else None,
            )
            for n in rows
        ]
        vectors = [shape.encode(k) for shape in shapes]
        decisions = [
            decide(StepShape.decode(join_all(order, (0, 1))), rules)
            for order in (vectors, vectors[::-1])
        ]
        assert decisions[0] == decisions[1]
        most = max(rows)
        if most == 0:
            assert decisions[0].turn is Turn.SLEEP
            continue
        sizes = [most * (1 + k), most * (1 + k), *[most] * (k - 1)][: 1 + MTP.passes(k)]
        if mode == "fixed":
            sizes = [min(b for b in BUCKETS if b >= size) for size in sizes]
        assert decisions[0].mode == mode
        assert [decisions[0].target_size, *decisions[0].draft_sizes] == sizes
    assert count == 75


def test_case_19_each_pass_has_its_own_size() -> None:
    """Three requests and four, K = 3: the first draft pass takes 16 tokens, the others 4."""
    shapes = [
        StepShape(
            **HEAD,
            work=True,
            drafts=True,
            rows=n,
            target_tokens=4 * n,
            later_pass_tokens=n,
            first_pass_tokens=(4 * n,) * 4,
        )
        for n in (3, 4)
    ]
    joined = StepShape.decode(join_all([shape.encode(3) for shape in shapes], (0, 1)))
    decision = decide(joined, Rules.of(3, MTP))
    assert (decision.target_size, decision.draft_sizes) == (16, (16, 4, 4))
    assert decision.group_rows == 4


@given(size=st.integers(0, 40), mode=st.sampled_from(["live", "fixed"]))
def test_padding_never_shrinks(size: int, mode: str) -> None:
    found = padded(size, mode, BUCKETS)  # type: ignore[arg-type]
    assert found >= max(1, size)
    assert found == max(1, size) or (mode == "fixed" and found in BUCKETS)
    assert padded(found, mode, BUCKETS) == found  # type: ignore[arg-type]
    assert padded(size, "fixed", ()) == max(1, size)


VOTES = st.builds(
    lambda wish, drafts: (wish, drafts),
    st.none() | st.integers(0, 9),
    st.booleans(),
)


@given(votes=st.lists(VOTES, min_size=1, max_size=5), k=st.integers(0, 5))
def test_the_least_wish_counts_and_silence_is_neutral(
    votes: list[tuple[int | None, bool]], k: int
) -> None:
    shapes = [StepShape(**HEAD, work=True, wish=wish, drafts=drafts) for wish, drafts in votes]
    joined = StepShape.decode(join_all([s.encode(k) for s in shapes], range(len(shapes))))
    wishes = [wish for wish, _ in votes if wish is not None]
    wanted = min([k, *wishes]) if any(drafts for _, drafts in votes) else 0
    assert draft_length(joined, Rules.of(k, MTP)) == wanted


FOUR = st.lists(st.integers(1, 10**6), min_size=4, max_size=4)


@given(
    votes=st.lists(
        st.tuples(FOUR, FOUR),
        min_size=1,
        max_size=4,
    ),
    idle=st.integers(0, 3),
)
def test_adaptive_takes_the_groups_tokens_per_the_slowest_ranks_time(
    votes: list[tuple[list[int], list[int]]], idle: int
) -> None:
    shapes = [
        StepShape(**HEAD, work=True, drafts=True, expected=tuple(tokens), micros=tuple(micros))
        for tokens, micros in votes
    ]
    shapes += [StepShape(**HEAD)] * idle
    joined = StepShape.decode(join_all([s.encode(3) for s in shapes], range(len(shapes))))
    tokens = [sum(column) for column in zip(*(t for t, _ in votes), strict=True)]
    micros = [max(column) for column in zip(*(m for _, m in votes), strict=True)]
    found = draft_length(joined, Rules.of(3, MTP, adaptive=True))
    assert found == most_per_time(tokens, micros)
    best = max(tokens[k] / micros[k] for k in range(4))
    assert tokens[found] / micros[found] == pytest.approx(best, rel=1e-12)
    # Nobody decodes: nothing speaks against the longest.
    silent = StepShape(**HEAD, work=True, drafts=True)
    assert draft_length(silent, Rules.of(3, MTP, adaptive=True)) == 3


@given(best=st.integers(0, 5), k=st.integers(0, 5), step=st.integers(0, 500))
def test_looking_around_stays_in_range_and_is_rare(best: int, k: int, step: int) -> None:
    best = min(best, k)
    found = look_around(best, step, k)
    assert 0 <= found <= k
    assert abs(found - best) <= 1
    looks = [look_around(best, at, k) != best for at in range(LOOK_ROUND)]
    assert sum(looks) == (2 if k else 0)


def test_who_shares_passes() -> None:
    assert Rules.of(3, MTP).passes == (1, 1, 2, 3)
    assert Rules.of(3, BLOCK).passes == (1, 1, 1, 1)
    assert Rules.of(3, None).passes == (0, 0, 0, 0)
    assert Rules.of(2, DrafterTraits("dense", True, True)).passes == (0, 0, 0)
    assert Rules.of(2, DrafterTraits("ngram")).passes == (0, 0, 0)


def test_the_lowest_mode_wins() -> None:
    rules = Rules.of(0, None, buckets=BUCKETS)
    for modes, wanted in (
        ((None, None), "fixed"),
        ((MODE_FIXED, None), "fixed"),
        ((MODE_LIVE, None), "live"),
        ((MODE_LIVE, MODE_FIXED), "live"),
    ):
        shapes = [StepShape(**HEAD, work=True, mode=mode) for mode in modes]
        joined = StepShape.decode(join_all([s.encode(0) for s in shapes], (0, 1)))
        assert decide(joined, rules).mode == wanted
        assert decide(joined, Rules.of(0, None)).mode == "live"
