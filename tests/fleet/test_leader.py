"""A leader's life: which Wakes count, what a pause is, and how it ends."""

from __future__ import annotations

import pytest

from drumline.core.errors import EngineError
from drumline.fleet.leader import Leader, Life
from drumline.fleet.replica import StepStats
from drumline.lockstep.channel import Wake
from drumline.lockstep.conductor import Rest
from drumline.lockstep.local import LocalWakes, ThreadWaiter

STATS = object()


class Script:
    """A replica whose turns are written down: None is a step, a rest is a rest."""

    def __init__(self, turns: list[Rest | Exception | None]) -> None:
        self.turns = turns
        self.pause = self.drain = self.stop = False
        self.rest: Rest | None = None
        self.next_step = 0
        self.epoch = 3
        self.seen: list[tuple[bool, bool, bool]] = []

    def step(self) -> StepStats | None:
        self.next_step += 1
        self.seen.append((self.pause, self.drain, self.stop))
        turn = self.turns.pop(0)
        if isinstance(turn, Exception):
            raise turn
        self.rest = turn
        return STATS if turn is None else None  # type: ignore[return-value]


class Rig:
    def __init__(self, *turns: Rest | Exception | None) -> None:
        self.script = Script(list(turns))
        self.pending = False
        self.wakes, self.peer = LocalWakes.connect(2, ThreadWaiter())
        self.leader = Leader(
            self.script,  # type: ignore[arg-type]
            self.script,
            self.wakes,
            lambda: self.pending,
        )

    @property
    def exchanges(self) -> int:
        return self.script.next_step


def test_awake_until_nobody_has_work() -> None:
    rig = Rig(None, None, Rest.SLEEP)
    assert [rig.leader.turn() for _ in range(3)] == [STATS, STATS, None]
    assert rig.leader.life is Life.ASLEEP
    assert rig.leader.rests
    assert [rig.leader.turn() for _ in range(3)] == [None] * 3
    assert rig.exchanges == 3


def test_only_the_wake_of_the_next_exchange_counts() -> None:
    rig = Rig(Rest.SLEEP, None)
    rig.leader.turn()
    for wake in (Wake(3, 0), Wake(3, 2), Wake(2, 1), Wake(4, 1)):
        rig.peer.send(wake)
        assert rig.leader.turn() is None
        assert rig.leader.life is Life.ASLEEP
    rig.peer.send(Wake(3, 1))
    assert rig.leader.turn() is STATS
    assert rig.peer.receive() == [], "who is called calls nobody"


def test_a_wake_is_dropped_and_not_kept() -> None:
    """Sent for an exchange that this leader was in already; when it sleeps again it means
    nothing, and must mean nothing later either."""
    rig = Rig(Rest.SLEEP, Rest.SLEEP, Rest.SLEEP)
    rig.leader.turn()
    rig.peer.send(Wake(3, 2))  # not yet
    assert rig.leader.turn() is None
    rig.peer.send(Wake(3, 1))
    rig.leader.turn()
    assert rig.exchanges == 2  # now exchange 2 is next, but that Wake is gone
    assert rig.leader.turn() is None
    assert rig.exchanges == 2


def test_work_wakes_everybody_once() -> None:
    rig = Rig(Rest.SLEEP, None, None)
    rig.leader.turn()
    rig.pending = True
    assert [rig.leader.turn(), rig.leader.turn()] == [STATS, STATS]
    assert rig.peer.receive() == [Wake(3, 1)]


def test_no_wake_is_sent_or_heard_while_paused() -> None:
    rig = Rig(None, Rest.PAUSE, None)
    rig.leader.turn()
    rig.leader.pause()
    rig.leader.turn()
    assert rig.leader.paused
    assert rig.script.seen[1] == (True, False, False)
    assert not rig.script.pause, "it was granted"
    rig.pending = True
    rig.peer.send(Wake(3, 2))
    assert [rig.leader.turn() for _ in range(3)] == [None] * 3
    assert rig.peer.receive() == []
    rig.leader.pause()  # told late: it stands still already
    assert not rig.script.pause
    rig.leader.resume()
    assert rig.leader.turn() is STATS
    assert rig.exchanges == 3
    assert rig.peer.receive() == [], "everybody is told to go on"


def test_a_pause_of_sleepers_is_one_exchange() -> None:
    rig = Rig(Rest.SLEEP, Rest.PAUSE)
    rig.leader.turn()
    rig.leader.pause()
    assert rig.leader.turn() is None
    assert rig.leader.paused
    assert rig.peer.receive() == [Wake(3, 1)]
    assert rig.script.seen == [(False, False, False), (True, False, False)]


def test_a_pause_that_another_asked_for() -> None:
    rig = Rig(Rest.PAUSE, None)
    rig.leader.turn()
    assert rig.leader.paused
    rig.leader.resume()
    assert rig.leader.turn() is STATS


def test_resume_without_a_pause_changes_nothing() -> None:
    rig = Rig(Rest.SLEEP)
    rig.leader.turn()
    rig.leader.resume()
    assert rig.leader.life is Life.ASLEEP


@pytest.mark.parametrize("what", ["drain", "stop"])
def test_sleepers_wake_each_other_to_leave(what: str) -> None:
    rig = Rig(Rest.SLEEP, Rest.LEAVE)
    rig.leader.turn()
    getattr(rig.leader, what)()
    assert rig.leader.turn() is None
    assert rig.peer.receive() == [Wake(3, 1)]
    assert rig.leader.life is Life.GONE
    assert rig.leader.turn() is None
    assert rig.exchanges == 2


def test_a_stop_ends_a_pause_and_a_drain_waits_for_its_end() -> None:
    rig = Rig(Rest.PAUSE, Rest.LEAVE)
    rig.leader.turn()
    rig.leader.drain()
    assert rig.leader.turn() is None
    assert rig.leader.paused
    rig.leader.stop()
    rig.leader.turn()
    assert rig.leader.life is Life.GONE
    assert rig.script.seen[-1] == (False, True, True)


def test_what_breaks_ends_its_life() -> None:
    rig = Rig(None, EngineError("no"))
    rig.leader.turn()
    with pytest.raises(EngineError, match="no"):
        rig.leader.turn()
    assert rig.leader.life is Life.GONE
    assert rig.leader.turn() is None
