"""Who works with whom: ranks, replicas, groups and experts, as arithmetic.

    rank = (dp_index * pp + pp_index) * tp + tp_index          dp = 2, pp = 1, tp = 3

                 tp_index 0   1   2
    replica 0           [ 0 ] 1   2     tp group of rank 4: 3 4 5
    replica 1           [ 3 ] 4   5     leaders in brackets

A leader decides for its replica; the others of the replica follow. Experts of an expert-parallel
model lie on all ranks of a stage, and then all leaders agree on every step; else each replica is
alone. Stages (pp) have their place in the arithmetic; `resolve` refuses more than one until they
compute. Pure numbers: knows no process, address or tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GroupKind = Literal["tp", "ep", "agreement"]
GROUP_KINDS: tuple[GroupKind, ...] = ("tp", "ep", "agreement")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands: its replica, its stage of the layers, its share of each layer."""

    dp_index: int
    pp_index: int
    tp_index: int


@dataclass(frozen=True, slots=True)
class Mesh:
    """``dp`` replicas of ``tp`` ranks each, in ``pp`` stages. ``expert_parallel``: the model has
    experts, and they are spread over ranks."""

    dp: int = 1
    tp: int = 1
    expert_parallel: bool = False
    pp: int = 1

    def __post_init__(self) -> None:
        assert self.dp >= 1
        assert self.tp >= 1
        assert self.pp >= 1

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.dp * self.replica_size

    @property
    def ranks(self) -> range:
        return range(self.size)

    @property
    def replica_size(self) -> int:
        """Ranks of one replica."""
        return self.pp * self.tp

    @property
    def leaders(self) -> tuple[int, ...]:
        """The rank of every replica that decides, in the order of replicas."""
        return tuple(range(0, self.size, self.replica_size))

    @property
    def agrees(self) -> bool:
        """Whether replicas share collectives, so that their leaders take every step together."""
        return self.expert_parallel and self.dp > 1

    def rank(self, dp_index: int, tp_index: int = 0, pp_index: int = 0) -> int:
        assert 0 <= dp_index < self.dp
        assert 0 <= tp_index < self.tp
        assert 0 <= pp_index < self.pp
        return (dp_index * self.pp + pp_index) * self.tp + tp_index

    def place(self, rank: int) -> Place:
        assert 0 <= rank < self.size, f"rank {rank} of {self.size}"
        stage, tp_index = divmod(rank, self.tp)
        return Place(*divmod(stage, self.pp), tp_index)

    def leader(self, rank: int) -> int:
        """The leader of a rank's replica."""
        return self.rank(self.place(rank).dp_index)

    def leads(self, rank: int) -> bool:
        return self.leader(rank) == rank

    def replica(self, rank: int) -> tuple[int, ...]:
        """All ranks of a rank's replica, its leader first."""
        leader = self.leader(rank)
        return tuple(range(leader, leader + self.replica_size))

    def tp_group(self, rank: int) -> tuple[int, ...]:
        """The ranks that share each layer of a rank's stage, ascending."""
        first = rank - self.place(rank).tp_index
        return tuple(range(first, first + self.tp))

    def ep_group(self, rank: int) -> tuple[int, ...]:
        """The ranks over which a stage's experts are spread, ascending: of all replicas, or none
        without expert parallelism."""
        stage = self.place(rank).pp_index
        if not self.expert_parallel:
            return ()
        return tuple(
            self.rank(dp_index, tp_index, stage)
            for dp_index in range(self.dp)
            for tp_index in range(self.tp)
        )

    def agreement_group(self, rank: int) -> tuple[int, ...]:
        """The leaders that take every step together with the leader of this rank's replica."""
        return self.leaders if self.agrees else (self.leader(rank),)

    def group(self, kind: GroupKind, rank: int) -> tuple[int, ...]:
        """The members of a rank's group by its kind, ascending."""
        if kind == "tp":
            return self.tp_group(rank)
        return self.ep_group(rank) if kind == "ep" else self.agreement_group(rank)

    def experts(self, rank: int, count: int) -> range:
        """The experts a rank holds, out of ``count``: contiguous, ascending with the rank, as even
        as can be. A rank may hold none where ranks are more than experts. Without expert
        parallelism every rank holds (its share of) all of them."""
        if not self.expert_parallel:
            return range(count)
        group = self.ep_group(rank)
        index = group.index(rank)
        return range(count * index // len(group), count * (index + 1) // len(group))

    def expert_owner(self, expert: int, count: int) -> int:
        """The index in the ep group of the rank that holds an expert."""
        assert self.expert_parallel, "every rank holds all experts"
        assert 0 <= expert < count
        return ((expert + 1) * self.dp * self.tp - 1) // count
