"""What speculation is worth on real prompts: decode speed with it and without, by category.

All candidates answer the same prompts, prompt by prompt and by turns, so that what else the machine
does falls on all of them. Counted is the time from a request's first token to its last, one request
at a time; ratios are made within a round, and their medians told. A candidate may be another
engine's server (`LlamaServer`), which says itself how long it decoded.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from drumline.bench.acceptance import ALL, Question
from drumline.bench.latency import Spread
from drumline.core.errors import RequestError, UsageError
from drumline.core.params import SamplingParams
from drumline.engine.intake import Prompt
from drumline.engine.llm import LLM, Interrupt

START_SECONDS = 120.0
ANSWER_SECONDS = 300.0
PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Decoded:
    """``tokens`` that came in ``seconds``, without what the prompt took."""

    tokens: int
    seconds: float


class Candidate(Protocol):
    name: str

    def answer(self, question: Question, output_len: int) -> Decoded: ...

    def close(self) -> None: ...


class OwnEngine:
    """This engine, greedy. Its prefix cache must be off: a prompt comes once per round."""

    def __init__(self, name: str, llm: LLM) -> None:
        self.name = name
        self.llm = llm

    def answer(self, question: Question, output_len: int) -> Decoded:
        prompt = Prompt(messages=({"role": "user", "content": question.text},))
        params = SamplingParams(temperature=0.0, max_tokens=output_len)
        submission = self.llm.intake.admit(prompt, params)
        tokens, began, ended = 0, 0.0, 0.0
        interrupt = Interrupt()
        for _, delta in self.llm.run([submission], interrupt):
            if delta.token_ids:
                ended = time.perf_counter()
                if not began:
                    began = ended
                    tokens -= len(delta.token_ids)  # these are what decoding starts from
                tokens += len(delta.token_ids)
        if interrupt.raised:
            raise KeyboardInterrupt
        return Decoded(tokens, ended - began)

    def close(self) -> None:
        self.llm.close()


class LlamaServer:
    """llama.cpp's server with one slot. ``spec_type``: what its --spec-type takes, or None."""

    def __init__(self, program: Path, model: Path, threads: int, spec_type: str | None) -> None:
        if model.suffix != ".gguf":
            raise UsageError(f"{model}: llama.cpp reads GGUF files")
        if not os.access(program, os.X_OK):
            raise UsageError(f"--llama-server {program}: no such program")
        self.name = "llama.cpp" + (f" {spec_type}" if spec_type else "")
        self._port = _free_port()
        command = [
            *(str(program), "-m", str(model), "-t", str(threads), "-tb", str(threads)),
            *("-c", "4096", "-np", "1", "--host", "127.0.0.1", "--port", str(self._port)),
        ]
        if spec_type is not None:
            command += ["--spec-type", spec_type]
        self._folder = tempfile.TemporaryDirectory(prefix="drumline-peer-")
        self._log = Path(self._folder.name) / "log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def answer(self, question: Question, output_len: int) -> Decoded:
        body = {
            "messages": [{"role": "user", "content": question.text}],
            "max_tokens": output_len,
            "temperature": 0.0,
            "cache_prompt": False,
        }
        timings = self._ask("/v1/chat/completions", body, ANSWER_SECONDS)["timings"]
        return Decoded(int(timings["predicted_n"]), float(timings["predicted_ms"]) / 1e3)

    def close(self) -> None:
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(10.0)
        self._process.kill()
        self._process.wait(10.0)
        self._folder.cleanup()

    def _wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                last = self._log.read_text(errors="replace").strip().splitlines()[-1:]
                raise UsageError(f"{self.name} ended while starting: {''.join(last)}")
            with suppress(OSError, ValueError):
                self._ask("/health", None, 5.0)
                return
            time.sleep(0.1)
        raise UsageError(f"{self.name} did not start within {START_SECONDS:.0f} s")

    def _ask(self, path: str, body: Mapping[str, Any] | None, seconds: float) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=seconds) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            if body is None:
                raise  # not ready yet
            said = error.read().decode(errors="replace")
            raise RequestError(f"{self.name} refuses a prompt: {said}") from None


@dataclass(frozen=True, slots=True)
class Speeds:
    """Of one category: tokens per second of each candidate, a figure per round."""

    category: str
    by_candidate: dict[str, tuple[float, ...]]

    def ratio(self, candidate: str, to: str) -> Spread:
        pairs = zip(self.by_candidate[candidate], self.by_candidate[to], strict=True)
        return Spread.of([own / other for own, other in pairs])

    def as_json(self) -> dict[str, Any]:
        return {"category": self.category, "tokens_per_second": self.by_candidate}


def measure_speedup(
    candidates: Sequence[Candidate],
    questions: Sequence[Question],
    output_len: int,
    rounds: int,
    tell: Callable[[str], None] = lambda _: None,
) -> list[Speeds]:
    """Rounds over all prompts, after one prompt that warms up; categories in order of appearance,
    then all. A category without a single decoded token is left out."""
    for candidate in candidates:
        candidate.answer(questions[0], output_len)
    speeds: dict[str, dict[str, list[float]]] = {}
    for number in range(rounds):
        sums: dict[tuple[str, str], Decoded] = defaultdict(lambda: Decoded(0, 0.0))
        for question in questions:
            for candidate in candidates:
                got = candidate.answer(question, output_len)
                for category in dict.fromkeys((question.category, ALL)):
                    key = (category, candidate.name)
                    so_far = sums[key]
                    sums[key] = Decoded(so_far.tokens + got.tokens, so_far.seconds + got.seconds)
        for (category, name), sum_ in sums.items():
            if sum_.tokens:
                own = speeds.setdefault(category, {}).setdefault(name, [])
                own.append(sum_.tokens / sum_.seconds)
        told = ", ".join(f"{c.name} {speeds[ALL][c.name][-1]:.1f}" for c in candidates)
        tell(f"round {number + 1} of {rounds}, tokens/s: {told}")
    order = [
        *dict.fromkeys(question.category for question in questions if question.category != ALL)
    ]
    return [
        Speeds(category, {name: tuple(values) for name, values in speeds[category].items()})
        for category in [*order, ALL]
        if category in speeds
    ]


def best(speeds: Speeds, names: Sequence[str]) -> str:
    """Of some candidates the one whose median is highest."""
    return max(names, key=lambda name: statistics.median(speeds.by_candidate[name]))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
