"""The seams of `lockstep.channel` over socket pairs: wakes between leaders, plans to followers.

What is sent never waits for who reads it; what is awaited has a deadline, but for a follower's
next plan. Knows nothing of what plans say.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from statistics import median

from drumline.core.errors import RankLost
from drumline.engine.messages import (
    Shipped,
    ToRank,
    Woken,
    decode_acknowledgement,
    decode_shipped,
)
from drumline.engine.pipes import Pipe
from drumline.lockstep.channel import Acknowledgement, AgreementChannel, Wake
from drumline.lockstep.shape import Vector

_WAKE = struct.Struct("<qq")


class TimedAgreement:
    """An `AgreementChannel` that knows in ``seconds`` how long its last exchanges took."""

    def __init__(self, inner: AgreementChannel) -> None:
        self.seconds: deque[float] = deque(maxlen=1024)
        self._inner = inner

    @property
    def ranks(self) -> Sequence[int]:
        return self._inner.ranks

    @property
    def median_micros(self) -> float:
        return 1e6 * median(self.seconds) if self.seconds else 0.0

    def exchange(self, vector: Vector, timeout: float) -> Sequence[Vector]:
        began = time.perf_counter()
        found = self._inner.exchange(vector, timeout)
        self.seconds.append(time.perf_counter() - began)
        return found


class SocketWakes:
    """A `WakeChannel`. ``peers``: a stream to every other leader."""

    def __init__(self, peers: Sequence[socket.socket]) -> None:
        self._peers = list(peers)
        self._incoming = {peer.fileno(): bytearray() for peer in peers}
        for peer in peers:
            peer.setblocking(False)

    def send(self, wake: Wake) -> None:
        """A peer whose socket is full has more wakes than it could heed, one that is gone none."""
        for peer in self._peers:
            with suppress(OSError):
                peer.send(_WAKE.pack(wake.epoch, wake.step))

    def receive(self) -> Sequence[Wake]:
        found = []
        for peer in list(self._peers):
            buffer = self._incoming[peer.fileno()]
            with suppress(BlockingIOError):
                data = peer.recv(4096)
                if not data:  # it has left: nothing more comes, and the socket would stay readable
                    self._peers.remove(peer)
                    peer.close()
                    continue
                buffer += data
            whole = len(buffer) - len(buffer) % _WAKE.size
            found += [Wake(*fields) for fields in _WAKE.iter_unpack(buffer[:whole])]
            del buffer[:whole]
        return found

    def filenos(self) -> Sequence[int]:
        return [peer.fileno() for peer in self._peers]


class SocketPlans:
    """A `PlanChannel`. ``pipes``: one to each follower, by rank."""

    def __init__(self, ends: Mapping[int, socket.socket]) -> None:
        self._pipes = {rank: Pipe(ends[rank], decode_acknowledgement) for rank in sorted(ends)}
        self._words: dict[tuple[int, int], Acknowledgement] = {}

    @property
    def followers(self) -> Sequence[int]:
        return tuple(self._pipes)

    def send(self, sequence: int, plan: bytes) -> None:
        for pipe in self._pipes.values():
            pipe.send(Shipped(sequence=sequence, plan=plan))

    def collect(self, sequence: int, timeout: float) -> Sequence[Acknowledgement]:
        deadline = time.monotonic() + timeout
        while missing := [rank for rank in self._pipes if (rank, sequence) not in self._words]:
            left = deadline - time.monotonic()
            gone = [rank for rank in missing if self._pipes[rank].gone]
            if left <= 0 or gone:
                reason = "has gone" if gone else f"has not acknowledged within {timeout:g} s"
                rank = (gone or missing)[0]
                raise RankLost(rank, sequence, "agree", "acknowledgement", reason)
            poll = select.poll()
            for rank in missing:
                poll.register(self._pipes[rank].fileno(), self._pipes[rank].interest)
            poll.poll(left * 1000)
            for rank in missing:
                for word in self._pipes[rank].receive():
                    self._words[rank, word.sequence] = word
        return [self._words.pop((rank, sequence)) for rank in self._pipes]

    def close(self) -> None:
        """There will be no more plans."""
        for pipe in self._pipes.values():
            pipe.close()


class SocketPlanSource:
    """A follower's `PlanSource`. ``spin_seconds``: how long it looks for the next plan before it
    sleeps, since to be woken takes longer than the leader needs between two steps."""

    def __init__(self, end: socket.socket, spin_seconds: float = 0.0) -> None:
        self._pipe = Pipe(end, decode_shipped)
        self._spin_seconds = spin_seconds
        self._waiting: list[Shipped] = []

    def receive(self) -> tuple[int, bytes] | None:
        spin_until = time.monotonic() + self._spin_seconds
        while not self._waiting:
            if self._pipe.gone:
                return None
            if time.monotonic() < spin_until:
                self._waiting = self._pipe.receive()
                continue
            poll = select.poll()
            poll.register(self._pipe.fileno(), self._pipe.interest)
            poll.poll()  # the end of the leader or of the supervisor ends this wait
            self._waiting = self._pipe.receive()
        shipped = self._waiting.pop(0)
        return shipped.sequence, shipped.plan

    def acknowledge(self, word: Acknowledgement) -> None:
        self._pipe.send(word)
        self._pipe.drain(1.0)


class RelayedWakes:
    """A `WakeChannel` through the engine, which every leader speaks with anyway. ``inbox`` is
    filled by whoever reads what the engine says."""

    def __init__(self, link: Pipe[ToRank]) -> None:
        self.inbox: list[Wake] = []
        self._link = link

    def send(self, wake: Wake) -> None:
        self._link.send(Woken(epoch=wake.epoch, step=wake.step))

    def receive(self) -> Sequence[Wake]:
        found, self.inbox = self.inbox, []
        return found

    def filenos(self) -> Sequence[int]:
        return ()
