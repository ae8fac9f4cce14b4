"""A plan's way from the leader to those who only execute.

    Shipper     at the leader: ships sealed plans in sequence, settles the words that come back
    Follower    executes them in that order, and no other; says what it issued

A follower decides nothing. What it issued in a step must be what its leader issued: digests are
compared when the leader settles, before it tells the others how it stands.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from drumline.core.errors import Diverged, EngineError, RankLost
from drumline.core.ledger import Ledger
from drumline.core.plan import StepPlan
from drumline.lockstep.channel import Acknowledgement, PlanChannel, PlanSource

_decoder = msgspec.msgpack.Decoder(StepPlan)


def encode_plan(plan: StepPlan) -> bytes:
    """The plan as bytes; `decode_plan` makes an equal one of them."""
    return msgspec.msgpack.encode(plan)


def decode_plan(data: bytes) -> StepPlan:
    return _decoder.decode(data)


class Shipper:
    """The leader's end. ``timeout(plan)``: seconds that followers may take for a plan's step."""

    def __init__(
        self, channel: PlanChannel, ledger: Ledger, timeout: Callable[[StepPlan], float]
    ) -> None:
        self._channel = channel
        self._ledger = ledger
        self._timeout = timeout
        self._sequence = 0
        self._shipped: StepPlan | None = None

    def ship(self, plan: StepPlan) -> None:
        """Sends a plan out, before the leader executes it. The one before must be settled."""
        assert self._shipped is None, "the plan before was not settled"
        self._channel.send(self._sequence, encode_plan(plan))
        self._shipped = plan

    def settle(self) -> EngineError | None:
        """Why followers cannot go on, if they cannot: `RankLost` for one that failed or does not
        answer, `Diverged` for one that issued something else than its leader. After the step."""
        plan, self._shipped = self._shipped, None
        if plan is None:
            return None
        sequence, self._sequence = self._sequence, self._sequence + 1
        try:
            words = self._channel.collect(sequence, self._timeout(plan))
        except RankLost as error:
            return error
        for word in words:
            if word.error is not None:
                return RankLost(word.rank, plan.step, "target", "plan", word.error)
        own = self._ledger.last.full
        if any(word.digest != own for word in words):
            values = [(self._ledger.rank, own), *((word.rank, word.digest) for word in words)]
            return Diverged("ledger digest", values, plan.step)
        return None


class Follower:
    """One rank that follows. ``execute``: runs the step and ends it in the ledger."""

    def __init__(
        self, source: PlanSource, execute: Callable[[StepPlan], object], ledger: Ledger
    ) -> None:
        self._source = source
        self._execute = execute
        self._ledger = ledger
        self._sequence = 0

    def step(self) -> bool:
        """One plan; False when there will be none. Raises what broke, after saying so."""
        got = self._source.receive()
        if got is None:
            return False
        sequence, data = got
        rank = self._ledger.rank
        if sequence != self._sequence:
            raise EngineError(f"rank {rank}: plan {sequence} came, {self._sequence} is next")
        plan = decode_plan(data)
        self._sequence += 1
        self._ledger.begin(plan.epoch, plan.step)
        try:
            self._execute(plan)
            assert self._ledger.last.step == plan.step, "the step did not end in the ledger"
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            self._ledger.fail(reason)
            self._source.acknowledge(Acknowledgement(rank, sequence, 0, reason))
            raise
        word = Acknowledgement(rank, sequence, self._ledger.last.full)
        self._source.acknowledge(word)
        return True
