"""A draft model of another vocabulary. With the target's own weights under shuffled ids every
draft is right, which it is only if tokens are mapped both ways, and noise follows target ids."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafting.steps import Bench
from drumline.core.errors import ConfigError
from drumline.drafting.draft_model import DraftModelDrafter
from drumline.drafting.vocab_map import VocabMap, same_tokens
from drumline.models.checkpoint import open_checkpoint
from drumline.models.hub_tokenizer import hub_tokenizer

TinyPath = Callable[..., Path]
PROMPT = [7, 90, 15, 33, 64, 21, 8, 101, 56, 12, 77, 40, 31]
COUNT = 24
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "seed": 11}


@pytest.fixture(scope="module")
def target(tiny_path: TinyPath) -> Path:
    return tiny_path(arch="llama", seed=3)


def shuffled(path: Path, output: Path, seed: int = 1, missing: int = 0) -> tuple[Path, list[int]]:
    """The checkpoint under permuted ids, and old id → new id; the last ``missing`` old tokens
    (long ones that merges make) are replaced by text that the original has not."""
    shutil.copytree(path, output)
    file = output / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab: dict[str, int] = tokenizer["model"]["vocab"]
    order = torch.randperm(len(vocab), generator=torch.Generator().manual_seed(seed)).tolist()
    lost = sorted(vocab, key=lambda token: vocab[token])[len(vocab) - missing :]
    renamed = {token: f"zqx{at}" if token in lost else token for at, token in enumerate(vocab)}
    tokenizer["model"]["vocab"] = {renamed[token]: order[i] for token, i in vocab.items()}
    tokenizer["model"]["merges"] = [
        merge for merge in tokenizer["model"]["merges"] if "".join(merge) not in lost
    ]
    for added in tokenizer["added_tokens"]:
        added["id"] = order[added["id"]]
    for special in tokenizer["post_processor"].get("special_tokens", {}).values():
        special["ids"] = [order[i] for i in special["ids"]]
    file.write_text(json.dumps(tokenizer))
    weights = load_file(output / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        moved = torch.empty_like(weights[name])
        moved[order] = weights[name]
        weights[name] = moved
    save_file(weights, output / "model.safetensors")
    return output, order


def heterogeneous(path: Path, **keys: Any) -> dict[str, Any]:
    return {
        "method": "draft_model",
        "model": str(path),
        "num_speculative_tokens": 5,
        "use_heterogeneous_vocab": True,
    } | keys


def baseline(target: Path, **params: Any) -> tuple[int, ...]:
    bench = Bench(target)
    sequence = bench.add(PROMPT, **params)
    bench.run([sequence], COUNT, 0)
    return sequence.outputs[:COUNT]


@pytest.mark.parametrize("params", [{}, SAMPLED], ids=["greedy", "coupled"])
def test_shuffled_ids_lose_nothing(target: Path, tmp_path: Path, params: dict[str, Any]) -> None:
    draft, order = shuffled(target, tmp_path / "draft")
    bench = Bench(target, heterogeneous(draft))
    drafter = bench.drafter
    assert isinstance(drafter, DraftModelDrafter)
    found = drafter.speech.vocab_map
    assert found is not None
    assert found.shared_count == 128
    assert [found.read(token) for token in range(128)] == order
    sequence = bench.add(PROMPT, **params)
    bench.run([sequence], COUNT, 5, budget=5)
    assert sequence.outputs[:COUNT] == baseline(target, **params)
    assert set(sequence.gains) == {6}


def test_drafts_come_from_the_intersection_alone(target: Path, tmp_path: Path) -> None:
    draft, _ = shuffled(target, tmp_path / "draft", missing=20)
    bench = Bench(target, heterogeneous(draft))
    drafter = bench.drafter
    assert isinstance(drafter, DraftModelDrafter)
    found = drafter.speech.vocab_map
    assert found is not None
    assert found.target_ids == tuple(range(108))
    # The target is pushed towards a token that the draft cannot say, and says it.
    params = {"logit_bias": {110: 6.0}}
    sequence = bench.add(PROMPT, **params)
    drafted: set[int] = set()
    while len(sequence.outputs) < COUNT:
        bench.step([sequence], 5)
        drafted |= set(sequence.drafts)
    assert sequence.outputs[:COUNT] == baseline(target, **params)
    assert 110 in sequence.outputs
    assert drafted
    assert max(drafted) < 108


def test_a_token_that_the_draft_has_not_is_read_as_the_end_of_its_text(
    target: Path, tmp_path: Path
) -> None:
    draft, order = shuffled(target, tmp_path / "draft", missing=20)
    ours, theirs = hub_tokenizer(target), hub_tokenizer(draft)
    found = VocabMap(ours, theirs, 128, 128)
    unshared = [token for token in range(108, 128) if len(ours.token_bytes(token)) > 1]
    assert len(unshared) > 5
    for token in unshared:
        last = ours.token_bytes(token)[-1:]
        piece = found.read(token)
        assert theirs.token_bytes(piece).endswith(last)
        assert piece in {order[i] for i in range(108)}


def test_special_tokens_meet_by_role(target: Path, tmp_path: Path) -> None:
    """Two families spell the end of a text differently, and one has a token the other spells."""
    draft, order = shuffled(target, tmp_path / "draft")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        file = draft / name
        file.write_text(file.read_text().replace("<|im_end|>", "</s>"))
    ours, theirs = hub_tokenizer(target), hub_tokenizer(draft)
    found = VocabMap(ours, theirs, 128, 128)
    assert ours.eos_token_id is not None
    assert found.read(ours.eos_token_id) == theirs.eos_token_id
    assert ours.eos_token_id in found.target_ids
    # Without a role a special token has no counterpart, and is read as the unknown token.
    file = draft / "tokenizer.json"
    file.write_text(file.read_text().replace("<|im_start|>", "<|start|>"))
    found = VocabMap(ours, hub_tokenizer(draft), 128, 128)
    assert 3 not in found.target_ids
    assert found.read(3) == order[0]


def test_rows_beyond_a_head_are_never_said(target: Path) -> None:
    tokenizer = hub_tokenizer(target)
    found = VocabMap(tokenizer, tokenizer, 128, 50)
    assert found.target_ids == tuple(range(50))
    assert all(found.read(token) < 50 for token in range(128))


def test_same_tokens_sees_one_difference(target: Path, tmp_path: Path) -> None:
    draft, _ = shuffled(target, tmp_path / "draft")
    tokenizer = hub_tokenizer(target)
    assert same_tokens(tokenizer, hub_tokenizer(target), 128)
    assert not same_tokens(tokenizer, hub_tokenizer(draft), 128)


def test_shuffled_ids_are_refused_unless_asked_for(target: Path, tmp_path: Path) -> None:
    draft, _ = shuffled(target, tmp_path / "draft")
    keys = heterogeneous(draft)
    del keys["use_heterogeneous_vocab"]
    with pytest.raises(ConfigError, match="use_heterogeneous_vocab maps tokens"):
        Bench(target, keys)


def test_nothing_in_common_is_refused(target: Path, tmp_path: Path) -> None:
    draft, _ = shuffled(target, tmp_path / "draft")
    ours, theirs = open_checkpoint(target).tokenizer(), hub_tokenizer(draft)
    with pytest.raises(ConfigError, match="have no token in common"):
        VocabMap(ours, theirs, 0, 128)
