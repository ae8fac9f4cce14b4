"""What drafts bring is counted, not only what comes out: a perfect drafter gains K in every step,
one that always lies gains nothing, and nobody drafts past a limit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drafting.methods import METHODS
from drafting.world import (
    LENGTH,
    VOCAB,
    Signature,
    Watch,
    cache_bytes,
    engine,
    jobs,
    signature,
    tell,
    truth,
)
from drumline.core.params import SamplingParams
from drumline.core.plan import Row
from drumline.drafting.testing import Scripted
from drumline.engine.llm import LLM

TinyPath = Callable[..., Path]


@pytest.fixture(scope="module")
def target(tiny_path: TinyPath) -> Path:
    return tiny_path(arch="llama", seed=3, vocab=VOCAB)


@pytest.fixture(scope="module")
def alone(target: Path) -> dict[bool, list[Signature]]:
    return {sampled: truth(target, sampled) for sampled in (False, True)}


def speculating(target: Path, name: str, k: int, **settings: Any) -> tuple[LLM, Watch]:
    keys = {key: settings.pop(key) for key in tuple(settings) if key.startswith("num_spec")}
    speculative = METHODS[name].speculative(target, k, **keys)
    tokens = settings.pop("cache_tokens", None)
    if tokens is not None:
        settings["kv_cache_memory_bytes"] = cache_bytes(target, speculative, tokens)
    llm = engine(target, speculative, **settings)
    return llm, Watch(llm)


def serve(llm: LLM, batch: list[Any]) -> list[Signature]:
    outputs = llm.generate([prompt for prompt, _ in batch], [params for _, params in batch])
    return [signature(output) for output in outputs]


SITUATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"max_num_batched_tokens": 12, "max_num_seqs": 4},
    "preemption": {"cache_tokens": LENGTH},
    "no-caching": {"enable_prefix_caching": False},
    "zero-phases": {"num_speculative_tokens_per_batch_size": [[1, 7, 3], [8, 8, 0]]},
}


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["oracle", "liar"])
@pytest.mark.parametrize("situation", SITUATIONS)
def test_all_or_nothing(
    target: Path,
    alone: dict[bool, list[Signature]],
    name: str,
    situation: str,
    sampled: bool,
) -> None:
    """A row of d drafts yields d + 1 tokens from the oracle and one from the liar, whatever
    happened to it before; stops cut what is kept, never what is accepted."""
    llm, watch = speculating(target, name, 3, **SITUATIONS[situation])
    for _ in range(2):
        assert serve(llm, jobs(sampled)) == alone[sampled]
    gains = watch.gains()
    drafted = [drafts for drafts, _ in gains if drafts]
    assert len(drafted) > 20
    for drafts, tokens in gains:
        assert tokens == (1 + drafts if name == "oracle" else 1)
    if situation == "preemption":
        assert llm.core.counters.preemptions > 0
    if situation == "zero-phases":
        assert {plan.draft_k for plan, _ in watch.steps} == {0, 3}
    hits = llm.generate([jobs(sampled)[1][0]], SamplingParams(max_tokens=1))[0].num_cached_tokens
    assert (hits > 0) == (situation != "no-caching")


@pytest.mark.parametrize("k", [1, 3, 5, 8])
def test_the_oracle_takes_k_plus_one_tokens_in_every_step(
    target: Path, alone: dict[bool, list[Signature]], k: int
) -> None:
    """One request of 14 tokens: one from the prompt, then K + 1 at a time."""
    llm, watch = speculating(target, "oracle", k)
    assert serve(llm, jobs(False)[:1]) == alone[False][:1]
    sizes = [tokens for _, tokens in watch.gains()]
    full, rest = divmod(13, k + 1)
    assert sizes == [1] + [k + 1] * full + ([rest] if rest else [])
    stats = llm.core.speculation
    # A last token alone needs no draft.
    assert stats.drafts == full + (rest > 1)
    assert stats.accepted == stats.drafted == 13 - len(sizes[1:])


def test_scripted_gains_what_its_script_says(
    target: Path, alone: dict[bool, list[Signature]]
) -> None:
    llm, watch = speculating(target, "scripted", 3)
    assert serve(llm, jobs(True)) == alone[True]
    seen = set()
    before: dict[int, int] = {}  # tokens that a row had when its drafts were made
    prompts = {}
    for plan, result in watch.steps:
        prompts |= {a.request.number: len(a.request.prompt_token_ids) for a in plan.admitted}
        for row, outcome in zip(plan.rows, result.rows, strict=True):
            if row.drafts:
                at = before[row.number] - prompts[row.number]
                right = Scripted.accepted[at % len(Scripted.accepted)]
                assert len(outcome.tokens) == min(right, len(row.drafts)) + 1
                seen.add(len(outcome.tokens))
            if row.samples:
                before[row.number] = row.start + len(row.tokens) + len(outcome.tokens)
    assert seen == {1, 2, 3, 4}


def expected_k(row: Row, count: int, draft_k: int, length_max: int) -> int:
    """The rule near the limits, written down again: count committed tokens, drafts behind them,
    and room for one token more."""
    return max(0, min(draft_k, length_max - count - 1))


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("prompt_count", range(LENGTH - 9, LENGTH))
def test_near_the_limit_a_row_drafts_less_and_less(target: Path, k: int, prompt_count: int) -> None:
    """Every length from L - 8 on; an oracle, so that lengths jump, beside a short neighbour who
    is not disturbed."""
    prompt = tuple(5 + index * 7 % 100 for index in range(prompt_count))
    params = SamplingParams(temperature=0.0, max_tokens=None, seed=1, ignore_eos=True)
    neighbour = SamplingParams(temperature=0.0, max_tokens=12, seed=2, ignore_eos=True)
    batch = [(prompt, params), ((9, 8, 7), neighbour)]
    plain = serve(engine(target, None), batch)
    for (ids, own), (tokens, *_) in zip(batch, plain, strict=True):
        tell(ids, own, tokens)
    llm, watch = speculating(target, "oracle", k)
    assert serve(llm, batch) == plain
    assert len(plain[0][0]) == LENGTH - prompt_count
    length_max = {0: LENGTH, 1: 3 + 12}
    for plan, result in watch.steps:
        for row, outcome in zip(plan.rows, result.rows, strict=True):
            count = row.start + len(row.tokens) + len(outcome.tokens)
            if row.samples and count < length_max[row.number]:
                wanted = expected_k(row, count, plan.draft_k, length_max[row.number])
                assert len(outcome.drafts) == wanted
                assert count + len(outcome.drafts) < length_max[row.number]
            assert row.start + row.width <= length_max[row.number]


def test_a_request_beyond_the_drafters_range_goes_on_without_drafts(target: Path) -> None:
    """CASE 01 and 03 on one rank: the drafter covers 32 positions and is not asked for more."""
    long = SamplingParams(temperature=0.0, max_tokens=30, seed=3, ignore_eos=True)
    short = SamplingParams(temperature=0.0, max_tokens=18, seed=4, ignore_eos=True)
    batch = [(tuple(range(10, 30)), long), ((5, 6, 7), short)]
    plain = serve(engine(target, None), batch)
    for (ids, own), (tokens, *_) in zip(batch, plain, strict=True):
        tell(ids, own, tokens)
    llm, watch = speculating(target, "brittle", 3)
    assert serve(llm, batch) == plain
    assert llm.core.worker.speculator is not None
    assert llm.core.worker.speculator.failure_count == 0
    for plan, result in watch.steps:
        for row, outcome in zip(plan.rows, result.rows, strict=True):
            last = row.start + row.width - 1
            assert not row.drafts or last < 32
            assert len(outcome.tokens) == len(row.drafts) + 1
    beyond = [row for plan, _ in watch.steps for row in plan.rows if row.start >= 32]
    assert len(beyond) >= 17
    assert all(row.width == 1 for row in beyond)


def test_statistics_are_the_sums_of_what_happened(
    target: Path, alone: dict[bool, list[Signature]]
) -> None:
    llm, watch = speculating(target, "scripted", 3)
    outputs = llm.generate(*map(list, zip(*jobs(True), strict=True)))
    each = [output.outputs[0].speculation for output in outputs]
    gains = [(drafts, tokens) for drafts, tokens in watch.gains() if drafts]
    total = llm.core.speculation
    assert total.drafts == sum(stats.drafts for stats in each if stats) == len(gains)
    assert total.drafted == sum(drafts for drafts, _ in gains)
    assert total.accepted == sum(total.accepted_per_position)
    assert 0 < total.accepted <= sum(tokens - 1 for _, tokens in gains)
    assert all(stats is not None and len(stats.accepted_per_position) == 3 for stats in each)
    sums = [sum(stats.accepted_per_position[at] for stats in each if stats) for at in range(3)]
    assert tuple(sums) == total.accepted_per_position
    assert sums == sorted(sums, reverse=True)
