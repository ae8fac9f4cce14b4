"""What processes of an engine say to each other, as typed msgpack.

    front end ⇄ engine's process        Start, Submit, Cancel, Ping, Stop · Ready, Deltas, …
    engine ⇄ its ranks                  Begin, Serve, Submit, Pause, … · Standby, Warm, Deltas, …
    engine ⇄ nursery                    Birth · Born, Died
    engine ⇄ another machine            Relay, EndAll · Here, Relay, Born, Died, RankRing

Every message is a value; a message that does not decode is a bug of ours and raises. This module
knows no sockets and no engine.
"""

from __future__ import annotations

import msgspec

from drumline.config import EngineConfig, Resolved
from drumline.core.plan import SpeculationStats
from drumline.core.request import Request
from drumline.engine.facts import EngineFacts
from drumline.engine.outputs import OutputDelta
from drumline.lockstep.channel import Acknowledgement
from drumline.lockstep.forming import Introduction


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
    """What one step added. ``step``: its number, where a rank says it."""

    deltas: tuple[OutputDelta, ...]
    step: int = -1


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


# ---- between an engine and its ranks


class Handle(msgspec.Struct, frozen=True):
    """A descriptor that comes with a `Birth`, in the order of its list. ``kind``: ``link``,
    ``ledger``, ``wake``, ``plan``, or a group's kind. ``ranks``: at the other end, or in it."""

    kind: str
    ranks: tuple[int, ...] = ()
    chunk_bytes: int = 0


class Trial(msgspec.Struct, frozen=True):
    """What tests and ``bench hang`` switch on, and nobody else.

    ``mutants``: old decisions by the names of `lockstep.mutants`. ``watch_gate``: count steps in
    which the old gate would have skipped. ``gloo``: ranks of one host meet over torch.distributed
    although they could share memory. ``buckets``: sizes of mode "fixed", for which the leaders of
    ``mode_not_ready`` are not ready. ``held``: leaders that run nothing for so many steps although
    they have work. ``kv_blocks``: what each rank's cache holds. ``nudged``: ranks whose logits of
    odd tokens are higher by so much. ``faults``: exceptions as (rank, step, place); places are
    ``agree``, ``draft 0`` and so on, ``end``; ``load`` is a stop before anything is loaded.
    """

    mutants: tuple[str, ...] = ()
    watch_gate: bool = False
    gloo: bool = False
    buckets: tuple[int, ...] = ()
    mode_not_ready: tuple[int, ...] = ()
    held: tuple[tuple[int, int], ...] = ()
    kv_blocks: tuple[int, ...] = ()
    nudged: tuple[tuple[int, float], ...] = ()
    faults: tuple[tuple[int, int, str], ...] = ()


class Birth(msgspec.Struct, frozen=True, tag=True):
    """To the nursery: a rank to bring up, with its descriptors beside the message. ``meeting``:
    address and port where ranks meet over torch.distributed, if they do not share memory.
    ``relays``: wakes go through the engine, because leaders are on several machines."""

    rank: int
    path: str
    resolved: Resolved
    handles: tuple[Handle, ...]
    trial: Trial = Trial()
    meeting: tuple[str, int] | None = None
    relays: bool = False


class Born(msgspec.Struct, frozen=True, tag=True):
    rank: int
    process: int


class Died(msgspec.Struct, frozen=True, tag=True):
    """A rank's process has ended: its exit code, or the negative number of a signal."""

    rank: int
    code: int


class Standby(msgspec.Struct, frozen=True, tag=True):
    """A rank has loaded, and waits for `Begin`."""

    introduction: Introduction


class Begin(msgspec.Struct, frozen=True, tag=True):
    """All ranks have loaded: use every group once. ``kv_blocks``: what this rank's replica has."""

    kv_blocks: int


class Warm(msgspec.Struct, frozen=True, tag=True):
    """The rank has used every group, and waits for `Serve`. Seconds of one token in a pass."""

    token_seconds: float


class Serve(msgspec.Struct, frozen=True, tag=True):
    """All ranks are warm: take steps. ``token_seconds`` are those of the slowest rank."""

    token_seconds: float


class Pause(msgspec.Struct, frozen=True, tag=True):
    """Stand still; answered with `Paused` when no step is under way."""


class Resume(msgspec.Struct, frozen=True, tag=True): ...


class Paused(msgspec.Struct, frozen=True, tag=True): ...


class Ask(msgspec.Struct, frozen=True, tag=True):
    """For a replica's sums so far."""


