"""EAGLE-3 against its formulas, for every flag and spelling."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from drafting.golden import GoldenEagle3
from drafting.golden_world import Piece, World, build, random_tokens
from drumline.models.tiny_drafts import write_eagle3

TinyPath = Callable[..., Path]
TOKENS = random_tokens(1, 21)
K = 3

FLAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "all": {"norm_before_residual": True, "fc_norm": True, "norm_output": True},
    "reduced": {"draft_vocab": 40},
    "borrowed": {"embedding": False},
    "verifier_head": {"verifier_head": True},
    "verifier_head_reduced": {"verifier_head": True, "draft_vocab": 40},
    "original": {"original": True},
    "original_all": {"original": True, "draft_vocab": 50, "norm_before_residual": True},
    "narrow": {"hidden": 24, "taps": (1, 4)},
    "deep": {"layers": 2},
    "qwen3": {"layer": "qwen3"},
    "experts": {"layer": "qwen3_moe"},
}


@pytest.fixture(scope="module")
def target(tiny_path: TinyPath) -> Path:
    return tiny_path(arch="llama", seed=2, layers=4, hidden=48)


def drafted(world: World, k: int = K) -> tuple[dict[int, torch.Tensor], tuple[int, ...]]:
    """Prefills all tokens but the last in pieces, and drafts: logits by position, and drafts."""
    sequence = world.sequence(TOKENS)
    for count in (1, 6, 5):
        world.step([Piece(sequence, count, samples=False)], k)
    left = len(TOKENS) - 1 - sequence.computed
    (drafts,) = world.step([Piece(sequence, left, k=k)], k)
    network = world.drafter.network
    return {p: network.compute_logits(x[None])[0] for p, x in world.entries(sequence).items()}, (
        drafts
    )


def taps_of(world: World) -> dict[int, torch.Tensor]:
    """The target's own taps for all tokens but the last, in one run of a world of its own."""
    output = world.run_target([Piece(world.sequence(TOKENS), len(TOKENS) - 1)])
    return dict(output.taps)


@pytest.mark.parametrize("name", FLAGS)
def test_logits_and_drafts_are_the_formulas(name: str, target: Path, tmp_path: Path) -> None:
    folder = write_eagle3(target, tmp_path, 5, **FLAGS[name])
    world = build("eagle3", target, folder)
    logits, drafts = drafted(world)
    golden = GoldenEagle3(target, folder)
    first, *rest, expected = golden.chain(TOKENS, taps_of(world), K)
    assert sorted(logits) == list(range(1, len(TOKENS) + K - 1))  # slot 0 does not exist
    for entry in range(1, len(TOKENS)):
        torch.testing.assert_close(logits[entry], first[entry - 1], atol=1e-4, rtol=0)
    for index, row in enumerate(rest):
        torch.testing.assert_close(logits[len(TOKENS) + index], row[0], atol=1e-4, rtol=0)
    assert drafts == tuple(expected.tolist())
    assert first.std() > 0.5, "logits so flat that anything would agree"


@pytest.mark.parametrize(
    "flag", ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"]
)
def test_each_flag_matters(flag: str, target: Path, tmp_path: Path) -> None:
    """The same weights, read without the flag, give other logits in pass 1 or in pass 2."""
    folder = write_eagle3(target, tmp_path, 5, **{flag: True})
    world = build("eagle3", target, folder)
    logits, _ = drafted(world)
    golden = GoldenEagle3(target, folder)
    golden.config[flag] = False
    first, *rest, _ = golden.chain(TOKENS, taps_of(world), K)
    at = len(TOKENS) if flag == "norm_output" else 7
    wrong = rest[0][0] if flag == "norm_output" else first[at - 1]
    assert (logits[at] - wrong).abs().max() > 1e-2


def test_alignment_is_shifted_by_one(target: Path, tmp_path: Path) -> None:
    """Entry i pairs the token at i with the hidden state at i - 1, not the one at i."""
    folder = write_eagle3(target, tmp_path, 5)
    world = build("eagle3", target, folder)
    logits, _ = drafted(world)
    golden = GoldenEagle3(target, folder)
    unshifted = golden.logits(golden.forward(TOKENS[:-1], golden.fuse(taps_of(world))))
    assert (logits[9] - unshifted[8]).abs().max() > 1e-2
    assert (logits[9] - unshifted[9]).abs().max() > 1e-2


def test_taps_are_streams_after_so_many_layers(target: Path, tmp_path: Path) -> None:
    folder = write_eagle3(target, tmp_path, 5, taps=(1, 2, 3))
    world = build("eagle3", target, folder)
    assert world.drafter.taps == (1, 2, 3)
    logits, _ = drafted(world)
    golden = GoldenEagle3(target, folder)
    golden.config["eagle_aux_hidden_state_layer_ids"] = [2, 3, 4]
    shifted, *_ = golden.chain(TOKENS, taps_of(world), 1)
    assert (logits[7] - shifted[6]).abs().max() > 1e-2


def test_positions_go_on_by_one(target: Path, tmp_path: Path) -> None:
    """Rope positions are slots, counted from 1; a drafter's own entries follow without a gap."""
    folder = write_eagle3(target, tmp_path, 5)
    world = build("eagle3", target, folder)
    logits, _ = drafted(world)
    fed = [p for recorded in world.passes for p, s in zip(
        recorded.positions, recorded.slots, strict=True) if s >= 0]  # fmt: skip
    assert fed == list(range(1, len(TOKENS) + K - 1))
    golden = GoldenEagle3(target, folder)
    for shift in (-1, 1):
        golden.position_shift = shift
        _, second, *_ = golden.chain(TOKENS, taps_of(world), K)
        assert (logits[len(TOKENS)] - second[0]).abs().max() > 1e-3


def test_draft_ids_are_offsets(target: Path, tmp_path: Path) -> None:
    """Read as a table, or not at all, d2t would give other drafts."""
    folder = write_eagle3(target, tmp_path, 5, draft_vocab=40)
    world = build("eagle3", target, folder)
    logits, drafts = drafted(world)
    golden = GoldenEagle3(target, folder)
    draft_id = int(logits[len(TOKENS) - 1].argmax())
    offset = int(golden.maps["d2t"][draft_id])
    assert drafts[0] == draft_id + offset
    assert drafts[0] not in (draft_id, offset)
    assert all(bool(golden.maps["t2d"][token]) for token in drafts)
