"""The same answers on any number of threads, also where each of them has rows of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.core.params import SamplingParams
from drumline.engine.llm import LLM

TinyPath = Callable[..., Path]

SPECULATION: tuple[dict[str, Any] | None, ...] = (
    None,
    {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1},
)


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def answers(path: Path, threads: int, speculation: dict[str, Any] | None, **more: Any) -> list[Any]:
    """Of 14 requests together: prompts of 3 to 42 tokens, every third one drawn."""
    prompts = [
        tuple(5 + (7 * at + index) % 90 for at in range(3 + 3 * index)) for index in range(14)
    ]
    params = [
        SamplingParams(
            temperature=0.8 if index % 3 == 2 else 0.0,
            seed=index if index % 3 == 2 else None,
            max_tokens=12,
            logprobs=2,
            ignore_eos=True,
        )
        for index in range(14)
    ]
    settings = {"speculative_config": speculation} if speculation else {}
    with LLM(
        model=str(path), max_model_len=64, max_num_seqs=14, threads=threads, **settings, **more
    ) as llm:
        outputs = llm.generate(prompts, params)
    return [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in outputs]


@pytest.mark.parametrize("arch", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("quantization", [None, "q4_1"])
def test_threads_change_no_bit(tiny_path: TinyPath, arch: str, quantization: str | None) -> None:
    path = tiny_path(arch)
    truth = answers(path, 1, None, quantization=quantization)
    for threads in (1, 2, 3):
        for speculation in SPECULATION:
            assert answers(path, threads, speculation, quantization=quantization) == truth


@pytest.mark.parametrize("backend", ["reference", "native"])
def test_torch_does_not_compete_with_native_threads(tiny_path: TinyPath, backend: str) -> None:
    """In a step of native operations torch computes alone; afterwards, and with other operations,
    it has the threads that it had, or that the engine was given."""
    torch.set_num_threads(3)
    seen = set()
    with LLM(
        model=str(tiny_path("llama")), max_model_len=64, threads=2, ops_backend=backend
    ) as llm:
        torch.set_num_threads(3)
        worker = llm.core.worker
        forward = worker.model.forward

        def watched(*args: Any) -> Any:
            seen.add(torch.get_num_threads())
            return forward(*args)

        worker.model.forward = watched
        llm.generate([(5, 6, 7)], SamplingParams(max_tokens=3, ignore_eos=True))
    assert seen == {1 if backend == "native" else 2}
    assert torch.get_num_threads() == 3
    if backend == "native":
        assert worker.ops.threads == 2
