"""Joining shapes: any order, any grouping, nothing for the idle; and differences are named."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.core.errors import Diverged
from drumline.lockstep.shape import (
    LIMIT,
    MODE_FIXED,
    MODE_LIVE,
    StepShape,
    Vector,
    join,
    join_all,
    length,
    neutral,
)

K = 3
HEAD = {"step": 5, "epoch": 1, "config_digest": 77, "ledger_step": 4, "ledger_digest": 99}
COUNTS = st.integers(0, LIMIT)
LISTS = st.just(()) | st.tuples(*[COUNTS] * (K + 1))

SHAPES = st.builds(
    StepShape,
    **{name: st.just(value) for name, value in HEAD.items()},
    error=st.booleans(),
    stop=st.booleans(),
    drain=st.booleans(),
    pause=st.booleans(),
    work=st.booleans(),
    drafts=st.booleans(),
    rows=COUNTS,
    target_tokens=COUNTS,
    later_pass_tokens=COUNTS,
    first_pass_tokens=LISTS,
    micros=LISTS,
    wish=st.none() | st.integers(0, K),
    mode=st.none() | st.sampled_from([MODE_LIVE, MODE_FIXED]),
    expected=LISTS,
)
VECTORS = SHAPES.map(lambda shape: shape.encode(K))


@given(a=VECTORS, b=VECTORS, c=VECTORS)
def test_join_is_commutative_associative_and_has_a_neutral_element(
    a: Vector, b: Vector, c: Vector
) -> None:
    assert join(a, b) == join(b, a)
    assert join(a, join(b, c)) == join(join(a, b), c)
    assert join(a, neutral(K)) == join(neutral(K), a) == a
    assert join(neutral(K), neutral(K)) == neutral(K)


@given(vectors=st.lists(VECTORS, min_size=1, max_size=5), data=st.data())
def test_any_order_gives_the_same(vectors: list[Vector], data: st.DataObject) -> None:
    joined = join_all(vectors, range(len(vectors)))
    shuffled = data.draw(st.permutations(vectors))
    assert join_all(shuffled, range(len(vectors))) == joined
    assert reduce(join, vectors, neutral(K)) == joined


@given(shape=SHAPES, k=st.integers(0, 9))
def test_what_is_encoded_is_decoded(shape: StepShape, k: int) -> None:
    names = ("first_pass_tokens", "micros", "expected")
    lists = {name: tuple(range(1, k + 2)) if getattr(shape, name) else () for name in names}
    shape = replace(shape, **lists)
    vector = shape.encode(k)
    assert len(vector) == length(k)
    assert all(-(2**63) <= number < 2**63 for number in vector)
    assert all(type(number) is int for number in vector)
    assert StepShape.decode(vector) == shape


def test_every_field_is_folded_by_its_own_rule() -> None:
    left = StepShape(
        **HEAD,
        work=True,
        rows=3,
        target_tokens=12,
        later_pass_tokens=3,
        first_pass_tokens=(1, 20, 3, 4),
        micros=(5, 6, 7, 8),
        wish=2,
        mode=MODE_FIXED,
        expected=(1, 2, 3, LIMIT),
    )
    right = StepShape(
        **HEAD,
        pause=True,
        rows=4,
        target_tokens=4,
        later_pass_tokens=9,
        first_pass_tokens=(2, 1, 1, 9),
        micros=(9, 1, 7, 1),
        wish=1,
        expected=(10, 20, 30, 5),
    )
    joined = StepShape.decode(join(left.encode(K), right.encode(K)))
    assert joined == StepShape(
        **HEAD,
        work=True,
        pause=True,
        rows=4,
        target_tokens=12,
        later_pass_tokens=9,
        first_pass_tokens=(2, 20, 3, 9),
        micros=(9, 6, 7, 8),
        wish=1,
        mode=MODE_FIXED,
        expected=(11, 22, 33, LIMIT),
    )


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("step", "step"),
        ("epoch", "epoch"),
        ("config_digest", "config digest"),
        ("ledger_step", "ledger step"),
        ("ledger_digest", "ledger digest"),
    ],
)
def test_what_must_be_equal_and_is_not_names_ranks_and_values(field: str, words: str) -> None:
    own = StepShape(**HEAD)
    other = replace(own, **{field: 1234})
    vectors = [shape.encode(K) for shape in (own, own, other)]
    with pytest.raises(Diverged) as caught:
        join_all(vectors, (0, 2, 4))
    error = caught.value
    value = HEAD[field]
    assert error.what == words
    assert error.values == ((0, value), (2, value), (4, 1234))
    assert f"{words} differs: rank 0 has {value}, rank 2 has {value}, rank 4 has 1234" in str(error)
    for pair in ((vectors[0], vectors[2]), (vectors[2], vectors[0])):
        with pytest.raises(Diverged):
            join(*pair)


def test_two_draft_lengths_are_named_too() -> None:
    shape = StepShape(**HEAD)
    with pytest.raises(Diverged, match=f"length differs: rank 0 has {length(3)}, rank 1 has"):
        join_all([shape.encode(3), shape.encode(4)], (0, 1))
