"""MTP against its formulas in each dialect, the reduced vocabulary, and where a module is found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafting.golden import GoldenMtp, GoldenOwnMtp
from drafting.golden_world import Piece, World, build, random_tokens, settings
from drumline.core.errors import CheckpointError, ConfigError
from drumline.drafting.mtp import facts, read
from drumline.drafting.neural import head_rows, lean_rows
from drumline.models.checkpoint import open_checkpoint
from drumline.models.layers import EMBEDDING
from drumline.models.tiny import write_tiny
from drumline.models.tiny_drafts import add_mtp, write_mtp
from drumline.models.upcycle import upcycle_mtp
from drumline.ops.base import Ops
from drumline.ops.quantize import quantize
from drumline.ops.weights import WeightTensor

TinyPath = Callable[..., Path]
TOKENS = random_tokens(3, 19)
K = 3


@pytest.fixture(scope="module")
def target(tiny_path: TinyPath) -> Path:
    return tiny_path(arch="llama", seed=2, layers=2, hidden=48)


def drafted(world: World) -> tuple[dict[int, torch.Tensor], tuple[int, ...]]:
    sequence = world.sequence(TOKENS)
    world.step([Piece(sequence, 7, samples=False)], K)
    (drafts,) = world.step([Piece(sequence, len(TOKENS) - 8, k=K)], K)
    network = world.drafter.network
    entries = world.entries(sequence)
    return {p: network.compute_logits(x[None])[0] for p, x in entries.items()}, drafts


def compare(world: World, golden: GoldenMtp) -> None:
    logits, drafts = drafted(world)
    taps = world.run_target([Piece(world.sequence(TOKENS), len(TOKENS) - 1)]).taps
    first, *rest, expected = golden.chain(TOKENS, dict(taps), K)
    for entry in range(1, len(TOKENS)):
        torch.testing.assert_close(logits[entry], first[entry - 1], atol=1e-4, rtol=0)
    for index, row in enumerate(rest):
        torch.testing.assert_close(logits[len(TOKENS) + index], row[0], atol=1e-4, rtol=0)
    assert drafts == tuple(expected.tolist())
    assert first.std() > 0.5, "logits so flat that anything would agree"


@pytest.mark.parametrize(
    "options",
    [{}, {"draft_vocab": 50}, {"layer": "qwen3"}, {"layer": "qwen3_moe"}],
    ids=["plain", "reduced", "qwen3", "experts"],
)
def test_speculators_spelling(options: dict[str, Any], target: Path, tmp_path: Path) -> None:
    folder = write_mtp(target, tmp_path, 5, **options)
    compare(build("mtp", target, folder), GoldenMtp(target, folder))


def test_a_block_of_experts_drafts_what_the_dense_one_does(target: Path, tmp_path: Path) -> None:
    dense = write_mtp(target, tmp_path / "dense", 5, draft_vocab=50)
    experts = upcycle_mtp(dense, 4, tmp_path / "experts")
    config = read(settings("mtp", experts), open_checkpoint(target)).config
    assert config.experts is not None
    assert (config.experts.count, config.experts.per_token, config.experts.width) == (4, 4, 16)
    logits, drafts = drafted(build("mtp", target, dense))
    again, same = drafted(build("mtp", target, experts))
    assert same == drafts
    assert again.keys() == logits.keys()
    assert max(float((again[p] - logits[p]).abs().max()) for p in logits) < 1e-4


@pytest.mark.parametrize("layer", ["llama", "qwen3"])
def test_mtp_names_in_a_folder(layer: str, target: Path, tmp_path: Path) -> None:
    folder = write_mtp(target, tmp_path, 5, layer=layer, own_names=True)
    compare(build("mtp", target, folder), GoldenOwnMtp(target, folder))


@pytest.mark.parametrize("arch", ["llama", "qwen3", "qwen3_moe"])
def test_a_checkpoints_own_module(arch: str, tmp_path: Path) -> None:
    write_tiny(arch, tmp_path, 2, hidden=48)
    before = open_checkpoint(tmp_path)
    add_mtp(tmp_path, 5)
    after = open_checkpoint(tmp_path)
    assert set(after.tensors) == set(before.tensors), "the target does not read it"
    compare(build("mtp", tmp_path, None), GoldenOwnMtp(tmp_path, tmp_path))


@pytest.mark.parametrize("own_names", [False, True])
def test_hidden_states_are_before_or_after_the_final_norm(
    own_names: bool, target: Path, tmp_path: Path
) -> None:
    """Speculators' before, those of ``mtp.*`` after: the other way round gives other logits."""
    folder = write_mtp(target, tmp_path, 5, own_names=own_names)
    world = build("mtp", target, folder)
    logits, _ = drafted(world)
    golden = (GoldenOwnMtp if own_names else GoldenMtp)(target, folder)
    golden.normed = not golden.normed
    taps = world.run_target([Piece(world.sequence(TOKENS), len(TOKENS) - 1)]).taps
    first, *_ = golden.chain(TOKENS, dict(taps), 1)
    assert (logits[7] - first[6]).abs().max() > 1e-2


def test_alignment_is_shifted_by_one(target: Path, tmp_path: Path) -> None:
    folder = write_mtp(target, tmp_path, 5)
    world = build("mtp", target, folder)
    logits, _ = drafted(world)
    golden = GoldenMtp(target, folder)
    taps = world.run_target([Piece(world.sequence(TOKENS), len(TOKENS) - 1)]).taps
    unshifted = golden.logits(golden.forward(TOKENS[:-1], golden.fuse(dict(taps))))
    assert (logits[9] - unshifted[8]).abs().max() > 1e-2
    assert (logits[9] - unshifted[9]).abs().max() > 1e-2


