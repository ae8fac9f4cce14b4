"""Routing: load first, a found beginning as much as it saves, and nothing left behind."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from drumline.fleet.router import BLOCK_TOKENS, Router


def prompt(name: int, blocks: int, tail: int = 0) -> list[int]:
    return [name] * (blocks * BLOCK_TOKENS) + [name + 1] * tail


def test_equal_requests_are_spread_evenly() -> None:
    router = Router(4)
    # Too short for a block: nothing to find.
    assert [router.place(n, [1, 2, 3], 10) for n in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert router.loads == [26] * 4


def test_the_least_owed_is_next_not_the_fewest_requests() -> None:
    router = Router(2)
    assert router.place(0, [1], 100) == 0
    assert [router.place(n, [1], 10) for n in (1, 2, 3)] == [1, 1, 1]
    router.produced(0, 90)
    assert router.place(4, [1], 10) == 0


def test_a_conversation_stays_where_its_beginning_is() -> None:
    router = Router(3)
    assert router.place(0, prompt(7, 2), 8) == 0
    router.ended(0)
    assert router.place(1, prompt(1, 1), 4) == 0
    # Replica 0 owes 20 tokens and has 32 of this prompt: still cheaper than an empty one.
    assert router.place(2, prompt(7, 2, tail=5), 8) == 0
    # Now it owes more than the beginning saves.
    assert router.place(3, prompt(7, 2, tail=9), 40) == 1
    # And the beginning is there, too: the last who was sent it counts.
    router.ended(3)
    assert router.place(4, prompt(7, 2), 1) == 1


def test_who_is_closed_gets_nothing() -> None:
    router = Router(3)
    assert router.place(0, [1], 1, (False, True, True)) == 1
    assert router.place(1, [1], 1, (False, False, True)) == 2
    assert router.replica_of(1) == 2
    assert router.replica_of(9) is None


def test_memory_is_bounded() -> None:
    router = Router(2, prefixes_max=4)
    for number in range(50):
        router.place(number, prompt(number, 3), 1)
        router.ended(number)
    assert len(router._owners) == 4
    assert router.loads == [0, 0]


@given(
    replica_count=st.integers(1, 4),
    requests=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 20), st.integers(0, 30)),
        max_size=20,
    ),
)
def test_what_is_owed_is_the_sum_of_the_live(
    replica_count: int, requests: list[tuple[int, int, int, int]]
) -> None:
    router, twin = Router(replica_count), Router(replica_count)
    for number, (name, blocks, tokens, produced) in enumerate(requests):
        place = router.place(number, prompt(name, blocks, 1), tokens)
        assert place == twin.place(number, prompt(name, blocks, 1), tokens)
        for one in (router, twin):
            one.produced(number, produced)
        assert all(load >= 0 for load in router.loads)
    for number in range(len(requests)):
        router.ended(number)
        router.ended(number)  # once is enough
    assert router.loads == [0] * replica_count
