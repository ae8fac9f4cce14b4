"""`EngineCore`: one replica with a loaded model; the synchronous heart of every front end.

Requests go in checked, deltas come out, `step` moves. It joins the rooms and decides nothing that
they decide. It refuses to know where requests come from: a script, a terminal or a socket.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from msgspec import structs

from drumline.config import EngineConfig, Resolved
from drumline.core.clock import SystemClock
from drumline.core.errors import EngineDead, EngineError, Refused
from drumline.core.plan import Event, SpeculationStats, StepPlan, StepResult
from drumline.core.request import FinishReason, Request
from drumline.engine.facts import EngineFacts, gather_facts, places
from drumline.engine.finish import OutputJudge
from drumline.engine.opening import open_engine
from drumline.engine.outputs import OutputDelta
from drumline.fleet.leader import Leader
from drumline.fleet.replica import NOTHING, Arrivals, Replica, no_trouble
from drumline.kvcache import BlockPool
from drumline.lockstep.channel import Wake, WakeChannel
from drumline.lockstep.conductor import Conductor, SoloConductor
from drumline.models.tokenizer import IncrementalDetokenizer, Tokenizer
from drumline.scheduler import Scheduler
from drumline.scheduler.draft_cost import CostCurve
from drumline.scheduler.draft_length import DraftLength, make_draft_length
from drumline.scheduler.settings import scheduler_settings
from drumline.worker.load import load_worker, warm_up
from drumline.worker.measure import draft_micros, target_micros
from drumline.worker.worker import Worker


@dataclass(slots=True)
class Counters:
    """Sums since the engine was loaded. Tokens and seconds of decoding leave out each request's
    first token and the steps in which nobody decodes."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    steps: int = 0
    step_seconds: float = 0.0
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """What the engine holds right now. ``kv_usage``: share of blocks that requests hold."""

    step: int
    running: int
    waiting: int
    kv_usage: float


@dataclass(frozen=True)
class Agreement:
    """How a replica's steps are agreed upon, and with whom. ``trouble``: why those who follow it
    cannot go on, if they cannot. ``before``: told of every sealed plan before it is executed.
    ``alone``: nobody else takes part in its steps."""

    conductor: Conductor
    wakes: WakeChannel
    trouble: Callable[[], EngineError | None] = no_trouble
    before: Callable[[StepPlan], object] = lambda plan: None
    alone: bool = False


class Nobody:
    """The `WakeChannel` of a replica that agrees with nobody."""

    def send(self, wake: Wake) -> None: ...

    def receive(self) -> Sequence[Wake]:
        return ()

    def filenos(self) -> Sequence[int]:
        return ()


