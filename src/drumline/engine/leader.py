"""A leader's loop: words from the supervisor in, turns of its replica, deltas out.

It sleeps without a deadline only while its replica rests; then words, wakes and the end of the
supervisor wake it. Everything it decides, `fleet.Leader` and the conductor decide.
"""

from __future__ import annotations

import os
import select
from functools import partial

from drumline.config.report import config_digest
from drumline.core.errors import EngineError, Refused, RequestError
from drumline.core.ledger import Ledger
from drumline.core.plan import StepPlan
from drumline.core.request import FinishReason, Request
from drumline.engine.channels import RelayedWakes, SocketPlans, SocketWakes, TimedAgreement
from drumline.engine.core import Agreement, EngineCore, Nobody
from drumline.engine.ends import Ends, digest_number
from drumline.engine.facts import gather_facts
from drumline.engine.messages import (
    Ask,
    Birth,
    Cancel,
    Deltas,
    Pause,
    Paused,
    Ping,
    Pong,
    Resume,
    Stop,
    Submit,
    Told,
    ToRank,
    Woken,
)
from drumline.engine.opening import Opened
from drumline.engine.outputs import OutputDelta
from drumline.engine.trial import scheduler_of
from drumline.fleet.leader import Life
from drumline.lockstep.channel import Wake, WakeChannel
from drumline.lockstep.conductor import (
    Conductor,
    Deadlines,
    GroupConductor,
    SoloConductor,
)
from drumline.lockstep.decide import Rules
from drumline.lockstep.follower import Shipper
from drumline.lockstep.mutants import GateWatch, Mutant, MutantConductor
from drumline.parallel.groups import RankComms
from drumline.scheduler.draft_length import DraftLength
from drumline.worker.worker import Worker

EXIT_ORPHANED = 3
_Wrapped = MutantConductor | GateWatch


def allowed(deadlines: Deadlines, plan: StepPlan) -> float:
    """Seconds for a plan's step."""
    tokens = plan.target_size or sum(row.width for row in plan.rows)
    return deadlines.after(tokens + sum(plan.draft_sizes))


