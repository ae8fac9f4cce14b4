"""From a mesh to the comms of one rank.

Whoever starts the ranks makes a segment for every group (`create_segments`) and hands each rank
the descriptors of its own (`segments_of`); the rank attaches (`connect_shm`). Across hosts ranks
meet over torch.distributed and make every group in one order (`connect_gloo`). A rank always has
a tp group, though it may be alone in it; an ep group only where experts are spread; an agreement
channel only where it leads a replica that shares collectives with others.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from drumline.config.mesh import GROUP_KINDS, GroupKind, Mesh
from drumline.core.ledger import Ledger
from drumline.lockstep.shape import Vector
from drumline.parallel.comm import TIMEOUT_SECONDS, Comm
from drumline.parallel.gloo import gloo_comm
from drumline.parallel.shm import CHUNK_BYTES, SPIN_US, Segment, create_segment, shm_comm
from drumline.parallel.solo import solo_comm

AGREEMENT_CHUNK_BYTES = 1 << 14  # a step's shape is a few hundred numbers
CROWDED_SPIN_US = 5  # with more ranks than cores


@dataclass(frozen=True, slots=True)
class Group:
    """A group by its kind and its members' ranks, ascending."""

    kind: GroupKind
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class RankComms:
    """What one rank speaks through. ``ep`` is None where every rank holds its share of all
    experts; ``agreement`` where this rank follows, or leads a replica that is alone."""

    tp: Comm
    ep: Comm | None = None
    agreement: AgreementOverComm | None = None

    def set_timeout(self, seconds: float) -> None:
        for comm in (self.tp, self.ep):
            if comm is not None:
                comm.set_timeout(seconds)

    def close(self) -> None:
        for comm in (self.tp, self.ep):
            if comm is not None:
                comm.close()
        if self.agreement is not None:
            self.agreement.comm.close()


class _Unrecorded(Ledger):
    """The ledger of a group whose calls are recorded by whoever makes them: it says where the rank
    is, and writes nothing."""

    def __init__(self, recorded: Ledger) -> None:
        self._recorded = recorded

    @property
    def step(self) -> int:
        return self._recorded.step

    @property
    def phase(self) -> str:
        return self._recorded.phase

    def issue(self, operation: str, group: str, shape: Sequence[int], dtype: str) -> int:
        return 0

    def complete(self, ticket: int) -> None: ...


class AgreementOverComm:
    """A `drumline.lockstep.channel.AgreementChannel`."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    @property
    def ranks(self) -> Sequence[int]:
        return self.comm.ranks

    def exchange(self, vector: Vector, timeout: float) -> Sequence[Vector]:
        """Everybody's vector, by rank. They must be equal in length."""
        self.comm.set_timeout(timeout)
        gathered = self.comm.all_gather(torch.tensor(vector, dtype=torch.int64))
        rows: list[list[int]] = gathered.tolist()
        return [tuple(row) for row in rows]


def groups_of(mesh: Mesh) -> tuple[Group, ...]:
    """Every group of more than one rank, in an order that all ranks share. Those that agree are
    a group only where replicas share collectives."""
    found: dict[Group, None] = {}
    for kind in GROUP_KINDS:
        for rank in range(mesh.size):
            members = mesh.group(kind, rank)
            if len(members) > 1:
                found[Group(kind, members)] = None
    return tuple(found)


def create_segments(mesh: Mesh) -> dict[Group, Segment]:
    """Shared memory for every group, by whoever starts the ranks; closes what it made if it
    cannot make all."""
    segments: dict[Group, Segment] = {}
    try:
        for group in groups_of(mesh):
            chunk = AGREEMENT_CHUNK_BYTES if group.kind == "agreement" else CHUNK_BYTES
            segments[group] = create_segment(len(group.ranks), chunk)
    except BaseException:
        for segment in segments.values():
            segment.close()
        raise
    return segments


def segments_of(segments: Mapping[Group, Segment], rank: int) -> dict[Group, Segment]:
    """Those of the groups that ``rank`` is in."""
    return {group: segment for group, segment in segments.items() if rank in group.ranks}


def connect_shm(
    mesh: Mesh,
    rank: int,
    segments: Mapping[Group, Segment],
    ledger: Ledger,
    *,
    seconds: float = TIMEOUT_SECONDS,
    watch_fd: int = -1,
) -> RankComms:
    """Attaches ``rank`` to its groups. The descriptors stay the caller's."""
    spin_us = CROWDED_SPIN_US if crowded(mesh) else SPIN_US
    comms: dict[str, Comm] = {}
    for group, segment in segments_of(segments, rank).items():
        comms[group.kind] = shm_comm(
            group.kind,
            group.ranks,
            group.ranks.index(rank),
            segment,
            _Unrecorded(ledger) if group.kind == "agreement" else ledger,
            seconds=seconds,
            spin_us=spin_us,
            watch_fd=watch_fd,
        )
    return _rank_comms(mesh, rank, comms, ledger)


def connect_gloo(
    mesh: Mesh, rank: int, ledger: Ledger, *, seconds: float = TIMEOUT_SECONDS
) -> RankComms:
    """Makes every group of the mesh, which all ranks must do at the same time, after `join`."""
    comms: dict[str, Comm] = {}
    for group in groups_of(mesh):
        record = _Unrecorded(ledger) if group.kind == "agreement" else ledger
        comm = gloo_comm(group.kind, group.ranks, rank, record, seconds=seconds)
        if comm is not None:
            comms[group.kind] = comm
    return _rank_comms(mesh, rank, comms, ledger)


def solo_comms(ledger: Ledger | None = None) -> RankComms:
    """Those of the only rank."""
    return RankComms(solo_comm(ledger=ledger))


def _rank_comms(mesh: Mesh, rank: int, comms: Mapping[str, Comm], ledger: Ledger) -> RankComms:
    ep = comms.get("ep")
    if ep is None and mesh.expert_parallel:
        ep = solo_comm("ep", rank, ledger)
    agreement = comms.get("agreement")
    return RankComms(
        tp=comms.get("tp") or solo_comm("tp", rank, ledger),
        ep=ep,
        agreement=None if agreement is None else AgreementOverComm(agreement),
    )


def crowded(mesh: Mesh) -> bool:
    """Whether ranks outnumber cores, so that who spins takes the core of whom it waits for."""
    return mesh.size > _cores()


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
