"""Continuous batching in a total order.

Requests are ordered by arrival, or by (priority, arrival). From that order everything follows:

- every running row gets at least one token in every step, decodes before prefills;
- who lacks a block takes it from the drafts of others first, then from the last in the order,
  which is preempted: it loses its blocks, keeps its tokens, and waits at its place in the order;
- nobody is admitted past somebody who waits before him.

So the first in the order is never preempted, gains a token in each step, and comes to its end;
and so does the next. Drafts take only what budget and blocks are left over.

`propose` may be called again if its proposal was not executed: nothing is lost but trimmed drafts.
Knows neither tensors nor text nor time; the cache is block ids, a model is what fills a result.
"""

from __future__ import annotations

from bisect import insort

from msgspec import structs

from drumline.core.errors import Refused
from drumline.core.plan import (
    Admission,
    Event,
    Row,
    RowResult,
    SpeculationStats,
    StepPlan,
    StepProposal,
    StepResult,
)
from drumline.core.request import Finish, FinishReason, PositionLogprobs, Request, Verdict
from drumline.kvcache import BlockPool, blocks_for
from drumline.scheduler.counts import SpeculationCounts
from drumline.scheduler.draft_length import DraftLength, DraftTable, StaticDraftLength
from drumline.scheduler.drafts import draft_max, grant_drafts, reserve_ahead
from drumline.scheduler.finish import check_verdict
from drumline.scheduler.sequence import Sequence, by_order, discard
from drumline.scheduler.settings import Limits, SchedulerSettings, check_fits


