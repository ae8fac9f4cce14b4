"""Scripts: what a step issues follows from its plan and the traits, on every rank alike."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.core.errors import Diverged
from drumline.core.ledger import Entry, Ledger
from drumline.core.plan import Row, StepPlan
from drumline.core.traits import Collective, DrafterTraits, ModelTraits, PerToken
from drumline.lockstep.script import (
    Pass,
    build_script,
    draft_pass_sizes,
    first_pass_bounds,
    pass_sizes,
)

EP = Collective("all_gather", "ep", (PerToken(), 8))
TP = Collective("all_reduce", "tp", (PerToken(), 8))
LOGITS = Collective("all_gather", "tp", (None, 16))
TARGET = ModelTraits(body=(TP, EP, TP), logits=(LOGITS,))
SHARED = ModelTraits(body=(TP, EP), logits=(LOGITS,))

DRAFTERS = st.builds(
    DrafterTraits,
    method=st.just("any"),
    runs_forward=st.booleans(),
    stateful=st.booleans(),
    in_one_pass=st.booleans(),
    queries_ahead=st.integers(0, 1),
    catch_up=st.integers(0, 1),
)
ROWS = st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=6)


@given(traits=DRAFTERS, rows=ROWS, k_max=st.integers(0, 6))
def test_a_shape_tells_every_size_of_every_length(
    traits: DrafterTraits, rows: list[tuple[int, bool]], k_max: int
) -> None:
    """Leaders tell the first pass for each K and one bound for all later ones: this is enough."""
    first = first_pass_bounds(traits, rows, k_max)
    later = sum(samples for _, samples in rows)
    assert len(first) == k_max + 1
    for k in range(k_max + 1):
        count = traits.passes(k)
        assert pass_sizes(traits, rows, k) == (first[k], *[later] * count)[:count]


def test_no_collective_without_ranks() -> None:
    plan = StepPlan(0, 0, (Row(0, 0, (1, 2), (0,), True),), draft_k=2)
    drafter = DrafterTraits("mtp", True, True)
    script = build_script(plan, ModelTraits(), drafter)
    assert [(one.phase, one.part, one.size) for one in script] == [
        ("target", 0, 2),
        ("draft", 0, 2),
        ("draft", 1, 1),
    ]
    assert all(one.body == one.logits == () and one.tokens is None for one in script)
    assert len(build_script(plan, ModelTraits())) == 1


def test_a_step_over_many_ranks() -> None:
    drafter = DrafterTraits("mtp", True, True, first_pass=SHARED, later_pass=SHARED)
    assert drafter.groups == ("ep", "tp")
    rows = (Row(0, 4, (1,), (0,), True, (2,)), Row(1, 0, (1, 2, 3), (1,), False))
    plan = StepPlan(0, 5, rows, (), (), 2, 3, "live", 9, (9, 4), 3)
    target, first, second = build_script(plan, TARGET, drafter, tp=2)
    assert [entry.shape for entry in target.body] == [(9, 8)] * 3
    assert target.tokens == Collective("broadcast", "tp", (1, 3), "int64")
    assert [entry.shape for entry in first.body] == [(9, 8)] * 2
    assert [entry.shape for entry in second.body] == [(4, 8)] * 2
    assert first.tokens == second.tokens == Collective("broadcast", "tp", (1, 1), "int64")
    # No rows: the same passes, and nobody to tell a token.
    idle = build_script(StepPlan(0, 5, (), (), (), 2, 3, "live", 9, (9, 4), 3), TARGET, drafter, 2)
    assert [one.body for one in idle] == [target.body, first.body, second.body]
    assert [one.tokens for one in idle] == [None] * 3


@pytest.mark.parametrize("rows", [(), (Row(0, 0, (1, 2, 3), (0,), True),)])
def test_whose_sizes_count(rows: tuple[Row, ...]) -> None:
    """Shared passes are the plan's, to the number; others are the replica's own."""
    plan = StepPlan(0, 0, rows, (), (), 2, 1, "live", 9, (9, 4), 3)
    shared = DrafterTraits("mtp", True, True, first_pass=SHARED, later_pass=SHARED)
    assert draft_pass_sizes(plan, shared) == (9, 4)
    own = (3, 1) if rows else (0, 0)
    assert draft_pass_sizes(plan, DrafterTraits("dense", True, True)) == own
    local = ModelTraits(body=(TP,))
    sharded = DrafterTraits("dense", True, True, first_pass=local, later_pass=local)
    least = own if rows else (1, 1)  # of passes with collectives, none is empty
    assert draft_pass_sizes(plan, sharded) == least
    assert draft_pass_sizes(plan, DrafterTraits("ngram")) == ()


def issued(*collectives: Collective) -> tuple[Entry, ...]:
    ledger = Ledger.in_memory()
    ledger.enter("target")
    for one in collectives:
        shape = tuple(extent for extent in one.shape if isinstance(extent, int))
        ledger.issue(one.operation, one.group, shape, one.dtype)
    return ledger.leave()


def test_what_was_issued_is_compared_with_the_script() -> None:
    body = (TP.at(4), EP.at(4))
    tokens = Collective("broadcast", "tp", (2, 3), "int64")
    logits = Collective("all_gather", "tp", (5, 16))
    one = Pass("target", 0, 4, body=body, logits=(LOGITS,), tokens=tokens)
    for count in range(3):  # logits may be asked for any number of times
        one.check(issued(*body, *[logits] * count, tokens), 3, 8)
    wrong = {
        "#1: nothing": (body[0],),
        "#1: target #1: all_gather over ep of 5x8": (body[0], EP.at(5), tokens),
        "#0: target #0: all_gather over ep of 4x8": (body[1], body[0], tokens),
        "#2: nothing": body,
        "#3: target #3: broadcast": (*body, logits, tokens, tokens),
    }
    for words, collectives in wrong.items():
        with pytest.raises(Diverged, match="rank 3") as caught:
            one.check(issued(*collectives), 3, 8)
        assert words.partition(": ")[2] in str(caught.value)
        assert caught.value.what == f"target 0 {words.partition(':')[0]}"
        assert caught.value.step == 8
