"""Block pool, prefix chain and block table, case by case."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from drumline.kvcache import BlockPool, BlockTable, PrefixChain, blocks_for

SIZE = 4


def chain_of(tokens: list[int], extra: tuple[str | int, ...] = ()) -> PrefixChain:
    chain = PrefixChain(SIZE, extra)
    chain.extend(tokens, len(tokens))
    return chain


def filled(pool: BlockPool, tokens: list[int]) -> BlockTable:
    """A table whose tokens are all computed and registered."""
    table = BlockTable(pool)
    assert table.reserve(len(tokens))
    table.register(chain_of(tokens), len(tokens))
    return table


def test_blocks_for() -> None:
    assert [blocks_for(length, 4) for length in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]


def test_a_pool_hands_out_all_or_nothing() -> None:
    pool = BlockPool(3, SIZE)
    assert pool.allocate(4) is None
    assert pool.free_count == 3
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(1) is None
    assert pool.usage == 1.0
    pool.check()


def test_a_block_released_twice_is_our_mistake() -> None:
    pool = BlockPool(2, SIZE)
    taken = pool.allocate(1)
    assert taken is not None
    pool.release(taken)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(taken)


def test_the_least_recently_held_is_forgotten_first_and_tails_before_heads() -> None:
    pool = BlockPool(4, SIZE)
    old, new = filled(pool, [1] * 8), filled(pool, [2] * 8)
    old.release()
    new.release()
    assert (pool.free_count, pool.cached_count) == (0, 4)
    assert pool.allocate(1) == [1]  # the tail of the older
    assert len(pool.find(chain_of([1] * 8).keys[1:])) == 1
    assert len(pool.find(chain_of([2] * 8).keys[1:])) == 2
    pool.check()


def test_holding_again_makes_a_block_recent() -> None:
    pool = BlockPool(2, SIZE)
    first, second = filled(pool, [1] * 4), filled(pool, [2] * 4)
    first.release()
    second.release()
    again = BlockTable(pool)
    assert again.adopt(again.match(chain_of([1] * 5), 5)) == 4
    again.release()
    pool.allocate(1)
    assert len(pool.find(chain_of([1] * 4).keys[1:])) == 1
    assert pool.find(chain_of([2] * 4).keys[1:]) == []


def test_of_two_blocks_with_one_content_the_first_stays() -> None:
    pool = BlockPool(4, SIZE)
    first, second = filled(pool, [5] * 4), filled(pool, [5] * 4)
    assert first.block_ids != second.block_ids
    assert pool.find(chain_of([5] * 4).keys[1:]) == list(first.block_ids)
    second.release()
    assert (pool.free_count, pool.cached_count) == (3, 0)
    first.release()
    assert (pool.free_count, pool.cached_count) == (3, 1)
    pool.check()


def test_shared_blocks_count_their_holders() -> None:
    pool = BlockPool(4, SIZE)
    first = filled(pool, [5] * 8)
    second = BlockTable(pool)
    second.adopt(second.match(chain_of([5] * 9), 9))
    assert [pool.reference_count(block) for block in second.block_ids] == [2, 2]
    first.release()
    assert pool.used_count == 2
    second.release()
    assert pool.used_count == 0
    pool.check()


def test_a_match_leaves_at_least_one_token_to_compute() -> None:
    pool = BlockPool(8, SIZE)
    filled(pool, list(range(16)))
    table = BlockTable(pool)
    tokens = [*range(16), 99]
    assert len(table.match(chain_of(tokens), 17)) == 4
    assert len(table.match(chain_of(tokens[:16]), 16)) == 3


def test_a_key_stands_for_the_whole_prefix_and_its_extras() -> None:
    assert chain_of([1, 2, 3, 4, 5, 6, 7, 8]).keys[2] != chain_of([9, 2, 3, 4, 5, 6, 7, 8]).keys[2]
    assert chain_of([1] * 4).keys[1] != chain_of([1] * 4, ("salt",)).keys[1]
    assert chain_of([1] * 4, (1,)).keys[1] != chain_of([1] * 4, ("1",)).keys[1]
    assert chain_of([1] * 4, ("ab",)).keys[1] != chain_of([1] * 4, ("a", "b")).keys[1]
    # Grown in pieces or at once, only full blocks have a key.
    grown = PrefixChain(SIZE)
    for length in range(12):
        grown.extend([3] * 12, length)
    assert grown.keys == chain_of([3] * 11).keys
    assert len(grown.keys) == 3


def test_keys_are_the_same_in_every_process() -> None:
    script = (
        "from drumline.kvcache import PrefixChain;"
        "c = PrefixChain(4, ('salt', 3)); c.extend(list(range(8)), 8); print(c.keys[2].hex())"
    )
    seen = {chain_of(list(range(8)), ("salt", 3)).keys[2].hex()}
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": "src"}
        output = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, check=True
        )
        seen.add(output.stdout.decode().strip())
    assert len(seen) == 1


def test_truncate_frees_whole_blocks_past_a_length() -> None:
    pool = BlockPool(8, SIZE)
    table = BlockTable(pool)
    assert table.reserve(10)
    assert table.capacity == 12
    assert table.truncate(9) == 0
    assert table.truncate(8) == 1
    assert table.truncate(8) == 0  # said twice, it is the same rewind
    assert table.reserve(1)  # a length, not a difference
    assert table.capacity == 8
    assert table.truncate(0) == 2
    assert pool.free_count == 8


def test_reserve_is_all_or_nothing_and_reserve_most_is_not() -> None:
    pool = BlockPool(2, SIZE)
    table = BlockTable(pool)
    assert not table.reserve(9)
    assert table.block_ids == ()
    assert table.reserve_most(9) == 8
    assert table.reserve_most(3) == 8


def test_a_rewind_never_leads_into_a_findable_block() -> None:
    pool = BlockPool(4, SIZE)
    table = filled(pool, [1] * 8)
    with pytest.raises(AssertionError, match="shared block"):
        table.truncate(6)
    other = BlockTable(pool)
    other.adopt(other.match(chain_of([1] * 9), 9))
    with pytest.raises(AssertionError, match="shared block"):
        other.truncate(6)
    table = filled(pool, [2] * 8)
    table.truncate(4)
    assert len(pool.find(chain_of([2] * 8).keys[1:])) == 2
    pool.check()


def test_only_full_blocks_are_registered() -> None:
    pool = BlockPool(4, SIZE)
    table = BlockTable(pool)
    table.reserve(7)
    table.register(chain_of([1] * 7), 7)
    table.release()
    assert (pool.free_count, pool.cached_count) == (3, 1)


def test_fits_knows_that_matched_blocks_cannot_be_forgotten() -> None:
    pool = BlockPool(4, SIZE)
    table = filled(pool, [1] * 8)
    table.release()
    found = BlockTable(pool).match(chain_of([1] * 9), 9)
    assert len(found) == 2
    assert pool.fits(4)
    assert pool.fits(2, found)
    assert not pool.fits(3, found)


def test_hits_are_counted_in_tokens() -> None:
    pool = BlockPool(4, SIZE)
    pool.count_prefix(10, 8)
    pool.count_prefix(3, 0)
    assert (pool.prefix_query_tokens, pool.prefix_hit_tokens) == (13, 8)
