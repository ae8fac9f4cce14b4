"""deepseek_v3 and mixtral against transformers on miniature checkpoints, and their config keys."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from drumline.core.errors import CheckpointError, ConfigError
from drumline.models.checkpoint import open_checkpoint
from drumline.models.tiny import write_tiny
from drumline.ops.gating import route_by_groups

LENGTH = 60
IDS = torch.randint(0, 128, (LENGTH,), generator=torch.Generator().manual_seed(5))
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}

VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mixtral": ("mixtral", {}, {}),
    "mixtral, 3 of 5": ("mixtral", {"experts": 5, "experts_per_token": 3, "tied": True}, {}),
    "mixtral, one": ("mixtral", {"experts": 2, "experts_per_token": 1, "head_dim": 12}, {}),
    "deepseek": ("deepseek_v3", {}, {}),
    "all layers have experts": ("deepseek_v3", {"layers": 3}, {"first_k_dense_replace": 0}),
    "no experts": ("deepseek_v3", {}, {"first_k_dense_replace": 2}),
    "groups": (
        "deepseek_v3",
        {"experts": 12, "experts_per_token": 4},
        {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5},
    ),
    "weights as they are": ("deepseek_v3", {"norm_topk_prob": False, "tied": True}, {}),
    "halves": ("deepseek_v3", {"attention_bias": True}, {"rope_interleave": False}),
    "neighbours with biases": ("deepseek_v3", {"attention_bias": True}, {}),
    "yarn": ("deepseek_v3", {"rope_scaling": YARN}, {}),
    "mscale": ("deepseek_v3", {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}}, {}),
    "other sizes": (
        "deepseek_v3",
        {"heads": 2, "head_dim": 10, "intermediate": 24},
        {"n_shared_experts": 2},
    ),
}


def edit(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({k: v for k, v in config.items() if v != "drop"}))


def write(folder: Path, variant: str) -> None:
    """The variant's checkpoint: keys that only a config.json has decide the tensors, too."""
    from drumline.models import tiny
    from drumline.models.hub_config import read_hub_config

    arch, options, keys = VARIANTS[variant]
    write_tiny(arch, folder, seed=2, **options)
    if keys:
        edit(folder, **keys)
        tiny._write_weights(folder, read_hub_config(folder), 2, torch.float32, 1)


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_agrees_with_transformers(variant: str, tmp_path: Path, runner: Callable[..., Any]) -> None:
    write(tmp_path / "ours", variant)
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


@pytest.mark.parametrize("arch", ["mixtral", "deepseek_v3"])
def test_bits_do_not_depend_on_chunks(
    arch: str, tmp_path: Path, runner: Callable[..., Any]
) -> None:
    write_tiny(arch, tmp_path, seed=4)
    checkpoint = open_checkpoint(tmp_path)
    whole = runner(checkpoint, 64).logits(IDS)
    for chunk in (1, 7):
        assert torch.equal(runner(checkpoint, 64).logits(IDS, chunk=chunk), whole)


def test_one_head_is_cached(tmp_path: Path, runner: Callable[..., Any]) -> None:
    """The latent vector and the key that all heads share: 16 + 8 numbers for 4 heads."""
    write_tiny("deepseek_v3", tmp_path, seed=4)
    spec = runner(open_checkpoint(tmp_path), 64).model.kv_spec
    assert (spec.layers, spec.kv_heads, spec.head_dim) == (2, 1, 24)


@pytest.mark.parametrize("arch", ["mixtral", "deepseek_v3"])
def test_quantized_weights_say_nearly_the_same(
    arch: str, tmp_path: Path, runner: Callable[..., Any]
) -> None:
    write_tiny(arch, tmp_path, seed=4, hidden=64)
    plain = runner(open_checkpoint(tmp_path), 64).logits(IDS)
    quantized = runner(open_checkpoint(tmp_path, "q8_0"), 64).logits(IDS)
    assert 0 < (quantized - plain).abs().mean() < 0.15
    assert (quantized.argmax(1) == plain.argmax(1)).float().mean() > 0.8


