"""One model over ranks that share its layers: near the bits of one rank, alike on all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.config.mesh import Mesh
from drumline.core.cpu import native_available
from drumline.core.errors import RankLost
from parallel import model_jobs as jobs
from parallel.ranks import Ranks

IDS = torch.randint(5, 128, (23,), generator=torch.Generator().manual_seed(5)).tolist()
CHUNKS = [16, 1, 6]
TOLERANCE = 1e-4
GAP = 1e-3

# Heads in groups that do not divide evenly, biases, tied heads, all that is cut in its own way.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"heads": 8, "kv_heads": 4, "hidden": 64, "intermediate": 72}),
    "9 heads in 3 groups": ("llama", {"heads": 9, "kv_heads": 3, "hidden": 72, "tied": True}),
    "biases": (
        "llama",
        {"heads": 6, "kv_heads": 3, "hidden": 48, "attention_bias": True, "mlp_bias": True},
    ),
    "qwen2": ("qwen2", {"heads": 6, "kv_heads": 3, "hidden": 48, "vocab": 130}),
    "qwen3": ("qwen3", {"heads": 8, "kv_heads": 4, "head_dim": 12, "tied": True}),
    "qwen3_moe": ("qwen3_moe", {"heads": 8, "kv_heads": 4, "mlp_only_layers": (0,)}),
    "mixtral": ("mixtral", {"heads": 6, "kv_heads": 3, "hidden": 48, "experts": 3}),
    "deepseek": ("deepseek_v3", {"heads": 4}),
    "deepseek, biases": ("deepseek_v3", {"heads": 4, "attention_bias": True, "tied": True}),
}


@pytest.fixture(scope="module")
def ranks_of() -> Iterator[Callable[[int], Ranks]]:
    """Ranks of one replica that share layers, started once."""
    started: dict[int, Ranks] = {}

    def make(count: int) -> Ranks:
        if count not in started:
            started[count] = Ranks(count)
            started[count].connect_mesh(Mesh(tp=count))
        return started[count]

    yield make
    for ranks in started.values():
        ranks.close()


def check_agreement(found: torch.Tensor, truth: torch.Tensor) -> None:
    """Within the tolerance, and the same choice wherever the best two are apart."""
    assert (found - truth).abs().max() < TOLERANCE
    best = truth.topk(2, dim=1)
    apart = best.values[:, 0] - best.values[:, 1] > GAP
    assert apart.float().mean() > 0.9
    assert torch.equal(found.argmax(1)[apart], best.indices[:, 0][apart])


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_logits_are_those_of_one_rank(
    variant: str, tiny_path: Callable[..., Path], ranks_of: Callable[[int], Ranks]
) -> None:
    arch, options = VARIANTS[variant]
    path = str(tiny_path(arch=arch, seed=3, **options))
    one = ranks_of(1)
    one.run(jobs.build, path, "reference")
    (truth,) = one.run(jobs.logits, IDS, CHUNKS)
    (stream,) = one.run(jobs.taps, IDS)
    groups = options.get("kv_heads", options["heads"])
    for count in (2, 3, 4):
        if count > groups:
            continue
        ranks = ranks_of(count)
        shares = ranks.run(jobs.build, path, "reference")
        assert sum(heads for heads, _, _, _ in shares) == options["heads"]
        assert sum(rows for _, _, _, rows in shares) == options.get("vocab", 128)
        first, *others = ranks.run(jobs.logits, IDS, CHUNKS)
        check_agreement(first, truth)
        for other in others:
            assert torch.equal(other, first), "ranks of a replica must have the same bits"
        for tap, found in ranks.run(jobs.taps, IDS)[-1].items():
            assert (found - stream[tap]).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    ("arch", "intermediate", "widths"),
    [("llama", 160, [64, 96]), ("deepseek_v3", 64, [32, 32]), ("qwen3_moe", 96, [32, 64])],
)
def test_quantized_blocks_are_shared_whole(
    arch: str,
    intermediate: int,
    widths: list[int],
    tiny_path: Callable[..., Path],
    ranks_of: Callable[[int], Ranks],
) -> None:
    """Cut between blocks of 32; heads of 16 channels cut blocks, which then become float32."""
    path = str(tiny_path(arch=arch, seed=3, hidden=64, intermediate=intermediate))
    one, two = ranks_of(1), ranks_of(2)
    one.run(jobs.build, path, "reference", "q8_0")
    (truth,) = one.run(jobs.logits, IDS, CHUNKS)
    assert [width for _, _, width, _ in two.run(jobs.build, path, "reference", "q8_0")] == widths
    check_agreement(two.run(jobs.logits, IDS, CHUNKS)[0], truth)


@pytest.mark.parametrize("variant", ["9 heads in 3 groups", "qwen3", "qwen3_moe", "biases"])
def test_one_call_has_the_bits_of_many(
    variant: str, tiny_path: Callable[..., Path], ranks_of: Callable[[int], Ranks]
) -> None:
    """The native call that sums within, and the same operations one by one: bits, and ledger."""
    if not native_available():
        pytest.skip("the native module is not built")
    arch, options = VARIANTS[variant]
    path = str(tiny_path(arch=arch, seed=3, **options))
    ranks = ranks_of(3)
    ranks.run(jobs.build, path, "native")
    ranks.run(jobs.forget)
    fused = ranks.run(jobs.logits, IDS, CHUNKS)
    streams = ranks.run(jobs.taps, IDS)
    issued = ranks.run(jobs.issued)
    assert ranks.run(jobs.use_fused, False) == [True] * 3
    ranks.run(jobs.forget)
    assert torch.equal(ranks.run(jobs.logits, IDS, CHUNKS)[1], fused[1])
    for tap, found in ranks.run(jobs.taps, IDS)[2].items():
        assert torch.equal(found, streams[2][tap])
    assert ranks.run(jobs.issued) == issued


def test_a_rank_that_is_missing_within_the_call_is_named(
    tiny_path: Callable[..., Path],
) -> None:
    if not native_available():
        pytest.skip("the native module is not built")
    path = str(tiny_path(arch="llama", seed=3))
    with Ranks(2) as ranks:
        ranks.connect_mesh(Mesh(tp=2), seconds=60.0)
        ranks.run(jobs.build, path, "native")
        ranks.run(jobs.enter_embedding, IDS[:3])
        ranks.start(jobs.layers_alone, [()] * 2, ranks=[0])
        ranks.kill(1)
        error = ranks.outcome(0)
        assert isinstance(error, RankLost)
        assert error.rank == 1
        assert error.operation == "all_reduce over tp"
