"""What ranks tell each other once, before their first step: whether they may form a group at all.

Ranks that would compute other bits than their peers refuse, naming both values. What may differ is
settled here for good: within a replica the least cache counts, over replicas it stays what it is;
the slowest rank's time for a token goes into every deadline. Pure; knows no channel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from drumline.config.mesh import Mesh
from drumline.core.errors import Diverged


@dataclass(frozen=True, slots=True)
class Introduction:
    """A rank by what must be equal (``config_digest``, ``instruction_set``) and what need not be:
    blocks that its cache can hold, seconds for a token as measured at warm-up."""

    rank: int
    config_digest: str
    instruction_set: str
    kv_blocks: int
    token_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Formed:
    """What a group has settled: ``kv_blocks`` of each replica, in their order."""

    kv_blocks: tuple[int, ...]
    token_seconds: float
    capacities: tuple[int, ...]  # what each rank could hold, in rank order

    def table(self) -> str:
        """The capacities in words, one line for whoever starts the group."""
        said = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(self.capacities))
        return f"KV blocks: {said}; used by replica: {', '.join(map(str, self.kv_blocks))}"


def form(mesh: Mesh, introductions: Sequence[Introduction]) -> Formed:
    """The group of all ranks. Raises `Diverged` where they differ in what must be equal."""
    assert [one.rank for one in introductions] == list(mesh.ranks), "each rank, in order"
    _equal("config digest", introductions, lambda one: one.config_digest)
    _equal("instruction set", introductions, lambda one: one.instruction_set)
    capacities = tuple(one.kv_blocks for one in introductions)
    return Formed(
        kv_blocks=tuple(
            min(capacities[rank] for rank in mesh.replica(leader)) for leader in mesh.leaders
        ),
        token_seconds=max(one.token_seconds for one in introductions),
        capacities=capacities,
    )


def _equal(
    what: str, introductions: Sequence[Introduction], read: Callable[[Introduction], str]
) -> None:
    values = [(one.rank, read(one)) for one in introductions]
    if any(value != values[0][1] for _, value in values):
        raise Diverged(what, values, step=-1)
