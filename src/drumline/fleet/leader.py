"""One replica's life among those it agrees with: awake, asleep, paused, gone.

    awake    takes turns; each is one exchange, and a step if that is decided
    asleep   nobody had work. Work, a wish to pause or to leave: Wake(epoch, n + 1) to the others,
             and into exchange n + 1. A Wake of exactly that exchange: into it
    paused   only `resume` and `stop` go on; requests wait, Wakes are dropped
    gone     the loop has ended

A Wake counts only if its step is the sleeper's next one: it may have been sent to somebody who was
in that exchange already, and then it means nothing any more. A pause, its end and a stop are told
to every leader, and whoever tells waits for all before the next; each leader is `paused` when no
step of the group is under way. The owner waits for descriptors, deadlines and its own inbox
whenever the leader `rests`; nothing in here waits but the exchange itself.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Protocol

from drumline.fleet.replica import Replica, StepStats
from drumline.lockstep.channel import Wake, WakeChannel
from drumline.lockstep.conductor import Rest


class Life(enum.StrEnum):
    AWAKE = "awake"
    ASLEEP = "asleep"
    PAUSED = "paused"
    GONE = "gone"


_AFTER = {Rest.SLEEP: Life.ASLEEP, Rest.PAUSE: Life.PAUSED, Rest.LEAVE: Life.GONE}


class Numbered(Protocol):
    """What a leader must know of its conductor: the number of its next exchange."""

    @property
    def epoch(self) -> int: ...

    @property
    def next_step(self) -> int: ...


class Leader:
    """Drives one replica. ``pending``: whether something has come that a turn would take in."""

    def __init__(
        self,
        replica: Replica,
        conductor: Numbered,
        wakes: WakeChannel,
        pending: Callable[[], bool],
    ) -> None:
        self.replica = replica
        self.life = Life.AWAKE
        self._conductor = conductor
        self._wakes = wakes
        self._pending = pending

    @property
    def rests(self) -> bool:
        """Nothing happens before something comes: work, a Wake, a word from outside."""
        return self.life is not Life.AWAKE

    @property
    def paused(self) -> bool:
        """No step of the group is under way, and none starts before `resume`."""
        return self.life is Life.PAUSED

    def pause(self) -> None:
        """Asks the group to stand still, work or not; done when the leader is `paused`."""
        if self.life is not Life.PAUSED:
            self.replica.pause = True

    def resume(self) -> None:
        """Goes on where it stood still, at the same exchange as everybody."""
        self.replica.pause = False
        if self.life is Life.PAUSED:
            self.life = Life.AWAKE

    def drain(self) -> None:
        """Leaves when nobody has work any more. Closing the intake is its owner's affair."""
        self.replica.drain = True

    def stop(self) -> None:
        """Leaves soon: what is unfinished ends with ``abort``. A pause ends with it."""
        self.replica.stop = True
        self.resume()

    def turn(self) -> StepStats | None:
        """One turn; None if there was no step. Raises what ends the group, and is gone then."""
        if self.life is not Life.AWAKE and not self._rises():
            return None
        try:
            stats = self.replica.step()
        except Exception:
            self.life = Life.GONE
            raise
        if stats is None:
            assert self.replica.rest is not None
            self.life = _AFTER[self.replica.rest]
            if self.paused:
                self.replica.pause = False
        return stats

    def _rises(self) -> bool:
        """Whether a sleeper comes into the next exchange."""
        own = Wake(self._conductor.epoch, self._conductor.next_step)
        called = own in self._wakes.receive()
        if self.life is not Life.ASLEEP:
            return False
        replica = self.replica
        if not called and (self._pending() or replica.pause or replica.drain or replica.stop):
            self._wakes.send(own)
            called = True
        if called:
            self.life = Life.AWAKE
        return called
