"""Miniature checkpoints: reproducible, loadable, lively, and refused where impossible."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from drumline.core.errors import ConfigError
from drumline.models.checkpoint import open_checkpoint
from drumline.models.tiny import write_tiny


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_same_seed_same_bytes(arch: str, tmp_path: Path) -> None:
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        write_tiny(arch, tmp_path / name, seed=seed, shards=2, vocab=300)
    a, b, c = (contents(tmp_path / name) for name in "abc")
    assert a == b
    assert a != c
    assert a["tokenizer.json"] == c["tokenizer.json"]


def test_a_second_write_leaves_no_stale_shards(tmp_path: Path) -> None:
    write_tiny("llama", tmp_path, seed=1, shards=4)
    first = open_checkpoint(tmp_path)
    write_tiny("llama", tmp_path, seed=1, shards=1)
    second = open_checkpoint(tmp_path)
    assert [p.name for p in tmp_path.glob("model*")] == ["model.safetensors"]
    assert first.digest == second.digest


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_logits_spread_and_greedy_text_wanders(
    arch: str, tied: bool, seed: int, tmp_path: Path, runner: Callable[..., Any]
) -> None:
    write_tiny(arch, tmp_path, seed=seed, tied=tied)
    run = runner(open_checkpoint(tmp_path), 80)
    ids = torch.arange(5, 13)
    logits = run.logits(ids)
    assert 1 < logits.std() < 3
    tokens = [int(logits[-1].argmax())]
    for position in range(len(ids), len(ids) + 63):
        last = torch.tensor(tokens[-1:])
        out = run.model.forward(last, run.batch(position, 1), run.cache)
        tokens.append(int(run.model.compute_logits(out.hidden).argmax()))
    assert len(set(tokens)) >= 12
    assert len(set(tokens[-16:])) >= 4


@pytest.mark.parametrize("vocab", [16, 50, 128, 300, 2000])
def test_the_vocabulary_is_full_and_spells_text(vocab: int, tmp_path: Path) -> None:
    write_tiny("llama", tmp_path, seed=1, vocab=vocab)
    tokenizer = open_checkpoint(tmp_path).tokenizer()
    assert tokenizer.vocab_size == vocab
    text = "the cat. " if vocab >= 50 else "abc"
    if vocab >= 300:
        text = "Émile, 日本 🙂🏽 \t«ok»\r\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode(text) == theirs.encode(text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arch": "gpt2"}, "arch='gpt2': expected one of deepseek_v3, llama"),
        ({"heads": 5}, "heads=5: must divide hidden=32"),
        ({"kv_heads": 3}, "kv_heads=3: must divide heads=4"),
        ({"head_dim": 7}, "head_dim=7: must be even"),
        ({"layers": 0}, "layers=0: must be at least 1"),
        ({"vocab": 3}, "vocab=3: must be at least 16"),
        ({"dtype": "int8"}, "dtype='int8': expected one of float32"),
        ({"shards": 1000}, "shards=1000: the checkpoint has 21 tensors only"),
        ({"seed": -1}, "seed=-1: must not be negative"),
        ({"arch": "qwen2", "mlp_bias": True}, "mlp_bias=True: qwen2 has no biases"),
        ({"arch": "mistral", "attention_bias": True}, "attention_bias=True: not a choice"),
        ({"rope_scaling": {"type": "su"}}, "rope_scaling.type 'su': not supported"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor: missing"),
    ],
)
def test_impossible_combinations_are_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        write_tiny(**{"arch": "llama", "output": tmp_path / "x", "seed": 1, **options})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
