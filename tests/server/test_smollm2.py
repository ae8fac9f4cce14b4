"""The official client chats with a real model, and gets the tokens that ``generate`` gives."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import openai
import pytest

from server.running import Server, command, environment

pytestmark = pytest.mark.model

QUESTIONS = ["Why do ships float?", "Name three colours."]
ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_tokens": 24},
    {"temperature": 0.8, "top_p": 0.9, "seed": 17, "max_tokens": 24},
]
IDS = {"return_token_ids": True}


def generated(model: Path, file: Path) -> list[tuple[list[int], str, str]]:
    """What ``drumline generate --json`` says of each question under each way to ask."""
    lines = [
        {"messages": [{"role": "user", "content": question}], **asked}
        for question in QUESTIONS
        for asked in ASKED
    ]
    file.write_text("\n".join(json.dumps(line) for line in lines))
    arguments = ("generate", "--model", str(model), "--prompts", str(file), "--json")
    run = subprocess.run(
        command(*arguments, "--threads", "1", "--max-model-len", "512"),
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(),
        check=True,
    )
    samples = [json.loads(line) for line in run.stdout.splitlines()][:-1]
    return [(s["token_ids"], s["text"], s["finish_reason"]) for s in samples]


def test_the_official_client_gets_what_generate_gives(smollm2_path: Path, tmp_path: Path) -> None:
    wanted = iter(generated(smollm2_path, tmp_path / "prompts.jsonl"))
    arguments = (str(smollm2_path), "--served-model-name", "smollm2", "--max-model-len", "512")
    with (
        Server(*arguments) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
    ):
        for question in QUESTIONS:
            for asked in ASKED:
                given: dict[str, Any] = {
                    "model": "smollm2",
                    "messages": [{"role": "user", "content": question}],
                    "extra_body": IDS,
                    **asked,
                }
                ids, text, reason = next(wanted)
                whole: Any = client.chat.completions.create(**given).choices[0]
                assert (whole.token_ids, whole.message.content) == (ids, text)
                assert whole.finish_reason == reason
                streamed: tuple[list[int], str] = ([], "")
                chunks: Any = client.chat.completions.create(stream=True, **given)
                for chunk in chunks:
                    choice = chunk.choices[0]
                    streamed = (
                        streamed[0] + (getattr(choice, "token_ids", None) or []),
                        streamed[1] + (choice.delta.content or ""),
                    )
                assert streamed == (ids, text)
