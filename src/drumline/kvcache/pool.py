"""All KV blocks of one rank, each in exactly one of three states.

    free      nobody holds it, its content means nothing
    used      one or more tables hold it
    cached    nobody holds it, its content is known by a key and may be found again

The law, held by `BlockPool.check`: free + used + cached = all. Cached blocks are forgotten in the
order in which they were let go of, never by a clock. Knows neither tokens nor sequences.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


def blocks_for(length: int, block_size: int) -> int:
    """Blocks that hold ``length`` tokens."""
    return -(-length // block_size)


class BlockPool:
    """Reference counts, the free list and the index of cached content."""

    def __init__(self, block_count: int, block_size: int) -> None:
        assert block_count > 0
        assert block_size > 0
        self.block_count = block_count
        self.block_size = block_size
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0
        self._references = [0] * block_count
        self._keys: list[bytes | None] = [None] * block_count
        self._index: dict[bytes, int] = {}
        self._free = list(range(block_count - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently held first

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def cached_count(self) -> int:
        return len(self._cached)

    @property
    def available_count(self) -> int:
        """Blocks that `allocate` could hand out now."""
        return len(self._free) + len(self._cached)

    @property
    def used_count(self) -> int:
        return self.block_count - self.available_count

    @property
    def usage(self) -> float:
        """The share of blocks in use, 0 to 1."""
        return self.used_count / self.block_count

    def reference_count(self, block_id: int) -> int:
        return self._references[block_id]

    def allocate(self, count: int) -> list[int] | None:
        """``count`` blocks with one reference each, or None and nothing changes."""
        if count > self.available_count:
            return None
        taken = []
        for _ in range(count):
            block_id = self._free.pop() if self._free else self._evict()
            self._references[block_id] = 1
            taken.append(block_id)
        return taken

    def hold(self, block_ids: Iterable[int]) -> None:
        """Adds a reference to blocks that `find` named."""
        for block_id in block_ids:
            if self._references[block_id] == 0:
                del self._cached[block_id]
            self._references[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Drops one reference each. The last block goes first: a prefix outlives what follows."""
        for block_id in reversed(block_ids):
            references = self._references[block_id] - 1
            assert references >= 0, f"block {block_id} released more often than held"
            self._references[block_id] = references
            if references == 0:
                if self._keys[block_id] is None:
                    self._free.append(block_id)
                else:
                    self._cached[block_id] = None

    def register(self, block_id: int, key: bytes) -> None:
        """Makes a held, full block findable. Of two blocks with one content the first stays."""
        assert self._references[block_id] > 0, f"block {block_id} registered while nobody holds it"
        if key in self._index:
            return
        assert self._keys[block_id] is None, f"block {block_id} registered under a second key"
        self._keys[block_id] = key
        self._index[key] = block_id

    def is_registered(self, block_id: int) -> bool:
        return self._keys[block_id] is not None

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of the longest known run of ``keys``, from the first on. Holds nothing."""
        found = []
        for key in keys:
            block_id = self._index.get(key)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def fits(self, count: int, found: Sequence[int] = ()) -> bool:
        """Whether ``count`` blocks could be allocated once the ``found`` ones are held."""
        idle = sum(self._references[block_id] == 0 for block_id in found)
        return count <= self.available_count - idle

    def count_prefix(self, query_tokens: int, hit_tokens: int) -> None:
        assert 0 <= hit_tokens <= query_tokens
        self.prefix_query_tokens += query_tokens
        self.prefix_hit_tokens += hit_tokens

    def check(self) -> None:
        """Asserts the conservation law and that the index and the blocks agree."""
        used = sum(references > 0 for references in self._references)
        assert len(self._free) + used + len(self._cached) == self.block_count
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        for block_id in self._free:
            assert self._references[block_id] == 0, f"block {block_id} is free and held"
            assert self._keys[block_id] is None, f"block {block_id} is free and findable"
        for block_id in self._cached:
            assert self._references[block_id] == 0, f"block {block_id} is cached and held"
            assert self._keys[block_id] is not None, f"block {block_id} is cached without a key"
        for key, block_id in self._index.items():
            assert self._keys[block_id] == key, f"block {block_id} is found under a wrong key"
        assert len(self._index) == sum(key is not None for key in self._keys)

    def _evict(self) -> int:
        block_id, _ = self._cached.popitem(last=False)
        key = self._keys[block_id]
        assert key is not None
        del self._index[key]
        self._keys[block_id] = None
        return block_id
