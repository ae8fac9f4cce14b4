"""One request on its way: what is committed, what of it stands in the cache, what is guessed.

    position   0 ........ computed_count ........ committed_count ........ + len(drafts)
                in the cache            to compute              guessed

Only the scheduler changes a `Sequence`; it never leaves this room.
"""

from __future__ import annotations

from bisect import bisect_left
from operator import attrgetter

from drumline.core.plan import Event
from drumline.core.request import PositionLogprobs, Request, Verdict
from drumline.kvcache import BlockPool, BlockTable, PrefixChain
from drumline.scheduler.counts import SpeculationCounts


class Sequence:
    """Mutable state of one unfinished request. ``order`` is its place in the total order."""

    __slots__ = (
        "asked_count",
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
        "speculation",
        "table",
        "token_ids",
        "told",
    )

    def __init__(
        self,
        request: Request,
        order: tuple[int, int],
        pool: BlockPool,
        num_speculative_tokens: int = 0,
    ) -> None:
        self.request = request
        self.order = order
        self.token_ids = list(request.prompt_token_ids)  # committed: prompt, then output
        self.computed_count = 0
        self.drafts: tuple[int, ...] = ()
        self.asked_count = 0  # drafts the drafter was asked for when it gave those
        self.speculation = SpeculationCounts(num_speculative_tokens)
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
        self.asked_count = max(0, min(draft_limit - self.committed_count, count_max))

    def trim_drafts(self, count_max: int) -> None:
        """Keeps the first ones; what is dropped was neither right nor wrong."""
        if len(self.drafts) > count_max:
            self.drafts = self.drafts[:count_max]
            self.asked_count = count_max

    def drop_drafts(self) -> None:
        self.drafts = ()
        self.asked_count = 0

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


by_order = attrgetter("order")


def discard(items: list[Sequence], sequence: Sequence) -> bool:
    """Takes a sequence out of a list in ascending order; False if it is not there."""
    index = bisect_left(items, sequence.order, key=by_order)
    if index < len(items) and items[index] is sequence:
        del items[index]
        return True
    return False
