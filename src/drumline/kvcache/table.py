"""The blocks of one sequence, in the order of its positions.

All arguments are lengths in tokens from the start of the sequence, never differences, so that a
rewind said twice is the same rewind:

    position    0 1 2 3 | 4 5 6 7 | 8 9 . .      block_size = 4, reserve(10)
    block_ids      7    |    3    |    9         capacity = 12
    truncate(8) gives block 9 back; truncate(9) keeps it

A block that can be found by its key keeps its bits: rewinds stop before it or drop it. One position
of it may be computed again, by a sequence that adopts it; that writes what stands there.
"""

from __future__ import annotations

from collections.abc import Sequence

from drumline.kvcache.pool import BlockPool, blocks_for
from drumline.kvcache.prefix import PrefixChain


class BlockTable:
    """Holds references in a pool on behalf of one sequence."""

    __slots__ = ("_block_ids", "_frozen", "_pool", "_registered_count")

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._block_ids: list[int] = []
        self._frozen: tuple[int, ...] | None = ()
        self._registered_count = 0  # leading blocks that have been offered to the prefix cache

    @property
    def block_ids(self) -> tuple[int, ...]:
        if self._frozen is None:
            self._frozen = tuple(self._block_ids)
        return self._frozen

    @property
    def capacity(self) -> int:
        """Tokens that fit into the blocks held."""
        return len(self._block_ids) * self._pool.block_size

    def match(self, chain: PrefixChain, length: int) -> list[int]:
        """Cached blocks for a prefix of ``length`` tokens, for `adopt`.

        At least one token stays to be computed, so that there are logits to sample from.
        """
        full_count = min((length - 1) // self._pool.block_size, len(chain.keys) - 1)
        return self._pool.find(chain.keys[1 : 1 + full_count])

    def adopt(self, found: Sequence[int]) -> int:
        """Starts an empty table with matched blocks; returns the tokens they hold."""
        assert not self._block_ids, "only an empty table adopts a prefix"
        self._pool.hold(found)
        self._block_ids.extend(found)
        self._registered_count = len(found)
        self._frozen = None
        return self.capacity

    def reserve(self, length: int) -> bool:
        """Makes room for ``length`` tokens, or returns False and changes nothing."""
        missing = blocks_for(length, self._pool.block_size) - len(self._block_ids)
        if missing <= 0:
            return True
        taken = self._pool.allocate(missing)
        if taken is None:
            return False
        self._block_ids.extend(taken)
        self._frozen = None
        return True

    def reserve_most(self, length: int) -> int:
        """Makes as much room as there is, up to ``length`` tokens; returns the capacity."""
        missing = blocks_for(length, self._pool.block_size) - len(self._block_ids)
        if missing > 0:
            missing = min(missing, self._pool.available_count)
            self.reserve(self.capacity + missing * self._pool.block_size)
        return self.capacity

    def truncate(self, length: int) -> int:
        """Rewinds to ``length`` tokens; returns how many whole blocks past it were given back."""
        size = self._pool.block_size
        kept_count = blocks_for(length, size)
        surplus: Sequence[int] = ()
        if kept_count < len(self._block_ids):
            surplus = self._block_ids[kept_count:]
            del self._block_ids[kept_count:]
            self._pool.release(surplus)
            self._frozen = None
        if length < self._registered_count * size:
            assert length % size == 0, "a rewind would lead to writing into a shared block"
            self._registered_count = kept_count
        return len(surplus)

    def may_register(self, length: int) -> bool:
        """Whether `register` would offer a block."""
        return length // self._pool.block_size > self._registered_count

    def register(self, chain: PrefixChain, length: int) -> None:
        """Offers the full blocks among the first ``length`` tokens to the prefix cache.

        ``length`` counts tokens that are committed and whose values have been computed.
        """
        assert length <= self.capacity
        for block in range(self._registered_count, length // self._pool.block_size):
            self._pool.register(self._block_ids[block], chain.keys[block + 1])
            self._registered_count = block + 1

    def release(self) -> None:
        """Gives every block back."""
        self.truncate(0)