class EngineCore:
    """One replica; `load` makes it the whole engine. Not thread-safe: one owner submits, cancels
    and steps."""

    descriptors: tuple[int, ...] = ()  # nothing to wait for: it moves by its own steps
    also: tuple[int, ...] = ()

    def __init__(
        self,
        resolved: Resolved,
        worker: Worker,
        tokenizer: Tokenizer,
        facts: EngineFacts,
        draft_length: DraftLength,
        agreement: Agreement | None = None,
        make_scheduler: Callable[..., Scheduler] = Scheduler,
    ) -> None:
        self.resolved = resolved
        self.tokenizer = tokenizer
        self.facts = facts
        self.counters = Counters()
        self.pool = BlockPool(resolved.num_kv_blocks, resolved.block_size)
        self.scheduler = make_scheduler(
            scheduler_settings(resolved, worker.traits),
            self.pool,
            draft_length,
        )
        self.worker = worker
        self._judge = OutputJudge()
        self._arrived: list[Request] = []
        self._cancelled: list[int] = []
        self._deltas: list[OutputDelta] = []
        self._live: dict[int, int] = {}  # number → tokens kept so far
        self._decoding = False
        self._broken: str | None = None
        agreed = agreement or Agreement(SoloConductor(), Nobody(), alone=True)
        self._agreed = agreed
        self._replica = Replica(
            scheduler=self.scheduler,
            conductor=agreed.conductor,
            executor=self,
            intake=self,
            emitter=self,
            finish=self._judge,
            clock=SystemClock(),
            trouble=agreed.trouble,
        )
        self.leader = Leader(self._replica, agreed.conductor, agreed.wakes, lambda: self.pending)

    @classmethod
    def load(cls, config: EngineConfig) -> EngineCore:
        """Opens the checkpoint, resolves the configuration, loads, warms up.

        Raises `UsageError` for whatever was asked and cannot be had.
        """
        began = time.monotonic()
        opened = open_engine(config)
        resolved = opened.resolved
        assert resolved.mesh.size == 1, "one replica of one rank"
        tokenizer = opened.tokenizer()
        worker = load_worker(resolved, opened.checkpoint)
        token_seconds = warm_up(worker)
        facts = gather_facts(opened, token_seconds, time.monotonic() - began)
        length = measured_draft_length(resolved, worker)
        return cls(resolved, worker, tokenizer, facts, length)

    def close(self) -> None:
        """Releases what the worker holds beyond memory."""
        self.worker.close()

    # ---- requests ------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._arrived or self._cancelled or self._deltas or self._replica.has_work)

    @property
    def pending(self) -> bool:
        """Whether a turn has something to take in; one who is alone looks again at its work."""
        if self._arrived or self._cancelled:
            return True
        return self._agreed.alone and self._replica.has_work

    @property
    def room(self) -> int:
        """How many samples `submit` would take now: free seats and free places in the queue."""
        return max(0, places(self.resolved) - len(self._live))

    @property
    def speculation(self) -> SpeculationStats:
        """What drafts brought to all requests so far."""
        return self.scheduler.speculation

    @property
    def draft_lengths(self) -> dict[int, int]:
        """Draft length → steps with a live row that drafted so many."""
        return dict(self._replica.draft_length_histogram)

    def submit(self, requests: Sequence[Request]) -> None:
        """Takes all of them or none. Raises `Refused` if the queue is full, `EngineDead` after a
        failure."""
        if self._broken is not None:
            raise EngineDead(self._broken)
        if len(requests) > self.room:
            limit = self.resolved.config.server.max_num_queued_reqs
            raise Refused(f"the queue is full: max_num_queued_reqs={limit}")
        for request in requests:
            self._live[request.number] = 0
            skip = request.params.skip_special_tokens
            detokenizer = IncrementalDetokenizer(self.tokenizer, skip_special_tokens=skip)
            self._judge.start(request, detokenizer, request.params.stop)
            self.counters.prompt_tokens += len(request.prompt_token_ids)
        self._arrived += requests

    def cancel(self, number: int) -> None:
        """The request ends with ``abort`` within two steps; unknown numbers are ignored."""
        if number in self._live:
            self._cancelled.append(number)

    def cancel_all(self) -> None:
        for number in self._live:
            self.cancel(number)

    def step(self) -> list[OutputDelta]:
        """One turn of the loop. Raises `EngineError` if it broke; the deltas that end what was in
        flight are then in `take_deltas`."""
        with torch.inference_mode():
            try:
                stats = self.leader.turn()
            except EngineError as error:
                self._broken = str(error)
                self._deltas = [self._with_reason(delta) for delta in self._deltas]
                raise
            finally:
                if not self._replica.has_work:
                    self.worker.rest()
        if stats is not None:
            self.counters.steps += 1
            self.counters.step_seconds += stats.seconds
            self.counters.preemptions += stats.preemption_count
            if self._decoding:
                self.counters.decode_seconds += stats.seconds
        return self.take_deltas()

    def _with_reason(self, delta: OutputDelta) -> OutputDelta:
        """The end of a request that went down with the engine says what broke it."""
        if delta.finish_reason is FinishReason.ERROR and delta.error is None:
            return structs.replace(delta, error=self._broken)
        return delta

    def take_deltas(self) -> list[OutputDelta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def load_now(self, wait: bool = True) -> Load:
        return Load(
            step=self.counters.steps,
            running=self.scheduler.running_count,
            waiting=self.scheduler.waiting_count + len(self._arrived),
            kv_usage=self.pool.usage,
        )

    # ---- the replica's seams -------------------------------------------------------------

    def take(self, limit: int) -> Arrivals:
        if not self._arrived and not self._cancelled:
            return NOTHING
        arrivals = Arrivals(tuple(self._arrived[:limit]), tuple(self._cancelled))
        del self._arrived[:limit]
        waiting = {request.number for request in self._arrived}
        self._cancelled = [number for number in self._cancelled if number in waiting]
        return arrivals

    def execute(self, plan: StepPlan) -> StepResult:
        live = self._live
        self._decoding = any(row.samples and live[row.number] for row in plan.rows)
        self._agreed.before(plan)
        return self.worker.execute(plan)

    def emit(self, events: Sequence[Event]) -> None:
        for event in events:
            self._deltas.append(self._delta(event))

    def _delta(self, event: Event) -> OutputDelta:
        """The event with its text. A request that ends is forgotten here."""
        number = event.number
        unjudged = event.finish_reason in (FinishReason.ABORT, FinishReason.ERROR)
        text = self._judge.take_rest(number) if unjudged else self._judge.take_text(number)
        before = self._live[number]
        count = len(event.tokens)
        self.counters.completion_tokens += count
        self.counters.decode_tokens += count if before else max(0, count - 1)
        self._live[number] = before + count
        if event.finish_reason is not None:
            self._judge.forget(number)
            self.worker.end(number)
            del self._live[number]
        return OutputDelta(
            number=number,
            text=text,
            token_ids=event.tokens,
            logprobs=event.logprobs,
            prompt_logprobs=event.prompt_logprobs,
            finish_reason=event.finish_reason,
            stop_reason=event.stop_reason,
            cached_token_count=event.cached_token_count,
            error=event.error,
            speculation=event.speculation,
        )


def measured_draft_length(resolved: Resolved, worker: Worker) -> DraftLength:
    """How long drafts are; what passes cost is measured where the choice depends on it."""
    speculation = resolved.speculation
    if speculation is None or speculation.draft_length != "adaptive":
        return make_draft_length(speculation)
    if worker.script is not None:
        worker.script.surveying = True
    k = resolved.num_speculative_tokens
    rows = resolved.max_num_seqs
    target = target_micros(worker, min(rows * (1 + k), resolved.max_num_batched_tokens))
    drafts = draft_micros(worker, rows)
    if worker.script is not None:
        worker.script.surveying = False
    if worker.traits is None:  # a rank that follows one that drafts
        return make_draft_length(None)
    costs = CostCurve.measured(rows, k, target, drafts, worker.traits.passes)
    return make_draft_length(speculation, costs)
