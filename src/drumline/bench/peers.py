"""Other engines, measured on the same model and the same number of threads.

A peer answers three questions, each in one fresh process per call or in a helper that stays:
decode tokens per second of one stream, of several streams together, and prefill tokens per second.
What it cannot answer it does not know (None). Peers are never imported into this process: their
threads and allocators would be measured with ours.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from drumline.core.errors import UsageError

TIMEOUT_SECONDS = 900.0


@dataclass(frozen=True, slots=True)
class Workload:
    """``streams`` equal requests of ``prompt_len`` tokens, ``output_len`` more each."""

    streams: int
    prompt_len: int
    output_len: int


class Peer(Protocol):
    name: str

    def decode(self, work: Workload) -> float | None:
        """Tokens per second over all streams while they decode."""
        ...

    def prefill(self, tokens: int) -> float | None:
        """Prompt tokens per second of one prompt."""
        ...

    def close(self) -> None: ...


class LlamaCpp:
    """llama.cpp through its own benchmarks: llama-bench, and llama-batched-bench for several
    streams. Both read GGUF files."""

    def __init__(self, model: Path, threads: int, bench: Path, batched: Path | None) -> None:
        if model.suffix != ".gguf":
            raise UsageError(f"{model}: llama.cpp reads GGUF files")
        for path in (bench, batched):
            if path is not None and not os.access(path, os.X_OK):
                raise UsageError(f"{path}: no such program")
        self.name = "llama.cpp"
        self._model = model
        self._threads = threads
        self._bench = bench
        self._batched = batched

    def decode(self, work: Workload) -> float | None:
        if work.streams == 1:
            return self._bench_run(0, work.output_len)
        if self._batched is None:
            return None
        room = work.streams * (work.prompt_len + work.output_len)
        lines = _run(
            [
                *(str(self._batched), "-m", str(self._model), "-t", str(self._threads)),
                *("-c", str(room + 64), "-npp", str(work.prompt_len)),
                *("-ntg", str(work.output_len), "-npl", str(work.streams)),
                *("--output-format", "jsonl"),
            ]
        ).splitlines()
        found = [json.loads(line) for line in lines if line.startswith("{")]
        speeds = [float(one["speed_tg"]) for one in found if one.get("pl") == work.streams]
        if not speeds:
            raise UsageError(f"{self._batched}: no figure for {work.streams} streams in its output")
        return speeds[0]

    def prefill(self, tokens: int) -> float | None:
        return self._bench_run(tokens, 0)

    def close(self) -> None:
        """Nothing stays between calls."""

    def _bench_run(self, prompt: int, output: int) -> float:
        text = _run(
            [
                *(str(self._bench), "-m", str(self._model), "-t", str(self._threads)),
                *("-p", str(prompt), "-n", str(output), "-r", "1", "-o", "json"),
            ]
        )
        try:
            (found,) = json.loads(text[text.index("[") :])
            return float(found["avg_ts"])
        except (ValueError, KeyError) as error:
            raise UsageError(
                f"{self._bench}: its output is not what was expected: {error}"
            ) from None


class Helper:
    """A peer that is a Python library: `peer_helper` runs in a process of its own, under the
    interpreter that has the library, and answers one JSON line per question."""

    def __init__(
        self, name: str, model: Path, threads: int, vocabulary: int, python: Path | None
    ) -> None:
        self.name = name
        script = Path(__file__).with_name("peer_helper.py")
        command = [str(python or sys.executable), str(script), name, str(model)]
        command += [str(threads), str(vocabulary)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        ready = self._answer()
        if "error" in ready:
            self.close()
            raise UsageError(f"peer {name}: {ready['error']}")

    def decode(self, work: Workload) -> float | None:
        question = {"streams": work.streams, "prompt": work.prompt_len, "output": work.output_len}
        return self._ask({"decode": question})

    def prefill(self, tokens: int) -> float | None:
        return self._ask({"prefill": tokens})

    def close(self) -> None:
        self._process.kill()
        self._process.wait(10)

    def _ask(self, question: Mapping[str, Any]) -> float | None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        found = self._answer()
        if "error" in found:
            raise UsageError(f"peer {self.name}: {found['error']}")
        return None if found["rate"] is None else float(found["rate"])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline = threading.Timer(TIMEOUT_SECONDS, self._process.kill)
        deadline.start()
        try:
            for line in self._process.stdout:
                if line.startswith("{"):  # libraries talk on standard output, too
                    answer: dict[str, Any] = json.loads(line)
                    return answer
        finally:
            deadline.cancel()
        code = self._process.wait(10)
        late = f", after {TIMEOUT_SECONDS:.0f} s without an answer" if code < 0 else ""
        return {"error": f"its process ended with code {code}{late}"}


def open_peer(
    name: str,
    model: Path,
    threads: int,
    vocabulary: int,
    llama_bench: Path | None = None,
    llama_batched_bench: Path | None = None,
    python: Path | None = None,
) -> Peer:
    """The peer of that name. Raises `UsageError` for one that is not there."""
    if name == "llama.cpp":
        if llama_bench is None:
            raise UsageError("--llama-bench: the peer llama.cpp needs the path of that program")
        return LlamaCpp(model, threads, llama_bench, llama_batched_bench)
    return Helper(name, model, threads, vocabulary, python)


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise UsageError(f"{command[0]}: no answer within {TIMEOUT_SECONDS:.0f} s") from None
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["nothing said why"]
        raise UsageError(f"{command[0]} ended with code {done.returncode}: {last[0]}")
    return done.stdout
