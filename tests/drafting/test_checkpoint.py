"""Draft checkpoints: what is read, and the one line that refuses what does not fit."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafting.golden_world import settings
from drumline.cli.main import main
from drumline.core.errors import CheckpointError, ConfigError
from drumline.drafting.checkpoint import default_taps, tap_from_layer_output
from drumline.drafting.eagle import read as read_eagle
from drumline.drafting.eagle3 import Eagle3Draft
from drumline.drafting.eagle3 import read as read_eagle3
from drumline.drafting.registry import drafter_module
from drumline.models.checkpoint import Checkpoint, open_checkpoint
from drumline.models.config import ArchitectureConfig
from drumline.models.tiny_drafts import write_eagle, write_eagle3

TinyPath = Callable[..., Path]


@pytest.fixture(scope="module")
def target(tiny_path: TinyPath) -> Path:
    return tiny_path(arch="llama", seed=2, layers=6, hidden=32)


@pytest.fixture(scope="module")
def config(target: Path) -> ArchitectureConfig:
    return open_checkpoint(target).config


@pytest.fixture
def folder(target: Path, tmp_path: Path) -> Path:
    return write_eagle3(target, tmp_path, 5, draft_vocab=40)


def change(folder: Path, change: Callable[[Any], None]) -> Path:
    path = folder / "config.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    return folder


def retensor(folder: Path, drop: str = "", **more: torch.Tensor) -> Path:
    file = folder / "model.safetensors"
    kept = {name: data for name, data in load_file(file).items() if name != drop}
    save_file(kept | more, file)
    return folder


def read(folder: Path, config: ArchitectureConfig) -> Eagle3Draft:
    return read_eagle3(settings("eagle3", folder), of(config))


def of(config: ArchitectureConfig) -> Checkpoint:
    """As much of a checkpoint as reading a draft looks at."""
    return cast(Checkpoint, SimpleNamespace(config=config, path=Path("some-target")))


# ---------------------------------------------------------------- meanings


def test_a_tap_is_the_stream_after_so_many_layers(config: ArchitectureConfig) -> None:
    """Ids of EAGLE and speculators are taps; z-lab's DFlash counts the layers themselves."""
    assert [tap_from_layer_output(i) for i in (0, 1, 5)] == [1, 2, 6]
    assert default_taps(config.num_hidden_layers) == (2, 3, 3)
    assert default_taps(60) == (2, 30, 57)  # as a published 60-layer draft writes them


@pytest.mark.parametrize("original", [False, True])
def test_taps_not_given_are_eagle3s(
    original: bool, target: Path, config: ArchitectureConfig, tmp_path: Path
) -> None:
    folder = write_eagle3(target, tmp_path, 5, original=original)
    change(folder, lambda c: c.update(eagle_aux_hidden_state_layer_ids=None))
    assert read(folder, config).taps == (2, 3, 3)
    inside = {"eagle_aux_hidden_state_layer_ids": [1, 2, 4], "use_aux_hidden_state": True}
    if original:
        change(folder, lambda c: c.update(eagle_config=inside))
        assert read(folder, config).taps == (1, 2, 4)


def test_offsets_become_a_table(folder: Path, config: ArchitectureConfig) -> None:
    table = read(folder, config).table
    d2t = load_file(folder / "model.safetensors")["d2t"].tolist()
    assert table == tuple(i + offset for i, offset in enumerate(d2t))
    assert list(table) == sorted(set(table))
    assert read(retensor(folder, drop="t2d"), config).table == table, "the mask may be absent"


def test_what_the_envelope_says(folder: Path, config: ArchitectureConfig) -> None:
    assert read(folder, config).envelope.tokens == 3
    assert read(folder, config).envelope.sharpening == 1.0
    change(folder, lambda c: c.update(draft_sharpening=1.7))
    assert read(folder, config).envelope.sharpening == 1.7
    change(folder, lambda c: c.update(draft_sharpening="greedy"))
    assert read(folder, config).envelope.sharpening == math.inf
    change(folder, lambda c: c.update(draft_sharpening=0.5))
    with pytest.raises(CheckpointError, match="draft_sharpening 0.5"):
        read(folder, config)


# ---------------------------------------------------------------- config.json


def method(values: Any) -> Any:
    return values["speculators_config"]["proposal_methods"][0]


