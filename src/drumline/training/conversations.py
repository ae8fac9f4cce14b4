"""Self-distillation data: the target writes its own questions and answers them.

A drafter must guess what this target says, so the best text to learn from is the target's own
(self-distillation with queries made from nothing but the template's user header: Xu et al. 2024,
"Magpie"). Four kinds of user turns: free ones, those that go on from an opener, whole ones put
together from patterns, and those that ask something about a passage, which is answers of the same
piece. Everything follows from one
seed; work is cut into pieces that are files, written whole or not at all, so an interrupted run
goes on where it stopped.

    piece-00007.jsonl     one conversation a line: {"prompt_token_ids", "token_ids"}
    recipe.json           what they were made by
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
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
from drumline.training import questions
from drumline.training.openers import DOCUMENT, INSTRUCTIONS, OPENERS

RECIPE = "recipe.json"
LENGTH_MAX = 1280  # tokens of a conversation, template included
_PIECE = re.compile(r"piece-(\d+)\.jsonl")
SENTENCE_END = re.compile(r"[.?!](?=\s)|\n")
SENTINEL = "\u27eadrumline\u27eb"


@dataclass(frozen=True, slots=True)
class Recipe:
    """What the data is made by. Lengths in tokens. ``greedy_percent`` of the answers are greedy,
    the others drawn at ``answer_temperature``. Of the user turns, ``passage_percent`` are about a
    passage of up to ``documents_max`` answers, ``pattern_percent`` are whole (`questions.compose`),
    ``opener_percent`` go on from an opener, and the others are free; a passage's question has
    ``question_tokens_max`` tokens."""

    seed: int = 0
    piece_size: int = 128
    user_tokens_max: int = 96
    question_tokens_max: int = 32
    answer_tokens_max: int = 128
    user_temperature: float = 1.0
    user_top_p: float = 0.95
    greedy_percent: int = 90
    answer_temperature: float = 0.8
    opener_percent: int = 20
    pattern_percent: int = 40
    passage_percent: int = 30
    documents_max: int = 3
    openers: tuple[str, ...] = OPENERS
    instructions: tuple[str, ...] = INSTRUCTIONS
    questions: str = questions.DIGEST

    def draw(self, what: str, number: int, below: int) -> int:
        """One of ``below`` for conversation ``number``; each ``what`` is drawn by itself."""
        return derive_seed(what, self.seed, number) % below

    def about_passage(self, number: int) -> bool:
        return self.draw("kind", number, 100) < self.passage_percent

    def question(self, number: int) -> str:
        """A whole user turn; empty where the target writes it, or the end of it."""
        kind = self.draw("kind", number, 100) - self.passage_percent
        if not 0 <= kind < self.pattern_percent:
            return ""
        return questions.compose(lambda what, below: self.draw(what, number, below))

    def opener(self, number: int) -> str:
        """How the user's turn begins; empty for a free one."""
        kind = self.draw("kind", number, 100) - self.passage_percent - self.pattern_percent
        if kind >= self.opener_percent:
            return ""
        return self.openers[self.draw("opener", number, len(self.openers))]

    def as_json(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return content


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
        path.write_text(json.dumps(recipe.as_json(), indent=1) + "\n", encoding="utf-8")
        return
    before, now = read_recipe(folder) or {}, recipe.as_json()
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            raise UsageError(
                f"{path}: pieces of another recipe are here, with another {name} "
                f"({before.get(name)}, now {now.get(name)})"
            )


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
    """Piece ``index``: questions first, all together, then their answers; then the same for user
    turns about passages, which those answers are."""
    first = index * recipe.piece_size
    numbers = range(first, first + recipe.piece_size)
    ready = {number: text for number in numbers if (text := recipe.question(number))}
    asked = [number for number in numbers if number not in ready]
    asked = [number for number in asked if not recipe.about_passage(number)]
    begun = [recipe.opener(number) for number in asked]
    ready |= _write_turns(llm, recipe, asked, begun, recipe.user_tokens_max)
    found = _answer(llm, recipe, dict(sorted(ready.items())))
    about = [number for number in numbers if recipe.about_passage(number)]
    documents = [text for text in (_text(llm.tokenizer, one) for one in found) if text]
    if not about or not documents:
        return found
    turns = {number: passage_turn(recipe, number, documents) for number in about}
    asking = [number for number in about if not _whole(recipe, number)]
    begun = [turns[number] for number in asking]
    written = _write_turns(llm, recipe, asking, begun, recipe.question_tokens_max)
    whole = {number: turns[number] for number in about if _whole(recipe, number)}
    return found + _answer(llm, recipe, dict(sorted((whole | written).items())))


def passage_turn(recipe: Recipe, number: int, documents: Sequence[str]) -> str:
    """An instruction with a passage in it: one document, or several that follow each other, as
    they are or numbered."""
    count = 1 + recipe.draw("count", number, recipe.documents_max)
    start = recipe.draw("passage", number, len(documents))
    chosen = [documents[(start + n) % len(documents)] for n in range(min(count, len(documents)))]
    if len(chosen) > 1 and recipe.draw("numbered", number, 2):
        chosen = [DOCUMENT.format(n, text) for n, text in enumerate(chosen, 1)]
    return _instruction(recipe, number).replace("{}", "\n\n".join(chosen))


def _instruction(recipe: Recipe, number: int) -> str:
    return recipe.instructions[recipe.draw("instruction", number, len(recipe.instructions))]


def _whole(recipe: Recipe, number: int) -> bool:
    """Whether an instruction leaves nothing to write: no question begins after its passage."""
    after = _instruction(recipe, number).partition("{}")[2]
    return not after or after.endswith(".")


def _text(tokenizer: Tokenizer, one: Conversation) -> str:
    return tokenizer.decode(one.token_ids, skip_special_tokens=True).strip()


def _write_turns(
    llm: LLM, recipe: Recipe, numbers: Sequence[int], begun: Sequence[str], limit: int
) -> dict[int, str]:
    """User turns that the target writes, by number; ``begun`` is how each begins. One that runs
    into its limit ends at its last sentence, and is left out where it has none."""
    header = user_header(llm.tokenizer)
    encoded = [llm.tokenizer.encode(header + text, add_special_tokens=False) for text in begun]
    kept = [at for at, ids in enumerate(encoded) if _fits(llm, ids)]
    numbers, begun = [numbers[at] for at in kept], [begun[at] for at in kept]
    prompts = [tuple(encoded[at]) for at in kept]
    asking = [
        SamplingParams(
            temperature=recipe.user_temperature,
            top_p=recipe.user_top_p,
            max_tokens=limit,
            seed=derive_seed("question", recipe.seed, number),
        )
        for number in numbers
    ]
    outputs = llm.generate(prompts, asking) if prompts else []
    turns: dict[int, str] = {}
    for number, text, output in zip(numbers, begun, outputs, strict=True):
        own = output.outputs[0].text
        if output.outputs[0].finish_reason is not FinishReason.STOP:
            own = own[: max((match.end() for match in SENTENCE_END.finditer(own)), default=0)]
        if own.strip():
            turns[number] = (text + own).strip()
    return turns


def _answer(llm: LLM, recipe: Recipe, turns: dict[int, str]) -> list[Conversation]:
    prompts: list[tuple[int, ...]] = []
    answering: list[SamplingParams] = []
    for number, text in turns.items():
        ids = llm.tokenizer.encode_chat([{"role": "user", "content": text}])
        if _fits(llm, ids):
            prompts.append(tuple(ids))
            answering.append(_answer_params(recipe, number))
    answers = llm.generate(prompts, answering) if prompts else []
    return [
        Conversation(answer.prompt_token_ids, answer.outputs[0].token_ids) for answer in answers
    ]


def _fits(llm: LLM, ids: Sequence[int]) -> bool:
    """Whether a prompt leaves room for a token; one that does not is left out."""
    return len(ids) < llm.intake.limits.max_model_len


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
