"""Drafters with weights inside the engine: not one bit of output changes, and what they draft at a
position depends on the tokens before it alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drumline.core.params import SamplingParams
from drumline.core.plan import SpeculationStats
from drumline.engine.llm import LLM
from drumline.models.tiny import write_tiny
from drumline.models.tiny_drafts import (
    add_mtp,
    write_eagle,
    write_eagle3,
    write_medusa,
    write_mtp,
)

Drafts = dict[tuple[tuple[int, ...], int], tuple[int, ...]]  # (prompt, n) → drafts
COUNT, VOCAB = 6, 128
LENGTH = 64


def soften(folder: Path, share: float) -> Path:
    """The target's layers add little: the next token follows from the last one, mostly."""
    file = folder / "model.safetensors"
    tensors = {
        name: data * share if name.endswith(("o_proj.weight", "down_proj.weight")) else data
        for name, data in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def near_mtp(target: Path, folder: Path, share: float) -> Path:
    """A module that says what the last token says, and ``share`` of what its block makes of it:
    near its target, and not without its keys and values."""
    write_mtp(target, folder, 5)
    file = folder / "model.safetensors"
    tensors, verifier = load_file(file), load_file(target / "model.safetensors")
    p, hidden = "mtp_layers.0.", verifier["model.norm.weight"].shape[0]
    tensors[f"{p}input_proj.weight"] = torch.eye(hidden, 2 * hidden)
    tensors[f"{p}token_layernorm.weight"] = torch.ones(hidden)
    tensors[f"{p}final_layernorm.weight"] = verifier["model.norm.weight"].clone()
    for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
        tensors[p + name] = share * tensors[p + name]
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    write_tiny("llama", folder, 3, vocab=VOCAB, hidden=32, layers=2)
    add_mtp(folder, 4)
    return soften(folder, 0.05)


@pytest.fixture(scope="module")
def drafts(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Speculative configs by name."""
    root = tmp_path_factory.mktemp("drafts")
    write_eagle(target, root / "eagle", 5)
    write_eagle3(target, root / "eagle3", 5, draft_vocab=60, norm_before_residual=True)
    write_eagle3(target, root / "experts", 5, layer="qwen3_moe", norm_output=True)
    write_medusa(target, root / "medusa", 5)
    near_mtp(target, root / "near", 0.05)
    write_mtp(target, root / "reduced", 5, draft_vocab=50)
    return {
        "own": {"method": "mtp"},
        "near": {"method": "mtp", "model": str(root / "near")},
        "reduced": {"method": "mtp", "model": str(root / "reduced")},
        "eagle": {"method": "eagle", "model": str(root / "eagle")},
        "eagle3": {"method": "eagle3", "model": str(root / "eagle3")},
        "experts": {"method": "eagle3", "model": str(root / "experts")},
        "medusa": {"method": "medusa", "model": str(root / "medusa")},
    }


def jobs() -> list[tuple[list[int], SamplingParams]]:
    draw = random.Random(7)
    shared = [draw.randrange(5, VOCAB) for _ in range(13)]
    found = []
    for index in range(COUNT):
        prompt = [draw.randrange(5, VOCAB) for _ in range(draw.choice([1, 4, 9]))]
        prompt = shared[: 4 * (index % 4)] + prompt if index % 2 else prompt
        params: dict[str, Any] = {"max_tokens": 14, "logprobs": 2, "ignore_eos": True}
        params |= {"temperature": 0.0} if index % 3 else {"temperature": 0.8, "seed": index}
        if index == 4:
            params |= {"repetition_penalty": 1.3}
        found.append((prompt, SamplingParams.from_mapping(params)))
    return found


@dataclass
class Run:
    """Tokens and log-probabilities per output, drafts by place, and what was counted."""

    signatures: list[Any]
    drafts: Drafts
    stats: SpeculationStats
    preempted: int


def run(target: Path, spec: dict[str, Any] | None, **settings: Any) -> Run:
    """Outputs of all jobs, twice over (the second time from the prefix cache), and every draft."""
    settings = {"max_model_len": LENGTH, "block_size": 4, "threads": 1, **settings}
    settings = {"ops_backend": "reference", **settings}
    llm = LLM(model=str(target), speculative_config=spec, **settings)
    seen: Drafts = {}
    speculator = llm.core.worker.speculator
    if speculator is not None:
        _watch(speculator.drafter, seen)
    prompts, params = zip(*jobs(), strict=True)
    outputs = [llm.generate(list(prompts), list(params)) for _ in range(2)]
    assert llm.core.pool.usage == 0
    signatures = [
        (completion.token_ids, completion.logprobs)
        for output in outputs[0] + outputs[1]
        for completion in output.outputs
    ]
    return Run(signatures, seen, llm.core.speculation, llm.core.counters.preemptions)


def _watch(drafter: Any, seen: Drafts) -> None:
    plain = drafter.propose

    def propose(rows: Any, output: Any, draft_k: int) -> Any:
        proposal = plain(rows, output, draft_k)
        for row, guess in zip(rows, proposal.drafts, strict=True):
            if guess:
                # By the tokens and the draw's key: all that a draft may depend on.
                key = (tuple(row.committed), row.request.seed if row.request.params.temperature
                       else -1)  # fmt: skip
                known = seen.setdefault(key, tuple(guess))
                common = min(len(known), len(guess))
                assert known[:common] == tuple(guess)[:common], "history in a draft"
                seen[key] = max(known, tuple(guess), key=len)
        return proposal

    drafter.propose = propose


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def plain(target: Path) -> list[Any]:
    signatures = run(target, None).signatures
    assert len({tokens for tokens, _ in signatures}) == COUNT
    return signatures


NAMES = ("own", "near", "reduced", "eagle", "eagle3", "experts", "medusa")
# Budgets, blocks that force preemption, companions, bookkeeping: each differs from the reference.
WAYS: dict[str, dict[str, Any]] = {
    "chunks": {"max_num_batched_tokens": 5, "max_num_seqs": 3},
    "pressure": {"kv_cache_memory_bytes": 0, "max_num_seqs": 6},
}


def pressed(name: str, target: Path, spec: dict[str, Any]) -> dict[str, Any]:
    """Settings of a way, with so few blocks that requests push each other out."""
    settings = dict(WAYS[name])
    if "kv_cache_memory_bytes" in settings:
        llm = LLM(model=str(target), speculative_config=spec, max_model_len=LENGTH, block_size=4,
                  threads=1, ops_backend="reference")  # fmt: skip
        per_block = llm.core.resolved.kv_cache_bytes // llm.core.resolved.num_kv_blocks
        settings["kv_cache_memory_bytes"] = per_block * 17
    return settings


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_not_one_bit_changes(
    name: str, k: int, target: Path, drafts: dict[str, Any], plain: list[Any]
) -> None:
    """Alone with a large budget, in chunks of five, and under pressure with the other
    bookkeeping: the same tokens, the same log-probabilities, and the same drafts at each place."""
    spec = drafts[name] | {"num_speculative_tokens": k}
    reference = run(target, spec)
    assert reference.signatures == plain
    assert reference.stats.drafted > 50
    for way in WAYS:
        other = spec | {"disable_padded_drafter_batch": way == "pressure"}
        found = run(target, other, **pressed(way, target, other))
        assert found.signatures == plain
        assert found.preempted > 0 or way != "pressure"
        both = reference.drafts.keys() & found.drafts.keys()
        assert len(both) > 30
        for key in both:
            one, two = reference.drafts[key], found.drafts[key]
            common = min(len(one), len(two))
            assert one[:common] == two[:common]


@pytest.mark.parametrize("k", [1, 3])
def test_a_module_near_its_target_is_accepted_often(
    k: int, target: Path, drafts: dict[str, Any]
) -> None:
    stats = run(target, drafts["near"] | {"num_speculative_tokens": k}).stats
    assert 0.3 < stats.accepted / stats.drafted < 0.98


def test_a_module_that_is_its_target_is_always_accepted(tmp_path: Path) -> None:
    """Layers that add nothing, on both sides: the drafts are the target's tokens, greedy and
    sampled (coupled noise), chunked, cached and preempted."""
    target = tmp_path / "target"
    write_tiny("llama", target, 3, vocab=VOCAB, hidden=32, layers=2)
    soften(target, 0.0)
    spec = {"method": "mtp", "model": str(near_mtp(target, tmp_path / "same", 0.0))}
    for settings in ({}, WAYS["chunks"]):
        stats = run(target, spec | {"num_speculative_tokens": 3}, **settings).stats
        assert stats.drafted > 60
        assert stats.accepted == stats.drafted