def test_a_reduced_head_is_rows_of_the_targets(tiny_path: TinyPath, tmp_path: Path) -> None:
    """Also of a head tied to the embedding; each logit is the full head's, bit for bit."""
    target = tiny_path(arch="llama", seed=4, tied=True, hidden=48)
    whole = build("mtp", target, write_mtp(target, tmp_path / "whole", 5))
    part = build("mtp", target, write_mtp(target, tmp_path / "part", 5, draft_vocab=50))
    table = read(settings("mtp", tmp_path / "part"), open_checkpoint(target)).table
    assert table is not None
    assert len(table) == 50
    wide, _ = drafted(whole)
    narrow, drafts = drafted(part)
    assert torch.allclose(narrow[7], wide[7][list(table)], atol=1e-5, rtol=0)
    assert set(drafts) <= set(table)


def test_rows_of_a_quantised_head_stay_as_they_are() -> None:
    """A GGUF's head is gathered block by block: what is read is the file's own rows."""
    raw = torch.arange(6 * 2 * 34, dtype=torch.int64).remainder(60).to(torch.uint8).view(6, 68)
    head = WeightTensor(EMBEDDING, (6, 64), "Q8_0", raw)
    checkpoint: Any = SimpleNamespace(
        tensors={EMBEDDING: head}, config=SimpleNamespace(tie_word_embeddings=True)
    )
    rows = head_rows(checkpoint, (1, 4, 5))
    assert (rows.kind, rows.shape) == ("Q8_0", (3, 64))
    assert torch.equal(rows.to_float(), head.to_float()[[1, 4, 5]])


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_1", "Q4_0"])
def test_a_draft_s_rows_become_lean_where_that_makes_them_smaller(kind: str) -> None:
    values = torch.randn((6, 64), generator=torch.Generator().manual_seed(1))
    data = values if kind == "F32" else quantize(kind, values)
    stored = WeightTensor(EMBEDDING, (6, 64), kind, data)
    native, reference = (cast(Ops, SimpleNamespace(name=name)) for name in ("native", "reference"))
    lean = lean_rows(stored, native)
    assert lean.shape == stored.shape
    if kind in ("Q4_1", "Q4_0"):
        assert lean is stored, "blocks of 4 bits stay what they are"
    else:
        assert lean.kind == "Q4_1"
        assert lean.nbytes < stored.nbytes
        assert torch.equal(lean.data, quantize("Q4_1", stored.to_float()))
    assert lean_rows(stored, reference) is stored
    narrow = WeightTensor(EMBEDDING, (6, 40), "F32", torch.randn(6, 40))
    assert lean_rows(narrow, native) is narrow, "no whole blocks"


def test_facts_say_what_the_cache_must_hold(target: Path, tmp_path: Path) -> None:
    folder = write_mtp(target, tmp_path, 5, tokens=4)
    found = facts(settings("mtp", folder), open_checkpoint(target))
    assert found["layers"] == 1
    assert (found["kv_heads"], found["head_dim"]) == (2, 12)
    assert (found["positions_max"], found["default_tokens"]) == (512, 4)
    numbers = sum(t.numel() for t in load_file(folder / "model.safetensors").values())
    assert found["weight_bytes"] == 4 * numbers


# ---------------------------------------------------------------- where a module is found


def test_without_any_module_the_error_says_what_is_needed(target: Path) -> None:
    with pytest.raises(
        ConfigError, match="no mtp head is shipped for .*, and its checkpoint has none of its own"
    ):
        read(settings("mtp", None), open_checkpoint(target))


# ---------------------------------------------------------------- refusals


def edit(folder: Path, **values: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


@pytest.mark.parametrize("own_names", [False, True])
def test_more_modules_than_one(own_names: bool, target: Path, tmp_path: Path) -> None:
    folder = edit(write_mtp(target, tmp_path, 5, own_names=own_names), num_nextn_predict_layers=2)
    with pytest.raises(CheckpointError, match="num_nextn_predict_layers 2: not supported"):
        read(settings("mtp", folder), open_checkpoint(target))


def test_a_head_of_another_hidden_size(target: Path, tiny_path: TinyPath, tmp_path: Path) -> None:
    folder = write_mtp(target, tmp_path, 5)
    other = open_checkpoint(tiny_path(arch="llama", seed=2, hidden=32))
    with pytest.raises(CheckpointError, match="hidden size 48, the target's is 32"):
        read(settings("mtp", folder), other)


@pytest.mark.parametrize("own_names", [False, True])
def test_tensors_missing_or_unknown(own_names: bool, target: Path, tmp_path: Path) -> None:
    folder = write_mtp(target, tmp_path, 5, own_names=own_names)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = "mtp.fc.weight" if own_names else "mtp_layers.0.input_proj.weight"
    save_file({k: v for k, v in tensors.items() if k != name}, file)
    with pytest.raises(CheckpointError, match="missing tensor input_proj"):
        read(settings("mtp", folder), open_checkpoint(target))
    for stranger in ("lm_head.weight", name.replace("fc", "fd").replace("input", "output")):
        save_file(tensors | {stranger: torch.zeros(2)}, file)
        with pytest.raises(CheckpointError, match="unexpected tensor"):
            read(settings("mtp", folder), open_checkpoint(target))
