"""The engine's process as its parent sees it: started, spoken to, looked after, ended.

Both ends of one socket pair: messages cross it, and its end of file is the news of a death, in
either direction and within milliseconds. No file, port or pipe is left by any way of dying. This
module refuses to know what the messages mean.

    frame: length of the payload (4 bytes, little endian), payload
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from drumline.engine.messages import (
    FromEngine,
    ToEngine,
    decode_from_engine,
    decode_to_engine,
    encode,
)

HEADER = struct.Struct("<I")
READ_BYTES = 1 << 18
EXIT_SECONDS = 2.0  # from the end of the socket to the end of the process
STOPPED_BY_PARENT = (signal.SIGINT, signal.SIGTERM)


class EngineLink:
    """The parent's end. Made by `open`, inside a running event loop."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls) -> EngineLink:
        """Starts the process; it waits for its first message."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = spawn("drumline.engine.process", theirs.fileno())
        reader, writer = await asyncio.open_connection(sock=ours)
        return cls(process, reader, writer)

    def send(self, message: ToEngine) -> None:
        """Queues a message; what is sent to a process that has died is lost."""
        data = encode(message)
        self._writer.write(HEADER.pack(len(data)) + data)

    async def receive(self) -> FromEngine | None:
        """The next message; None once the other end is gone."""
        try:
            (size,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
            return decode_from_engine(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def ending(self) -> str:
        """How the process ended, in words. Call it when `receive` gave None."""
        name = f"the engine's process {self.process.pid}"
        try:
            code = await asyncio.to_thread(self.process.wait, EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return f"{name} hung up and did not end"
        if code >= 0:
            return f"{name} ended with code {code}"
        return f"{name} was ended by signal {-code} ({signal.Signals(-code).name})"

    def kill(self) -> None:
        """Ends the process without asking, a stopped one too."""
        self.process.kill()

    async def close(self) -> None:
        """Kills the process if it is still there; afterwards nothing of it is left."""
        if self.process.poll() is None:
            self.process.kill()
        await asyncio.to_thread(self.process.wait, EXIT_SECONDS)
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


def spawn(
    module: str, descriptor: int, variables: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Starts ``module`` with a descriptor and nothing else of ours.

    Signals that a terminal or a service manager sends to the whole group are the parent's affair:
    they are blocked from the process's first moment, until it ignores them.
    """
    package_root = str(Path(__file__).parents[2])
    paths = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPED_BY_PARENT)
    try:
        return subprocess.Popen(
            [sys.executable, "-m", module, str(descriptor)],
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(variables or {}), "PYTHONPATH": os.pathsep.join(paths)},
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class ParentLink:
    """The engine process's end: blocking, for one thread. A parent that does not read holds the
    engine up, for as long as it lives; one that is gone ends the process, wherever it is."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._buffer = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: FromEngine) -> None:
        data = encode(message)
        self._socket.sendall(HEADER.pack(len(data)) + data)

    def receive(self, wait: bool) -> list[ToEngine]:
        """Every message that has come whole; with ``wait`` at least one. EOFError if the parent
        is gone."""
        messages = self._whole()
        while True:
            try:
                data = self._socket.recv(
                    READ_BYTES, 0 if wait and not messages else socket.MSG_DONTWAIT
                )
            except BlockingIOError:
                return messages
            if not data:
                raise EOFError("the parent is gone")
            self._buffer += data
            messages += self._whole()

    def _whole(self) -> list[ToEngine]:
        messages, at = [], 0
        while len(self._buffer) - at >= HEADER.size:
            (size,) = HEADER.unpack_from(self._buffer, at)
            end = at + HEADER.size + size
            if len(self._buffer) < end:
                break
            messages.append(decode_to_engine(self._buffer[at + HEADER.size : end]))
            at = end
        del self._buffer[:at]
        return messages

    def watch(self, when_gone: Callable[[], None]) -> None:
        """Calls ``when_gone`` from a thread of its own as soon as the parent's end is closed."""

        def wait() -> None:
            hangup = select.poll()
            hangup.register(self._socket.fileno(), select.POLLHUP)
            hangup.poll()
            when_gone()

        threading.Thread(target=wait, name="parent-watch", daemon=True).start()

    def close(self) -> None:
        self._socket.close()
