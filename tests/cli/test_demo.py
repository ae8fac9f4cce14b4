"""The demo: its last line is the result, and it can fail."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drumline.cli import demo
from drumline.cli.main import main

TinyPath = Callable[..., Path]
SUFFIX = '{"method": "suffix", "num_speculative_tokens": 3}'


@pytest.fixture
def command(tiny_path: TinyPath) -> list[str]:
    path = tiny_path(seed=3, max_position_embeddings=256)
    return [
        "demo",
        "--model",
        str(path),
        "--prompt",
        "ab ab",
        "--max-tokens",
        "40",
        "--threads",
        "1",
    ]


@pytest.mark.parametrize("flags", [[], ["-sc", SUFFIX], ["--spec-method", "suffix"]])
def test_the_last_line_is_the_result(
    command: list[str], flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, *flags]) == 0
    said = capsys.readouterr()
    method = "suffix" if flags else "ngram"
    assert re.fullmatch(
        rf"demo: same tokens, \d+\.\d\dx \({method}, acceptance length \d\.\d\d\)",
        said.out.splitlines()[-1],
    )
    assert "without speculation" in said.err
    assert "with speculation" in said.err
    if not flags:
        chosen = next(line for line in said.err.splitlines() if "speculative_config.method" in line)
        assert "the checkpoint has no" in chosen


def test_a_token_that_differs_is_a_failure(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = demo.answer

    def lying(llm: Any, *args: Any, **kwargs: Any) -> Any:
        told = whole(llm, *args, **kwargs)
        assert told is not None
        return told if told.method == "none" else replace(told, token_ids=told.token_ids[:-1])

    monkeypatch.setattr(demo, "answer", lying)
    assert main(command) == 1
    assert "DIFFERENT" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("flags", "name"), [(["--max-tokens", "1"], "max_tokens"), (["--prompt", "  "], "prompt")]
)
def test_refusals(
    command: list[str], flags: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, *flags]) == 2
    assert f"{name}=" in capsys.readouterr().err
