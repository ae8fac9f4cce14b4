"""From a mesh to comms: who speaks with whom, and the agreement channel over them."""

from __future__ import annotations

import pytest

from drumline.config.mesh import Mesh
from drumline.core.errors import RankLost
from drumline.core.ledger import Ledger
from drumline.parallel.groups import Group, create_segments, groups_of, segments_of, solo_comms
from parallel import jobs
from parallel.ranks import Ranks


def test_every_group_is_made_once_in_one_order() -> None:
    assert groups_of(Mesh(dp=2, tp=2, expert_parallel=True)) == (
        Group("tp", (0, 1)),
        Group("tp", (2, 3)),
        Group("ep", (0, 1, 2, 3)),
        Group("agreement", (0, 2)),
    )
    assert groups_of(Mesh(dp=4)) == ()  # dense replicas share nothing
    assert groups_of(Mesh(dp=3, expert_parallel=True)) == (
        Group("ep", (0, 1, 2)),
        Group("agreement", (0, 1, 2)),
    )


def test_a_rank_gets_the_segments_of_its_own_groups() -> None:
    segments = create_segments(Mesh(dp=2, tp=2, expert_parallel=True))
    kinds = [[group.kind for group in segments_of(segments, rank)] for rank in range(4)]
    assert kinds == [["tp", "ep", "agreement"], ["tp", "ep"]] * 2
    for segment in segments.values():
        segment.close()


def test_one_rank_needs_nobody() -> None:
    ledger = Ledger.in_memory()
    comms = solo_comms(ledger)
    assert (comms.tp.size, comms.ep, comms.agreement) == (1, None, None)
    assert float(comms.tp.all_reduce(jobs.values(0, (1,)))) == float(jobs.values(0, (1,)))
    assert [record.entry.operation for record in ledger.ring().records] == ["all_reduce"]


@pytest.mark.parametrize("over", ["shm", "gloo"])
def test_a_mesh_comes_to_life(over: str) -> None:
    """dp = 2, tp = 2 with experts spread: sums within replicas, gathers over all, one agreement."""
    mesh = Mesh(dp=2, tp=2, expert_parallel=True)
    with Ranks(4) as ranks:
        ranks.connect_mesh(mesh, over)
        ranks.run(jobs.begin, 0, 6, "agree")
        found = ranks.run(jobs.use_mesh)
        assert [tp for tp, _, _ in found] == [1.0, 1.0, 5.0, 5.0]
        assert [ep for _, ep, _ in found] == [[0, 1, 2, 3]] * 4
        vectors = [(0, 7, -(2**62)), (2, 7, -(2**62))]
        assert [agreed for _, _, agreed in found] == [vectors, None, vectors, None]
        if over == "shm":
            ranks.start(jobs.agree_alone, [()] * 4, ranks=[0])
            error = ranks.outcome(0)
            assert isinstance(error, RankLost)
            assert (error.rank, error.step, error.phase) == (2, 6, "agree")
