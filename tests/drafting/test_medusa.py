"""Medusa against its formulas, in both spellings; one pass, and nothing kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import linear, silu

from drafting.golden_world import Piece, build, random_tokens, settings
from drumline.core.errors import CheckpointError, ConfigError
from drumline.drafting.medusa import facts, read
from drumline.models.checkpoint import open_checkpoint
from drumline.models.tiny_drafts import write_medusa

TinyPath = Callable[..., Path]
TOKENS = random_tokens(3, 19)

SPELLINGS: dict[str, dict[str, Any]] = {
    "original": {},
    "original_deep": {"layers": 2},
    "vllm": {"original": False},
    "vllm_bias": {"original": False, "bias": True, "layers": 2},
}


@pytest.fixture(scope="module")
def target(tiny_path: TinyPath) -> Path:
    return tiny_path(arch="llama", seed=2, layers=2, hidden=48)


def golden_logits(folder: Path, target: Path, hidden: torch.Tensor) -> list[torch.Tensor]:
    """One row per head, from the target's hidden state before its final norm ``[hidden]``."""
    verifier = load_file(target / "model.safetensors")
    w = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    original = "medusa_num_heads" in config
    heads = config["medusa_num_heads" if original else "num_heads"]
    layers = config["medusa_num_layers" if original else "num_hidden_layers"]
    normed = hidden / (hidden.pow(2).mean() + 1e-6).sqrt() * verifier["model.norm.weight"]
    found = []
    for head in range(heads):
        state = normed
        for layer in range(layers):
            name = f"{head}.{layer}.linear" if original else f"blocks.{head}.layers.{layer}"
            state = state + silu(linear(state, w[f"{name}.weight"], w.get(f"{name}.bias")))
        out = f"{head}.{layers}" if original else f"lm_heads.{head}"
        found.append(linear(state, w[f"{out}.weight"]))
    return found


@pytest.mark.parametrize("name", SPELLINGS)
def test_heads_are_the_formulas(name: str, target: Path, tmp_path: Path) -> None:
    folder = write_medusa(target, tmp_path, 5, **SPELLINGS[name])
    world = build("medusa", target, folder)
    hidden = world.run_target([Piece(world.sequence(TOKENS), len(TOKENS) - 1)]).hidden[-1]
    expected = golden_logits(folder, target, hidden)
    seen: list[torch.Tensor] = []
    plain = world.drafter.compute_logits
    world.drafter.compute_logits = lambda state, head: seen.append(plain(state, head)) or seen[-1]
    sequence, other = world.sequence(TOKENS), world.sequence(random_tokens(8, 9))
    world.step([Piece(sequence, 9, samples=False)], 3)
    pieces = [
        Piece(other, 4, k=1),
        Piece(sequence, len(TOKENS) - 10, rejected=(7, 8), k=3),
        Piece(world.sequence(TOKENS), 3, samples=False),
    ]
    _, drafts, nothing = world.step(pieces, 3)
    assert nothing == ()
    assert [rows.shape[0] for rows in seen] == [2, 1, 1]  # the other row wants one draft only
    for rows, golden in zip(seen, expected, strict=True):
        torch.testing.assert_close(rows[-1], golden, atol=1e-4, rtol=0)
    assert drafts == tuple(int(golden.argmax()) for golden in expected)


def test_the_state_is_that_of_the_last_committed_position(target: Path, tmp_path: Path) -> None:
    """Not of a rejected draft, and not of the position before."""
    world = build("medusa", target, write_medusa(target, tmp_path, 5))
    (alone,) = world.step([Piece(world.sequence(TOKENS), 12, k=3)], 3)
    (beside,) = world.step([Piece(world.sequence(TOKENS), 12, rejected=(9, 9), k=3)], 3)
    (earlier,) = world.step([Piece(world.sequence(TOKENS), 11, k=3)], 3)
    assert alone == beside
    assert alone != earlier


def test_one_pass_or_none(target: Path, tmp_path: Path) -> None:
    world = build("medusa", target, write_medusa(target, tmp_path, 5))
    traits = world.drafter.traits
    assert (traits.passes(0), traits.passes(1), traits.passes(3)) == (0, 1, 1)
    assert not traits.stateful
    for pieces in ([], [Piece(world.sequence(TOKENS), 3, k=2)]):
        for draft_k in (0, 3):
            world.step(pieces, draft_k)
            assert len(world.ledger.passes) == traits.passes(draft_k)


def test_facts_and_limits(target: Path, tmp_path: Path) -> None:
    folder = write_medusa(target, tmp_path, 5, heads=4)
    found = facts(settings("medusa", folder), open_checkpoint(target))
    assert (found["default_tokens"], found["tokens_max"]) == (4, 4)
    with pytest.raises(ConfigError, match="num_speculative_tokens=5: the checkpoint has 4 heads"):
        build("medusa", target, folder, num_speculative_tokens=5)


def test_the_originals_file_name(target: Path, tmp_path: Path) -> None:
    folder = write_medusa(target, tmp_path, 5)
    (folder / "model.safetensors").rename(folder / "medusa_lm_head.safetensors")
    assert read(settings("medusa", folder), open_checkpoint(target).config).heads == 3


def test_heads_for_another_target(target: Path, tiny_path: TinyPath, tmp_path: Path) -> None:
    other = open_checkpoint(tiny_path(arch="llama", seed=2, hidden=32)).config
    folder = write_medusa(target, tmp_path, 5, original=False)
    with pytest.raises(CheckpointError, match="hidden size 48, the target's is 32"):
        read(settings("medusa", folder), other)
    missing = write_medusa(target, tmp_path / "more", 5)
    config = missing / "config.json"
    config.write_text(json.dumps({"medusa_num_heads": 4, "medusa_num_layers": 1}))
    with pytest.raises(CheckpointError, match=r"missing tensor 3\.0\.linear"):
        read(settings("medusa", missing), open_checkpoint(target).config)