CONFIGS: dict[str, tuple[Callable[[Any], None], str]] = {
    "unknown type": (
        lambda c: c.update(speculators_model_type="eagle4"),
        "speculators_model_type 'eagle4': not supported; supported are dflash, eagle3, mtp; did",
    ),
    "another method": (
        lambda c: c.update(speculators_model_type="mtp"),
        "this checkpoint drafts by method mtp, not eagle3",
    ),
    "contradicting algorithm": (
        lambda c: c["speculators_config"].update(algorithm="mtp"),
        "speculators_config.algorithm 'mtp': contradicts",
    ),
    "lossy k": (lambda c: method(c).update(verifier_accept_k=2), "verifier_accept_k 2: lossy"),
    "lossy tolerance": (
        lambda c: method(c).update(accept_tolerance=0.1),
        "accept_tolerance 0.1: lossy",
    ),
    "proposal type": (lambda c: method(c).update(proposal_type="tree"), "proposal_type 'tree'"),
    "default method": (
        lambda c: c["speculators_config"].update(default_proposal_method="tree"),
        "default_proposal_method 'tree': not one of greedy",
    ),
    "no methods": (
        lambda c: c["speculators_config"].update(proposal_methods=[]),
        "proposal_methods",
    ),
    "both norms": (
        lambda c: c.update(norm_before_fc=True, fc_norm=True),
        "fc_norm True: contradicts norm_before_fc",
    ),
    "unknown flag": (lambda c: c.update(norm_befor_fc=True), "did you mean 'norm_before_fc'"),
    "tap too deep": (
        lambda c: c.update(eagle_aux_hidden_state_layer_ids=[1, 2, 7]),
        "tap 7 is outside 0..6",
    ),
    "vocabulary": (
        lambda c: c["transformer_layer_config"].update(vocab_size=200),
        "vocab_size 200 is not the target's 128",
    ),
    "target's width": (
        lambda c: c.update(target_hidden_size=64),
        "hidden size 64, the target's is 32",
    ),
    "no layers": (lambda c: c.pop("transformer_layer_config"), "transformer_layer_config"),
    "draft vocabulary": (lambda c: c.update(draft_vocab_size=200), "outside 1..128"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_that_are_refused(name: str, folder: Path, config: ArchitectureConfig) -> None:
    how, message = CONFIGS[name]
    change(folder, how)
    with pytest.raises(CheckpointError) as caught:
        read(folder, config)
    assert message in str(caught.value)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_flags_that_are_off_are_no_strangers(folder: Path, config: ArchitectureConfig) -> None:
    read(change(folder, lambda c: c.update(some_new_flag=False, another=None)), config)


def test_no_folder_is_named_by_what_needs_it(config: ArchitectureConfig, tmp_path: Path) -> None:
    wanted = "no eagle3 head is shipped for some-target.*needs the folder of a trained one"
    with pytest.raises(ConfigError, match=wanted):
        read_eagle3(settings("eagle3", None), of(config))
    with pytest.raises(CheckpointError, match="no such file"):
        read_eagle3(settings("eagle3", tmp_path / "nowhere"), of(config))


# ---------------------------------------------------------------- tensors

OFFSETS = torch.arange(40) % 7
TENSORS: dict[str, tuple[str, dict[str, torch.Tensor], str]] = {
    "no head": ("lm_head.weight", {}, "missing tensor lm_head.weight, expected shape [40, 32]"),
    "no norm": ("norm.weight", {}, "missing tensor norm.weight"),
    "no map": ("d2t", {}, "missing tensor d2t, expected shape [40]"),
    "stranger": ("", {"verifier_norm.weight": torch.ones(32)}, "unexpected tensor verifier_norm"),
    "shape": (
        "",
        {"layers.0.self_attn.q_proj.weight": torch.zeros(32, 32)},
        "q_proj.weight has shape [32, 32], expected [32, 64]",
    ),
    "not increasing": ("", {"d2t": -OFFSETS}, "d2t is not increasing: draft id 1 stands for 0"),
    "out of range": ("", {"d2t": torch.full((40,), 90)}, "target ids 90..129, outside 0..127"),
    "below": ("", {"d2t": torch.full((40,), -1)}, "target ids -1..38, outside 0..127"),
    "short map": ("", {"d2t": torch.zeros(39).long()}, "tensor d2t is int64 [39]"),
    "float map": ("", {"d2t": torch.zeros(40)}, "tensor d2t is float32 [40]"),
    "mask": ("", {"t2d": torch.ones(128).bool()}, "t2d and d2t name different tokens"),
    "another target": ("", {"fc.weight": torch.zeros(32, 144)}, "hidden size 48, the target's"),
    "odd fc": ("", {"fc.weight": torch.zeros(32, 100)}, "fc reads 100 numbers, not 3 taps' worth"),
    "integers": ("", {"norm.weight": torch.ones(32).long()}, "norm.weight is stored as int64"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_are_refused(name: str, folder: Path, config: ArchitectureConfig) -> None:
    drop, more, message = TENSORS[name]
    retensor(folder, drop, **more)
    with pytest.raises(CheckpointError) as caught:
        read(folder, config)
    assert message in str(caught.value)


def test_an_embedding_may_be_borrowed_only_if_it_fits(
    target: Path, config: ArchitectureConfig, tmp_path: Path
) -> None:
    read(write_eagle3(target, tmp_path / "own", 5, embedding=False), config)
    narrow = write_eagle3(target, tmp_path / "narrow", 5, embedding=False, hidden=24)
    with pytest.raises(CheckpointError, match=r"missing tensor embed_tokens\.weight"):
        read(narrow, config)


def test_a_head_is_the_targets_only_if_the_config_says_so_and_it_fits(
    target: Path, config: ArchitectureConfig, tmp_path: Path
) -> None:
    shared = write_eagle3(target, tmp_path / "shared", 5, draft_vocab=40, verifier_head=True)
    assert read(shared, config).weight_bytes > 4 * 40 * 32
    retensor(shared, **{"lm_head.weight": torch.zeros(40, 32)})
    with pytest.raises(CheckpointError, match=r"unexpected tensor lm_head\.weight"):
        read(shared, config)
    narrow = write_eagle3(target, tmp_path / "narrow", 5, hidden=24, verifier_head=True)
    with pytest.raises(CheckpointError, match="verifier_head.*needs the target's hidden size"):
        read(narrow, config)


def test_one_tensor_in_two_spellings(folder: Path, config: ArchitectureConfig) -> None:
    retensor(folder, **{"midlayer.hidden_norm.weight": torch.ones(32)})
    with pytest.raises(CheckpointError, match="in two spellings"):
        read(folder, config)


def test_pickles_are_never_opened(folder: Path, config: ArchitectureConfig) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is a pickle, which is never"):
        read(folder, config)


def test_eagle_is_strict_too(target: Path, config: ArchitectureConfig, tmp_path: Path) -> None:
    folder = write_eagle(target, tmp_path, 5)
    assert read_eagle(settings("eagle", folder), config).sharpening == 1.0
    change(folder, lambda c: c.update(bias=False))
    with pytest.raises(CheckpointError, match=r"unexpected tensor fc\.bias"):
        read_eagle(settings("eagle", folder), config)
    retensor(folder, drop="fc.bias")
    read_eagle(settings("eagle", folder), config)
    change(folder, lambda c: c.update(bias=True))
    with pytest.raises(CheckpointError, match=r"missing tensor fc\.bias"):
        read_eagle(settings("eagle", folder), config)
    change(folder, lambda c: c.update(hidden_size=64, bias=False))
    with pytest.raises(CheckpointError, match="hidden size 64, the target's is 32"):
        read_eagle(settings("eagle", folder), config)


def test_tiny_writes_drafts_that_can_be_read(tmp_path: Path) -> None:
    """From the command line, the same bytes each time."""
    flags = ["--mtp", "--eagle", "--eagle3", "--draft-moe", "--medusa", "--seed", "6"]
    for name in ("one", "two"):
        assert main(["tiny", "--arch", "llama", *flags, "--output", str(tmp_path / name)]) == 0
    files = sorted(p.relative_to(tmp_path / "one") for p in (tmp_path / "one").rglob("*.*"))
    assert sum(path.name == "model.safetensors" for path in files) == 4
    for path in files:
        assert (tmp_path / "one" / path).read_bytes() == (tmp_path / "two" / path).read_bytes()
    checkpoint = open_checkpoint(tmp_path / "one")
    for method in ("mtp", "eagle", "eagle3", "medusa"):
        folder = None if method == "mtp" else tmp_path / "one" / method
        found = drafter_module(method).facts(settings(method, folder), checkpoint)
        assert found["weight_bytes"] > 0
    assert main(["tiny", "--arch", "llama", "--draft-moe", "--output", str(tmp_path / "x")]) == 2