class LeaderLoop:
    """One replica's leader in its process, from its first turn to its last."""

    def __init__(
        self,
        birth: Birth,
        ends: Ends,
        ledger: Ledger,
        comms: RankComms,
        opened: Opened,
        worker: Worker,
        length: DraftLength,
        deadlines: Deadlines,
    ) -> None:
        faults = [
            step
            for rank, step, place in birth.trial.faults
            if place == "agree" and rank == birth.rank
        ]
        self._fault = faults[0] if faults else None
        self.link = ends.link
        self.ledger = ledger
        self.comms = comms
        self.deadlines = deadlines
        self.wakes: WakeChannel = SocketWakes(ends.wakes) if ends.wakes else Nobody()
        if birth.relays:
            self.wakes = RelayedWakes(ends.link)
        self.plans = SocketPlans(ends.plans) if ends.plans else None
        self.shipper: Shipper | None = None
        self.timed: TimedAgreement | None = None
        if self.plans is not None:
            self.shipper = Shipper(self.plans, ledger, partial(allowed, deadlines))
        self.conductor = self._conductor(birth, opened, worker)
        agreement = Agreement(
            self.conductor,
            self.wakes,
            trouble=self._trouble,
            before=self._before,
            alone=comms.agreement is None,
        )
        facts = gather_facts(opened, deadlines.token_seconds, 0.0)
        self.core = EngineCore(
            opened.resolved,
            worker,
            opened.tokenizer(),
            facts,
            length,
            agreement,
            scheduler_of(birth.trial, birth.rank),
        )
        self._owes_pause = False

    def _conductor(self, birth: Birth, opened: Opened, worker: Worker) -> Conductor:
        if self.comms.agreement is None:
            return SoloConductor()
        resolved = opened.resolved
        speculation = resolved.speculation
        adaptive = speculation is not None and speculation.draft_length == "adaptive"
        self.timed = TimedAgreement(self.comms.agreement)
        inner = GroupConductor(
            self.timed,
            Rules.of(resolved.num_speculative_tokens, worker.traits, adaptive, birth.trial.buckets),
            self.ledger,
            config_digest=digest_number(config_digest(resolved)),
            drafter=worker.traits,
            deadlines=self.deadlines,
        )
        inner.mode_ready = inner.mode_ready and birth.rank not in birth.trial.mode_not_ready
        mutants = [Mutant(name) for name in birth.trial.mutants]
        own = None if worker.traits is None else worker.traits.positions_max
        reach = own or resolved.max_model_len
        if mutants:
            return MutantConductor(inner, mutants, reach)
        return GateWatch(inner, reach) if birth.trial.watch_gate else inner

    def run(self) -> None:
        """Until told to stop. Raises what ends the group."""
        leader = self.core.leader
        while leader.life is not Life.GONE:
            self._rest()
            for word in self.link.receive():
                self._handle(word)
            if self.link.gone:
                os._exit(EXIT_ORPHANED)
            self._send(self.core.step())
            if self._owes_pause and leader.paused:
                self._owes_pause = False
                self.link.send(Paused())
        if self.plans is not None:
            self.plans.close()

    def _rest(self) -> None:
        """Waits while there is nothing to do."""
        if not self.core.leader.rests or self.core.pending:
            return
        poll = select.poll()
        poll.register(self.link.fileno(), self.link.interest)
        for descriptor in self.wakes.filenos():
            poll.register(descriptor, select.POLLIN)
        poll.poll()

    def _send(self, deltas: list[OutputDelta]) -> None:
        if deltas:
            self.link.send(Deltas(deltas=tuple(deltas), step=self.conductor.next_step - 1))

    def _trouble(self) -> EngineError | None:
        """Why this replica cannot take another step."""
        if self._fault == self.conductor.next_step:
            return EngineError("injected before the exchange")
        return None if self.shipper is None else self.shipper.settle()

    def _before(self, plan: StepPlan) -> None:
        """A sealed plan, about to be executed."""
        if self.comms.agreement is None:
            self.ledger.begin(plan.epoch, plan.step)
        self.comms.set_timeout(allowed(self.deadlines, plan))
        if self.shipper is not None:
            self.shipper.ship(plan)

    def _handle(self, word: ToRank) -> None:
        match word:
            case Submit(requests):
                self._submit(requests)
            case Cancel(numbers):
                for number in numbers:
                    self.core.cancel(number)
            case Ping():
                load = self.core.load_now()
                self.link.send(Pong(load.step, load.running, load.waiting, load.kv_usage))
            case Woken(epoch, step):
                assert isinstance(self.wakes, RelayedWakes)
                self.wakes.inbox.append(Wake(epoch, step))
            case Ask():
                self.link.send(self._told())
            case Pause():
                self._owes_pause = True
                self.core.leader.pause()
            case Resume():
                self.core.leader.resume()
            case Stop():
                self.core.leader.stop()
            case _:
                raise AssertionError(f"{word} after the start")

    def _submit(self, requests: tuple[Request, ...]) -> None:
        try:
            self.core.submit(requests)
        except (Refused, RequestError) as error:
            ended = [
                OutputDelta(request.number, finish_reason=FinishReason.ERROR, error=str(error))
                for request in requests
            ]
            self._send(ended)

    def _told(self) -> Told:
        core, conductor = self.core, self.conductor
        inner = conductor.inner if isinstance(conductor, _Wrapped) else conductor
        failures = conductor.failures if isinstance(conductor, GateWatch) else ()
        return Told(
            steps=core.counters.steps,
            preemptions=core.counters.preemptions,
            speculation=core.speculation,
            draft_lengths=core.draft_lengths,
            exchanges=inner.exchange_count if isinstance(inner, GroupConductor) else 0,
            exchange_micros=0.0 if self.timed is None else self.timed.median_micros,
            step_seconds=core.counters.step_seconds,
            gate_failures=tuple(failures),
        )
