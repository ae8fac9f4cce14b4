"""The target as its own draft through the whole engine: equal bits, and acceptance to the last
token, whatever the scheduler does. Every drafted row must gain its drafts and one token more."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drafting.methods import Method
from drafting.test_draft_model_vocab import shuffled
from drafting.world import LENGTH, VOCAB, Watch, cache_bytes, engine, jobs, signature, truth
from drumline.core.params import SamplingParams
from drumline.engine.llm import LLM

TinyPath = Callable[..., Path]

SAME = Method("same", lambda target: {"method": "draft_model", "model": str(target)})


@pytest.fixture(scope="module", params=["llama", "qwen3_moe"])
def target(tiny_path: TinyPath, request: pytest.FixtureRequest) -> Path:
    return tiny_path(arch=request.param, seed=3, vocab=VOCAB)


@pytest.fixture(scope="module")
def alone(target: Path) -> dict[bool, list[Any]]:
    return {sampled: truth(target, sampled) for sampled in (False, True)}


def run_watched(llm: LLM, batch: list[Any], rounds: int = 1) -> tuple[Watch, list[Any]]:
    watch = Watch(llm)
    for _ in range(rounds):
        outputs = llm.generate([prompt for prompt, _ in batch], [params for _, params in batch])
    return watch, [signature(output) for output in outputs]


def assert_all_accepted(watch: Watch) -> None:
    gains = [(drafts, tokens) for drafts, tokens in watch.gains() if drafts]
    assert len(gains) > 5
    assert all(tokens == drafts + 1 for drafts, tokens in gains), gains


@pytest.mark.parametrize(
    ("k", "sampled", "chunk", "preempt"),
    [(1, True, 5, True), (3, False, 5, True), (3, True, 256, True), (5, True, 5, False)],
)
def test_every_draft_is_right(
    target: Path, alone: dict[bool, list[Any]], k: int, sampled: bool, chunk: int, preempt: bool
) -> None:
    """With prefix caching on, and every prompt twice."""
    speculative = SAME.speculative(target, k)
    settings: dict[str, Any] = {"max_num_batched_tokens": chunk, "max_num_seqs": min(8, chunk)}
    if preempt:
        settings["kv_cache_memory_bytes"] = cache_bytes(target, speculative, LENGTH)
    llm = engine(target, speculative, **settings)
    watch, found = run_watched(llm, jobs(sampled), rounds=2)
    assert found == alone[sampled]
    assert_all_accepted(watch)
    if preempt and chunk == 256:
        assert llm.core.counters.preemptions > 0
    if not preempt:
        first: dict[int, int] = {}
        for plan, _ in watch.steps:
            for row in plan.rows:
                first.setdefault(row.number, row.start)
        assert any(first.values()), "no prefix was found in the cache"


def test_the_same_weights_under_other_ids(
    target: Path, alone: dict[bool, list[Any]], tmp_path: Path
) -> None:
    draft, _ = shuffled(target, tmp_path / "draft")
    keys = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    llm = engine(target, keys | {"use_heterogeneous_vocab": True}, max_num_batched_tokens=5)
    watch, found = run_watched(llm, jobs(sampled=True))
    assert found == alone[True]
    assert_all_accepted(watch)


def test_case_10_a_phase_without_drafts_is_followed_by_full_acceptance(target: Path) -> None:
    """A table drafts for up to four requests; with five, one of them is prefilled at K = 0."""
    table = [[1, 2, 3], [3, 4, 1], [5, 16, 0]]
    speculative = SAME.speculative(target, 3, num_speculative_tokens_per_batch_size=table)
    llm = engine(target, speculative, max_num_seqs=6, max_num_batched_tokens=16)
    watch = Watch(llm)
    prompts = [[7, 90, 15, 33 + at] * 3 for at in range(5)]
    counts = [40, 12, 13, 14, 40]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in counts]
    plain = [o.outputs[0].token_ids for o in engine(target).generate(prompts, params)]
    found = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
    assert found == plain
    lengths = [plan.draft_k for plan, _ in watch.steps]
    assert {key for key, _ in itertools.groupby(lengths)} == {0, 1, 3}
    assert_all_accepted(watch)


def test_case_01_a_shorter_draft_leaves_the_neighbour_alone(target: Path, tmp_path: Path) -> None:
    """X grows past position 32, where drafting ends for it; Y stays below and keeps all."""
    speculative = SAME.speculative(target, 3, max_model_len=32)
    llm = engine(target, speculative)
    watch = Watch(llm)
    prompts = [[7, 90, 15, 33, 64] * 4, [12, 77, 40]]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (30, 20)]
    outputs = llm.generate(prompts, params)
    plain = engine(target).generate(prompts, params)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain]
    assert_all_accepted(watch)
    for plan, result in watch.steps:
        for row, outcome in zip(plan.rows, result.rows, strict=True):
            if row.start + len(row.tokens) > 32:
                assert row.drafts == outcome.drafts == ()
                assert len(outcome.tokens) == 1
            last = row.start + len(row.tokens) + len(outcome.tokens) + len(outcome.drafts) - 1
            assert last < 32 or not outcome.drafts
    x, y = (output.outputs[0].speculation for output in outputs)
    assert x is not None
    assert y is not None
    assert 0 < x.drafted < 12
    assert y.accepted == y.drafted >= 14
    (choice,) = [
        c for c in llm.core.resolved.choices if c.field == "speculative_config.max_model_len"
    ]
    assert choice.used == 32
    assert f"max_model_len={LENGTH}" in choice.reason