class Scheduler:
    """Decides who runs, and keeps what came of it. One per replica; holds every live request."""

    def __init__(
        self,
        settings: SchedulerSettings,
        pool: BlockPool,
        draft_length: DraftLength | None = None,
    ) -> None:
        self.settings = settings
        self.pool = pool
        self.draft_length = draft_length or StaticDraftLength(settings.num_speculative_tokens)
        self.limits = Limits(settings.max_model_len, pool.block_count, pool.block_size)
        self.preemption_count = 0
        self.num_spec_tokens_to_schedule = 0  # the wish of the last proposal
        self._speculation = SpeculationCounts(settings.num_speculative_tokens)
        self._sequences: dict[int, Sequence] = {}
        self._running: list[Sequence] = []  # both lists ascend in the total order
        self._waiting: list[Sequence] = []
        self._cancelled: list[int] = []
        self._released: list[int] = []  # numbers whose worker state may be dropped
        self._events: list[Event] = []
        self._proposed: tuple[Row, ...] | None = None

    @property
    def running_count(self) -> int:
        return len(self._running)

    @property
    def waiting_count(self) -> int:
        return len(self._waiting)

    @property
    def dynamic_sd_lookup(self) -> DraftTable | None:
        """The table that draft lengths follow, under vLLM's name for it; None: they follow none."""
        return self.draft_length.lookup

    @property
    def waiting_room(self) -> int:
        """How many requests `add` would take now."""
        return max(0, self.settings.max_waiting - len(self._waiting))

    @property
    def speculation(self) -> SpeculationStats:
        """What drafts brought to all requests so far."""
        return self._speculation.stats()

    @property
    def has_work(self) -> bool:
        """Any unfinished request or undelivered event."""
        return bool(self._sequences or self._events)

    def add(self, request: Request) -> None:
        """Queues a request; raises `RequestError` if it can never run, `Refused` if full."""
        check_fits(request, self.limits)
        assert request.number not in self._sequences, f"number {request.number} is taken"
        if not self.waiting_room:
            raise Refused(f"the queue is full: max_waiting={self.settings.max_waiting}")
        priority = request.priority if self.settings.policy == "priority" else 0
        sequence = Sequence(
            request, (priority, request.number), self.pool, self.settings.num_speculative_tokens
        )
        self._sequences[request.number] = sequence
        insort(self._waiting, sequence, key=by_order)

    def cancel(self, number: int) -> None:
        """Ends a request with ``abort`` at the next `propose` or `commit`; unknown numbers pass."""
        sequence = self._sequences.get(number)
        if sequence is not None and not sequence.cancelled:
            sequence.cancelled = True
            self._cancelled.append(number)

    def cancel_all(self) -> None:
        """Ends everything with ``abort``, as `cancel` does."""
        for number in self._sequences:
            self.cancel(number)

    def fail_all(self) -> None:
        """Ends every request with ``error``: the engine broke."""
        self._proposed = None
        self._apply_cancellations()
        for sequence in list(self._sequences.values()):
            self._end(sequence, Verdict(0, FinishReason.ERROR))

    def take_events(self) -> list[Event]:
        """What owners have not been told yet, in the order in which it happened."""
        events, self._events = self._events, []
        return events

    # ---- propose -----------------------------------------------------------------------------

    def propose(self) -> StepProposal:
        """The rows this replica wants to run next; no rows if nothing can run."""
        self._apply_cancellations()
        decoding, prefilling = self._continue_running()
        vote = self.draft_length.vote([sequence.number for sequence in decoding])
        wish = self.draft_length.choose(vote)
        assert 0 <= wish <= self.settings.num_speculative_tokens
        self.num_spec_tokens_to_schedule = wish
        left = self.settings.max_num_batched_tokens - len(self._running)
        shares = [1] * len(prefilling)
        chunked = self.settings.enable_chunked_prefill
        if chunked:  # guesses and prompts share what is left
            hungry = bool(prefilling) or self._has_candidate()
            left -= grant_drafts(decoding, left // 2 if hungry else left)
        left = self._extend_prefills(prefilling, shares, left)
        left = self._admit(prefilling, shares, left)
        if not chunked:  # a whole prompt must not wait for guesses
            grant_drafts(decoding, left)
        rows = [self._row(sequence, 1) for sequence in decoding]
        rows += [self._row(*pair) for pair in zip(prefilling, shares, strict=True)]
        self._proposed = tuple(rows)
        fresh = [sequence for sequence in (*decoding, *prefilling) if not sequence.known]
        admitted = [Admission(sequence.request, tuple(sequence.token_ids)) for sequence in fresh]
        return StepProposal(
            self._proposed, tuple(admitted), tuple(self._released), draft_wish=wish, vote=vote
        )

    def _continue_running(self) -> tuple[list[Sequence], list[Sequence]]:
        """One slot for everybody who runs, earliest first; makes room by the rules above."""
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        index = 0
        while index < len(self._running):
            sequence = self._running[index]
            if not sequence.table.reserve(sequence.computed_count + 1):
                self._make_room(sequence)
                continue  # the same one again, unless it was itself the last
            (decoding if sequence.remaining_count == 1 else prefilling).append(sequence)
            index += 1
        return decoding, prefilling

    def _make_room(self, needy: Sequence) -> None:
        for sequence in reversed(self._running):
            if sequence.table.truncate(sequence.committed_count):
                sequence.drop_drafts()
                return
        victim = self._running[-1]
        assert victim is not needy or len(self._running) > 1, "a request alone lacks a block"
        self._preempt(victim)

    def _preempt(self, sequence: Sequence) -> None:
        discard(self._running, sequence)
        sequence.table.release()
        sequence.computed_count = 0
        sequence.drop_drafts()
        if sequence.known:
            self._released.append(sequence.number)
            sequence.known = False
        insort(self._waiting, sequence, key=by_order)
        self.preemption_count += 1

    def _has_candidate(self) -> bool:
        return bool(self._waiting) and len(self._running) < self.settings.seat_count

    def _extend_prefills(self, prefilling: list[Sequence], shares: list[int], left: int) -> int:
        for index, sequence in enumerate(prefilling):
            extra = min(left, self._chunk(sequence.remaining_count) - 1)
            shares[index] += extra
            left -= extra
        return left

    def _chunk(self, remaining_count: int) -> int:
        threshold = self.settings.long_prefill_token_threshold
        if threshold and self.settings.enable_chunked_prefill:
            return min(remaining_count, threshold)
        return remaining_count

    def _admit(self, prefilling: list[Sequence], shares: list[int], left: int) -> int:
        """Seats those who wait, in order, while seats, budget and blocks last.

        All committed tokens get their blocks at once, so that a prefill never lacks one.
        """
        size = self.pool.block_size
        while left and self._has_candidate():
            sequence = self._waiting[0]
            length = sequence.committed_count
            found = self._match(sequence)
            # The drafter's entry for the first own slot is made of the state before it.
            again = 1 if found and self.settings.drafter_recomputes_one else 0
            share = self._chunk(length - len(found) * size + again)
            if self.settings.enable_chunked_prefill:
                share = min(share, left)
            # Beside others, some room to grow: else it would soon be preempted again.
            ahead = min(length + size, sequence.request.length_max) if self._running else length
            if share > left or not self.pool.fits(blocks_for(ahead, size) - len(found), found):
                break
            del self._waiting[0]
            insort(self._running, sequence, key=by_order)
            sequence.computed_count = sequence.table.adopt(found) - again
            reserved = sequence.table.reserve(length)
            assert reserved, "the pool said that the blocks are there"
            self._note_first_match(sequence)
            prefilling.append(sequence)
            shares.append(share)
            left -= share
        return left

    def _match(self, sequence: Sequence) -> list[int]:
        if not (self.settings.enable_prefix_caching and sequence.request.reads_cache):
            return []
        length = sequence.committed_count
        sequence.chain.extend(sequence.token_ids, length)
        return sequence.table.match(sequence.chain, length)

    def _note_first_match(self, sequence: Sequence) -> None:
        """Counts a request's prefix hits once: finding its own blocks again is no hit."""
        if sequence.seen:
            return
        sequence.seen = True
        sequence.cached_token_count = sequence.computed_count
        if self.settings.enable_prefix_caching and sequence.request.reads_cache:
            self.pool.count_prefix(sequence.committed_count, sequence.computed_count)

    def _row(self, sequence: Sequence, count: int) -> Row:
        start = sequence.computed_count
        end = start + count
        samples = end == sequence.committed_count
        drafts: tuple[int, ...] = ()
        most = limit = 0
        if samples:
            drafts = sequence.drafts
            most = draft_max(sequence, self.settings, self.draft_length)
            limit = reserve_ahead(sequence, self.settings, end + len(drafts), most)
        else:  # a proposal that was not executed may have gone further
            sequence.table.truncate(sequence.committed_count)
        return Row(
            number=sequence.number,
            start=start,
            tokens=tuple(sequence.token_ids[start:end]),
            draft_limit=limit,
            draft_max=most,
            block_ids=sequence.table.block_ids,
            samples=samples,
            drafts=drafts,
        )

    # ---- commit ------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult, finish: Finish) -> list[Event]:
        """Takes over what a step brought; returns every event not yet told.

        Only tokens that ``finish`` keeps are committed, counted, cached and told.
        """
        assert self._proposed is not None, "a step was committed that was not proposed"
        assert plan.rows == self._proposed, "the plan holds other rows than the proposal"
        assert result.step == plan.step
        assert plan.released == tuple(self._released)
        self._proposed = None
        self._released.clear()
        for admission in plan.admitted:
            self._sequences[admission.request.number].known = True
        self._apply_cancellations()
        for row, outcome in zip(plan.rows, result.rows, strict=True):
            assert outcome.number == row.number, "results in another order than the rows"
            sequence = self._sequences.get(row.number)
            if sequence is not None:
                self._commit_row(sequence, row, outcome, plan.draft_k, finish)
        self.draft_length.executed()
        return self.take_events()

    def note_seconds(self, plan: StepPlan, seconds: float) -> None:
        """How long a committed step took, which says what a draft length costs if it is steady and
        no more than half of its drafts were left out; or all, where asking is what costs."""
        count, most = plan.draft_count, len(plan.rows) * plan.draft_k
        told = 2 * count >= most or (count == 0 and not self.draft_length.only_proposed)
        if plan.steady and told:
            self.draft_length.observe_seconds(len(plan.rows), plan.draft_k, count, seconds)

    def _commit_row(
        self, sequence: Sequence, row: Row, outcome: RowResult, draft_k: int, finish: Finish
    ) -> None:
        prompt_logprobs = sequence.fresh_prompt_logprobs(row.start, outcome.prompt_logprobs)
        sequence.computed_count = row.start + len(row.tokens)
        if outcome.error is not None:
            self._end(sequence, Verdict(0, FinishReason.ERROR), error=outcome.error)
            return
        if not row.samples:
            assert outcome.tokens == outcome.drafts == (), "a row that does not sample sampled"
            self._register(sequence)
            if prompt_logprobs:
                self._events.append(sequence.event(Verdict(0), (), (), prompt_logprobs))
            return
        tokens = outcome.tokens
        accepted_count = len(tokens) - 1
        assert 0 <= accepted_count <= len(row.drafts)
        assert tokens[:-1] == row.drafts[:accepted_count], "accepted is not what was drafted"
        verdict = finish.judge(sequence.request, sequence.output_count, tokens)
        check_verdict(sequence, verdict, len(tokens))
        if self.settings.num_speculative_tokens:
            self._note_drafts(sequence, row, accepted_count, verdict.kept)
        kept = tokens[: verdict.kept]
        sequence.token_ids.extend(kept)
        # The last token is never computed in the step that brings it.
        sequence.computed_count += min(accepted_count, verdict.kept)
        self._register(sequence)
        assert len(outcome.logprobs) in (0, len(tokens))
        logprobs = outcome.logprobs[: verdict.kept]
        if verdict.reason is not None:
            self._end(sequence, verdict, kept, logprobs, prompt_logprobs)
            return
        sequence.take_drafts(outcome.drafts, min(draft_k, row.draft_max), row.draft_limit)
        sequence.table.truncate(sequence.committed_count + len(sequence.drafts))
        self._events.append(sequence.event(verdict, kept, logprobs, prompt_logprobs))

    def _note_drafts(
        self, sequence: Sequence, row: Row, accepted_count: int, kept_count: int
    ) -> None:
        """What was right teaches; what was right and kept is reported."""
        only_proposed = self.draft_length.only_proposed
        tried_count = len(row.drafts) if only_proposed else sequence.asked_count
        self.draft_length.observe(sequence.number, tried_count, accepted_count)
        for counts in (sequence.speculation, self._speculation):
            counts.note(len(row.drafts), min(accepted_count, kept_count))

    def _register(self, sequence: Sequence) -> None:
        count = sequence.computed_count
        if self.settings.enable_prefix_caching and sequence.table.may_register(count):
            sequence.chain.extend(sequence.token_ids, count)
            sequence.table.register(sequence.chain, count)

    # ---- ends --------------------------------------------------------------------------------

    def _apply_cancellations(self) -> None:
        cancelled, self._cancelled = self._cancelled, []
        for number in cancelled:
            self._end(self._sequences[number], Verdict(0, FinishReason.ABORT))

    def _end(
        self,
        sequence: Sequence,
        verdict: Verdict,
        kept: tuple[int, ...] = (),
        logprobs: tuple[PositionLogprobs, ...] = (),
        prompt_logprobs: tuple[PositionLogprobs, ...] = (),
        error: str | None = None,
    ) -> None:
        """Tells the end and forgets the request; its full blocks may stay findable."""
        event = sequence.event(verdict, kept, logprobs, prompt_logprobs)
        speculates = self.settings.num_speculative_tokens > 0
        speculation = sequence.speculation.stats() if speculates else None
        self._events.append(structs.replace(event, error=error, speculation=speculation))
        self.draft_length.forget(sequence.number)
        del self._sequences[sequence.number]
        if not discard(self._running, sequence):
            found = discard(self._waiting, sequence)
            assert found, "a live request neither runs nor waits"
        sequence.table.release()
        if sequence.known:
            self._released.append(sequence.number)

    def check(self) -> None:
        """Asserts the conservation law, and that every reference belongs to a running request."""
        self.pool.check()
        held = [0] * self.pool.block_count
        for sequence in self._running:
            for block_id in sequence.table.block_ids:
                held[block_id] += 1
        for block_id, count in enumerate(held):
            assert self.pool.reference_count(block_id) == count, f"block {block_id} leaks"
        for sequence in self._waiting:
            assert not sequence.table.block_ids, "a waiting request holds blocks"
            assert sequence.computed_count == len(sequence.drafts) == 0
        for sequence in self._running if self._proposed is None else ():
            surplus = sequence.table.capacity - sequence.committed_count - len(sequence.drafts)
            assert surplus < self.pool.block_size, "slots are held that nobody will fill"
        assert len(self._sequences) == len(self._running) + len(self._waiting)
