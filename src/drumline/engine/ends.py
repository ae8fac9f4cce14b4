"""What a rank is born with: its descriptors, by their meaning.

Pure bookkeeping; it opens no model and takes no step.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

from drumline.config.mesh import GROUP_KINDS
from drumline.engine.messages import Birth, ToRank, decode_to_rank
from drumline.engine.pipes import Pipe
from drumline.parallel.groups import Group
from drumline.parallel.shm import Segment


@dataclass(frozen=True)
class Ends:
    """The descriptors that came with a birth. ``plans``: by the rank at the other end."""

    link: Pipe[ToRank]
    ledger: int
    segments: dict[Group, Segment]
    wakes: tuple[socket.socket, ...]
    plans: dict[int, socket.socket]

    @classmethod
    def of(cls, birth: Birth, descriptors: Sequence[int]) -> Ends:
        segments: dict[Group, Segment] = {}
        sockets: dict[str, dict[int, socket.socket]] = {"link": {}, "wake": {}, "plan": {}}
        ledger = -1
        for handle, descriptor in zip(birth.handles, descriptors, strict=True):
            if handle.kind == "ledger":
                ledger = descriptor
            elif handle.kind in sockets:
                peer = handle.ranks[0] if handle.ranks else -1
                sockets[handle.kind][peer] = socket.socket(fileno=descriptor)
            else:
                (kind,) = (kind for kind in GROUP_KINDS if kind == handle.kind)
                segment = Segment(descriptor, len(handle.ranks), handle.chunk_bytes)
                segments[Group(kind, handle.ranks)] = segment
        link = Pipe(sockets["link"][-1], decode_to_rank)
        return cls(link, ledger, segments, tuple(sockets["wake"].values()), sockets["plan"])


def digest_number(digest: str) -> int:
    """The digest as 63 bits, for a `StepShape`."""
    return int(digest[:16], 16) & (2**63 - 1)
