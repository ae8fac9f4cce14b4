"""What a rank has issued, in order: a ring of fixed-size records that outlives its process.

    begin(epoch, step)           a step starts; its numbers and digests start anew
      enter(phase, part)         "agree", "target", "draft" 0, "draft" 1, …
        issue(...) ─► ticket     written before the operation is entered
        complete(ticket)         and marked after it
      leave()                    what the phase has issued, to be compared with the script
    end()                        the step's digests become those of the last executed step

A digest stands for everything a step issued, in order: phase, operation, group, shape, type.
`StepDigest.wide` covers what spans replicas (group "ep") and must be equal on all of them; `full`
covers all but the agreement itself and must be equal within a replica.

The file is a header and ``capacity`` slots; record i lies in slot i % capacity. It may be read at
any moment, while its process writes or after that was killed: a record whose bytes are not all
there is left out, and no other depends on them. Every word is a small number in the file.
Knows no tensor, no time and no other rank.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

PHASES = ("agree", "target", "draft", "warmup")
OPERATIONS = ("all_reduce", "all_gather", "all_to_all", "broadcast", "barrier")
GROUPS = ("tp", "ep", "agreement")
DTYPES = ("float32", "float16", "bfloat16", "int64", "int32", "uint8")
EXTENTS_MAX = 4
CAPACITY = 4096

_MAGIC = b"drumledg"
_VERSION = 2
_HEADER = struct.Struct("<8sHHiqH")  # magic, version, capacity, rank, error step, length
_HEADER_BYTES = 1024
_REASON_AT = 64
_REASON_BYTES_MAX = _HEADER_BYTES - _REASON_AT
# sequence + 1, epoch, step; phase, part; number; operation, group, dtype, how many extents, they;
# sequence + 1 again, so that a record cut off in its making shows; state
_RECORD = struct.Struct("<qiqBBHBBBB4qIB")
_SLOT = struct.Struct("<qiq2sH36sIB")  # the same, with what repeats as bytes
_WHERE, _WHAT = struct.Struct("<BB"), struct.Struct("<BBBB4q")
_RECORD_BYTES = 72
_STATE_AT = _RECORD.size - 1
_KNOWN_MAX = 4096  # operations whose bytes are kept
_ERROR_AT = struct.calcsize("<8sHHi")
_MASK = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Entry:
    """One operation as it was issued. ``part`` counts draft passes, ``number`` within the part."""

    phase: str
    part: int
    number: int
    operation: str
    group: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        where = f"{self.phase} {self.part}" if self.phase == "draft" else self.phase
        extents = "x".join(map(str, self.shape))
        return f"{where} #{self.number}: {self.operation} over {self.group} of {extents}"


@dataclass(frozen=True, slots=True)
class Record:
    """An entry in the ring: ``sequence`` counts all of a rank's records from 0."""

    sequence: int
    epoch: int
    step: int
    entry: Entry
    completed: bool


@dataclass(frozen=True, slots=True)
class StepDigest:
    """What an executed step issued, as two 63-bit numbers; see the module. Step -1: none yet."""

    step: int = -1
    wide: int = 0
    full: int = 0


@dataclass(frozen=True, slots=True)
class Ring:
    """A ledger as it was found: the last records, oldest first, and the last words if any."""

    rank: int
    records: tuple[Record, ...]
    error: tuple[int, str] | None  # (step, reason)


_Key = tuple[str, int, str, str, tuple[int, ...], str]


