"""A model that is a hash, a worker that keeps real memory, and drivers for the scheduler.

The cache entry of position p is a digest of entry p - 1, read through the block table, and the
token; the next token is a digest of *all* entries, read through the block table. A wrong block, a
stale draft, a prefix shared by mistake or a slot written twice therefore changes the output, which
is compared with `alone`: the same model run on one sequence with no cache at all.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from drumline.core.params import SamplingParams
from drumline.core.plan import Event, Row, RowResult, SpeculationStats, StepPlan, StepResult
from drumline.core.request import FinishReason, PositionLogprobs, Request, TokenLogprob
from drumline.kvcache import BlockPool
from drumline.lockstep.conductor import SoloConductor
from drumline.scheduler import CostCurve, DraftLength, Scheduler, SchedulerSettings, TokenFinish

VOCAB = 128
PROMPT_LOGPROBS = SamplingParams(prompt_logprobs=0)
PLAIN = SamplingParams()

# What the clock of this world says of a step.
TARGET_MICROS, TOKEN_MICROS, PASS_MICROS = 1000, 20, 100


def costs_of(rows_max: int, k: int) -> CostCurve:
    """The cost curve that is true in this world."""
    target = {tokens: TARGET_MICROS + TOKEN_MICROS * tokens for tokens in (1, rows_max * (1 + k))}
    return CostCurve.measured(rows_max, k, target, {1: PASS_MICROS}, lambda count: count)


def _entry(before: bytes, token: int) -> bytes:
    return blake2b(before + token.to_bytes(4, "little"), digest_size=8).digest()


def _choose(entries: Sequence[bytes]) -> int:
    return int.from_bytes(blake2b(b"".join(entries), digest_size=4).digest(), "little") % VOCAB


def alone(request: Request) -> tuple[tuple[int, ...], FinishReason]:
    """Output ids and reason of a request that has the model to itself."""
    entries = [b""]
    for token in request.prompt_token_ids:
        entries.append(_entry(entries[-1], token))
    output: list[int] = []
    while len(output) < request.max_tokens:
        output.append(_choose(entries[1:]))
        if output[-1] in request.stop_token_ids:
            return tuple(output), FinishReason.STOP
        entries.append(_entry(entries[-1], output[-1]))
    return tuple(output), FinishReason.LENGTH


def make_request(
    number: int,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    stops: Sequence[int] = (),
    priority: int = 0,
    params: SamplingParams = PLAIN,
    k: int | None = None,
) -> Request:
    return Request(
        number=number,
        prompt_token_ids=tuple(prompt),
        params=params,
        max_tokens=max_tokens,
        seed=0,
        stop_token_ids=frozenset(stops),
        priority=priority,
        num_speculative_tokens=k,
    )


class HashWorker:
    """Executes plans in real memory. ``skill``: the chance that a draft is the target's token."""

    def __init__(self, pool: BlockPool, skill: float = 0.0, seed: int = 0) -> None:
        self.pool = pool
        self.skill = skill
        self.requests: dict[int, Request] = {}
        self.token_ids: dict[int, list[int]] = {}
        self.memory: list[bytes | None] = [None] * (pool.block_count * pool.block_size)
        self.drafted = 0
        self.accepted = 0
        self.recomputed = 0
        self._random = random.Random(seed)
        self._script: dict[int, list[int]] = {}

    def script(self, number: int, tokens: Sequence[int]) -> None:
        """Makes the model say ``tokens`` first, whatever the hash says."""
        self._script[number] = list(tokens)

    def execute(self, plan: StepPlan) -> StepResult:
        for number in plan.released:  # released before admitted: a number may be in both
            del self.requests[number], self.token_ids[number]
        for admission in plan.admitted:
            number = admission.request.number
            assert number not in self.requests, "admitted twice without a release"
            self.requests[number] = admission.request
            self.token_ids[number] = list(admission.token_ids)
        writers: set[int] = set()
        for row in plan.rows:
            size = self.pool.block_size
            start = row.start + self._again(row)
            first, last = start // size, (row.start + row.width - 1) // size
            for block_id in row.block_ids[first : last + 1]:
                assert block_id not in writers, "two rows write into one block"
                assert self.pool.reference_count(block_id) == 1, "a shared block is written"
                assert not self.pool.is_registered(block_id), "a findable block is written"
                writers.add(block_id)
        return StepResult(plan.step, tuple(self._run(row, plan) for row in plan.rows))

    def _again(self, row: Row) -> int:
        """1 if the row begins with the last position of a block that others may read: computed
        once more for the drafter's sake, which must write what stands there already."""
        block_id = row.block_ids[row.start // self.pool.block_size]
        if not self.pool.is_registered(block_id):
            return 0
        assert (row.start + 1) % self.pool.block_size == 0, "a findable block is written"
        before = b"" if row.start == 0 else self.memory[self._slot(row, row.start - 1)]
        assert before is not None
        assert self.memory[self._slot(row, row.start)] == _entry(before, row.tokens[0])
        self.recomputed += 1
        return 1

    def _slot(self, row: Row, position: int) -> int:
        size = self.pool.block_size
        return row.block_ids[position // size] * size + position % size

    def _write(self, row: Row, position: int, token: int) -> None:
        assert 0 <= token < VOCAB, f"id {token} handed to the model"
        before = b"" if position == 0 else self.memory[self._slot(row, position - 1)]
        assert before is not None
        self.memory[self._slot(row, position)] = _entry(before, token)

    def _next(self, row: Row, position: int) -> int:
        """The target's token for ``position``, from what the row's blocks hold before it."""
        script = self._script.get(row.number)
        index = position - len(self.requests[row.number].prompt_token_ids)
        if script is not None and index < len(script):
            return script[index]
        entries = [self.memory[self._slot(row, before)] for before in range(position)]
        return _choose([entry for entry in entries if entry is not None])

    def _run(self, row: Row, plan: StepPlan) -> RowResult:
        known = self.token_ids[row.number]
        end = row.start + len(row.tokens)
        assert row.tokens == tuple(known[row.start : end]), "a row holds other ids than committed"
        assert row.samples == (end == len(known))
        assert len(row.drafts) < plan.verify_width
        for offset, token in enumerate(row.tokens + row.drafts):
            self._write(row, row.start + offset, token)
        prompt_logprobs = self._prompt_logprobs(row)
        if not row.samples:
            return RowResult(row.number, (), (), prompt_logprobs)
        tokens = [self._next(row, end)]
        for draft in row.drafts:
            if draft != tokens[-1]:
                break
            tokens.append(self._next(row, end + len(tokens)))
        known.extend(tokens)
        self.drafted += len(row.drafts)
        self.accepted += len(tokens) - 1
        logprobs = tuple(PositionLogprobs(TokenLogprob(token, -1.0, 1)) for token in tokens)
        drafts = self._draft(row, plan.draft_k)
        return RowResult(row.number, tuple(tokens), logprobs, prompt_logprobs, drafts)

    def _prompt_logprobs(self, row: Row) -> tuple[PositionLogprobs, ...]:
        request = self.requests[row.number]
        if request.params.prompt_logprobs is None:
            return ()
        prompt = request.prompt_token_ids
        last = min(row.start + len(row.tokens), len(prompt) - 1)
        return tuple(
            PositionLogprobs(TokenLogprob(prompt[position], -float(position), 1))
            for position in range(row.start + 1, last + 1)
        )

    def _draft(self, row: Row, draft_k: int) -> tuple[int, ...]:
        """A drafter's rule: k = clamp(draft_limit - n, 0, min(draft_k, draft_max)); by skill."""
        known = self.token_ids[row.number]
        count = max(0, min(row.draft_limit - len(known), draft_k, row.draft_max))
        if 0.0 < self.skill < 1.0:
            count = self._random.randint(0, count)
        truth = list(alone_from(known, count)) if row.number not in self._script else []
        script = self._script.get(row.number, [])
        prompt_count = len(self.requests[row.number].prompt_token_ids)
        drafts = []
        for offset in range(count):
            index = len(known) + offset - prompt_count
            right = truth[offset] if truth else script[index] if index < len(script) else 0
            good = self._random.random() < self.skill
            drafts.append(right if good else (right + 1) % VOCAB)
            # A drafter keeps entries of its own in the same slots: they must be the row's alone.
            slot_block = row.block_ids[(len(known) + offset) // self.pool.block_size]
            assert self.pool.reference_count(slot_block) == 1
        return tuple(drafts)


def alone_from(token_ids: Sequence[int], count: int) -> tuple[int, ...]:
    """The next ``count`` tokens of the model after ``token_ids``."""
    entries = [b""]
    for token in token_ids:
        entries.append(_entry(entries[-1], token))
    output: list[int] = []
    for _ in range(count):
        output.append(_choose(entries[1:]))
        entries.append(_entry(entries[-1], output[-1]))
    return tuple(output)


@dataclass
class Told:
    """Everything one owner has heard."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)
    reasons: list[FinishReason] = field(default_factory=list)
    stop_reason: int | str | None = None
    cached_token_count: int = 0
    speculation: SpeculationStats | None = None


class World:
    """Scheduler, conductor and worker under one roof; checks the laws after each step."""

    def __init__(
        self,
        settings: SchedulerSettings,
        *,
        block_count: int,
        block_size: int = 4,
        skill: float = 0.0,
        seed: int = 0,
        draft_length: DraftLength | None = None,
    ) -> None:
        self.pool = BlockPool(block_count, block_size)
        self.scheduler = Scheduler(settings, self.pool, draft_length)
        self.conductor = SoloConductor()
        self.worker = HashWorker(self.pool, skill, seed)
        self.finish = TokenFinish()
        self.told: dict[int, Told] = {}
        self.plans: list[StepPlan] = []
        self.drafts: dict[int, tuple[int, ...]] = {}  # of the last executed step
        self.step_count = 0

    def add(self, request: Request) -> None:
        self.scheduler.add(request)

    def step(self, cancel_in_flight: Sequence[int] = ()) -> list[Event]:
        settings = self.scheduler.settings
        proposal = self.scheduler.propose()
        self.scheduler.check()
        assert proposal.token_count <= settings.max_num_batched_tokens
        assert len(proposal.rows) <= settings.max_num_seqs
        if proposal.rows:
            plan = self.conductor.seal(proposal)
            for row in plan.rows:
                fresh = self.drafts.get(row.number, ())
                assert row.drafts == fresh[: len(row.drafts)], "drafts outlived a step"
            self.plans.append(plan)
            result = self.worker.execute(plan)
            self.drafts = {row.number: row.drafts for row in result.rows}
        for number in cancel_in_flight:
            self.scheduler.cancel(number)
        if proposal.rows:
            events = self.scheduler.commit(plan, result, self.finish)
            micros = TARGET_MICROS + TOKEN_MICROS * proposal.token_count
            micros += PASS_MICROS * plan.draft_k
            self.scheduler.note_seconds(plan, micros / 1_000_000)
        else:
            events = self.scheduler.take_events()
        self.scheduler.check()
        self.step_count += 1
        for event in events:
            self._hear(event)
        return events

    def run(self, step_limit: int = 10_000) -> None:
        while self.scheduler.has_work:
            self.step()
            assert self.step_count <= step_limit, "never ends"

    def _hear(self, event: Event) -> None:
        fresh = event.number not in self.told
        told = self.told.setdefault(event.number, Told())
        assert not told.reasons, f"request {event.number} is told something after its end"
        told.tokens.extend(event.tokens)
        told.logprobs.extend(event.logprobs)
        told.prompt_logprobs.extend(event.prompt_logprobs)
        if event.finish_reason is not None:
            told.reasons.append(event.finish_reason)
            told.stop_reason = event.stop_reason
            told.speculation = event.speculation
        if event.cached_token_count:
            assert fresh, "cached tokens are told in the first event"
            told.cached_token_count = event.cached_token_count

    def check_empty(self) -> None:
        """Nothing of any request is left; all blocks can be had."""
        scheduler = self.scheduler
        assert not scheduler.has_work
        assert scheduler.running_count == scheduler.waiting_count == 0
        assert self.pool.used_count == 0
        assert self.pool.available_count == self.pool.block_count
        self.pool.check()
