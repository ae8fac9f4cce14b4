"""One request on its way: what is committed, what of it stands in the cache, what is guessed.

    position   0 ........ computed_count ........ committed_count ........ + len(drafts)
                in the cache            to compute              guessed

Only the scheduler changes a `Sequence`; it never leaves this room.
"""

from __future__ import annotations

from drumline.core.plan import Event
from drumline.core.request import PositionLogprobs, Request, Verdict
from drumline.kvcache import BlockPool, BlockTable, PrefixChain


class Sequence:
    """Mutable state of one unfinished request. ``order`` is its place in the total order."""

    __slots__ = (
        "cached_token_count",
        "cancelled",
        "chain",
        "computed_count",
        "drafts",
        "known",
        "order",
        "prompt_logprob_count",
        "request",
        "seen",
        "table",
        "token_ids",
        "told",
    )

    def __init__(self, request: Request, order: tuple[int, int], pool: BlockPool) -> None:
        self.request = request
        self.order = order
        self.token_ids = list(request.prompt_token_ids)  # committed: prompt, then output
        self.computed_count = 0
        self.drafts: tuple[int, ...] = ()
        self.table = BlockTable(pool)
        self.chain = PrefixChain(pool.block_size)
        self.known = False  # the workers have an executed admission of it
        self.seen = False  # it was admitted at least once
        self.told = False  # its owner has had an event
        self.cancelled = False
        self.cached_token_count = 0
        self.prompt_logprob_count = 0  # prompt positions reported, so that no replay repeats one

    @property
    def number(self) -> int:
        return self.request.number

    @property
    def committed_count(self) -> int:
        return len(self.token_ids)

    @property
    def output_count(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def remaining_count(self) -> int:
        """Committed tokens whose values are not in the cache; 1 while decoding."""
        return len(self.token_ids) - self.computed_count

    def take_drafts(self, drafts: tuple[int, ...], count_max: int, draft_limit: int) -> None:
        """Guesses for the next executed step, and for no later one."""
        if drafts:
            assert len(drafts) <= count_max, "more drafts than plan and row asked for"
            end = self.committed_count + len(drafts)
            assert end <= draft_limit, "a draft stands at or past its row's limit"
        self.drafts = drafts

    def fresh_prompt_logprobs(
        self, start: int, entries: tuple[PositionLogprobs, ...]
    ) -> tuple[PositionLogprobs, ...]:
        """Those not told before a preemption; entry i belongs to position start + 1 + i."""
        if not entries:
            return ()
        last = start + len(entries)
        assert last < len(self.request.prompt_token_ids)
        told_count = max(0, self.prompt_logprob_count - start)
        self.prompt_logprob_count = max(self.prompt_logprob_count, last)
        return entries[told_count:]

    def event(
        self,
        verdict: Verdict,
        kept: tuple[int, ...] = (),
        logprobs: tuple[PositionLogprobs, ...] = (),
        prompt_logprobs: tuple[PositionLogprobs, ...] = (),
    ) -> Event:
        """What the owner is told; cached prompt tokens are reported once, in the first event."""
        cached_token_count = 0 if self.told else self.cached_token_count
        self.told = True
        return Event(
            number=self.request.number,
            tokens=kept,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=verdict.reason,
            stop_reason=verdict.stop_reason,
            cached_token_count=cached_token_count,
        )