class Ledger:
    """The writer. One per rank and process; not thread-safe."""

    def __init__(self, memory: mmap.mmap | bytearray, rank: int, capacity: int = CAPACITY) -> None:
        """``memory``: zeroed, `size_of` (capacity) bytes. Most callers want a classmethod."""
        assert 0 < capacity < 2**16
        assert len(memory) >= size_of(capacity)
        self.rank = rank
        self.last = StepDigest()
        self._memory = memory
        self._capacity = capacity
        self._count = 0
        self._epoch = self._step = 0
        self._phase, self._part, self._number = "agree", 0, 0
        self._issued: list[_Key] = []
        self._known: dict[_Key, tuple[bytes, bytes, bytes]] = {}
        self._wide = self._full = b""
        _HEADER.pack_into(memory, 0, _MAGIC, _VERSION, capacity, rank, -1, 0)

    @classmethod
    def in_memory(cls, rank: int = 0, capacity: int = 64) -> Ledger:
        """A ledger that dies with its process; for one rank, tests and the simulator."""
        return cls(bytearray(size_of(capacity)), rank, capacity)

    @classmethod
    def on_descriptor(cls, descriptor: int, rank: int, capacity: int = CAPACITY) -> Ledger:
        """On an open file, which is grown to its size. The descriptor may be closed afterwards."""
        os.ftruncate(descriptor, size_of(capacity))
        return cls(mmap.mmap(descriptor, size_of(capacity)), rank, capacity)

    @classmethod
    def in_file(cls, path: Path, rank: int, capacity: int = CAPACITY) -> Ledger:
        """In a file at ``path``, which is made anew."""
        with path.open("w+b") as file:
            return cls.on_descriptor(file.fileno(), rank, capacity)

    # ---- the step ------------------------------------------------------------------------

    def begin(self, epoch: int, step: int) -> None:
        """A step starts. Said again of the same step, it starts anew."""
        self._epoch, self._step = epoch, step
        self._wide = self._full = b""
        self.enter("agree")

    def enter(self, phase: str, part: int = 0) -> None:
        """A phase of the step starts; numbers start at 0."""
        assert phase in PHASES, phase
        self._phase, self._part, self._number = phase, part, 0
        self._issued = []

    def issue(self, operation: str, group: str, shape: Sequence[int], dtype: str) -> int:
        """Writes that an operation is about to be entered; returns the ticket to complete it."""
        key = (self._phase, self._part, operation, group, tuple(shape), dtype)
        known = self._known.get(key)
        if known is None:
            known = self._learn(key)
        where, what, content = known
        ticket = self._count
        _SLOT.pack_into(
            self._memory,
            self._at(ticket),
            ticket + 1,
            self._epoch,
            self._step,
            where,
            self._number,
            what,
            (ticket + 1) & 0xFFFFFFFF,
            0,
        )
        self._count += 1
        self._number += 1
        self._issued.append(key)
        # Order is told by chaining; numbers also count what a replica issues alone.
        if group != "agreement":
            self._full = _digest(self._full, content)
        if group == "ep":
            self._wide = _digest(self._wide, content)
        return ticket

    def complete(self, ticket: int) -> None:
        """The operation came to its end."""
        assert self._count - self._capacity <= ticket < self._count
        self._memory[self._at(ticket) + _STATE_AT] = 1

    def leave(self) -> tuple[Entry, ...]:
        """What the phase has issued so far."""
        return tuple(
            Entry(phase, part, number, operation, group, shape, dtype)
            for number, (phase, part, operation, group, shape, dtype) in enumerate(self._issued)
        )

    def end(self) -> None:
        """The step was executed; its digests may be told."""
        self.last = StepDigest(self._step, _number(self._wide), _number(self._full))

    def fail(self, reason: str) -> None:
        """This rank's last words, for whoever reads the ring: why it leaves in this step."""
        text = reason.encode()[:_REASON_BYTES_MAX]
        self._memory[_REASON_AT : _REASON_AT + len(text)] = text
        struct.pack_into("<qH", self._memory, _ERROR_AT, self._step, len(text))

    # ---- what it is at -------------------------------------------------------------------

    @property
    def step(self) -> int:
        return self._step

    @property
    def phase(self) -> str:
        """Where the rank is, in words."""
        return f"draft pass {self._part}" if self._phase == "draft" else self._phase

    def ring(self) -> Ring:
        """What `read_ring` would find."""
        return parse_ring(bytes(self._memory))

    def _learn(self, key: _Key) -> tuple[bytes, bytes, bytes]:
        """The bytes of what repeats in records: where, what, and both."""
        phase, part, operation, group, shape, dtype = key
        assert len(shape) <= EXTENTS_MAX, shape
        where = _WHERE.pack(PHASES.index(phase), part)
        what = _WHAT.pack(
            OPERATIONS.index(operation),
            GROUPS.index(group),
            DTYPES.index(dtype),
            len(shape),
            *shape,
            *(0,) * (EXTENTS_MAX - len(shape)),
        )
        if len(self._known) == _KNOWN_MAX:
            self._known.clear()
        self._known[key] = (where, what, where + what)
        return self._known[key]

    def _at(self, sequence: int) -> int:
        return _HEADER_BYTES + sequence % self._capacity * _RECORD_BYTES


def size_of(capacity: int) -> int:
    """Bytes of a ledger with so many slots."""
    return _HEADER_BYTES + capacity * _RECORD_BYTES


def read_ring(path: Path) -> Ring:
    """The ring in a file. Raises `ValueError` for a file that is no ledger."""
    return parse_ring(path.read_bytes())


def parse_ring(data: bytes) -> Ring:
    """The ring in these bytes; a record that was cut off in its making is left out."""
    if len(data) < _HEADER_BYTES or not data.startswith(_MAGIC):
        raise ValueError("not a ledger")
    _, version, capacity, rank, error_step, length = _HEADER.unpack_from(data)
    if version != _VERSION or len(data) < size_of(capacity):
        raise ValueError(f"a ledger of version {version} with {len(data)} bytes")
    # No count says how many there are: its own bytes would be missing while they are written.
    found = (_unpack(data, _HEADER_BYTES + slot * _RECORD_BYTES) for slot in range(capacity))
    records = sorted((record for record in found if record), key=lambda record: record.sequence)
    error = None
    if length > 0:  # written last, and 0 while the step is written
        text = data[_REASON_AT : _REASON_AT + length].decode(errors="replace")
        error = (error_step, text)
    return Ring(rank, tuple(records), error)


def _unpack(data: bytes, at: int) -> Record | None:
    fields = _RECORD.unpack_from(data, at)
    sequence, epoch, step, phase, part, number, operation, group, dtype, count = fields[:10]
    if sequence < 1 or count > EXTENTS_MAX or fields[14] != sequence % 2**32:
        return None
    try:
        entry = Entry(
            PHASES[phase],
            part,
            number,
            OPERATIONS[operation],
            GROUPS[group],
            tuple(fields[10 : 10 + count]),
            DTYPES[dtype],
        )
    except IndexError:
        return None
    return Record(sequence - 1, epoch, step, entry, bool(fields[15]))


def _digest(before: bytes, content: bytes) -> bytes:
    return blake2b(before + content, digest_size=8).digest()


def _number(digest: bytes) -> int:
    return int.from_bytes(digest, "little") & _MASK
