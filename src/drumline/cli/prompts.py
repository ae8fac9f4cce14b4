"""Prompts as users write them: on the command line, or a JSON object per line in a file.

Every complaint names the file, the line and the field. Knows no engine.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drumline.core.errors import RequestError, UsageError, nearest_name
from drumline.core.params import SamplingParams
from drumline.engine.intake import Prompt

PROMPT_FIELDS = ("prompt", "prompt_token_ids", "messages")
# OpenAI's spellings of what SamplingParams has under vLLM's.
OTHER_FIELDS = ("max_completion_tokens", "top_logprobs", "priority")
LINES_MAX = 1_000_000


@dataclass(frozen=True, slots=True)
class Job:
    """One line of work: a prompt, the sampling parameters that were given for it (checked; the
    model's own defaults come under them later), and where it stands, for messages."""

    prompt: Prompt
    given: Mapping[str, Any]
    priority: int = 0
    where: str = ""

    def params(self, defaults: SamplingParams) -> SamplingParams:
        return SamplingParams.from_mapping(self.given, defaults)


def as_chat(text: str) -> Prompt:
    return Prompt(messages=({"role": "user", "content": text},))


def from_texts(texts: Sequence[str], flags: Mapping[str, Any], chat: bool) -> list[Job]:
    """Prompts typed as ``--prompt TEXT``; ``flags`` are the sampling flags that were typed."""
    SamplingParams.from_mapping(flags)
    jobs = []
    for index, text in enumerate(texts):
        where = f"--prompt {index + 1}" if len(texts) > 1 else "--prompt"
        jobs.append(Job(as_chat(text) if chat else Prompt(text=text), flags, where=where))
    return jobs


def from_file(path: Path, flags: Mapping[str, Any], chat: bool) -> list[Job]:
    """Reads ``--prompts FILE.jsonl``; blank lines are skipped. Raises `UsageError`."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"--prompts {path}: {error.strerror or error}") from None
    jobs = []
    for number, line in enumerate(data.removeprefix(codecs.BOM_UTF8).splitlines(), 1):
        if line.strip():
            jobs.append(_job(f"{path} line {number}", line, flags, chat))
    if not jobs:
        raise UsageError(f"--prompts {path}: no prompts in it")
    if len(jobs) > LINES_MAX:
        raise UsageError(f"--prompts {path}: {len(jobs)} prompts are more than {LINES_MAX}")
    return jobs


def _job(where: str, line: bytes, flags: Mapping[str, Any], chat: bool) -> Job:
    try:
        entry = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UsageError(f"{where}: not UTF-8 at byte {error.start}") from None
    except (ValueError, RecursionError) as error:  # ValueError: also a number of 5000 digits
        raise UsageError(f"{where}: not JSON: {error}") from None
    if not isinstance(entry, dict):
        raise UsageError(f"{where}: an object is needed, got {type(entry).__name__}")
    try:
        return _read(where, entry, flags, chat)
    except RequestError as error:
        raise UsageError(f"{where}: {error}") from None


def _read(where: str, entry: dict[str, Any], flags: Mapping[str, Any], chat: bool) -> Job:
    known = {*SamplingParams.names(), *PROMPT_FIELDS, *OTHER_FIELDS}
    for name in entry:
        if name not in known:
            raise RequestError(f"unknown parameter{nearest_name(name, known)}", param=name)
    given = [name for name in PROMPT_FIELDS if entry.get(name) is not None]
    if len(given) != 1:
        raise RequestError(f"exactly one of {', '.join(PROMPT_FIELDS)} is needed", param="prompt")
    priority = entry.get("priority", 0)
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise RequestError(f"{priority!r} is not an integer", param="priority")
    sampling = {name: entry[name] for name in SamplingParams.names() if name in entry}
    sampling = {**flags, **_openai(entry, sampling)}
    SamplingParams.from_mapping(sampling)
    return Job(_prompt(given[0], entry[given[0]], chat), sampling, priority, where)


def _openai(entry: Mapping[str, Any], sampling: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's chat spelling: ``logprobs: true`` with ``top_logprobs``, and null as default."""
    defaults = {"max_tokens", "seed", "logprobs", "prompt_logprobs", "allowed_token_ids"}
    defaults.add("num_speculative_tokens")
    sampling = {k: v for k, v in sampling.items() if v is not None or k in defaults}
    if entry.get("max_completion_tokens") is not None:
        if entry.get("max_tokens") is not None:
            raise RequestError("is another name for max_tokens", param="max_completion_tokens")
        sampling["max_tokens"] = entry["max_completion_tokens"]
    top = entry.get("top_logprobs")
    if isinstance(sampling.get("logprobs"), bool):
        sampling["logprobs"] = (top or 0) if sampling["logprobs"] else None
    elif top is not None:
        raise RequestError("needs logprobs to be true", param="top_logprobs")
    return sampling


def _prompt(name: str, value: Any, chat: bool) -> Prompt:
    if name == "prompt":
        if not isinstance(value, str):
            raise RequestError(f"{value!r:.60} is not a text", param=name)
        return as_chat(value) if chat else Prompt(text=value)
    if not isinstance(value, list) or not value:
        raise RequestError("a list with at least one entry is needed", param=name)
    if name == "prompt_token_ids":
        return Prompt(token_ids=tuple(value))
    for message in value:
        content = message.get("content") if isinstance(message, dict) else None
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str) or not isinstance(content, str):
            raise RequestError("each message needs a role and a content, both texts", param=name)
    return Prompt(messages=tuple(value))
