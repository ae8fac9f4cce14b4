"""Groups of ranks on one host, over shared memory that leaves nothing behind.

A `Segment` is made by whoever starts the ranks and handed to them as a descriptor: it has no name
in any file system, so it is gone when the last process that holds it is. Carries bytes; the native
`ShmGroup` waits for ranks, spins briefly and sleeps.
"""

from __future__ import annotations

import importlib.util
import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from drumline.core.errors import EngineError
from drumline.core.ledger import DTYPES, OPERATIONS, Ledger
from drumline.parallel.comm import TIMEOUT_SECONDS, Failure, RecordedComm

if TYPE_CHECKING:
    from drumline._native import ShmGroup

CHUNK_BYTES = 1 << 18  # what a rank publishes at once; more goes in several pieces
# While ranks have a core each, waiting for a peer takes less than falling asleep and being woken.
SPIN_US = 50
ABORTED = 1  # an abort word without a rank's own code

_MASK = (1 << 56) - 1
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "uint8": 1}


@dataclass(frozen=True)
class Segment:
    """Shared memory for one group. ``descriptor`` is this process's; close it when the ranks have
    attached, or keep it to raise the abort word."""

    descriptor: int
    ranks: int
    chunk_bytes: int = CHUNK_BYTES

    def close(self) -> None:
        os.close(self.descriptor)


def available() -> bool:
    """Whether this installation has the native code that shared memory needs; else use gloo."""
    return importlib.util.find_spec("drumline._native") is not None


def _attached(segment: Segment, rank: int, spin_us: int, watch_fd: int) -> ShmGroup:
    from drumline._native import ShmGroup

    return ShmGroup(segment.descriptor, rank, segment.ranks, segment.chunk_bytes, spin_us, watch_fd)


def create_segment(ranks: int, chunk_bytes: int = CHUNK_BYTES) -> Segment:
    """A fresh segment, inheritable by processes that are handed its descriptor."""
    from drumline._native import shm_segment_bytes

    chunk_bytes = max(chunk_bytes, 64 * ranks)
    size = shm_segment_bytes(ranks, chunk_bytes)
    descriptor = _anonymous_file()
    try:
        os.ftruncate(descriptor, size)
    except OSError as error:
        os.close(descriptor)
        raise EngineError(f"shared memory of {size} bytes: {error.strerror}") from None
    return Segment(descriptor, ranks, chunk_bytes)


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("drumline", os.MFD_CLOEXEC)
    folder = "/dev/shm" if Path("/dev/shm").is_dir() else None
    descriptor, name = tempfile.mkstemp(prefix="drumline-", dir=folder)
    os.unlink(name)
    return descriptor


class ShmCarrier:
    """A `Carrier` over a `Segment`."""

    def __init__(self, segment: Segment, rank: int, spin_us: int, watch_fd: int = -1) -> None:
        """``rank``: index in the group. ``watch_fd``: a descriptor whose hangup ends every wait,
        because whoever started the ranks is gone."""
        try:
            self.group = _attached(segment, rank, spin_us, watch_fd)
        except (RuntimeError, OSError) as error:
            raise EngineError(f"index {rank} of {segment.ranks}: {error}") from None

    def gather(self, x: Tensor, out: Tensor, seconds: float) -> Failure | None:
        nbytes = x.nbytes
        tag = _tag("all_gather", x)
        found = self.group.gather(x.data_ptr(), nbytes, out.data_ptr(), tag, microseconds(seconds))
        return None if found is None else self.failure(found, seconds)

    def reduce(self, x: Tensor, out: Tensor, seconds: float) -> Failure | None:
        tag = _tag("all_reduce", x)
        found = self.group.reduce(
            x.data_ptr(), x.numel(), out.data_ptr(), tag, microseconds(seconds)
        )
        return None if found is None else self.failure(found, seconds)

    def exchange(self, x: Tensor, out: Tensor, seconds: float) -> Failure | None:
        tag = _tag("all_to_all", x)
        part = x.nbytes // self.group.ranks
        found = self.group.exchange(x.data_ptr(), part, out.data_ptr(), tag, microseconds(seconds))
        return None if found is None else self.failure(found, seconds)

    def broadcast(self, x: Tensor, root: int, seconds: float) -> Failure | None:
        tag = _tag("broadcast", x)
        found = self.group.broadcast(x.data_ptr(), x.nbytes, root, tag, microseconds(seconds))
        return None if found is None else self.failure(found, seconds)

    def close(self) -> None:
        self.group.close()

    def failure(self, found: tuple[str, list[int], int, int], seconds: float) -> Failure:
        kind, members, mine, theirs = found
        if kind == "timeout":
            return Failure(f"nothing after {seconds:g} s", tuple(members))
        if kind == "died":
            process = self.group.processes()[members[0]]
            return Failure(f"its process {process} has ended", tuple(members))
        if kind == "differs":
            pairs = ((self.group.rank, _told(mine)), (members[0], _told(theirs)))
            return Failure("ranks make different calls", tuple(members), pairs)
        if kind == "orphaned":
            return Failure("whoever started the ranks is gone")
        return Failure(f"the group was told to end (code {mine})")


def shm_comm(
    kind: str,
    ranks: tuple[int, ...],
    rank: int,
    segment: Segment,
    ledger: Ledger,
    *,
    seconds: float = TIMEOUT_SECONDS,
    spin_us: int = SPIN_US,
    watch_fd: int = -1,
) -> RecordedComm:
    """The group ``ranks`` as its ``rank``-th member sees it. The segment's descriptor stays the
    caller's and may be closed afterwards."""
    assert segment.ranks == len(ranks)
    carrier = ShmCarrier(segment, rank, spin_us, watch_fd)
    return RecordedComm(kind, ranks, rank, carrier, ledger, seconds)


def raise_abort(segment: Segment, code: int = ABORTED) -> None:
    """Ends every wait in the group, now and later. For whoever started the ranks."""
    group = _attached(segment, -1, 0, -1)
    group.raise_abort(code)
    group.close()


def microseconds(seconds: float) -> int:
    return int(seconds * 1e6)


def _tag(operation: str, x: Tensor) -> int:
    return tag_of(operation, x.shape, str(x.dtype).removeprefix("torch."))


def tag_of(operation: str, shape: Sequence[int], dtype: str) -> int:
    """What all ranks must bring alike: operation, type and bytes, in 64 bits."""
    nbytes = math.prod(shape) * _BYTES[dtype]
    return OPERATIONS.index(operation) << 60 | DTYPES.index(dtype) << 56 | nbytes & _MASK


def _told(tag: int) -> str:
    dtype = DTYPES[tag >> 56 & 15]
    return f"{OPERATIONS[tag >> 60]} of {tag & _MASK} bytes of {dtype}"
