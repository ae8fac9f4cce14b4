"""The first difference between ranks' ledgers: which step, which collective, who issued what.

A group's collectives are the same on all its members, in order. A member that is behind has issued
a beginning of what the others have; one that issued something else there, or went on to a later
step without it, differs. Pure; reads rings whatever became of their ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from drumline.config.mesh import Mesh
from drumline.core.errors import Diverged
from drumline.core.ledger import Entry, Record, Ring

STEPS = 2  # the last ones, in which ranks can differ that met in an exchange before


def first_difference(mesh: Mesh, rings: Mapping[int, Ring]) -> Diverged | None:
    """None where every group's members issued the same, as far as they came."""
    found: list[Diverged] = []
    for kind in ("ep", "tp"):
        seen: set[tuple[int, ...]] = set()
        for rank in sorted(rings):
            members = mesh.ep_group(rank) if kind == "ep" else mesh.tp_group(rank)
            if len(members) > 1 and members not in seen and set(members) <= rings.keys():
                seen.add(members)
                one = _in_group(kind, {member: rings[member] for member in members})
                if one is not None:
                    found.append(one)
    return min(found, key=lambda error: error.step, default=None)


def _in_group(kind: str, rings: Mapping[int, Ring]) -> Diverged | None:
    reached = {rank: _last_step(ring.records) for rank, ring in rings.items()}
    newest = max(reached.values())
    for step in range(max(0, newest - STEPS + 1), newest + 1):
        issued = {rank: _of_step(ring.records, kind, step) for rank, ring in rings.items()}
        for index in range(max(map(len, issued.values()))):
            said: dict[int, Entry | None] = {}
            for rank, entries in issued.items():
                if index < len(entries):
                    said[rank] = entries[index]
                elif reached[rank] > step:
                    said[rank] = None  # it went on without
            if len(set(said.values())) > 1:
                values = [
                    (rank, f"nothing, in step {reached[rank]}" if entry is None else str(entry))
                    for rank, entry in said.items()
                ]
                return Diverged(f"collective {index} over {kind}", values, step)
    return None


def _last_step(records: Sequence[Record]) -> int:
    return max((record.step for record in records if record.entry.phase != "warmup"), default=-1)


def _of_step(records: Sequence[Record], kind: str, step: int) -> list[Entry]:
    return [
        record.entry
        for record in records
        if record.step == step and record.entry.group == kind and record.entry.phase != "warmup"
    ]
