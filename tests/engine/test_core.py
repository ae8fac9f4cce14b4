"""`EngineCore` through its seams: failures stay where they belong, memory and blocks come back."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from drumline.config import EngineConfig
from drumline.core.errors import EngineDead, EngineError, Refused
from drumline.core.params import SamplingParams
from drumline.core.request import FinishReason
from drumline.engine.llm import LLM, Interrupt

TinyPath = Callable[..., Path]


def _config(path: Path, **settings: Any) -> EngineConfig:
    return EngineConfig.from_kwargs(model=str(path), max_model_len=64, threads=1, **settings)


def resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


def test_200_requests_of_200_tokens_leave_memory_flat(tiny_path: TinyPath) -> None:
    """In the second half of one call nothing grows but the outputs themselves; afterwards every
    block is free."""
    llm = LLM(model=str(tiny_path()), max_model_len=256, max_num_seqs=25, threads=1)
    prompts = [(5 + index % 100, 6, 7) for index in range(200)]
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    submissions = llm.submissions(prompts, params)
    ended, sizes = 0, {}
    for _, delta in llm.run(submissions, Interrupt()):
        if delta.finish_reason is not None:
            assert delta.finish_reason is FinishReason.LENGTH
            ended += 1
            if ended in (100, 200):
                gc.collect()
                sizes[ended] = resident_bytes()
    assert ended == 200
    assert sizes[200] - sizes[100] < 4 * 2**20
    assert llm.core.counters.completion_tokens == 200 * 200
    llm.core.scheduler.check()
    assert llm.core.pool.used_count == 0
    assert llm.core.pool.free_count + llm.core.pool.cached_count == llm.core.pool.block_count


def test_a_request_without_finite_logits_ends_alone(tiny_path: TinyPath) -> None:
    llm = LLM(model=str(tiny_path(seed=11)), max_model_len=64, threads=1)
    prompts = [(9, 10, 11), (20, 21), (30, 31, 32, 33)]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    clean = llm.generate(prompts, params)
    model = llm.core.worker.model
    whole = model.forward

    def poisoned(*arguments: Any) -> Any:
        output = whole(*arguments)
        if output.logits is None or output.logits.shape[0] < 2:
            return output
        logits = output.logits.clone()
        logits[1] = float("nan")
        return structs.replace(output, logits=logits)

    model.forward = poisoned  # type: ignore[method-assign]
    first, second, third = llm.generate(prompts, params)
    assert second.outputs[0].finish_reason is FinishReason.ERROR
    assert "not finite" in (second.outputs[0].error or "")
    assert first.outputs[0].token_ids == clean[0].outputs[0].token_ids
    # After the second has gone, the third is row 1 and is hit as well: alone, too.
    assert third.outputs[0].finish_reason is FinishReason.ERROR
    model.forward = whole  # type: ignore[method-assign]
    after = llm.generate(prompts, params)
    assert [o.outputs[0].token_ids for o in after] == [o.outputs[0].token_ids for o in clean]


def test_a_broken_step_ends_everything_once_and_says_so(tiny_path: TinyPath) -> None:
    llm = LLM(model=str(tiny_path()), max_model_len=64, threads=1)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    submissions = llm.submissions([(5, 6), (7, 8)], params)
    for submission in submissions:
        llm.core.submit(submission.requests)
    llm.core.step()

    def explode(*_: object, **__: object) -> None:
        raise RuntimeError("out of luck")

    llm.core.worker.model.forward = explode  # type: ignore[assignment,method-assign]
    with pytest.raises(EngineError, match="out of luck"):
        llm.core.step()
    ends = llm.core.take_deltas()
    assert [(end.number, end.finish_reason) for end in ends] == [
        (0, FinishReason.ERROR),
        (1, FinishReason.ERROR),
    ]
    assert not llm.core.has_work
    with pytest.raises(EngineDead, match="out of luck"):
        llm.core.submit(submissions[0].requests)


def test_a_full_queue_refuses_all_samples_or_none(tiny_path: TinyPath) -> None:
    llm = LLM.from_config(_config(tiny_path(), max_num_seqs=2, max_num_queued_reqs=3))
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, n=4)
    one, two = llm.submissions([(5,), (6,)], params)
    llm.core.submit(one.requests)
    assert llm.core.room == 1
    with pytest.raises(Refused, match="max_num_queued_reqs=3"):
        llm.core.submit(two.requests)
    seen = set()
    while llm.core.has_work:
        seen |= {delta.number for delta in llm.core.step() if delta.finish_reason}
    assert seen == {0, 1, 2, 3}
    assert llm.core.room == 5


def test_cancelled_before_it_was_seen(tiny_path: TinyPath) -> None:
    """A request that is cancelled before the first step still ends, with ``abort``."""
    llm = LLM(model=str(tiny_path()), max_model_len=64, threads=1)
    params = SamplingParams(temperature=0.0, max_tokens=8)
    (submission,) = llm.submissions([(5, 6)], params)
    llm.core.submit(submission.requests)
    llm.core.cancel(submission.requests[0].number)
    deltas = []
    while llm.core.has_work:
        deltas += llm.core.step()
    assert [delta.finish_reason for delta in deltas] == [FinishReason.ABORT]
    assert llm.core.pool.used_count == 0
