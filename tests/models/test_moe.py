"""qwen3_moe against transformers, whose experts are stacked in memory, and its checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from drumline.core.errors import CheckpointError, ConfigError
from drumline.models.checkpoint import open_checkpoint
from drumline.models.tiny import write_tiny

IDS = torch.randint(0, 128, (60,), generator=torch.Generator().manual_seed(5))

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one expert each": {"experts": 5, "experts_per_token": 1},
    "all experts": {"experts": 3, "experts_per_token": 3},
    "weights as they are": {"experts": 8, "experts_per_token": 3, "norm_topk_prob": False},
    "first layer dense": {"layers": 3, "mlp_only_layers": [0]},
    "tied, own head_dim": {"tied": True, "head_dim": 24, "attention_bias": True},
}


def edit(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({k: v for k, v in config.items() if v != "drop"}))


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_agrees_with_transformers(variant: str, tmp_path: Path, runner: Callable[..., Any]) -> None:
    write_tiny("qwen3_moe", tmp_path / "ours", seed=2, **VARIANTS[variant])
    checkpoint = open_checkpoint(tmp_path / "ours")
    assert checkpoint.config.ignored_keys == ()
    ours = runner(checkpoint, 64).logits(IDS, chunk=25)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        reference = model(IDS[None]).logits[0]
    assert reference.std() > 1
    assert (ours - reference).abs().max() < 1e-4
    model.save_pretrained(tmp_path / "theirs")  # with their spelling of the keys
    again = open_checkpoint(tmp_path / "theirs")
    assert torch.equal(runner(again, 64).logits(IDS, chunk=25), ours)


def test_decoder_sparse_step_counts_layers_from_one(
    tmp_path: Path, runner: Callable[..., Any]
) -> None:
    """With step 2 layers 1 and 3 have experts; written here by transformers."""
    write_tiny("qwen3_moe", tmp_path, seed=2, layers=4, mlp_only_layers=[0, 2])
    ours = runner(open_checkpoint(tmp_path), 64).logits(IDS)
    edit(tmp_path, mlp_only_layers=[], decoder_sparse_step=2)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config.expert_layers == (1, 3)
    assert torch.equal(runner(checkpoint, 64).logits(IDS), ours)


def stack_experts(folder: Path) -> dict[str, torch.Tensor]:
    """The folder's tensors in the layout that transformers 5 has in memory."""
    tensors = load_file(folder / "model.safetensors")
    stacked = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"
        parts = {
            part: torch.stack([tensors[f"{prefix}.{e}.{part}_proj.weight"] for e in range(4)])
            for part in ("gate", "up", "down")
        }
        stacked[f"{prefix}.gate_up_proj"] = torch.cat((parts["gate"], parts["up"]), 1)
        stacked[f"{prefix}.down_proj"] = parts["down"]
    return stacked


def test_stacked_experts_load_to_the_same_bits(tmp_path: Path, runner: Callable[..., Any]) -> None:
    write_tiny("qwen3_moe", tmp_path, seed=3)
    ours = runner(open_checkpoint(tmp_path), 64).logits(IDS)
    stacked = stack_experts(tmp_path)
    save_file(stacked, tmp_path / "model.safetensors")
    assert torch.equal(runner(open_checkpoint(tmp_path), 64).logits(IDS), ours)
    name = "model.layers.0.mlp.experts.down_proj"
    save_file(
        stacked | {name: stacked[name][:3].contiguous()},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(CheckpointError, match=r"missing tensor .*experts\.3\.down_proj\.weight"):
        open_checkpoint(tmp_path)
    save_file(stacked | {name: stacked[name].flatten()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="no stack of experts"):
        open_checkpoint(tmp_path)
    both = "model.layers.0.mlp.experts.1.down_proj.weight"
    save_file(stacked | {both: stacked[name][1].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"is also in .*experts\.down_proj"):
        open_checkpoint(tmp_path)


def test_expert_tensors_are_strict_both_ways(tmp_path: Path) -> None:
    write_tiny("qwen3_moe", tmp_path, seed=3)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    save_file({k: v for k, v in tensors.items() if k != name}, file)
    with pytest.raises(CheckpointError, match=f"missing tensor {name}"):
        open_checkpoint(tmp_path)
    extra = name.replace("experts.2", "experts.4")
    save_file(tensors | {extra: tensors[name].clone()}, file)
    with pytest.raises(CheckpointError, match=f"unexpected tensor {extra}"):
        open_checkpoint(tmp_path)
    save_file(tensors | {name: tensors[name][:-1].contiguous()}, file)
    with pytest.raises(CheckpointError, match=rf"{name} has shape \[63, 32\], expected \[64, 32\]"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9: there are 4 experts"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok 0: expected an integer of at least 1"),
        ({"num_experts": "drop"}, "num_experts: missing"),
        ({"num_local_experts": 5}, "num_local_experts says 5"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size: missing"),
        ({"mlp_only_layers": ["a"]}, "expected a list of layer numbers"),
        ({"norm_topk_prob": 1}, "expected true or false"),
        ({"decoder_sparse_step": 0}, "expected an integer of at least 1"),
    ],
)
def test_bad_expert_keys_are_named(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_tiny("qwen3_moe", tmp_path, seed=3)
    edit(tmp_path, **values)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def test_an_architecture_without_experts_refuses_them(tmp_path: Path) -> None:
    write_tiny("qwen3", tmp_path, seed=3)
    edit(tmp_path, num_experts=4)
    with pytest.raises(CheckpointError, match="num_experts 4: not supported"):
        open_checkpoint(tmp_path)


def test_a_sliding_window_slides_in_every_layer(tmp_path: Path) -> None:
    write_tiny("qwen3_moe", tmp_path, seed=3)
    edit(tmp_path, sliding_window=32)
    assert open_checkpoint(tmp_path).config.sliding_window is None
    edit(tmp_path, use_sliding_window=True)
    assert open_checkpoint(tmp_path).config.sliding_window == 32


@pytest.mark.parametrize(
    ("arch", "options", "message"),
    [
        ("qwen3", {"experts": 4}, "experts=4: qwen3 has no experts"),
        ("qwen3_moe", {"experts": 0}, "experts=0: must be at least 1"),
        ("qwen3_moe", {"experts_per_token": 5}, r"experts_per_token=5: must be in 1\.\.4"),
    ],
)
def test_tiny_refuses(arch: str, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        write_tiny(arch, tmp_path / "never", seed=0, **options)
