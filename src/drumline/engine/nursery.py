"""Where ranks come from: one process that has loaded torch, and forks itself for each rank.

So that ranks start in milliseconds and share what they have in common. Every engine has a socket of
its own to it; over that come births and go the news of them. The nursery keeps no descriptor of a
rank, reaps those that end, ends those whose engine is gone, and itself when whoever started it is.
It knows no plan and no model.

    main socket     a message with a socket: an engine
    that socket     `Birth` with its descriptors ─►   ◄─ `Born`, `Died`
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import time
from dataclasses import dataclass

from drumline.engine.link import STOPPED_BY_PARENT
from drumline.engine.messages import Born, Died, decode_birth, encode

MESSAGE_BYTES = 1 << 17
DESCRIPTORS_MAX = 250  # what one message may carry
EXIT_SECONDS = 2.0  # for ranks to leave by themselves when their engine is gone


def main(descriptor: int) -> None:
    """Serves until the other end of ``descriptor`` is closed."""
    for number in STOPPED_BY_PARENT:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPED_BY_PARENT)
    import drumline.engine.rank  # noqa: F401  torch loads here, once for all ranks

    _Nursery(socket.socket(fileno=descriptor)).run()
    os._exit(0)  # nothing here needs an orderly farewell to torch


@dataclass(frozen=True)
class _Child:
    process: int
    rank: int
    engine: socket.socket


class _Nursery:
    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self.engines: dict[int, socket.socket] = {}
        self.children: dict[int, _Child] = {}  # by pidfd

    def run(self) -> None:
        while True:
            poll = select.poll()
            for descriptor in (self.end.fileno(), *self.engines, *self.children):
                poll.register(descriptor, select.POLLIN)
            ready = {descriptor for descriptor, _ in poll.poll()}
            for pidfd in ready & self.children.keys():
                self._reap(pidfd)
            for descriptor in ready & self.engines.keys():
                self._serve(self.engines[descriptor])
            if self.end.fileno() in ready:
                data, descriptors, _, _ = socket.recv_fds(self.end, 1, 1)
                if not data:
                    break
                engine = socket.socket(fileno=descriptors[0])
                self.engines[engine.fileno()] = engine
        for engine in list(self.engines.values()):
            self._end_all(engine)

    def _serve(self, engine: socket.socket) -> None:
        """One message of an engine, or its end."""
        data, descriptors, _, _ = socket.recv_fds(engine, MESSAGE_BYTES, DESCRIPTORS_MAX)
        if not data:
            self._end_all(engine)
            return
        process = os.fork()
        if process == 0:
            self._become(data, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        rank = decode_birth(data).rank
        self.children[os.pidfd_open(process)] = _Child(process, rank, engine)
        _tell(engine, encode(Born(rank=rank, process=process)))

    def _become(self, data: bytes, descriptors: list[int]) -> None:
        """The child: keeps nothing of the nursery, and never returns."""
        code = 1
        try:
            self.end.close()
            for engine in self.engines.values():
                engine.close()
            for pidfd in self.children:
                os.close(pidfd)
            from drumline.engine.rank import serve

            code = serve(decode_birth(data), descriptors)
        finally:
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _reap(self, pidfd: int) -> None:
        child = self.children.pop(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(child.process, 0)
        code = os.waitstatus_to_exitcode(status)
        _tell(child.engine, encode(Died(rank=child.rank, code=code)))

    def _end_all(self, engine: socket.socket) -> None:
        """The ranks of an engine see that it is gone, as we did; who does not leave is killed."""
        deadline = time.monotonic() + EXIT_SECONDS
        while (own := self._of(engine)) and (left := deadline - time.monotonic()) > 0:
            poll = select.poll()
            for pidfd in own:
                poll.register(pidfd, select.POLLIN)
            for pidfd, _ in poll.poll(left * 1000):
                self._reap(pidfd)
        for pidfd in self._of(engine):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            self._reap(pidfd)
        del self.engines[engine.fileno()]
        engine.close()

    def _of(self, engine: socket.socket) -> list[int]:
        return [pidfd for pidfd, child in self.children.items() if child.engine is engine]


def _tell(engine: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):
        engine.send(data)


if __name__ == "__main__":
    main(int(sys.argv[1]))
