"""Suffix decoding against a definition that counts every substring, and its memory."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafting.rows import draft_row
from drumline.drafting.suffix import Node, PastOutputs, SuffixDrafter, SuffixTrie

Found = tuple[float, int, list[int]]


def counted(
    texts: Sequence[Sequence[int]], end: Sequence[int], k: int, knobs: tuple[float, float, int]
) -> Found:
    """By definition: for each length of the match, follow the most frequent next token."""
    factor, least, depth = knobs
    best: Found = (0.0, 0, [])
    for size in range(1, min(depth - 1, len(end)) + 1):
        string = tuple(end[len(end) - size :])
        if not occurrences(texts, string):
            break
        drafts: list[int] = []
        total, chance = 0.0, 1.0
        while len(drafts) < min(k, int(factor * size), depth - size):
            follow = Counter(
                text[at + len(string)]
                for text, at in occurrences(texts, string)
                if at + len(string) < len(text)
            )
            if not follow:
                break
            token = min(follow, key=lambda token: (-follow[token], token))
            chance *= follow[token] / follow.total()
            if chance < least:
                break
            total += chance
            drafts.append(token)
            string += (token,)
        if total and (total, size) >= best[:2]:
            best = (total, size, drafts)
    return best


def occurrences(
    texts: Sequence[Sequence[int]], string: tuple[int, ...]
) -> list[tuple[Sequence[int], int]]:
    return [
        (text, at)
        for text in texts
        for at in range(len(text) - len(string) + 1)
        if tuple(text[at : at + len(string)]) == string
    ]


@settings(max_examples=200, deadline=None)
@given(
    texts=st.lists(st.lists(st.integers(0, 2), max_size=24), min_size=1, max_size=3),
    order=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6)), max_size=16),
    k=st.integers(1, 8),
    factor=st.sampled_from([0.5, 1.0, 2.0]),
    least=st.sampled_from([0.0, 0.1, 0.4]),
    depth=st.integers(2, 8),
)
def test_as_defined_in_whatever_order_texts_grow(
    texts: list[list[int]],
    order: list[tuple[int, int]],
    k: int,
    factor: float,
    least: float,
    depth: int,
) -> None:
    trie = SuffixTrie(depth)
    grown: list[list[int]] = [[] for _ in texts]
    for which, count in order:
        which %= len(texts)
        done = len(grown[which])
        trie.extend(grown[which], texts[which][done : done + count])
        found = trie.candidate(grown[which], k, factor, least)
        expected = counted(grown, grown[which], k, (factor, least, depth))
        assert found[1:] == expected[1:]
        assert found[0] == pytest.approx(expected[0])


def test_a_longer_match_drafts_more_and_a_doubtful_one_less() -> None:
    trie = SuffixTrie(24)
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    trie.extend(seen := [], text)  # type: ignore[var-annotated]
    assert seen == text
    for size in range(1, 5):
        assert trie.candidate(text[:size], 8, 1.0, 0.1)[2] == text[size : 2 * size]
    assert trie.candidate([4], 8, 3.0, 0.1)[2] == [5, 6, 7]
    assert trie.candidate([1, 2, 3, 4], 2, 1.0, 0.1)[2] == [5, 6]
    assert trie.candidate([99], 8, 1.0, 0.1) == (0.0, 0, [])
    trie.extend([], [3, 4, 0])  # now 5 follows 3, 4 in one of two
    assert trie.candidate([3, 4], 8, 4.0, 0.5)[2] == [0]  # 0.5 each; of equals the lowest id
    assert trie.candidate([3, 4], 8, 4.0, 0.6)[2] == []


def test_the_requests_own_text_comes_before_others_at_equal_chances() -> None:
    drafter = SuffixDrafter(depth=24, cached_requests=10, factor=1.0, min_token_prob=0.1)
    other = [50, 1, 2, 3, 7]
    drafter.propose([draft_row(other, 0, number=1)], None, 0)
    drafter.forget(1)
    mine = [1, 2, 3, 8, 60, 1, 2, 3]
    assert drafter.propose([draft_row(mine, 1, number=2)], None, 1).drafts == ((8,),)
    stranger = [61, 1, 2, 3]
    assert drafter.propose([draft_row(stranger, 1, number=3)], None, 1).drafts == ((7,),)


def test_past_outputs_are_remembered_and_prompts_are_not() -> None:
    drafter = SuffixDrafter(depth=8, cached_requests=2, factor=1.0, min_token_prob=0.1)
    first = [10, 11, 12, 1, 2, 3]
    drafter.propose([draft_row(first, 0, number=0, prompt_count=3)], None, 0)
    drafter.forget(0)
    assert drafter.propose([draft_row([9, 1, 2], 2, number=1)], None, 2).drafts == ((3,),)
    assert drafter.propose([draft_row([9, 10, 11], 2, number=2)], None, 2).drafts == ((),)


def test_nothing_is_shared_without_cached_requests() -> None:
    drafter = SuffixDrafter(depth=8, cached_requests=0, factor=1.0, min_token_prob=0.1)
    drafter.propose([draft_row([9, 1, 2, 3], 1, number=0)], None, 1)
    assert drafter.propose([draft_row([8, 1, 2], 1, number=1)], None, 1).drafts == ((),)


@pytest.mark.parametrize("limit", [1, 2, 3, 8])
def test_the_least_recently_extended_requests_go_first(limit: int) -> None:
    past = PastOutputs(depth=8, requests_max=limit)
    for number in range(20):
        past.follow(number, [100 + number, 200 + number])
        if limit > 1:
            past.follow(0, [100, *range(300, 300 + number + 1)])  # number 0 goes on and on
        assert len(past) <= limit
        assert past.trie.candidate([100 + number], 1, 1.0, 0.1)[2] == [200 + number] or number == 0
        assert past.token_count == sum(map(len, past._outputs.values()))
    known = {n for n in range(20) if past.trie.candidate([100 + n], 1, 1.0, 0.1)[2]}
    assert len(known) <= limit
    assert 19 in known
    if limit > 1:
        assert 0 in known
        assert past.trie.candidate([318], 1, 1.0, 0.1)[2] == [319]


def test_tokens_are_bounded_too() -> None:
    past = PastOutputs(depth=8, requests_max=1000, tokens_max=100)
    for number in range(200):
        past.follow(number, [number] * 7)
        assert past.token_count <= 100
    assert 8 <= len(past) <= 14


def nodes(node: Node) -> int:
    return 1 + sum(map(nodes, node.children.values()))


def test_memory_follows_what_is_looked_at() -> None:
    """Text that never repeats costs one entry per token and hardly a node, at any depth."""
    trie = SuffixTrie(24)
    text: list[int] = []
    draw = random.Random(3)
    for _ in range(2000):
        trie.extend(text, [draw.randrange(50_000)])
        trie.candidate(text[-24:], 4, 1.0, 0.1)
    assert nodes(trie.root) < 2 * len(text)
