"""What an engine's ranks have said: answers, last words, signs of life; and who is silent.

Takes in words and tells who is to blame when a group ends; what follows from that is decided by
whoever asks. Knows no request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from drumline.core.errors import DrumlineError
from drumline.engine.cluster import Cluster
from drumline.engine.messages import Deltas, FromRank, Ping, Trouble, Woken
from drumline.engine.outputs import OutputDelta
from drumline.engine.ranks import Ranks
from drumline.engine.verdict import verdict

GRACE_SECONDS = 0.5  # for ranks to say why they end, after the first did


class Hearing:
    """``take``: gets the deltas that come, in order. ``answers``: the last word of each kind, by
    rank."""

    def __init__(
        self, ranks: Ranks | Cluster, take: Callable[[Sequence[OutputDelta]], object]
    ) -> None:
        self.ranks = ranks
        self.mesh = ranks.mesh
        self.answers: dict[type[FromRank], dict[int, FromRank]] = {}
        self._take = take
        self._troubles: dict[int, Trouble] = {}
        self._last_steps: dict[int, int] = {}
        self._heard = dict.fromkeys(self.mesh.leaders, time.monotonic())
        self._asked: dict[int, float] = {}  # leader: when it was asked for a sign of life

    @property
    def broke(self) -> bool:
        """A rank has died, or said its last words."""
        return bool(self._troubles or self.ranks.died or self.ranks.nursery_gone)

    @property
    def grouped(self) -> bool:
        """Ranks share collectives, and watch each other."""
        return self.mesh.agrees or self.mesh.tp > 1

    def listen(self) -> None:
        """Takes in everything that has come."""
        for rank, word in self.ranks.receive():
            self._heard[rank] = time.monotonic()
            self._asked.pop(rank, None)
            match word:
                case Deltas(deltas, step):
                    self._last_steps[rank] = step
                    self._take(deltas)
                case Trouble():
                    self._troubles[rank] = word
                case Woken():
                    for leader in self.mesh.leaders:
                        if leader != rank:
                            self.ranks.tell(leader, word)
                case _:
                    self.answers.setdefault(type(word), {})[rank] = word

    def expect(self, leader: int) -> None:
        """A leader that rested is given something to do: from now on it must be heard."""
        self._heard[leader] = time.monotonic()

    def overdue(self, leaders: Sequence[int], seconds: float) -> tuple[int, ...]:
        """Of leaders at work, one that says nothing for so long although it was asked."""
        now = time.monotonic()
        for leader in leaders:
            asked = self._asked.get(leader)
            if asked is None and now - self._heard[leader] > seconds / 4:
                self._asked[leader] = now
                self.ranks.tell(leader, Ping())
            elif asked is not None and now - asked > seconds + GRACE_SECONDS:
                del self._asked[leader]
                return (leader,)
        return ()

    def verdict(self, overdue: tuple[int, ...] = ()) -> DrumlineError:
        """What the ranks broke with, once those that can have said their last words."""
        everybody = set(self.mesh.ranks)
        deadline = time.monotonic() + GRACE_SECONDS
        while self.grouped and not overdue and time.monotonic() < deadline:
            if everybody <= self._troubles.keys() | self.ranks.died.keys():
                break
            self.ranks.wait(deadline - time.monotonic())
            self.listen()
        silent = tuple(sorted(everybody - self._troubles.keys() - self.ranks.died.keys()))
        return verdict(
            self._troubles,
            self.ranks.died,
            self.ranks.ending,
            overdue or (silent if self.grouped else ()),
            self.ranks.ring,
            self._last_steps,
            self.mesh,
        )
