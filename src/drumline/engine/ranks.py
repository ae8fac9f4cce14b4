"""The processes of an engine's ranks, as whoever started them sees it: begun, heard, ended.

Everything they share has no name in any file system: segments, ledgers and sockets are descriptors
that are handed over, and gone with the last process that holds them. So nothing is left behind by
any way of ending. It knows no request and decides nothing.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Sequence

import msgspec

from drumline.core.ledger import CAPACITY, Ring, parse_ring, size_of
from drumline.engine.link import EXIT_SECONDS, spawn
from drumline.engine.messages import (
    Birth,
    Born,
    Died,
    FromRank,
    Handle,
    Trial,
    decode_from_nursery,
    decode_from_rank,
    encode,
)
from drumline.engine.nursery import MESSAGE_BYTES
from drumline.engine.opening import Opened
from drumline.engine.pipes import Pipe
from drumline.engine.verdict import ending_of
from drumline.fleet.nodes import Nodes
from drumline.parallel.groups import Group, create_segments, segments_of
from drumline.parallel.shm import Segment, available, raise_abort

NURSERY_SECONDS = 5.0  # for the nursery to take a message, and to leave


def free_port() -> int:
    """A port of this host that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Nursery:
    """The process that ranks are forked from. Several engines may use one, one after the other or
    at a time; whoever started it closes it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process: subprocess.Popen[bytes] = spawn(
                "drumline.engine.nursery", theirs.fileno(), {"OPENBLAS_NUM_THREADS": "1"}
            )
        self._end = ours

    def connect(self) -> socket.socket:
        """An engine's own socket to it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(self._end, [b"\0"], [theirs.fileno()])
        return ours

    def close(self) -> None:
        """Afterwards neither it nor a rank of it is left."""
        self._end.close()
        try:
            self._process.wait(NURSERY_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(EXIT_SECONDS)


class Ranks:
    """Starts ranks of a mesh on this host: all of them, or those of ``nodes.own``. ``died``: exit
    codes of those that have ended. ``nursery``: where they come from; one of its own where there
    is none."""

    def __init__(
        self,
        opened: Opened,
        trial: Trial,
        nursery: Nursery | None = None,
        nodes: Nodes | None = None,
    ) -> None:
        self.mesh = opened.resolved.mesh
        self.nodes = nodes
        self.here = self.mesh.ranks if nodes is None else nodes.ranks(nodes.own)
        self.pipes: dict[int, Pipe[FromRank]] = {}
        self.died: dict[int, int] = {}
        self.processes: dict[int, int] = {}  # rank: process
        self.nursery_gone = self.closed = False
        self._pidfds: dict[int, int] = {}
        self._ledgers: dict[int, int] = {}
        self._segments: list[Segment] = []
        self._own = Nursery() if nursery is None else None
        shared = self._own or nursery
        assert shared is not None
        self._end = shared.connect()
        try:
            self._bear(opened, trial)
        except BaseException:
            self.close()
            raise

    def _bear(self, opened: Opened, trial: Trial) -> None:
        meeting = None
        segments: dict[Group, Segment] = {}
        if self.nodes is not None:
            meeting = (self.nodes.address, self.nodes.port)
        elif trial.gloo or not available():
            meeting = ("127.0.0.1", free_port())
        else:
            segments = create_segments(self.mesh)
            self._segments = list(segments.values())
        handed: dict[int, list[tuple[Handle, int | socket.socket]]]
        handed = {rank: [] for rank in self.here}
        for rank in self.here:
            ours, theirs = socket.socketpair()
            self.pipes[rank] = Pipe(ours, decode_from_rank)
            ledger = os.memfd_create("drumline-ledger", os.MFD_CLOEXEC)
            os.ftruncate(ledger, size_of(CAPACITY))
            self._ledgers[rank] = ledger
            handed[rank] += [(Handle("link"), theirs), (Handle("ledger"), ledger)]
            for group, segment in segments_of(segments, rank).items():
                handle = Handle(group.kind, group.ranks, segment.chunk_bytes)
                handed[rank].append((handle, segment.descriptor))
        for one, other, kind in self._ties():
            left, right = socket.socketpair()
            handed[one].append((Handle(kind, (other,)), left))
            handed[other].append((Handle(kind, (one,)), right))
        self._end.settimeout(NURSERY_SECONDS)
        relays = self.nodes is not None
        for rank, given in handed.items():
            handles = tuple(handle for handle, _ in given)
            birth = Birth(rank, str(opened.path), opened.resolved, handles, trial, meeting, relays)
            ends = [end for _, end in given]
            numbers = [end if isinstance(end, int) else end.fileno() for end in ends]
            socket.send_fds(self._end, [encode(birth)], numbers)
            for end in ends:
                if not isinstance(end, int):
                    end.close()
        self._end.settimeout(0)

    def _ties(self) -> Iterable[tuple[int, int, str]]:
        """Pairs of ranks that speak to each other: leaders that agree, leaders and followers."""
        leaders = [leader for leader in self.mesh.leaders if leader in self.here]
        if self.mesh.agrees and self.nodes is None:
            for index, one in enumerate(leaders):
                yield from ((one, other, "wake") for other in leaders[index + 1 :])
        for leader in leaders:
            yield from ((leader, rank, "plan") for rank in self.mesh.replica(leader)[1:])

    def tell(self, rank: int, message: msgspec.Struct) -> None:
        self.pipes[rank].send(message)

    def where(self, rank: int) -> str:
        """The rank's process, in words."""
        return f"process {self.processes.get(rank)}"

    def ending(self, rank: int) -> str:
        """How a rank that has died ended, in words."""
        return ending_of(self.processes.get(rank), self.died[rank])

    # ---- hearing -------------------------------------------------------------------------

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What becomes readable when something happens."""
        return (self._end.fileno(), *(pipe.fileno() for pipe in self.pipes.values()))

    def wait(self, seconds: float, also: Sequence[int] = ()) -> None:
        """Until something happens, or one of ``also`` becomes readable, at most so long."""
        poll = select.poll()
        if not self.nursery_gone:
            poll.register(self._end.fileno(), select.POLLIN)
        for pipe in self.pipes.values():
            if not pipe.gone:
                poll.register(pipe.fileno(), pipe.interest)
        for descriptor in also:
            poll.register(descriptor, select.POLLIN)
        poll.poll(max(0.0, seconds) * 1000)

    def receive(self) -> list[tuple[int, FromRank]]:
        """(rank, message) for all that have come; `died` and `processes` are up to date then."""
        self._hear_nursery()
        return [(rank, word) for rank, pipe in self.pipes.items() for word in pipe.receive()]

    def _hear_nursery(self) -> None:
        while not self.nursery_gone:
            try:
                data = self._end.recv(MESSAGE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.nursery_gone = True
                return
            match decode_from_nursery(data):
                case Born(rank, process):
                    self.processes[rank] = process
                    with contextlib.suppress(ProcessLookupError):
                        self._pidfds[rank] = os.pidfd_open(process)
                case Died(rank, code):
                    self.died[rank] = code

    def ring(self, rank: int) -> Ring | None:
        """What the rank's ledger holds, whatever became of the rank; None if it has none yet."""
        try:
            return parse_ring(self.ring_bytes(rank))
        except ValueError:
            return None

    def ring_bytes(self, rank: int) -> bytes:
        return os.pread(self._ledgers[rank], size_of(CAPACITY), 0)

    # ---- ending --------------------------------------------------------------------------

    def await_end(self, seconds: float) -> bool:
        """Whether all ranks have left by themselves within so long."""
        deadline = time.monotonic() + seconds
        while len(self.died) < len(self.pipes) and not self.nursery_gone:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self.wait(left)
            self.receive()
        return True

    def kill(self) -> None:
        """Ends every wait and every rank, a stopped one too."""
        for segment in self._segments:
            with contextlib.suppress(Exception):
                raise_abort(segment)
        for rank, pidfd in self._pidfds.items():
            if rank not in self.died:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Kills what is still there; afterwards nothing is left."""
        if self.closed:
            return
        self.closed = True
        self._hear_nursery()
        if len(self.died) < len(self.pipes):
            self.kill()
        self.await_end(EXIT_SECONDS)
        self._end.close()  # the nursery ends whom it has
        if self._own is not None:
            self._own.close()
        for pipe in self.pipes.values():
            pipe.close()
        for descriptor in (*self._ledgers.values(), *self._pidfds.values()):
            os.close(descriptor)
        for segment in self._segments:
            segment.close()
        self._pidfds.clear()
        self._ledgers.clear()
        self._segments.clear()
