"""`drumline generate -dp 2` as a person types it, and every way of ending it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from drumline.cli.main import main
from parallel_engine.fleet import alive, descendants, shared_names, until

TinyPath = Callable[..., Path]
SECONDS = 90


def start(path: Path, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "drumline.cli.main", "generate", "--model", str(path)]
    command += ["-dp", "2", *flags]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def test_outputs_say_their_replica_and_the_summary_sums(
    tiny_path: TinyPath, tmp_path: Path
) -> None:
    lines = [
        {"prompt_token_ids": [3 + i, 4], "max_tokens": 5, "ignore_eos": True} for i in range(4)
    ]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ("--prompts", str(prompts), "--temperature", "0", "--json")
    with start(tiny_path(), *flags) as process:
        output, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, errors
    *samples, last = [json.loads(line) for line in output.splitlines()]
    assert sorted(sample["replica"] for sample in samples) == [0, 0, 1, 1]
    assert all(sample["finish_reason"] == "length" for sample in samples)
    summary = last["summary"]
    assert summary["completion_tokens"] == 20
    assert summary["draft_length_histogram"] == {"0": summary["steps"]}
    assert summary["decode_tokens_per_second"] > 0


def test_bench_latency_says_what_agreeing_costs(
    tiny_path: TinyPath, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where replicas share experts, and not where each goes its own way."""
    report = tmp_path / "report.json"
    flags = ["-dp", "2", "--batch-size", "2", "--input-len", "4", "--output-len", "6"]
    command = ["bench", "latency", "--num-iters", "1", "--threads", "1", "--json", str(report)]
    command += ["--model", str(tiny_path("qwen3_moe")), "--max-num-seqs", "2", *flags]
    assert main([*command, "-ep"]) == 0
    agreement = json.loads(report.read_text())["agreement"]
    assert agreement["exchange_micros"] > 0
    assert agreement["share"] == agreement["exchange_micros"] / agreement["step_micros"]
    said = f"waiting included: {agreement['exchange_micros']:.0f} µs, {agreement['share']:.1%} of"
    assert said in capsys.readouterr().out
    assert main(command) == 0
    assert "agreement" not in json.loads(report.read_text())
    assert "exchange" not in capsys.readouterr().out


@pytest.mark.parametrize("how", ["interrupt", "term", "kill", "kill nursery"])
def test_nothing_is_left(tiny_path: TinyPath, how: str) -> None:
    before = shared_names()
    path = tiny_path(vocab=300, max_position_embeddings=8192)
    flags = (
        "--prompt",
        "a b",
        "c d",
        "--max-tokens",
        "8000",
        "--max-num-seqs",
        "2",
        "--ignore-eos",
        "--json",
    )
    process = start(path, *flags)
    try:
        until(lambda: len(descendants(process.pid)) == 3, "no ranks", SECONDS)
        below = descendants(process.pid)
        (nursery,) = {one for one in below if descendants(one)}
        if how == "interrupt":  # as a terminal does it: to the whole group
            os.killpg(process.pid, signal.SIGINT)
        elif how == "term":
            os.killpg(process.pid, signal.SIGTERM)
        else:
            os.kill(nursery if how == "kill nursery" else process.pid, signal.SIGKILL)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    expected = {"interrupt": 130, "term": -signal.SIGTERM, "kill": -signal.SIGKILL}
    assert process.returncode == expected.get(how, 1), errors
    for one in below:
        until(lambda one=one: not alive(one), f"process {one} is left")  # type: ignore[misc]
    assert shared_names() <= before
    if how == "kill nursery":
        assert "rank" in errors
        assert "Traceback" not in errors