class Told(msgspec.Struct, frozen=True, tag=True):
    """A replica's sums since it was loaded. ``exchanges``: of shapes, over its agreement group;
    ``exchange_micros``: the median of the last of them, waiting for others included.
    ``step_seconds``: of all steps together."""

    steps: int
    preemptions: int
    speculation: SpeculationStats
    draft_lengths: dict[int, int]
    exchanges: int
    exchange_micros: float = 0.0
    step_seconds: float = 0.0
    gate_failures: tuple[int, ...] = ()  # steps, where a trial watches the old gate


class Woken(msgspec.Struct, frozen=True, tag=True):
    """A leader's `Wake`, passed on by the engine to the others."""

    epoch: int
    step: int


class Trouble(msgspec.Struct, frozen=True, tag=True):
    """A rank's last words. ``kind``: ``own`` if the fault is this rank's, ``lost`` if it waited
    for ``rank`` in vain, ``differs`` where ranks have other ``values``, ``told`` if somebody else
    ended its wait, ``usage`` if what was asked is at fault."""

    kind: str
    message: str
    rank: int
    step: int = -1
    phase: str = ""
    operation: str = ""
    what: str = ""
    values: tuple[tuple[int, str], ...] = ()


# ---- between machines


class Here(msgspec.Struct, frozen=True, tag=True):
    """A machine has come, with the processes of its ranks to be."""

    node: int


class Relay(msgspec.Struct, frozen=True, tag=True):
    """A message from or to a rank on another machine, as bytes of `ToRank` or `FromRank`."""

    rank: int
    data: bytes


class RankRing(msgspec.Struct, frozen=True, tag=True):
    """A rank's ledger, as it was when something broke."""

    rank: int
    data: bytes


class EndAll(msgspec.Struct, frozen=True, tag=True):
    """All ranks of that machine end now."""


# ---- within a replica


class Shipped(msgspec.Struct, frozen=True, tag=True):
    """A leader's plan for its followers, in bytes of `lockstep.follower`."""

    sequence: int
    plan: bytes


ToEngine = Start | Submit | Cancel | Ping | Stop
FromEngine = Ready | Deltas | Refusal | Pong | Fatal
ToRank = Begin | Serve | Woken | Submit | Cancel | Ping | Stop | Pause | Resume | Ask
FromRank = Standby | Warm | Woken | Deltas | Pong | Paused | Told | Trouble
FromNursery = Born | Died
FromNode = Here | Relay | Born | Died | RankRing
ToNode = Relay | EndAll

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)
_to_rank = msgspec.msgpack.Decoder(ToRank)
_from_rank = msgspec.msgpack.Decoder(FromRank)
_shipped = msgspec.msgpack.Decoder(Shipped)
_acknowledgement = msgspec.msgpack.Decoder(Acknowledgement)
_birth = msgspec.msgpack.Decoder(Birth)
_from_node = msgspec.msgpack.Decoder(FromNode)
_to_node = msgspec.msgpack.Decoder(ToNode)
_from_nursery = msgspec.msgpack.Decoder(FromNursery)


def encode(message: msgspec.Struct | Acknowledgement) -> bytes:
    return _encoder.encode(message)


def decode_to_engine(data: bytes | bytearray) -> ToEngine:
    decoded: ToEngine = _to_engine.decode(data)
    return decoded


def decode_from_engine(data: bytes) -> FromEngine:
    decoded: FromEngine = _from_engine.decode(data)
    return decoded


def decode_to_rank(data: bytes | bytearray) -> ToRank:
    decoded: ToRank = _to_rank.decode(data)
    return decoded


def decode_from_rank(data: bytes | bytearray) -> FromRank:
    decoded: FromRank = _from_rank.decode(data)
    return decoded


def decode_shipped(data: bytes | bytearray) -> Shipped:
    return _shipped.decode(data)


def decode_acknowledgement(data: bytes | bytearray) -> Acknowledgement:
    return _acknowledgement.decode(data)


def decode_birth(data: bytes) -> Birth:
    return _birth.decode(data)


def decode_from_nursery(data: bytes) -> FromNursery:
    decoded: FromNursery = _from_nursery.decode(data)
    return decoded


def decode_from_node(data: bytes | bytearray) -> FromNode:
    decoded: FromNode = _from_node.decode(data)
    return decoded


def decode_to_node(data: bytes | bytearray) -> ToNode:
    decoded: ToNode = _to_node.decode(data)
    return decoded
