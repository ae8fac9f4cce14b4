"""Experts spread over ranks: not one bit changes, whatever the other replicas do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.config.mesh import Mesh
from drumline.core.cpu import native_available
from parallel import model_jobs as jobs
from parallel.ranks import Ranks

LENGTHS = (23, 9, 0, 17)  # tokens of each replica's sequence: one has nothing to do
STEPS = 3
SIZE = 12  # every pass, on every rank

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {"heads": 8, "kv_heads": 4, "experts": 4}),
    "5 experts": ("qwen3_moe", {"experts": 5, "experts_per_token": 3, "norm_topk_prob": False}),
    "mixtral, all of 4": ("mixtral", {"experts": 4, "experts_per_token": 4}),
    "fewer than ranks": ("mixtral", {"experts": 2, "experts_per_token": 1}),
    "deepseek": ("deepseek_v3", {"layers": 3}),
}


def sequence(replica: int) -> list[int]:
    generator = torch.Generator().manual_seed(70 + replica)
    return torch.randint(5, 128, (LENGTHS[replica],), generator=generator).tolist()


def chunks(replica: int) -> list[int]:
    """The replica's tokens in each of the steps; none where it has run out."""
    left, found = LENGTHS[replica], []
    for _ in range(STEPS):
        found.append(min(left, SIZE - replica))
        left -= found[-1]
    assert left == 0
    return found


@pytest.fixture(scope="module")
def ranks_of() -> Iterator[Callable[[Mesh], Ranks]]:
    started: dict[Mesh, Ranks] = {}

    def make(mesh: Mesh) -> Ranks:
        if mesh not in started:
            started[mesh] = Ranks(mesh.size)
            started[mesh].connect_mesh(mesh)
        return started[mesh]

    yield make
    for ranks in started.values():
        ranks.close()


def run(ranks: Ranks, mesh: Mesh, path: str, backend: str, size: int) -> list[torch.Tensor]:
    """Logits of every replica's sequence, computed side by side in passes of one size."""
    ranks.run(jobs.build, path, backend)
    return again(ranks, mesh, size)


def again(ranks: Ranks, mesh: Mesh, size: int = SIZE) -> list[torch.Tensor]:
    """The same with what is built."""
    arguments = []
    for rank in range(mesh.size):
        replica = mesh.place(rank).dp_index
        arguments.append((sequence(replica), chunks(replica), size))
    return ranks.run_each(jobs.logits, arguments)


def alone(ranks: Ranks, path: str, backend: str, replica: int) -> torch.Tensor:
    """The same sequence on one rank that holds everything, in other chunks."""
    if not LENGTHS[replica]:
        return torch.empty(0)
    ranks.run(jobs.build, path, backend)
    return ranks.run(jobs.logits, sequence(replica), [LENGTHS[replica]])[0]


@pytest.mark.parametrize("model", list(MODELS))
def test_bits_are_those_of_one_rank(
    model: str, tiny_path: Callable[..., Path], ranks_of: Callable[[Mesh], Ranks]
) -> None:
    arch, options = MODELS[model]
    path = str(tiny_path(arch=arch, seed=3, **options))
    one = ranks_of(Mesh())
    truth = [alone(one, path, "reference", replica) for replica in range(4)]
    assert truth[0].std() > 1
    for dp in (2, 4):
        mesh = Mesh(dp=dp, expert_parallel=True)
        for replica, found in enumerate(run(ranks_of(mesh), mesh, path, "reference", SIZE)):
            assert torch.equal(found, truth[replica]), (dp, replica)


@pytest.mark.parametrize("model", ["qwen3_moe", "deepseek"])
def test_native_bits_are_those_of_one_rank(
    model: str, tiny_path: Callable[..., Path], ranks_of: Callable[[Mesh], Ranks]
) -> None:
    """Against the operation that runs all layers in one call."""
    if not native_available():
        pytest.skip("the native module is not built")
    arch, options = MODELS[model]
    path = str(tiny_path(arch=arch, seed=3, **options))
    one = ranks_of(Mesh())
    mesh = Mesh(dp=2, expert_parallel=True)
    for replica, found in enumerate(run(ranks_of(mesh), mesh, path, "native", SIZE)):
        assert torch.equal(found, alone(one, path, "native", replica))


