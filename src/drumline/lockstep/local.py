"""The seams of `lockstep.channel` within one process: for threads, tests and the simulator.

How a member waits is handed in: threads wait on a condition, a simulator hands its turn on. What
has gone with a reason fails every wait for it at once, as an abort word does between processes.
Knows no socket and no process.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from drumline.core.errors import RankLost
from drumline.lockstep.channel import Acknowledgement, Wake
from drumline.lockstep.shape import Vector


class Waiter(Protocol):
    """How a member waits for others."""

    def wait(self, ready: Callable[[], bool], timeout: float | None, what: str) -> bool:
        """Until ``ready()``; False when ``timeout`` seconds passed before. ``what`` names it."""
        ...

    def notify(self) -> None:
        """Something changed that others may wait for."""
        ...


class ThreadWaiter:
    """For threads: one condition for all that happens between them."""

    def __init__(self) -> None:
        self._condition = threading.Condition()

    def wait(self, ready: Callable[[], bool], timeout: float | None, what: str) -> bool:
        with self._condition:
            return self._condition.wait_for(ready, timeout=timeout)

    def notify(self) -> None:
        with self._condition:
            self._condition.notify_all()


class LocalGroup:
    """Members that exchange vectors in rounds. `member` gives each its channel."""

    def __init__(self, ranks: Sequence[int], waiter: Waiter) -> None:
        self.ranks = tuple(sorted(ranks))
        self.waiter = waiter
        self.gone: dict[int, str] = {}
        self.rounds: deque[dict[int, Vector]] = deque()
        self.first_round = 0  # number of rounds[0]; earlier ones have been read by all
        self._read_count: dict[int, int] = {}

    def member(self, rank: int) -> LocalAgreement:
        assert rank in self.ranks
        self._read_count[rank] = 0
        return LocalAgreement(self, rank)

    def leave(self, rank: int, reason: str) -> None:
        """The member is gone; whoever waits for it is told so."""
        self.gone[rank] = reason
        self.waiter.notify()

    def round(self, number: int) -> dict[int, Vector]:
        while self.first_round + len(self.rounds) <= number:
            self.rounds.append({})
        return self.rounds[number - self.first_round]

    def has_read(self, rank: int, number: int) -> None:
        self._read_count[rank] = number + 1
        while self.first_round < min(self._read_count.values()):
            self.rounds.popleft()
            self.first_round += 1


class LocalAgreement:
    """One member's `AgreementChannel`."""

    def __init__(self, group: LocalGroup, rank: int) -> None:
        self._group = group
        self._rank = rank
        self._round = 0

    @property
    def ranks(self) -> Sequence[int]:
        return self._group.ranks

    def exchange(self, vector: Vector, timeout: float) -> Sequence[Vector]:
        group, number = self._group, self._round
        given = group.round(number)
        given[self._rank] = vector
        self._round += 1
        group.waiter.notify()

        def missing() -> list[int]:
            return [rank for rank in group.ranks if rank not in given]

        def ready() -> bool:
            lost = missing()
            return not lost or any(rank in group.gone for rank in lost)

        came = group.waiter.wait(ready, timeout, f"rank {self._rank} exchange {number}")
        for rank in missing():
            reason = group.gone.get(rank)
            if reason is None and came:
                continue  # another one is gone
            reason = reason or f"has not come within {timeout:g} s"
            raise RankLost(rank, vector[1], "agree", "exchange", reason)
        group.has_read(self._rank, number)
        return [given[rank] for rank in group.ranks]


class LocalWakes:
    """One leader's `WakeChannel`; `connect` makes one for each."""

    def __init__(self, waiter: Waiter) -> None:
        self.inbox: deque[Wake] = deque()
        self._peers: list[LocalWakes] = []
        self._waiter = waiter

    @classmethod
    def connect(cls, count: int, waiter: Waiter) -> list[LocalWakes]:
        made = [cls(waiter) for _ in range(count)]
        for one in made:
            one._peers = [other for other in made if other is not one]
        return made

    def send(self, wake: Wake) -> None:
        for peer in self._peers:
            peer.inbox.append(wake)
        self._waiter.notify()

    def receive(self) -> Sequence[Wake]:
        found = []
        while self.inbox:
            found.append(self.inbox.popleft())
        return found

    def filenos(self) -> Sequence[int]:
        return ()


class LocalPlans:
    """Both ends of the way between one leader and its followers."""

    def __init__(self, followers: Sequence[int], waiter: Waiter) -> None:
        self.followers = tuple(sorted(followers))
        self.closed = False
        self.waiter = waiter
        self.sources = {rank: LocalSource(self, rank) for rank in self.followers}
        self._words: dict[tuple[int, int], Acknowledgement] = {}

    def send(self, sequence: int, plan: bytes) -> None:
        for rank in self.followers:
            self.sources[rank].plans.append((sequence, plan))
        self.waiter.notify()

    def collect(self, sequence: int, timeout: float) -> Sequence[Acknowledgement]:
        keys = [(rank, sequence) for rank in self.followers]
        came = self.waiter.wait(
            lambda: all(key in self._words for key in keys), timeout, f"plan {sequence}"
        )
        if not came:
            rank = next(rank for rank, _ in keys if (rank, sequence) not in self._words)
            reason = f"has not acknowledged within {timeout:g} s"
            raise RankLost(rank, sequence, "agree", "acknowledgement", reason)
        return [self._words.pop(key) for key in keys]

    def take(self, word: Acknowledgement) -> None:
        self._words[word.rank, word.sequence] = word
        self.waiter.notify()

    def close(self) -> None:
        """There will be no more plans."""
        self.closed = True
        self.waiter.notify()


class LocalSource:
    """One follower's `PlanSource`."""

    def __init__(self, plans: LocalPlans, rank: int) -> None:
        self.plans: deque[tuple[int, bytes]] = deque()
        self._way = plans
        self._rank = rank

    def receive(self) -> tuple[int, bytes] | None:
        way = self._way
        way.waiter.wait(lambda: bool(self.plans) or way.closed, None, f"rank {self._rank} plan")
        return self.plans.popleft() if self.plans else None

    def acknowledge(self, word: Acknowledgement) -> None:
        self._way.take(word)
