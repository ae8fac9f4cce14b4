"""How many drafts a target accepts, by category of prompt: the measure of a drafter.

Counts, not seconds: the figures are the same on any machine with the same backend. Prompts come
from a file of JSON lines with ``turns`` (Spec-Bench's spelling; the first turn is used) or
``prompt``, and an optional ``category``; each is one user turn in the chat template.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drumline.core.errors import RequestError, UsageError
from drumline.core.params import SamplingParams
from drumline.core.plan import SpeculationStats
from drumline.engine.intake import Prompt
from drumline.engine.llm import LLM, Interrupt
from drumline.engine.outputs import RequestRecord

ALL = "all"


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt of the file."""

    category: str
    text: str


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Sums over the prompts of one category. ``mean_acceptance_length``: tokens per verify pass,
    the target's own included; ``per_position``: share of the passes in which draft i stood."""

    category: str
    prompts: int
    tokens: int
    drafts: int
    drafted: int
    accepted: int
    mean_acceptance_length: float
    per_position: tuple[float, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def read_questions(path: Path) -> list[Question]:
    """Raises `UsageError` naming the line that is not a question."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--data {path}: cannot be read: {error}") from None
    questions = [_question(path, number, line) for number, line in enumerate(lines, 1) if line]
    if not questions:
        raise UsageError(f"--data {path}: no prompts in it")
    return questions


def _question(path: Path, number: int, line: str) -> Question:
    try:
        entry = json.loads(line)
        text = entry["turns"][0] if "turns" in entry else entry["prompt"]
        category = entry.get("category", ALL)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        text = category = None
    if not isinstance(text, str) or not isinstance(category, str):
        raise UsageError(f"--data {path} line {number}: needs turns or prompt, with texts")
    return Question(category, text)


def measure_acceptance(
    llm: LLM, questions: list[Question], params: SamplingParams
) -> list[Acceptance]:
    """Answers every question and sums by category, in order of first appearance, then all.

    Raises `RequestError` for a question that does not fit the model.
    """
    submissions = []
    for number, question in enumerate(questions):
        prompt = Prompt(messages=({"role": "user", "content": question.text},))
        try:
            submissions.append(llm.intake.admit(prompt, params))
        except RequestError as error:
            raise RequestError(f"prompt {number}: {error}") from None
    records = [RequestRecord.of(submission) for submission in submissions]
    interrupt = Interrupt()
    for index, delta in llm.run(submissions, interrupt):
        records[index].add(delta)
    if interrupt.raised:
        raise KeyboardInterrupt
    categories = list(dict.fromkeys(question.category for question in questions))
    results = []
    for category in [*categories, ALL] if categories != [ALL] else [ALL]:
        chosen = [
            record.output().outputs[0]
            for question, record in zip(questions, records, strict=True)
            if category in (ALL, question.category)
        ]
        stats = [output.speculation for output in chosen if output.speculation is not None]
        tokens = sum(len(output.token_ids) for output in chosen)
        results.append(_sum(category, len(chosen), tokens, stats))
    return results


def _sum(category: str, prompts: int, tokens: int, stats: list[SpeculationStats]) -> Acceptance:
    drafts = sum(one.drafts for one in stats)
    width = max((len(one.accepted_per_position) for one in stats), default=0)
    places = [sum(one.accepted_per_position[at] for one in stats) for at in range(width)]
    accepted = sum(one.accepted for one in stats)
    return Acceptance(
        category=category,
        prompts=prompts,
        tokens=tokens,
        drafts=drafts,
        drafted=sum(one.drafted for one in stats),
        accepted=accepted,
        mean_acceptance_length=1.0 + accepted / drafts if drafts else 1.0,
        per_position=tuple(place / drafts if drafts else 0.0 for place in places),
    )
