"""Prompt lookup against a definition that scans everything, and its cost against rescanning."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafting.rows import draft_row
from drumline.drafting.ngram import GramIndex, NgramDrafter


def looked_up(tokens: Sequence[int], low: int, high: int, k: int) -> tuple[int, ...]:
    """By definition: the longest n first, of its places the newest, then copy token by token."""
    for size in range(high, low - 1, -1):
        tail = list(tokens[-size:])
        for at in range(len(tokens) - size - 1, -1, -1):
            if size < len(tokens) and list(tokens[at : at + size]) == tail:
                text = list(tokens)
                for ahead in range(k):
                    text.append(text[at + size + ahead])
                return tuple(text[len(tokens) :])
    return ()


@pytest.mark.parametrize(
    ("tokens", "low", "high", "k", "drafts"),
    [
        ([1, 2, 3, 9, 1, 2, 3], 1, 3, 3, (9, 1, 2)),
        ([1, 2, 8, 1, 2, 9, 1, 2], 2, 2, 1, (9,)),  # the newest
        ([5, 1, 2, 8, 7, 2, 9, 1, 2], 1, 2, 2, (8, 7)),  # the longest before the newest
        ([1, 2, 3, 4], 1, 3, 3, ()),
        ([7, 7], 1, 3, 4, (7, 7, 7, 7)),  # into its own drafts
        ([1, 2, 1, 2], 2, 2, 5, (1, 2, 1, 2, 1)),
        ([3, 4, 9, 3], 2, 5, 2, ()),  # one token alone is too short
        ([3], 1, 3, 2, ()),
    ],
)
def test_what_followed_before(
    tokens: list[int], low: int, high: int, k: int, drafts: tuple[int, ...]
) -> None:
    assert looked_up(tokens, low, high, k) == drafts
    drafter = NgramDrafter(low, high)
    assert drafter.propose([draft_row(tokens, k)], None, k).drafts == (drafts,)


@settings(max_examples=200, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 3), min_size=2, max_size=40),
    cuts=st.lists(st.integers(1, 5), min_size=1, max_size=12),
    low=st.integers(1, 3),
    more=st.integers(0, 3),
    k=st.integers(1, 6),
    forget_at=st.integers(0, 10),
)
def test_as_defined_however_it_grows(
    tokens: list[int], cuts: list[int], low: int, more: int, k: int, forget_at: int
) -> None:
    """Grown by any number of tokens at a time, and forgotten on the way."""
    drafter = NgramDrafter(low, low + more)
    end = 2
    for turn, cut in enumerate(cuts):
        if turn == forget_at:
            drafter.forget(0)
        (found,) = drafter.propose([draft_row(tokens[:end], k)], None, k).drafts
        assert found == looked_up(tokens[:end], low, low + more, k)
        end = min(len(tokens), end + cut)


def test_it_reads_each_token_once_and_keeps_what_the_sequence_bounds() -> None:
    class Counting(list[int]):
        read = 0

        def __getitem__(self, key):  # type: ignore[no-untyped-def]
            found = super().__getitem__(key)
            Counting.read += len(found) if isinstance(key, slice) else 1
            return found

    draw = random.Random(1)
    tokens = Counting(draw.randrange(50) for _ in range(3000))
    index = GramIndex(2, 4)
    index.follow(tokens)
    assert len(index) <= 3 * len(tokens)
    Counting.read = 0
    for _ in range(100):
        tokens.append(draw.randrange(50))
        index.follow(tokens)
        index.find(tokens)
    assert Counting.read <= 100 * 2 * (2 + 3 + 4)


def test_rows_of_k_zero_cost_nothing_and_sequences_are_apart() -> None:
    drafter = NgramDrafter(1, 2)
    rows = [draft_row([1, 2, 1], 2, number=0), draft_row([1, 9, 1], 0, 1), draft_row([3, 1], 2, 2)]
    assert drafter.propose(rows, None, 2).drafts == ((2, 1), (), ())
    assert set(drafter._indices) == {0, 2}
    drafter.forget(0)
    drafter.forget(7)
    assert set(drafter._indices) == {2}
