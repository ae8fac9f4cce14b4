"""`FleetCore`: an engine of several ranks, with the surface of `EngineCore`.

Requests are spread over replicas, deltas come back, and when a rank is lost every request ends
with an error that names it. It starts the ranks' processes and ends them; what they agree on among
themselves is theirs. It holds no weights and computes nothing.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import msgspec
from msgspec import structs

from drumline.config import EngineConfig, Resolved
from drumline.core.errors import (
    DeadlineExceeded,
    DrumlineError,
    EngineDead,
    Refused,
)
from drumline.core.plan import SpeculationStats
from drumline.core.request import FinishReason, Request
from drumline.engine.cluster import Cluster, end, end_in_order, open_ranks
from drumline.engine.core import Counters, Load
from drumline.engine.facts import EngineFacts, gather_facts, places
from drumline.engine.hearing import GRACE_SECONDS, Hearing
from drumline.engine.messages import (
    Ask,
    Begin,
    Cancel,
    Pause,
    Paused,
    Ping,
    Pong,
    Resume,
    Serve,
    Standby,
    Submit,
    Told,
    Trial,
    Warm,
)
from drumline.engine.opening import Opened
from drumline.engine.outputs import OutputDelta
from drumline.engine.ranks import Nursery, Ranks
from drumline.engine.tally import Tally, draft_lengths, summed
from drumline.fleet.router import Router
from drumline.lockstep.forming import Formed, form
from drumline.models.tokenizer import Tokenizer

LOG = logging.getLogger("drumline.engine")
LOOK_SECONDS = 0.1  # the longest that `step` waits for something to happen
STOP_SECONDS = 10.0
GROUP_PATIENCE = 3
FORGOTTEN_SECONDS = 3.0  # for the same, where nobody closes the engine
NO_TRIAL = Trial()

Answer = TypeVar("Answer", Standby, Warm, Pong, Paused, Told)


class FleetCore:
    """Made by `load`. Not thread-safe: one owner submits, cancels and steps. Closed by its owner,
    or when it is forgotten; either way nothing of the ranks is left."""

    def __init__(
        self, opened: Opened, ranks: Ranks | Cluster, facts: EngineFacts, tokenizer: Tokenizer
    ) -> None:
        self.resolved: Resolved = opened.resolved
        self.facts = facts
        self.tokenizer = tokenizer
        self.ranks = ranks
        self.mesh = opened.resolved.mesh
        self.formed: Formed | None = None  # what the ranks settled when they began
        self.also: tuple[int, ...] = ()  # descriptors that end a wait in `step`
        self._router = Router(self.mesh.dp)
        self._tally = Tally()
        self._deltas: list[OutputDelta] = []
        self._hearing = Hearing(ranks, self._take)
        self._broken: DrumlineError | None = None
        self._closed = self._serving = False
        self._finalizer = weakref.finalize(self, end, ranks, FORGOTTEN_SECONDS)

    @classmethod
    def load(
        cls, config: EngineConfig, trial: Trial = NO_TRIAL, nursery: Nursery | None = None
    ) -> FleetCore:
        """Starts all ranks and waits until they serve, at most startup_timeout_seconds.

        Raises `UsageError` for whatever was asked and cannot be had, `DeadlineExceeded` or
        `RankLost` naming a rank that does not come up.
        """
        began = time.monotonic()
        opened, ranks = open_ranks(config, trial, nursery)
        try:
            tokenizer = opened.tokenizer()
            core = cls(opened, ranks, gather_facts(opened, 0.0, 0.0), tokenizer)
            core._begin(began + config.runtime.startup_timeout_seconds, opened, began)
        except BaseException:
            ranks.close()
            raise
        return core

    def _begin(self, deadline: float, opened: Opened, began: float) -> None:
        everybody = self.mesh.ranks
        standing = self._gather(Standby, everybody, deadline, "has not loaded")
        self.formed = formed = form(self.mesh, [standing[rank].introduction for rank in everybody])
        for rank in everybody:
            blocks = formed.kv_blocks[self.mesh.place(rank).dp_index]
            self.ranks.tell(rank, Begin(kv_blocks=blocks))
        warm = self._gather(Warm, everybody, deadline, "has not warmed up")
        token_seconds = max(one.token_seconds for one in warm.values())
        for rank in everybody:
            self.ranks.tell(rank, Serve(token_seconds=token_seconds))
        for leader in self.mesh.leaders:
            self.ranks.tell(leader, Ping())
        self._gather(Pong, self.mesh.leaders, deadline, "does not serve")
        self._serving = True
        least = replace(opened.resolved, num_kv_blocks=min(formed.kv_blocks))
        seconds = time.monotonic() - began
        self.facts = gather_facts(replace(opened, resolved=least), token_seconds, seconds)
        if len(set(formed.capacities)) > 1:
            LOG.info("%s", formed.table())

    # ---- requests ------------------------------------------------------------------------

    @property
    def descriptors(self) -> tuple[int, ...]:
        return self.ranks.descriptors  # readable when a rank says something

    @property
    def failure(self) -> DrumlineError | None:
        """What the ranks broke with, if they did."""
        return self._broken

    @property
    def has_work(self) -> bool:
        return bool(self._deltas or self._tally.live)

    @property
    def room(self) -> int:
        """How many samples `submit` would take now, over all replicas."""
        return max(0, places(self.resolved) - len(self._tally.live))

    def submit(self, requests: Sequence[Request], replica: int | None = None) -> None:
        """Takes all of them or none; each goes where the router sends it, or to ``replica``.
        Raises `Refused` if the queues are full, `EngineDead` after a failure."""
        if self._broken is not None or self._closed:
            raise EngineDead(str(self._broken or "the engine was closed"))
        if len(requests) > self.room:
            limit = self.resolved.config.server.max_num_queued_reqs
            raise Refused(f"the queue is full: max_num_queued_reqs={limit}")
        for request in requests:
            able = [replica in (None, index) for index in range(self.mesh.dp)]
            chosen = self._router.place(
                request.number, request.prompt_token_ids, request.max_tokens, able
            )
            leader = self.mesh.leaders[chosen]
            if not self._tally.busy(chosen):
                self._hearing.expect(leader)
            self._tally.begin(request, chosen)
            self.ranks.tell(leader, Submit(requests=(request,)))

    def cancel(self, number: int) -> None:
        """The request ends with ``abort`` soon; unknown numbers are ignored."""
        replica = self._tally.live.get(number)
        if replica is not None and self._broken is None:
            self.ranks.tell(self.mesh.leaders[replica], Cancel(numbers=(number,)))

    def cancel_all(self) -> None:
        for number in list(self._tally.live):
            self.cancel(number)

    def step(self) -> list[OutputDelta]:
        """Waits a moment for something to happen, and gives what came. Raises `EngineError` if
        the ranks broke; the deltas that end what was in flight are then in `take_deltas`."""
        if self._broken is None:
            if not self._deltas:
                self.ranks.wait(LOOK_SECONDS, self.also)
            self._hearing.listen()
            self._watch()
        if self._broken is not None and self._tally.ended_by_failure:
            self._tally.ended_by_failure = False
            raise self._broken
        return self.take_deltas()

    def take_deltas(self) -> list[OutputDelta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    # ---- what is known of it -------------------------------------------------------------

    @property
    def counters(self) -> Counters:
        self._tally.note(self.told(), self.mesh.agrees)
        return self._tally.counters

    @property
    def speculation(self) -> SpeculationStats:
        """What drafts brought to all requests so far."""
        return summed([one.speculation for one in self.told().values()])

    @property
    def draft_lengths(self) -> dict[int, int]:
        """Draft length → steps with a live row that drafted so many: the group's where replicas
        take every step together, else summed over them."""
        return draft_lengths(self.told(), self.mesh.agrees)

    def load_now(self, wait: bool = True) -> Load:
        """What all replicas hold; without ``wait`` what they said last, which is asked anew."""
        if self._broken is not None:
            raise EngineDead(str(self._broken))
        if wait:
            self._ask(Ping(), Pong)
        else:
            self._ask(Ping(), None)
            self._hearing.listen()
        said = [word for word in self._hearing.answers[Pong].values() if isinstance(word, Pong)]
        return Load(
            step=max(word.step for word in said),
            running=sum(word.running for word in said),
            waiting=sum(word.waiting for word in said),
            kv_usage=max(word.kv_usage for word in said),
        )

    # ---- standing still ------------------------------------------------------------------

    def pause(self) -> None:
        """Returns when no replica is in a step; none starts before `resume`."""
        self._ask(Pause(), Paused)

    def resume(self) -> None:
        self._ask(Resume(), None)
        self._ask(Ping(), Pong)

    def close(self) -> None:
        """Aborts what is in flight, ends the ranks, and leaves nothing behind."""
        if self._closed:
            return
        self._closed = True
        if self._broken is None:
            end_in_order(self.ranks, STOP_SECONDS)
            self._hearing.listen()
        self._end_all(FinishReason.ABORT, None)
        self._drop()

    def _drop(self) -> None:
        self._finalizer.detach()
        self.ranks.close()

    # ---- ranks ---------------------------------------------------------------------------

    def _take(self, deltas: Sequence[OutputDelta]) -> None:
        for delta in deltas:
            replica = self._tally.live.get(delta.number)
            if replica is None:
                continue
            self._tally.count(delta)
            self._router.produced(delta.number, len(delta.token_ids))
            if delta.finish_reason is not None:
                self._router.ended(delta.number)
            self._deltas.append(structs.replace(delta, replica=replica))

    @property
    def _patience(self) -> float:
        """Seconds without a word from a leader at work. Ranks that share collectives watch each
        other, and know better: they are given the time to say so."""
        return self.facts.step_deadline_seconds * (GROUP_PATIENCE if self._hearing.grouped else 1)

    def _watch(self) -> None:
        """Sees deaths, last words, and leaders that have work and say nothing."""
        if self._closed:
            return
        if self._hearing.broke:
            self._fail(())
            return
        mode = self.resolved.config.runtime.watchdog
        if mode == "off":
            return
        busy = [
            leader for replica, leader in enumerate(self.mesh.leaders) if self._tally.busy(replica)
        ]
        late = self._hearing.overdue(busy, self._patience)
        if late and mode == "enforce":
            self._fail(late)
        elif late:
            LOG.error("watchdog: rank %d says nothing for %.1f s", late[0], self._patience)

    def _fail(self, overdue: tuple[int, ...]) -> None:
        """The ranks have broken: all of them end, and every request is told who is to blame."""
        self._broken = self._hearing.verdict(overdue)
        self.ranks.kill()
        self._end_all(FinishReason.ERROR, str(self._broken))
        self._tally.ended_by_failure = True
        self._drop()

    def _end_all(self, reason: FinishReason, error: str | None) -> None:
        for number, replica in list(self._tally.live.items()):
            delta = OutputDelta(number, finish_reason=reason, error=error, replica=replica)
            self._tally.count(delta)
            self._router.ended(number)
            self._deltas.append(delta)

    # ---- questions -----------------------------------------------------------------------

    def told(self) -> dict[int, Told]:
        """Every leader's sums; the last known ones where there is nobody to ask."""
        if self._broken is None and not self._closed:
            self._ask(Ask(), Told)
        known = self._hearing.answers.get(Told, {})
        return {rank: word for rank, word in known.items() if isinstance(word, Told)}

    def _ask(self, question: msgspec.Struct, kind: type[Answer] | None) -> None:
        """Puts a question to every leader and waits for all answers, if any are due."""
        if self._broken is not None or self._closed:
            raise EngineDead(str(self._broken or "the engine was closed"))
        if kind is not None:
            self._hearing.answers.pop(kind, None)
        for leader in self.mesh.leaders:
            self.ranks.tell(leader, question)
        if kind is not None:
            seconds = self._patience + GRACE_SECONDS
            self._gather(kind, self.mesh.leaders, time.monotonic() + seconds, "does not answer")

    def _gather(
        self, kind: type[Answer], ranks: Sequence[int], deadline: float, what: str
    ) -> dict[int, Answer]:
        """One answer from each; raises what the ranks broke with, or `DeadlineExceeded`."""
        began = time.monotonic()
        while True:
            known = self._hearing.answers.get(kind, {})
            missing = [rank for rank in ranks if rank not in known]
            if not missing:
                found = {rank: known[rank] for rank in ranks}
                return {rank: word for rank, word in found.items() if isinstance(word, kind)}
            left = deadline - time.monotonic()
            if left <= 0:
                name = f"rank {missing[0]} ({self.ranks.where(missing[0])}) {what}"
                if self._serving:
                    self._fail((missing[0],))
                else:
                    self._broken = DeadlineExceeded(name, time.monotonic() - began)
                    self._drop()
                assert self._broken is not None
                raise self._broken
            self.ranks.wait(left)
            self._hearing.listen()
            if self._hearing.broke:
                self._fail(())
                assert self._broken is not None
                raise self._broken
