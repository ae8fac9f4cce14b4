"""A miniature target, and conversations in which it answers, made once for all tests here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from drumline.core.params import SamplingParams
from drumline.engine.llm import LLM
from drumline.training.conversations import piece_path
from drumline.training.optimize import Settings
from drumline.training.pipeline import Plan
from drumline.training.target import Target, load_target

PIECES = (0, 1)
PIECE_SIZE = 60
ANSWER = 24


@pytest.fixture(scope="session")
def target_path(tiny_path: Callable[..., Path]) -> Path:
    return tiny_path("llama", 5, vocab=96, hidden=32, layers=4)


@pytest.fixture(scope="session")
def target(target_path: Path) -> Target:
    return load_target(target_path, "tiny")


@pytest.fixture(scope="session")
def llm(target_path: Path) -> LLM:
    return LLM(model=str(target_path), max_model_len=128, max_num_seqs=32, ops_backend="reference")


@pytest.fixture(scope="session")
def conversations(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two pieces of greedy answers to prompts of few words, so that there is something to learn."""
    folder = tmp_path_factory.mktemp("conversations")
    random = Random(11)
    words = [[random.randrange(5, 96) for _ in range(3)] for _ in range(6)]
    greedy = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
    for index in PIECES:
        prompts = [
            tuple(token for _ in range(3) for token in random.choice(words))
            for _ in range(PIECE_SIZE)
        ]
        lines = [
            json.dumps({"prompt_token_ids": list(prompt), "token_ids": output.outputs[0].token_ids})
            for prompt, output in zip(prompts, llm.generate(prompts, greedy), strict=True)
        ]
        piece_path(folder, index).write_text("".join(f"{line}\n" for line in lines))
    return folder


@pytest.fixture
def make_plan(conversations: Path, tmp_path: Path) -> Callable[..., Plan]:
    """A plan over the two pieces that trains within seconds."""

    def make(
        method: str = "mtp",
        output: str = "head",
        epochs: int = 30,
        draft_vocab_size: int | None = 80,
    ) -> Plan:
        settings = Settings(
            seed=1,
            epochs=epochs,
            learning_rate=5e-2,
            batch_tokens=1024,
            step_weights=(1.0, 0.7, 0.49),
        )
        return Plan(
            method=method,
            output=tmp_path / output,
            data=conversations,
            pieces=PIECES,
            settings=settings,
            draft_vocab_size=draft_vocab_size,
            held_out_share=0.2,
        )

    return make