def by_hand(
    logits: list[float], bias: list[float], groups: int, used: int, per_token: int
) -> list[int]:
    """The choice of experts in plain Python, over ``sorted``, which is stable."""
    scores = 1.0 / (1.0 + torch.exp(-torch.tensor(logits)))
    merit = (scores + torch.tensor(bias)).tolist()
    size = len(logits) // groups
    worth = [  # in float32, or what is a tie there would be none here
        float(torch.tensor(sorted(merit[g * size : (g + 1) * size])[-2:]).sum())
        for g in range(groups)
    ]
    best = sorted(range(groups), key=lambda g: -worth[g])[:used]
    allowed = [e for e in range(len(logits)) if e // size in best]
    return sorted(sorted(allowed, key=lambda e: -merit[e])[:per_token])


@pytest.mark.parametrize(("groups", "used", "per_token"), [(1, 1, 3), (2, 1, 2), (4, 2, 3)])
def test_experts_are_chosen_as_by_hand(groups: int, used: int, per_token: int) -> None:
    generator = torch.Generator().manual_seed(3)
    # Few different values, so that ties are everywhere: the lowest id, the lowest group win.
    logits = torch.randint(-2, 3, (200, 12), generator=generator).float()
    bias = torch.randint(-1, 2, (12,), generator=generator) * 0.25

    def route(rows: torch.Tensor, normalize: bool) -> Any:
        return route_by_groups(
            rows,
            bias,
            groups=groups,
            used=used,
            per_token=per_token,
            normalize=normalize,
            scaling=2.5,
        )

    found = route(logits, True)
    expected = [by_hand(row, bias.tolist(), groups, used, per_token) for row in logits.tolist()]
    assert found.experts.tolist() == expected
    assert torch.allclose(found.weights.sum(1), torch.tensor(2.5))
    plain = route(logits, False)
    assert torch.allclose(plain.weights, 2.5 * torch.sigmoid(logits).gather(1, plain.experts))
    for row in range(0, 200, 37):  # a row alone has the bits it has among others
        alone = route(logits[row : row + 1], True)
        assert torch.equal(alone.weights[0], found.weights[row])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"n_routed_experts": "drop"}, "n_routed_experts: missing"),
        ({"n_group": 3}, "n_group 3: does not cut 8 experts into groups of at least two"),
        ({"n_group": 8}, "n_group 8: does not cut 8 experts into groups of at least two"),
        ({"topk_group": 3}, "topk_group 3: there are 2 groups"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok 5: 1 groups have 4 experts"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9: there are 8 experts"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax': not supported; supported is"),
        ({"topk_method": "greedy"}, "topk_method 'greedy': not supported; supported is noaux_tc"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2: not supported"),
        ({"qk_head_dim": 20}, "qk_head_dim 20: the parts of a head have 8 and 8"),
        ({"num_key_value_heads": 2}, "num_key_value_heads 2: latent attention has one for each of"),
        ({"partial_rotary_factor": 0.5}, "the parts of a head have sizes of their own"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor 0: expected a number above 0"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config .*not supported"),
        (
            {"n_shared_experts": 2},
            r"shared_experts.gate_proj.weight has shape \[64, 32\], expected",
        ),
        ({"kv_lora_rank": 20}, r"kv_a_proj_with_mqa.weight has shape \[24, 32\], expected \[28"),
    ],
)
def test_bad_keys_are_named(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_tiny("deepseek_v3", tmp_path, seed=3)
    edit(tmp_path, **values)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def test_what_a_mixtral_config_leaves_out_is_what_transformers_takes(tmp_path: Path) -> None:
    write_tiny("mixtral", tmp_path, seed=3)
    edit(tmp_path, rope_theta="drop", rms_norm_eps="drop", head_dim="drop")
    config = open_checkpoint(tmp_path).config
    assert (config.rope_theta, config.rms_norm_eps, config.head_dim) == (1e6, 1e-5, 8)


@pytest.mark.parametrize(
    ("arch", "options", "message"),
    [
        ("deepseek_v3", {"experts": 1}, "experts=1: deepseek_v3 has groups of at least two"),
        ("deepseek_v3", {"mlp_only_layers": [1]}, "deepseek_v3 has dense layers first"),
        ("mixtral", {"mlp_only_layers": [0]}, "has experts in all layers"),
        ("mixtral", {"attention_bias": True}, "not a choice that mixtral has"),
    ],
)
def test_tiny_refuses(arch: str, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        write_tiny(arch, tmp_path / "never", seed=0, **options)


@pytest.mark.parametrize("arch", ["mixtral", "deepseek_v3"])
@pytest.mark.parametrize("seed", [1, 2])
def test_greedy_text_wanders(
    arch: str, seed: int, tmp_path: Path, runner: Callable[..., Any]
) -> None:
    write_tiny(arch, tmp_path, seed=seed)
    run = runner(open_checkpoint(tmp_path), 80)
    ids = torch.arange(5, 13)
    logits = run.logits(ids)
    assert 1 < logits.std() < 3
    tokens = [int(logits[-1].argmax())]
    for position in range(len(ids), len(ids) + 63):
        out = run.model.forward(torch.tensor(tokens[-1:]), run.batch(position, 1), run.cache)
        tokens.append(int(run.model.compute_logits(out.hidden).argmax()))
    assert len(set(tokens)) >= 12
    assert len(set(tokens[-16:])) >= 4
