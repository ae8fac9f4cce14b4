"""The mesh: every rank has one place, groups part the ranks, experts have one owner."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from drumline.config.mesh import GROUP_KINDS, Mesh, Place

MESHES = st.builds(
    Mesh,
    dp=st.integers(1, 6),
    tp=st.integers(1, 5),
    expert_parallel=st.booleans(),
    pp=st.integers(1, 3),
)


def test_the_drawing() -> None:
    mesh = Mesh(dp=2, tp=3, expert_parallel=True)
    assert mesh.leaders == (0, 3)
    assert mesh.tp_group(4) == mesh.replica(4) == (3, 4, 5)
    assert mesh.place(4) == Place(dp_index=1, pp_index=0, tp_index=1)
    assert mesh.ep_group(4) == (0, 1, 2, 3, 4, 5)
    assert mesh.agreement_group(4) == (0, 3)
    assert [list(mesh.experts(rank, 4)) for rank in mesh.ranks] == [[], [0], [1], [], [2], [3]]


def test_who_agrees() -> None:
    """Replicas agree where they share experts, and nowhere else."""
    assert Mesh(2, 2, expert_parallel=True).agreement_group(3) == (0, 2)
    assert Mesh(2, 2, expert_parallel=False).agreement_group(3) == (2,)
    assert Mesh(1, 4, expert_parallel=True).agreement_group(3) == (0,)
    assert not Mesh(1, 4, expert_parallel=True).agrees


@given(mesh=MESHES)
def test_every_rank_has_one_place(mesh: Mesh) -> None:
    assert [mesh.rank(p.dp_index, p.tp_index, p.pp_index) for p in map(mesh.place, mesh.ranks)] == [
        *mesh.ranks
    ]
    assert len(mesh.ranks) == mesh.size == mesh.dp * mesh.pp * mesh.tp
    assert [rank for rank in mesh.ranks if mesh.leads(rank)] == [*mesh.leaders]
    for rank in mesh.ranks:
        assert mesh.leader(rank) in mesh.leaders
        assert mesh.replica(rank)[0] == mesh.leader(rank)


@given(mesh=MESHES)
def test_groups_are_the_same_for_all_their_members(mesh: Mesh) -> None:
    """Two ranks that thought differently of a group would wait in two of them."""
    for kind in GROUP_KINDS:
        for rank in mesh.ranks:
            group = mesh.group(kind, rank)
            assert list(group) == sorted(set(group))
            assert all(mesh.group(kind, member) == group for member in group)
            if kind != "agreement" and group:
                assert rank in group
    assert sorted(rank for group in {mesh.tp_group(r) for r in mesh.ranks} for rank in group) == [
        *mesh.ranks
    ]


@given(mesh=MESHES, count=st.integers(1, 40))
def test_every_expert_has_one_owner_per_stage(mesh: Mesh, count: int) -> None:
    if not mesh.expert_parallel:
        assert all(mesh.experts(rank, count) == range(count) for rank in mesh.ranks)
        return
    for rank in mesh.ranks:
        group = mesh.ep_group(rank)
        held = [expert for member in group for expert in mesh.experts(member, count)]
        assert held == [*range(count)]
        sizes = [len(mesh.experts(member, count)) for member in group]
        assert max(sizes) - min(sizes) <= 1
        for index, member in enumerate(group):
            for expert in mesh.experts(member, count):
                assert mesh.expert_owner(expert, count) == index
