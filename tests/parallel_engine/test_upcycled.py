"""Real text over ranks: SmolLM2 and its MTP head as mixtures, experts spread, replicas agreeing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drumline.core.params import SamplingParams
from drumline.drafting.shipped import HEADS
from drumline.engine.llm import LLM
from drumline.models.upcycle import upcycle, upcycle_mtp

PROMPTS = ["The capital of France is", "Water boils at", "Once upon a time, a small ship"]


@pytest.mark.model
@pytest.mark.slow
def test_upcycled_smollm2_says_the_same_over_two_replicas(
    smollm2_path: Path, tmp_path: Path
) -> None:
    folder = upcycle(smollm2_path, 4, tmp_path / "mixture")
    head = upcycle_mtp(HEADS / "smollm2-mtp", 4, tmp_path / "mtp")
    params = SamplingParams(temperature=0.0, max_tokens=16, logprobs=0)
    settings: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 4, "threads": 1}
    with LLM(model=str(folder), **settings) as llm:
        alone = llm.generate(PROMPTS, params)
    asked = {"method": "mtp", "model": str(head), "num_speculative_tokens": 3}
    speculation = json.dumps(asked)
    more: dict[str, Any] = {"data_parallel_size": 2, "enable_expert_parallel": True}
    with LLM(model=str(folder), speculative_config=speculation, **settings, **more) as llm:
        spread = llm.generate(PROMPTS, params)
        stats = llm.core.speculation
    for one, other in zip(alone, spread, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].logprobs == other.outputs[0].logprobs
    assert {out.outputs[0].replica for out in spread} == {0, 1}
    assert stats.accepted > 0
