"""Messages over a socket pair, from both ends, for loops that must not wait for their peer.

What does not fit into the socket waits in memory until it does: a leader that waited for a slow
reader would hold up everybody it agrees with. Knows no meaning of any message.

    frame: length of the payload (4 bytes, little endian), payload
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

import msgspec

from drumline.engine.link import HEADER, READ_BYTES
from drumline.engine.messages import encode
from drumline.lockstep.channel import Acknowledgement

Message = TypeVar("Message")
_SIOCGIFADDR = 0x8915  # Linux: the address of an interface


class Pipe(Generic[Message]):
    """One end. ``decode`` reads what comes; whatever is a message may be sent."""

    def __init__(self, end: socket.socket, decode: Callable[[bytearray], Message]) -> None:
        end.setblocking(False)
        self._socket = end
        self._decode = decode
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._unread: list[Message] = []
        self.gone = False  # the other end is closed

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def interest(self) -> int:
        """What to poll for."""
        return select.POLLIN | (select.POLLOUT if self._outgoing else 0)

    def send(self, message: msgspec.Struct | Acknowledgement) -> None:
        data = encode(message)
        self._outgoing += HEADER.pack(len(data)) + data
        self.flush()

    def flush(self) -> None:
        """Sends what the socket takes now; what a closed one does not take is lost."""
        while self._outgoing and not self.gone:
            try:
                sent = self._socket.send(self._outgoing)
            except BlockingIOError:
                return
            except OSError:
                self.gone = True
                return
            del self._outgoing[:sent]

    def drain(self, seconds: float) -> None:
        """Waits until everything is sent, at most so long."""
        poll = select.poll()
        poll.register(self.fileno(), select.POLLOUT)
        while self._outgoing and not self.gone and poll.poll(seconds * 1000):
            self.flush()

    def receive(self) -> list[Message]:
        """Every message that has come whole."""
        self.flush()
        while not self.gone:
            try:
                data = self._socket.recv(READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self.gone = not data
            self._incoming += data
        messages, self._unread = self._unread, []
        at = 0
        while len(self._incoming) - at >= HEADER.size:
            (size,) = HEADER.unpack_from(self._incoming, at)
            end = at + HEADER.size + size
            if len(self._incoming) < end:
                break
            messages.append(self._decode(self._incoming[at + HEADER.size : end]))
            at = end
        del self._incoming[:at]
        return messages

    def unread(self, messages: list[Message]) -> None:
        """Gives back what the next `receive` shall bring first; poll says nothing of it."""
        self._unread = messages + self._unread

    def close(self) -> None:
        self._socket.close()


def exit_when_gone(descriptor: int, code: int) -> None:
    """Ends this process as soon as the other end of ``descriptor`` is closed, wherever it is."""

    def wait() -> None:
        hangup = select.poll()
        hangup.register(descriptor, select.POLLHUP)
        hangup.poll()
        os._exit(code)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()


def interface_to(address: str) -> str | None:
    """The network interface of this host that reaches ``address``; None for the host itself."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                if socket.inet_ntoa(answer[20:24]) == own:
                    return None if own.startswith("127.") else name
    return None
