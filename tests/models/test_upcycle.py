"""A dense model as experts that are always active: the same answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from drumline.cli.main import main
from drumline.core.errors import ConfigError
from drumline.models import upcycle as module
from drumline.models.checkpoint import open_checkpoint
from drumline.models.tiny import write_tiny
from drumline.models.tiny_drafts import write_mtp
from drumline.models.upcycle import upcycle, upcycle_mtp

IDS = torch.randint(5, 128, (60,), generator=torch.Generator().manual_seed(5))
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "factor": 3.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 16.0,
    "truncate": False,
}


@pytest.mark.parametrize(
    ("arch", "experts", "options"),
    [
        ("llama", 2, {}),
        ("llama", 4, {"tied": True, "dtype": "bfloat16", "rope_scaling": LLAMA3}),
        ("llama", 3, {"intermediate": 48, "dtype": "float16", "rope_scaling": YARN}),
        ("mistral", 8, {"heads": 4, "kv_heads": 1, "head_dim": 12, "shards": 2}),
        ("llama", 2, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ("llama", 2, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    ],
)
def test_logits_are_the_dense_ones(
    arch: str, experts: int, options: dict[str, Any], tmp_path: Path, runner: Callable[..., Any]
) -> None:
    write_tiny(arch, tmp_path / "dense", 3, **options)
    folder = upcycle(tmp_path / "dense", experts, tmp_path / "experts")
    dense, mixture = open_checkpoint(tmp_path / "dense"), open_checkpoint(folder)
    assert (mixture.config.model_type, mixture.config.ignored_keys) == ("mixtral", ())
    assert mixture.config.experts is not None
    assert (mixture.config.experts.count, mixture.config.experts.per_token) == (experts, experts)
    for name in ("rope_scaling", "rope_theta", "sampling", "eos_token_ids", "sliding_window"):
        assert getattr(mixture.config, name) == getattr(dense.config, name), name
    ours = runner(mixture, 64).logits(IDS)
    assert (ours - runner(dense, 64).logits(IDS)).abs().max() < 1e-4
    assert mixture.tokenizer().encode("the cat") == dense.tokenizer().encode("the cat")
    chat = [{"role": "user", "content": "hi"}]
    assert mixture.tokenizer().encode_chat(chat) == dense.tokenizer().encode_chat(chat)


def test_transformers_reads_it(tmp_path: Path, runner: Callable[..., Any]) -> None:
    write_tiny("llama", tmp_path / "dense", 3)
    folder = upcycle(tmp_path / "dense", 4, tmp_path / "experts")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        theirs = model(IDS[None]).logits[0]
    assert (runner(open_checkpoint(folder), 64).logits(IDS) - theirs).abs().max() < 1e-4


def test_floats_keep_their_type_where_nothing_is_rounded(tmp_path: Path) -> None:
    write_tiny("llama", tmp_path / "dense", 3, dtype="bfloat16", intermediate=48)
    for experts, down in ((2, "BF16"), (3, "F32")):
        folder = upcycle(tmp_path / "dense", experts, tmp_path / str(experts))
        kinds = {n.split(".")[-2]: w.kind for n, w in open_checkpoint(folder).tensors.items()}
        assert (kinds["w1"], kinds["q_proj"], kinds["w2"]) == ("BF16", "BF16", down)


def test_large_ones_come_in_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runner: Callable[..., Any]
) -> None:
    write_tiny("llama", tmp_path / "dense", 3)
    whole = upcycle(tmp_path / "dense", 2, tmp_path / "one")
    monkeypatch.setattr(module, "SHARD_BYTES", 40_000)
    sharded = upcycle(tmp_path / "dense", 2, tmp_path / "many")
    files = sorted(path.name for path in sharded.glob("*.safetensors"))
    assert len(files) == 3
    assert files[0] == "model-00001-of-00003.safetensors"
    assert open_checkpoint(sharded).digest == open_checkpoint(whole).digest


@pytest.mark.parametrize(
    ("arch", "experts", "options", "message"),
    [
        ("llama", 1, {}, "experts=1: must be at least 2"),
        ("llama", 5, {}, "experts=5: does not divide the feed-forward's width 64"),
        ("qwen3", 2, {}, "model='qwen3': expected one of llama, mistral"),
        ("llama", 2, {"mlp_bias": True}, "model='llama with biases': expected one of"),
    ],
)
def test_what_does_not_fit_is_refused(
    arch: str, experts: int, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_tiny(arch, tmp_path / "dense", 3, **options)
    with pytest.raises(ConfigError, match=message):
        upcycle(tmp_path / "dense", experts, tmp_path / "out")


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    write_tiny("llama", tmp_path / "dense", 3)
    with pytest.raises(ConfigError, match=r"output='.*dense': is not empty"):
        upcycle(tmp_path / "dense", 2, tmp_path / "dense")
    with pytest.raises(ConfigError, match="not a folder"):
        upcycle(tmp_path / "dense", 2, tmp_path / "dense" / "config.json")


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny("llama", tmp_path / "dense", 3)
    arguments = ["upcycle", "--model", str(tmp_path / "dense"), "--output", str(tmp_path / "out")]
    assert main([*arguments, "--experts", "4"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["MixtralForCausalLM"]
    assert main([*arguments, "--experts", "4"]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_the_verb_with_a_module_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny("llama", tmp_path / "dense", 3)
    write_mtp(tmp_path / "dense", tmp_path / "head", 5)
    arguments = ["upcycle", "--model", str(tmp_path / "dense"), "--experts", "4"]
    output = ["--output", str(tmp_path / "out")]
    assert main([*arguments, *output, "--mtp"]) == 2
    assert "mtp=None: none is shipped for dense" in capsys.readouterr().err
    assert main([*arguments, *output, "--mtp", str(tmp_path / "head")]) == 0
    module = json.loads((tmp_path / "out" / "mtp" / "config.json").read_text())
    block = module["transformer_layer_config"]
    assert (block["model_type"], block["num_local_experts"]) == ("mixtral", 4)
    assert open_checkpoint(tmp_path / "out").config.experts is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"own_names": True}, "not a next-token module in speculators' spelling"),
        ({"layer": "qwen3"}, "mtp='qwen3': expected one of llama, mistral"),
    ],
)
def test_a_module_that_does_not_fit_is_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_tiny("llama", tmp_path / "dense", 3)
    head = write_mtp(tmp_path / "dense", tmp_path / "head", 5, **options)
    with pytest.raises(ConfigError, match=message):
        upcycle_mtp(head, 2, tmp_path / "out")


# ---------------------------------------------------------------- a real model


PROMPTS = [
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the river,",
]
NEW = 8


def greedy(run: Any, ids: list[int]) -> tuple[torch.Tensor, list[int]]:
    """Logits of the prompt, and the tokens that follow."""
    logits = run.logits(torch.tensor(ids))
    tokens = [int(logits[-1].argmax())]
    for position in range(len(ids), len(ids) + NEW - 1):
        out = run.model.forward(torch.tensor(tokens[-1:]), run.batch(position, 1), run.cache)
        tokens.append(int(run.model.compute_logits(out.hidden).argmax()))
    return logits, tokens


@pytest.mark.model
def test_smollm2_says_what_it_said(
    smollm2_path: Path, tmp_path: Path, runner: Callable[..., Any]
) -> None:
    """Dequantized from its GGUF file and cut into 4 experts: the same greedy tokens, logits within
    1e-3, the same tokenizer and chat template."""
    folder = upcycle(smollm2_path, 4, tmp_path / "experts")
    dense, mixture = open_checkpoint(smollm2_path), open_checkpoint(folder)
    tokenizer = dense.tokenizer()
    chat = [{"role": "user", "content": "Hello, 日本 🙂 123"}]
    assert mixture.tokenizer().encode_chat(chat) == tokenizer.encode_chat(chat)
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    run = runner(dense, 64)
    first = [greedy(run, ids) for ids in prompts]
    run = runner(mixture, 64)
    for ids, (logits, tokens) in zip(prompts, first, strict=True):
        again, said = greedy(run, ids)
        assert said == tokens
        assert (again - logits).abs().max() < 1e-3
