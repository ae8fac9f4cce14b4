"""A real model under the drafters that need no training and the head that ships for it: the bits of
every token and log-probability are those of the run without, greedy and sampled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drafting.world import Signature, signature
from drumline.core.params import SamplingParams
from drumline.drafting.shipped import best_method, shipped_head
from drumline.engine.llm import LLM
from drumline.models.checkpoint import open_checkpoint

pytestmark = pytest.mark.model

PROMPTS = [
    "One, two, three, four, one, two, three, four, one, two,",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return",
    "<|im_start|>user\nWhy do ships float although steel sinks?<|im_end|>\n<|im_start|>assistant\n",
]
LENGTH: dict[str, Any] = {"max_tokens": 28, "logprobs": 2}
SAMPLING: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9}]
JOBS = [
    (
        prompt,
        SamplingParams.from_mapping({"max_tokens": 28, "logprobs": 2, "seed": seed} | sampling),
    )
    for seed, prompt in enumerate(PROMPTS)
    for sampling in SAMPLING
]
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"prompt_lookup_min": 2},
    "suffix": {},
    "mtp": {},
    "eagle3": {},
}


def engine(path: Path, **settings: Any) -> LLM:
    return LLM(model=str(path), max_model_len=256, threads=1, **settings)


@pytest.fixture(scope="module")
def alone(smollm2_path: Path) -> list[Signature]:
    llm = engine(smollm2_path)
    return [signature(llm.generate([prompt], params)[0]) for prompt, params in JOBS]


def test_what_ships_for_the_model_is_among_the_methods(smollm2_path: Path) -> None:
    config = open_checkpoint(smollm2_path).config
    for method in ("eagle3", "mtp"):
        head = shipped_head(method, config, str(smollm2_path))
        assert head is not None
        assert sum(file.stat().st_size for file in head.iterdir()) < 10_000_000
    assert best_method(config, str(smollm2_path)) == "eagle3"


@pytest.mark.parametrize("draft_length", ["static", "adaptive"])
@pytest.mark.parametrize("method", METHODS)
def test_same_bits(
    smollm2_path: Path, alone: list[Signature], method: str, draft_length: str
) -> None:
    keys = {"method": method, "num_speculative_tokens": 3, "draft_length": draft_length}
    llm = engine(smollm2_path, speculative_config=keys | METHODS[method])
    outputs = llm.generate([prompt for prompt, _ in JOBS], [params for _, params in JOBS])
    assert [signature(output) for output in outputs] == alone
    stats = llm.core.speculation
    if draft_length == "static":
        assert stats.accepted >= 10, stats  # of the list of numbers alone
    speculator = llm.core.worker.speculator
    assert speculator is not None
    assert speculator.failure_count == 0
