"""What the front end and the engine's process say to each other, as typed msgpack.

Every message is a value; a message that does not decode is a bug of ours and raises. This module
knows no sockets and no engine.
"""

from __future__ import annotations

import msgspec

from drumline.config import EngineConfig
from drumline.core.request import Request
from drumline.engine.facts import EngineFacts
from drumline.engine.outputs import OutputDelta


class Start(msgspec.Struct, frozen=True, tag=True):
    """The first message: what to load."""

    config: EngineConfig


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Samples to run, already checked by intake; taken all together or refused all together."""

    requests: tuple[Request, ...]


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Samples nobody waits for any more; numbers the engine does not know are ignored."""

    numbers: tuple[int, ...]


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Answered between two steps: proof that the loop moves."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Leave: what is in flight ends with ``abort``, and is told so first."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine has loaded. ``facts`` is what intake and ``/v1/models`` need to know."""

    facts: EngineFacts


class Deltas(msgspec.Struct, frozen=True, tag=True):
    """What one step added."""

    deltas: tuple[OutputDelta, ...]


class Refusal(msgspec.Struct, frozen=True, tag=True):
    """A submission that a limit turned away; ``numbers`` are its samples. ``full`` says that it
    may be tried again later."""

    numbers: tuple[int, ...]
    message: str
    full: bool


class Pong(msgspec.Struct, frozen=True, tag=True):
    """The loop's answer: steps so far and what it holds."""

    step: int
    running: int
    waiting: int
    kv_usage: float


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """The engine's last words. ``usage`` says that what was asked is at fault, not the engine."""

    message: str
    usage: bool


ToEngine = Start | Submit | Cancel | Ping | Stop
FromEngine = Ready | Deltas | Refusal | Pong | Fatal

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    return _encoder.encode(message)


def decode_to_engine(data: bytes | bytearray) -> ToEngine:
    decoded: ToEngine = _to_engine.decode(data)
    return decoded


def decode_from_engine(data: bytes) -> FromEngine:
    decoded: FromEngine = _from_engine.decode(data)
    return decoded
