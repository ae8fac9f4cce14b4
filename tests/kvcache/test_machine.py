"""Any order of calls on tables over one pool keeps the law: free + used + cached = all."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from drumline.kvcache import BlockPool, BlockTable, PrefixChain

TOKENS = st.integers(min_value=0, max_value=1)  # two ids: prefixes collide often


class Holder:
    """A sequence as the pool sees it, with its blocks' content as it should be."""

    def __init__(self, pool: BlockPool, token_ids: list[int]) -> None:
        self.token_ids = token_ids
        self.table = BlockTable(pool)
        self.chain = PrefixChain(pool.block_size)
        self.computed = 0


class PoolMachine(RuleBasedStateMachine):
    """``content`` models memory: what was last written to each block, with what stood before."""

    @initialize(block_count=st.integers(1, 8), block_size=st.integers(1, 3))
    def start(self, block_count: int, block_size: int) -> None:
        self.pool = BlockPool(block_count, block_size)
        self.content: dict[int, tuple[int, ...]] = {}
        self.holders: list[Holder] = []

    @rule(tokens=st.lists(TOKENS, min_size=1, max_size=10))
    def arrive(self, tokens: list[int]) -> None:
        holder = Holder(self.pool, tokens)
        holder.chain.extend(tokens, len(tokens))
        found = holder.table.match(holder.chain, len(tokens))
        size = self.pool.block_size
        for index, block_id in enumerate(found):
            assert self.content[block_id] == tuple(tokens[: (index + 1) * size])
        before = self.pool.available_count
        assert self.pool.fits(0, found)
        holder.computed = holder.table.adopt(found)
        assert holder.computed < len(tokens)
        assert self.pool.available_count <= before
        self.holders.append(holder)

    def _pick(self, index: int) -> Holder:
        return self.holders[index % len(self.holders)]

    @precondition(lambda self: self.holders)
    @rule(index=st.integers(0, 7), count=st.integers(1, 6))
    def compute(self, index: int, count: int) -> None:
        """Some more committed tokens are computed, and full blocks registered."""
        holder = self._pick(index)
        length = min(len(holder.token_ids), holder.computed + count)
        available, blocks = self.pool.available_count, len(holder.table.block_ids)
        if not holder.table.reserve(length):
            assert (self.pool.available_count, len(holder.table.block_ids)) == (available, blocks)
            return
        size = self.pool.block_size
        for position in range(holder.computed, length):
            block_id = holder.table.block_ids[position // size]
            assert self.pool.reference_count(block_id) == 1
            assert not self.pool.is_registered(block_id)
            self.content[block_id] = tuple(holder.token_ids[: position + 1])
        holder.computed = length
        holder.table.register(holder.chain, length)

    @precondition(lambda self: self.holders)
    @rule(index=st.integers(0, 7), tokens=st.lists(TOKENS, min_size=1, max_size=3))
    def commit(self, index: int, tokens: list[int]) -> None:
        holder = self._pick(index)
        if len(holder.token_ids) < 16:
            holder.token_ids.extend(tokens)
            holder.chain.extend(holder.token_ids, len(holder.token_ids))

    @precondition(lambda self: self.holders)
    @rule(index=st.integers(0, 7), ahead=st.integers(0, 6), kept=st.integers(0, 6))
    def guess_and_rewind(self, index: int, ahead: int, kept: int) -> None:
        holder = self._pick(index)
        holder.table.reserve_most(holder.computed + ahead)
        length = holder.computed + min(kept, ahead)
        holder.table.truncate(length)
        blocks = holder.table.block_ids
        holder.table.truncate(length)
        assert holder.table.block_ids == blocks

    @precondition(lambda self: self.holders)
    @rule(index=st.integers(0, 7))
    def leave(self, index: int) -> None:
        self.holders.pop(index % len(self.holders)).table.release()

    @invariant()
    def law(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        held = [0] * self.pool.block_count
        for holder in self.holders:
            for block_id in holder.table.block_ids:
                held[block_id] += 1
        for block_id, count in enumerate(held):
            assert self.pool.reference_count(block_id) == count
        used = sum(count > 0 for count in held)
        assert self.pool.free_count + used + self.pool.cached_count == self.pool.block_count
        if not self.holders:
            assert self.pool.usage == 0.0


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
