"""Promise P1 through the whole engine: the same ids and the same bits of every log-probability,
whatever shares the batch, however prompts are cut, whoever is preempted, whatever was cached."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.core.cpu import native_available
from drumline.core.params import SamplingParams
from drumline.core.request import PositionLogprobs
from drumline.engine.llm import LLM
from drumline.engine.outputs import RequestOutput

Signature = tuple[tuple[int, ...], tuple[PositionLogprobs, ...], Any, str]
TinyPath = Callable[..., Path]
Target = tuple[Path, str]  # checkpoint and ops backend

COUNT = 16
VOCAB = 300
BLOCK = 4  # promised for a fixed block size: it is the order in which attention adds


def workload() -> list[tuple[tuple[int, ...], SamplingParams]]:
    """16 requests: half of them share prefixes; greedy and sampled, penalties and filters."""
    draw = random.Random(7)
    shared = tuple(draw.randrange(5, VOCAB) for _ in range(32))
    jobs = []
    for index in range(COUNT):
        length = draw.choice([1, 2, 7, 15, 16, 17, 33])
        prompt = tuple(draw.randrange(5, VOCAB) for _ in range(length))
        if index % 2:
            prompt = shared[: draw.choice([16, 24, 32])] + prompt
        params: dict[str, Any] = {"max_tokens": 16, "logprobs": 3, "ignore_eos": index % 3 > 0}
        if index % 4 == 0:
            params["temperature"] = 0.0
        else:
            params |= {"temperature": 0.9, "seed": 1000 + index, "top_p": 0.95}
        if index % 5 == 1:
            params |= {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "min_tokens": 4}
        if index % 5 == 2:
            params |= {"top_k": 20, "min_p": 0.02, "presence_penalty": 0.5}
        if index % 8 == 5:
            params |= {"prompt_logprobs": 2}
        jobs.append((prompt, SamplingParams.from_mapping(params)))
    return jobs


JOBS = workload()


def signature(output: RequestOutput) -> Signature:
    (completion,) = output.outputs
    assert completion.logprobs is not None
    return completion.token_ids, completion.logprobs, output.prompt_logprobs, completion.text


@pytest.fixture(scope="module", params=["reference", "native"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "native" and not native_available():
        pytest.skip("the native module is not built")
    name: str = request.param
    return name


def load(target: Target, **settings: Any) -> LLM:
    path, backend = target
    settings = {"max_model_len": 256, "block_size": BLOCK, **settings}
    return LLM(model=str(path), ops_backend=backend, **settings)


def run(
    target: Target, order: list[int], threads: int = 1, **settings: Any
) -> tuple[LLM, list[Signature]]:
    llm = load(target, threads=threads, **settings)
    prompts = [JOBS[index][0] for index in order]
    outputs = llm.generate(prompts, [JOBS[index][1] for index in order])
    assert llm.core.pool.usage == 0
    found: list[Signature] = [None] * COUNT  # type: ignore[list-item]
    for index, output in zip(order, outputs, strict=True):
        found[index] = signature(output)
    return llm, found


@pytest.fixture(scope="module")
def target(tiny_path: TinyPath, backend: str) -> Target:
    path = tiny_path(arch="llama", seed=3, vocab=VOCAB, hidden=48, layers=2, heads=6, kv_heads=2)
    return path, backend


@pytest.fixture(scope="module")
def alone(target: Target) -> list[Signature]:
    """Every request by itself in a fresh engine state: the truth for all that follows."""
    llm = load(target, threads=1, enable_prefix_caching=False)
    return [signature(llm.generate([prompt], params)[0]) for prompt, params in JOBS]


@pytest.fixture(autouse=True)
def restore_threads() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


def test_the_workload_is_worth_comparing(alone: list[Signature]) -> None:
    lengths = [len(tokens) for tokens, *_ in alone]
    assert len({tokens for tokens, *_ in alone}) == COUNT
    assert sum(lengths) > 150
    assert max(lengths) == 16
    assert max(len(set(tokens)) for tokens, *_ in alone) > 8


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("caching", [True, False])
def test_together(
    target: Target, alone: list[Signature], chunk: int, caching: bool, threads: int
) -> None:
    order = list(range(COUNT))
    random.Random(chunk).shuffle(order)
    _, found = run(
        target,
        order,
        threads,
        max_num_batched_tokens=chunk,
        max_num_seqs=min(chunk, COUNT),
        enable_prefix_caching=caching,
    )
    assert found == alone


@pytest.mark.parametrize("seed", range(4))
def test_random_arrivals(target: Target, alone: list[Signature], seed: int) -> None:
    """Requests come in random order, a few at a time, while others are already decoding."""
    llm = load(target, threads=1 + seed % 2)
    draw = random.Random(seed)
    order = list(range(COUNT))
    draw.shuffle(order)
    records: dict[int, Any] = {}
    from drumline.engine.intake import Prompt
    from drumline.engine.outputs import RequestRecord

    by_number = {}
    while order or llm.core.has_work:
        for _ in range(draw.randint(0, 3)):
            if order:
                index = order.pop()
                prompt, params = JOBS[index]
                submission = llm.intake.admit(Prompt(token_ids=prompt), params)
                llm.core.submit(submission.requests)
                records[index] = RequestRecord.of(submission)
                by_number[submission.requests[0].number] = index
        for delta in llm.core.step():
            records[by_number[delta.number]].add(delta)
    assert [signature(records[index].output()) for index in range(COUNT)] == alone


@pytest.mark.parametrize("caching", [True, False])
def test_under_preemption(target: Target, alone: list[Signature], caching: bool) -> None:
    """A cache for two or three requests: somebody is thrown out again and again."""
    per_token = 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, channels, bytes
    settings = {"max_model_len": 96, "kv_cache_memory_bytes": 96 * per_token}
    llm, found = run(target, list(range(COUNT)), enable_prefix_caching=caching, **settings)
    assert found == alone
    for seed in range(3):
        order = list(range(COUNT))
        random.Random(seed).shuffle(order)
        outputs = llm.generate([JOBS[i][0] for i in order], [JOBS[i][1] for i in order])
        assert [signature(output) for output in outputs] == [alone[i] for i in order]
    assert llm.core.counters.preemptions >= 10


def test_hits_are_hits(target: Target, alone: list[Signature]) -> None:
    """The second round reads its prompts from the cache, and nothing else changes."""
    llm, first = run(target, list(range(COUNT)))
    outputs = llm.generate([prompt for prompt, _ in JOBS], [params for _, params in JOBS])
    assert [signature(output) for output in outputs] == first == alone
    cached = [output.num_cached_tokens for output in outputs]
    for (prompt, params), count in zip(JOBS, cached, strict=True):
        expected = 0 if params.prompt_logprobs is not None else (len(prompt) - 1) // BLOCK * BLOCK
        assert count == expected


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_other_architectures(tiny_path: TinyPath, backend: str, arch: str) -> None:
    target = tiny_path(arch=arch, seed=5, vocab=VOCAB), backend
    _, one = run(target, list(range(COUNT)), max_num_batched_tokens=7, max_num_seqs=7)
    _, other = run(target, list(range(COUNT))[::-1], 2, max_num_seqs=3, enable_prefix_caching=False)
    assert one == other
