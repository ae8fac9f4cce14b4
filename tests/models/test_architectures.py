"""Every architecture and rope scaling against transformers, float32, on miniature checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from drumline.core.errors import ConfigError
from drumline.models.checkpoint import open_checkpoint
from drumline.models.rope import build_rope
from drumline.models.tiny import write_tiny

LENGTH = 200  # beyond the original length of the scalings that have one
TOLERANCE = 1e-4

SCALINGS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn_options": {
        "type": "yarn",
        "factor": 3.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "attention_factor": 1.2,
        "truncate": False,
    },
}


def theirs(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        logits: torch.Tensor = model(ids[None]).logits[0]
    return logits


def random_ids(vocab: int, seed: int = 0, count: int = LENGTH) -> torch.Tensor:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("scaling", list(SCALINGS))
def test_logits_agree_with_transformers(
    arch: str, scaling: str, tmp_path: Path, runner: Callable[..., Any]
) -> None:
    write_tiny(arch, tmp_path, seed=1, rope_scaling=SCALINGS[scaling], head_dim=16, hidden=64)
    ids = random_ids(128)
    ours = runner(open_checkpoint(tmp_path), LENGTH).logits(ids, chunk=64)
    reference = theirs(tmp_path, ids)
    assert reference.std() > 1
    assert (ours - reference).abs().max() < TOLERANCE


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("llama", {"tied": True}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "multi-query": ("llama", {"heads": 4, "kv_heads": 1}),
    "all heads": ("qwen2", {"heads": 4, "kv_heads": 4, "tied": True}),
    "own head_dim": ("qwen3", {"head_dim": 24, "heads": 4, "kv_heads": 2, "tied": True}),
    "qwen3 bias": ("qwen3", {"attention_bias": True}),
    "wide": ("llama", {"hidden": 96, "intermediate": 40, "layers": 3, "vocab": 300}),
    "theta": ("qwen3", {"rope_theta": 1e6, "head_dim": 32}),
    "sharded": ("qwen2", {"shards": 3}),
}


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_variants_agree_with_transformers(
    variant: str, tmp_path: Path, runner: Callable[..., Any]
) -> None:
    arch, options = VARIANTS[variant]
    write_tiny(arch, tmp_path, seed=2, **options)
    ids = random_ids(options.get("vocab", 128), seed=5, count=60)
    ours = runner(open_checkpoint(tmp_path), 64).logits(ids)
    assert (ours - theirs(tmp_path, ids)).abs().max() < TOLERANCE


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_files_compute_in_float32(
    dtype: str, tmp_path: Path, runner: Callable[..., Any]
) -> None:
    write_tiny("llama", tmp_path, seed=2, dtype=dtype)
    checkpoint = open_checkpoint(tmp_path)
    assert {w.kind for w in checkpoint.tensors.values()} == {
        {"float16": "F16", "bfloat16": "BF16"}[dtype]
    }
    ids = random_ids(128, count=40)
    ours = runner(checkpoint, 64).logits(ids)
    assert (ours - theirs(tmp_path, ids)).abs().max() < TOLERANCE


def test_the_two_spellings_of_rope_keys_read_the_same(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        write_tiny("llama", folder, seed=1, rope_theta=5e5, rope_scaling=SCALINGS["llama3"])
    path = new / "config.json"
    config = json.loads(path.read_text())
    config["rope_parameters"] = {
        **config.pop("rope_scaling"),
        "rope_theta": config.pop("rope_theta"),
    }
    path.write_text(json.dumps(config))
    assert open_checkpoint(old).config == open_checkpoint(new).config
    assert open_checkpoint(old).digest == open_checkpoint(new).digest


def test_dynamic_scaling_fixes_its_base_from_the_length(
    tmp_path: Path, runner: Callable[..., Any]
) -> None:
    """Beyond the original length transformers takes the running length; we take the maximum, so
    at the maximum both agree, and no position depends on how long the sequence is so far."""
    write_tiny(
        "llama", tmp_path, seed=1, rope_scaling=SCALINGS["dynamic"], max_position_embeddings=64
    )
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config.fixed_rope_base(64) is None
    base = checkpoint.config.fixed_rope_base(LENGTH)
    assert base is not None
    assert base > checkpoint.config.rope_theta
    ids = random_ids(128)
    ours = runner(checkpoint, LENGTH).logits(ids)
    assert (ours - theirs(tmp_path, ids)).abs().max() < TOLERANCE
    one, all_at_once = runner(checkpoint, LENGTH).logits(ids[:50], chunk=1), ours[:50]
    assert torch.equal(one, all_at_once)


def test_partial_rotary_turns_the_first_channels_only(tmp_path: Path) -> None:
    write_tiny("qwen3", tmp_path, seed=1, head_dim=16)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"partial_rotary_factor": 0.5}))
    config = open_checkpoint(tmp_path).config
    table = build_rope(config, 10, torch.device("cpu"))
    assert config.rotary_dim == 8
    assert table.cos.shape == table.sin.shape == (10, 4)
    frequencies = 10000.0 ** (-torch.arange(4) / 4)
    assert torch.allclose(table.cos[9], (9 * frequencies).cos(), atol=1e-6)


def test_taps_are_the_residual_stream(tmp_path: Path, runner: Callable[..., Any]) -> None:
    """Tap k = after k layers: what transformers lists as hidden_states[k], up to the last."""
    write_tiny("llama", tmp_path, seed=1, layers=3)
    ids = random_ids(128, count=20)
    run = runner(open_checkpoint(tmp_path), 32)
    out = run.model.forward(ids, run.batch(0, 20), run.cache, taps=(0, 1, 3))
    assert sorted(out.taps) == [0, 1, 3]
    assert torch.equal(out.taps[3], out.hidden)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        states = model(ids[None], output_hidden_states=True).hidden_states
    for tap in (0, 1):
        assert (out.taps[tap] - states[tap][0]).abs().max() < TOLERANCE
    spec = run.model.kv_spec
    assert (spec.layers, spec.kv_heads, spec.head_dim) == (3, 2, 8)


def test_an_active_sliding_window_is_refused(tmp_path: Path, runner: Callable[..., Any]) -> None:
    write_tiny("mistral", tmp_path, seed=1)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sliding_window": 48}))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config.max_context_length == 48
    runner(checkpoint, 48)
    with pytest.raises(ConfigError, match=r"max_model_len=49: .* sliding window of 48 tokens"):
        runner(checkpoint, 49)
