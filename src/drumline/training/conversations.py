"""Self-distillation data: the target writes its own questions and answers them.

A drafter must guess what this target says, so the best text to learn from is the target's own
(self-distillation with queries made from nothing but the template's user header: Xu et al. 2024,
"Magpie"). Everything follows from one seed; work is cut into pieces that are files, written whole
or not at all, so an interrupted run goes on where it stopped.

    piece-00007.jsonl     one conversation a line: {"prompt_token_ids", "token_ids"}
    recipe.json           what they were made by
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drumline.core.errors import CheckpointError, UsageError
from drumline.core.params import SamplingParams
from drumline.core.random import derive_seed
from drumline.core.request import FinishReason
from drumline.engine.llm import LLM
from drumline.models.config import read_json
from drumline.models.tokenizer import Tokenizer

RECIPE = "recipe.json"
LENGTH_MAX = 512  # tokens of a conversation, template included
_PIECE = re.compile(r"piece-(\d+)\.jsonl")
SENTINEL = "\u27eadrumline\u27eb"


@dataclass(frozen=True, slots=True)
class Recipe:
    """What the data is made by. Lengths in tokens. ``greedy_percent`` of the answers are greedy,
    the others drawn at ``answer_temperature``."""

    seed: int = 0
    piece_size: int = 64
    user_tokens_max: int = 96
    answer_tokens_max: int = 192
    user_temperature: float = 1.0
    user_top_p: float = 0.95
    greedy_percent: int = 70
    answer_temperature: float = 0.8


@dataclass(frozen=True, slots=True)
class Conversation:
    """A question in the chat template, and the target's answer. Token ids."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]

    @property
    def ids(self) -> tuple[int, ...]:
        return self.prompt_token_ids + self.token_ids


def user_header(tokenizer: Tokenizer) -> str:
    """What the chat template writes before a user's first word.

    Raises `CheckpointError` if there is no template, or if it does not show the user's text as
    it is.
    """
    if not tokenizer.has_chat_template:
        raise CheckpointError(
            tokenizer.path, "no chat template, so the target cannot write its own questions"
        )
    text = tokenizer.apply_chat_template([{"role": "user", "content": SENTINEL}])
    header, found, _ = text.partition(SENTINEL)
    if not found:
        raise CheckpointError(tokenizer.path, "the chat template hides the user's text")
    return header


def note_recipe(folder: Path, recipe: Recipe) -> None:
    """Writes ``recipe.json`` beside the first piece that is made; `UsageError` if there is another,
    since pieces of two recipes would not be what either says."""
    path = folder / RECIPE
    if read_recipe(folder) is None:
        path.write_text(json.dumps(asdict(recipe), indent=1) + "\n", encoding="utf-8")
    elif read_recipe(folder) != asdict(recipe):
        raise UsageError(f"{path}: pieces of another recipe are here ({read_recipe(folder)})")


def read_recipe(folder: Path) -> dict[str, Any] | None:
    """What the pieces of a folder were made by; None if nobody wrote it down."""
    path = folder / RECIPE
    return read_json(path) if path.exists() else None


def piece_indices(folder: Path) -> tuple[int, ...]:
    """Which pieces a folder has, ascending."""
    found = [_PIECE.fullmatch(path.name) for path in folder.glob("piece-*.jsonl")]
    return tuple(sorted(int(match[1]) for match in found if match))


def piece_path(folder: Path, index: int) -> Path:
    return folder / f"piece-{index:05d}.jsonl"


def write_piece(llm: LLM, folder: Path, index: int, recipe: Recipe) -> int:
    """Makes one piece and returns its conversation count; a piece that exists is left alone."""
    path = piece_path(folder, index)
    if not path.exists():
        lines = [
            json.dumps({"prompt_token_ids": one.prompt_token_ids, "token_ids": one.token_ids})
            for one in make_conversations(llm, index, recipe)
        ]
        draft = path.with_suffix(".new")
        draft.write_text("".join(f"{line}\n" for line in lines))
        os.replace(draft, path)
    return sum(1 for _ in path.open())


def make_conversations(llm: LLM, index: int, recipe: Recipe) -> list[Conversation]:
    """Piece ``index``: questions first, all together, then the answers."""
    first = index * recipe.piece_size
    numbers = range(first, first + recipe.piece_size)
    header = llm.tokenizer.encode(user_header(llm.tokenizer), add_special_tokens=False)
    asking = [_user_params(recipe, number) for number in numbers]
    questions = llm.generate([tuple(header)] * len(numbers), asking)
    prompts: list[Mapping[str, Any]] = []
    answering: list[SamplingParams] = []
    for number, output in zip(numbers, questions, strict=True):
        question = output.outputs[0]
        # A question that ran into the limit is cut somewhere; nobody asks like that.
        if question.finish_reason is FinishReason.STOP and question.text.strip():
            prompts.append({"messages": [{"role": "user", "content": question.text.strip()}]})
            answering.append(_answer_params(recipe, number))
    answers = llm.generate(prompts, answering) if prompts else []
    return [
        Conversation(answer.prompt_token_ids, answer.outputs[0].token_ids) for answer in answers
    ]


def _user_params(recipe: Recipe, number: int) -> SamplingParams:
    return SamplingParams(
        temperature=recipe.user_temperature,
        top_p=recipe.user_top_p,
        max_tokens=recipe.user_tokens_max,
        seed=derive_seed("question", recipe.seed, number),
    )


def _answer_params(recipe: Recipe, number: int) -> SamplingParams:
    greedy = derive_seed("greedy", recipe.seed, number) % 100 < recipe.greedy_percent
    return SamplingParams(
        temperature=0.0 if greedy else recipe.answer_temperature,
        max_tokens=recipe.answer_tokens_max,
        seed=derive_seed("answer", recipe.seed, number),
    )


def read_piece(folder: Path, index: int, vocab_size: int) -> list[Conversation]:
    """The conversations of one piece. Raises `UsageError` for one that is missing or not ours."""
    path = piece_path(folder, index)
    if not path.exists():
        raise UsageError(f"{path}: no such piece; make the data first")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not UTF-8") from None
    return [
        _read_line(f"{path} line {number}", line, vocab_size)
        for number, line in enumerate(lines, 1)
    ]


def _read_line(where: str, line: str, vocab_size: int) -> Conversation:
    names = ("prompt_token_ids", "token_ids")
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"{where}: not JSON: {error}") from None
    if not isinstance(entry, dict) or set(entry) != set(names):
        raise UsageError(f"{where}: an object with {' and '.join(names)} is needed")
    return Conversation(*(_ids(f"{where}, {name}", entry[name], vocab_size) for name in names))


def _ids(where: str, value: Any, vocab_size: int) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise UsageError(f"{where}: a list of token ids is needed")
    for token in value:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise UsageError(f"{where}: {token!r} is not a token id below {vocab_size}")
    return tuple(value)