@pytest.mark.parametrize("model", ["qwen3_moe", "5 experts", "fewer than ranks"])
@pytest.mark.parametrize(
    "mesh",
    [
        Mesh(dp=2, expert_parallel=True),
        Mesh(dp=4, expert_parallel=True),
        Mesh(dp=2, tp=2, expert_parallel=True),
    ],
    ids=str,
)
def test_one_call_has_the_bits_of_many(
    model: str, mesh: Mesh, tiny_path: Callable[..., Path], ranks_of: Callable[[Mesh], Ranks]
) -> None:
    """The native call that exchanges within, and the same operations one by one: bits, ledger."""
    if not native_available():
        pytest.skip("the native module is not built")
    arch, options = MODELS[model]
    path = str(tiny_path(arch=arch, seed=3, **options))
    ranks = ranks_of(mesh)
    ranks.run(jobs.build, path, "native")
    found = []
    for fused in (True, False):
        ranks.run(jobs.forget)
        found.append((again(ranks, mesh), ranks.run(jobs.issued)))
        assert ranks.run(jobs.use_fused, False) == [fused] * mesh.size
    (one, first), (other, second) = found
    assert first == second
    for rank in range(mesh.size):
        assert torch.equal(one[rank], other[rank])
    if mesh.tp == 1:
        assert torch.equal(one[0], alone(ranks_of(Mesh()), path, "native", 0))


@pytest.mark.parametrize("model", ["qwen3_moe", "deepseek"])
def test_replicas_of_two_ranks_share_experts(
    model: str, tiny_path: Callable[..., Path], ranks_of: Callable[[Mesh], Ranks]
) -> None:
    """tp = 2: the same bits for one replica and for two; near those of one rank."""
    arch, options = MODELS[model]
    path = str(tiny_path(arch=arch, seed=3, **options))
    two, four = (Mesh(dp=dp, tp=2, expert_parallel=True) for dp in (1, 2))
    truth = alone(ranks_of(Mesh()), path, "reference", 0)
    single = run(ranks_of(two), two, path, "reference", SIZE)
    double = run(ranks_of(four), four, path, "reference", SIZE)
    assert torch.equal(single[0], single[1])
    for rank in range(2):
        assert torch.equal(double[rank], single[0])
    assert torch.equal(double[2], double[3])
    assert (single[0] - truth).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        ("qwen3_moe", Mesh(dp=2, expert_parallel=True)),
        ("qwen3_moe", Mesh(dp=2, tp=2, expert_parallel=True)),
        ("qwen3_moe", Mesh(tp=2)),
        ("deepseek", Mesh(dp=2, tp=2, expert_parallel=True)),
        ("deepseek", Mesh(tp=2)),
        ("fewer than ranks", Mesh(dp=4, expert_parallel=True)),
    ],
    ids=str,
)
def test_what_is_issued_is_what_the_traits_say(
    model: str, mesh: Mesh, tiny_path: Callable[..., Path], ranks_of: Callable[[Mesh], Ranks]
) -> None:
    """It follows from sizes alone: a replica with nothing to do issues what the busy one does."""
    arch, options = MODELS[model]
    path = str(tiny_path(arch=arch, seed=3, **options))
    ranks = ranks_of(mesh)
    ranks.run(jobs.build, path, "reference")
    ranks.run(jobs.forget)
    pieces = []
    for rank in range(mesh.size):
        busy = mesh.place(rank).dp_index == 0
        pieces.append((sequence(0)[:7], [7], SIZE) if busy else ([], [0], SIZE))
    ranks.run_each(jobs.logits, pieces)
    issued, told = ranks.run(jobs.issued), ranks.run(jobs.told, path, SIZE)
    logits = ("all_gather", "tp", (7, 64))  # rows of the busy replica, half of the vocabulary
    for rank in range(mesh.size):
        expected = [entry for entry in told[rank] if None not in entry[2]]
        if mesh.tp > 1:
            assert ("all_gather", "tp", (None, 64)) in told[rank]
            expected += [logits] if mesh.place(rank).dp_index == 0 else []
        assert issued[rank] == expected


def test_the_shapes_of_an_exchange(
    tiny_path: Callable[..., Path], ranks_of: Callable[[Mesh], Ranks]
) -> None:
    """Tokens and two chosen ids go out, outputs of two experts of each rank come back, twice."""
    arch, options = MODELS["qwen3_moe"]
    path = str(tiny_path(arch=arch, seed=3, **options))
    ranks = ranks_of(Mesh(dp=2, expert_parallel=True))
    layer = [("all_gather", "ep", (SIZE, 34)), ("all_to_all", "ep", (2, SIZE, 2, 32))]
    assert ranks.run(jobs.told, path, SIZE) == [layer * 2] * 2


def test_padding_costs_no_expert(
    tiny_path: Callable[..., Path], ranks_of: Callable[[Mesh], Ranks]
) -> None:
    arch, options = MODELS["qwen3_moe"]
    path = str(tiny_path(arch=arch, seed=3, **options))
    mesh = Mesh(dp=2, expert_parallel=True)
    ranks = ranks_of(mesh)
    ranks.run(jobs.build, path, "reference")
    ranks.run(jobs.count_pairs)
    busy, idle = (sequence(0)[:7], [7], SIZE), ([], [0], SIZE)
    ranks.run_each(jobs.logits, [busy, idle])
    assert sum(ranks.run(jobs.pairs)) == 7 * 2 * 2  # tokens, experts of each, layers
