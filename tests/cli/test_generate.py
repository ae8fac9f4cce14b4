"""`drumline generate`: the contract of ``--json``, and every way a run can end."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drumline import LLM, SamplingParams
from drumline.cli.main import main
from drumline.worker.worker import Worker
from server.running import command, environment, wait_until

FIELDS = [
    "index",
    "sample",
    "prompt_token_ids",
    "token_ids",
    "text",
    "finish_reason",
    "error",
    "seed",
    "replica",
]
SUMMARY = [
    "prompt_tokens",
    "completion_tokens",
    "seconds",
    "decode_tokens_per_second",
    "steps",
    "draft_length_histogram",
    "adjustments",
]
LENGTH = 8192


@pytest.fixture(scope="module")
def path(tiny_path: Callable[..., Path]) -> Path:
    return tiny_path(vocab=300, max_position_embeddings=LENGTH)


@pytest.fixture(scope="module")
def llm(path: Path) -> LLM:
    return LLM(str(path), threads=1)


def generate(path: Path, *arguments: str) -> list[str]:
    return ["generate", "--model", str(path), "--threads", "1", *arguments]


def objects(text: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    *samples, last = [json.loads(line) for line in text.splitlines()]
    assert list(last) == ["summary"]
    return samples, last["summary"]


def start(path: Path, *arguments: str, **env: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command(*generate(path, *arguments)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(**env),
    )


# ---- --json


def test_json_is_what_llm_gives_in_input_order(
    path: Path, llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[dict[str, Any]] = [
        {"prompt": "the rain", "max_tokens": 20, "seed": 3, "logprobs": 2},
        {"prompt_token_ids": [1, 9, 10], "temperature": 0, "ignore_eos": True},
        {"messages": [{"role": "user", "content": "hi"}], "seed": 5, "n": 2, "max_tokens": 3},
        {"prompt": "in Spain", "seed": 7, "max_completion_tokens": 2, "prompt_logprobs": 1},
    ]
    file = tmp_path / "prompts.jsonl"
    text = "\n\n".join(json.dumps(line) for line in lines) + "\r\n"
    file.write_bytes(b"\xef\xbb\xbf" + text.encode())
    arguments = generate(path, "--prompts", str(file), "--json", "--max-tokens", "8")
    assert main(arguments) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    samples, summary = objects(shown.out)
    assert [(s["index"], s["sample"]) for s in samples] == [(0, 0), (1, 0), (2, 0), (2, 1), (3, 0)]

    params = [
        SamplingParams(max_tokens=20, seed=3, logprobs=2),
        SamplingParams(max_tokens=8, temperature=0, ignore_eos=True),
        SamplingParams(max_tokens=3, seed=5, n=2),
        SamplingParams(max_tokens=2, seed=7, prompt_logprobs=1),
    ]
    prompts = [
        {key: line[key] for key in ("prompt", "prompt_token_ids", "messages") if key in line}
        for line in lines
    ]
    wanted = [(o, c) for o in llm.generate(prompts, params) for c in o.outputs]
    for sample, (output, completion) in zip(samples, wanted, strict=True):
        assert list(sample)[: len(FIELDS)] == FIELDS
        assert tuple(sample["prompt_token_ids"]) == output.prompt_token_ids
        assert tuple(sample["token_ids"]) == completion.token_ids
        assert sample["text"] == completion.text
        assert sample["finish_reason"] == str(completion.finish_reason)
        assert sample["seed"] == completion.seed or "seed" not in lines[sample["index"]]
        assert (sample["error"], sample["replica"]) == (None, 0)
        assert list(sample["speculation"]) == [
            "steps",
            "drafted",
            "accepted",
            "accepted_per_position",
        ]
        if completion.logprobs is None:
            assert "logprobs" not in sample
            continue
        assert [(e["token_id"], e["logprob"], e["rank"]) for e in sample["logprobs"]] == [
            (e.token.token_id, e.token.logprob, e.token.rank) for e in completion.logprobs
        ]
        assert [[t["logprob"] for t in e["top"]] for e in sample["logprobs"]] == [
            [t.logprob for t in e.top] for e in completion.logprobs
        ]
    assert samples[-1]["prompt_logprobs"][0] is None
    assert list(summary)[: len(SUMMARY)] == SUMMARY
    assert summary["completion_tokens"] == sum(len(s["token_ids"]) for s in samples)
    assert summary["prompt_tokens"] == sum(len(line[0].prompt_token_ids) for line in wanted[:2]) + (
        len(wanted[2][0].prompt_token_ids) + len(wanted[4][0].prompt_token_ids)
    )
    assert sum(summary["draft_length_histogram"].values()) == summary["steps"]
    assert (summary["adjustments"], summary["interrupted"]) == ([], False)


def test_an_engine_seed_reproduces_a_whole_run(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = []
    for seed in ("7", "7", "8"):
        assert main(generate(path, "--prompt", "a", "b", "--json", "--seed", seed)) == 0
        runs.append([s["token_ids"] for s in objects(capsys.readouterr().out)[0]])
    assert runs[0] == runs[1] != runs[2]


def test_adjustments_are_in_the_summary(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "--model", str(path), "--prompt", "a", "--json", "--max-tokens", "1"]
    assert main([*arguments, "--threads", "999"]) == 0
    (adjustment,) = objects(capsys.readouterr().out)[1]["adjustments"]
    assert (adjustment["field"], adjustment["asked"]) == ("threads", 999)
    assert set(adjustment) == {"field", "asked", "used", "reason"}


# ---- text


def test_one_prompt_streams_its_text_and_the_table_goes_to_stderr(
    path: Path, llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, stop="~")
    for flags, prompt in (
        ((), "the rain"),
        (("--chat",), [{"role": "user", "content": "the rain"}]),
    ):
        want = (llm.chat(prompt, params) if flags else llm.generate(prompt, params))[0].outputs[0]  # type: ignore[arg-type]
        arguments = ("--prompt", "the rain", "--temperature", "0", "--max-tokens", "12")
        assert main(generate(path, *arguments, "--stop", "~", *flags)) == 0
        shown = capsys.readouterr()
        assert shown.out.rstrip("\n") == _printed(want.text).rstrip("\n")
        for words in ("max_num_seqs", "loaded in", "tokens/s"):
            assert words in shown.err


def _printed(text: str) -> str:
    return "".join(
        char if char in "\n\t" or unicodedata.category(char) != "Cc" else "\ufffd" for char in text
    )


def test_several_prompts_print_in_order_without_a_bar(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--prompt", "a", "b", "--prompt", "c", "--n", "2", "--max-tokens", "3", "--quiet")
    assert main(generate(path, *arguments, "--ignore-eos")) == 0
    shown = capsys.readouterr()
    heads = [line for line in shown.out.splitlines() if line.startswith("--- ")]
    assert heads == [f"--- {i} sample {s} (length)" for i in range(3) for s in range(2)]
    assert shown.err == ""


def test_a_terminal_gets_a_bar_that_goes_away_and_no_control_characters(path: Path) -> None:
    """Standard error is a terminal; standard output is read by a program."""
    ours, theirs = pty.openpty()
    prompts = ("--prompt", "a", "b", "c", "--max-tokens", "600", "--ignore-eos")
    run = subprocess.Popen(
        command(*generate(path, *prompts)),
        stdout=subprocess.PIPE,
        stderr=theirs,
        env=environment(TERM="xterm", COLUMNS="100"),
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        shown += piece
    os.close(ours)
    assert run.stdout is not None
    text = run.stdout.read().decode()
    assert run.wait(60) == 0
    assert "0/3" in shown.decode()
    assert shown.rstrip().endswith(b"tokens/s")
    assert shown.count(b"\x1b[?25l") == shown.count(b"\x1b[?25h"), "the cursor is back"
    assert {c for c in text if unicodedata.category(c) == "Cc"} <= {"\n", "\t"}


def test_a_terminal_without_a_character_is_no_error(path: Path) -> None:
    run = start(path, "--prompt", "a", "--ignore-eos", "--quiet", PYTHONIOENCODING="ascii")
    out, err = run.communicate(timeout=60)
    assert (run.returncode, err) == (0, b"")
    assert out.isascii()


# ---- ways to end


def test_an_interrupt_prints_what_was_done(path: Path, tmp_path: Path) -> None:
    """The first is done, two run, the last has not begun; each still gets its line."""
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "a", "max_tokens": 2}, *({"prompt": "b", "max_tokens": 8000},) * 3]
    file.write_text("\n".join(json.dumps({**line, "ignore_eos": True}) for line in lines))
    run = start(path, "--prompts", str(file), "--json", "--max-num-seqs", "2")
    assert run.stdout is not None
    first = run.stdout.readline().decode()
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=30)
    assert (run.returncode, err) == (130, b"")
    samples, summary = objects(first + out.decode())
    assert [s["finish_reason"] for s in samples] == ["length", "abort", "abort", "abort"]
    assert samples[1]["token_ids"]
    assert samples[3]["token_ids"] == []
    assert summary["interrupted"] is True
    assert summary["completion_tokens"] == sum(len(s["token_ids"]) for s in samples)


def test_an_interrupt_ends_a_streamed_text(path: Path) -> None:
    run = start(path, "--prompt", "a", "--max-tokens", "8000", "--ignore-eos")
    assert run.stdout is not None
    assert run.stdout.read(20)
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=30)
    assert run.returncode == 130
    assert out.endswith(b"\n")
    assert err.decode().splitlines()[-1].startswith("interrupted after ")
    assert b"Traceback" not in err


def test_a_second_interrupt_does_not_wait(path: Path) -> None:
    run = start(path, "--prompt", "a", "--max-tokens", "8000", "--ignore-eos")
    assert run.stdout is not None
    assert run.stdout.read(20)
    for _ in range(3):
        run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=30)
    assert run.returncode == 130
    assert b"Traceback" not in err


def test_an_interrupt_while_loading_says_nothing(path: Path) -> None:
    run = start(path, "--prompt", "a", "--max-tokens", "8000", "--ignore-eos")
    maps = Path(f"/proc/{run.pid}/maps")
    wait_until(lambda: "libtorch" in maps.read_text(), 30.0)
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=30)
    assert run.returncode == 130
    assert b"Traceback" not in err + out


@pytest.mark.parametrize("flags", [["--json"], []], ids=["json", "text"])
def test_a_reader_that_leaves_ends_it_quietly(path: Path, flags: list[str]) -> None:
    prompts = ["a"] if not flags else ["a"] * 200
    arguments = ("--prompt", *prompts, "--max-tokens", "4000" if not flags else "20")
    run = start(path, *arguments, "--ignore-eos", "--quiet", *flags)
    assert run.stdout is not None
    assert run.stdout.read(20)
    run.stdout.close()
    assert run.stderr is not None
    err = run.stderr.read()
    assert run.wait(60) == 1
    assert err == b""


def test_a_failing_engine_prints_what_was_done(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    execute, steps = Worker.execute, 0

    def failing(worker: Worker, plan: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps > 5:
            raise ValueError("a cosmic ray")
        return execute(worker, plan)

    monkeypatch.setattr(Worker, "execute", failing)
    arguments = ("--prompt", "a", "b", "--max-tokens", "20", "--ignore-eos", "--json")
    assert main(generate(path, *arguments)) == 1
    shown = capsys.readouterr()
    samples, summary = objects(shown.out)
    assert [s["finish_reason"] for s in samples] == ["error", "error"]
    assert all("a cosmic ray" in s["error"] and len(s["token_ids"]) == 5 for s in samples)
    assert summary["completion_tokens"] == 10
    assert shown.err.count("\n") == 1
    assert "a cosmic ray" in shown.err


def test_output_that_is_captured_by_anything_is_fine(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = io.StringIO()
    monkeypatch.setattr("sys.stdout", captured)
    assert main(generate(path, "--prompt", "a", "--max-tokens", "2", "--quiet")) == 0
    assert captured.getvalue()


@pytest.mark.model
def test_smollm2_answers_in_the_terminal(
    smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", "--model", str(smollm2_path), "--threads", "1", "--chat", "--quiet"]
    question = ["--prompt", "What is the capital of France?", "--temperature", "0"]
    assert main([*arguments, *question, "--max-tokens", "24"]) == 0
    assert "France" in capsys.readouterr().out
