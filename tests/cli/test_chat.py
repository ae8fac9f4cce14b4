"""`drumline chat` on a terminal of its own: turns, history, Ctrl-C, Ctrl-D."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from drumline import LLM, SamplingParams
from drumline.cli.main import main
from drumline.cli.terminal import printable
from server.running import command, environment, wait_until

SYSTEM = "be brief"
CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


@pytest.fixture(scope="module")
def path(tiny_path: Callable[..., Path]) -> Path:
    return tiny_path(max_position_embeddings=8192)


class Terminal:
    """The other end of a program's terminal."""

    def __init__(self, arguments: list[str]) -> None:
        ours, theirs = pty.openpty()
        self.descriptor = ours
        self.process = subprocess.Popen(
            command(*arguments),
            stdin=theirs,
            stdout=theirs,
            stderr=subprocess.PIPE,
            env=environment(TERM="dumb"),
            start_new_session=True,
        )
        os.close(theirs)
        self.shown = ""

    def read_until(self, words: str, seconds: float = 60.0) -> str:
        """What came, up to and with ``words``; it is not seen again."""
        deadline = time.monotonic() + seconds
        while words not in self.shown:
            left = deadline - time.monotonic()
            assert left > 0, f"{words!r} did not come: {self.shown[-500:]!r}"
            if select.select([self.descriptor], [], [], left)[0]:
                piece = os.read(self.descriptor, 65536).decode(errors="replace")
                self.shown += CONTROL.sub("", piece).replace("\r", "")
        before, _, self.shown = self.shown.partition(words)
        return before + words

    def wait_asking(self) -> None:
        """Until the program sleeps, waiting for a key: a signal finds it there."""
        stat = Path(f"/proc/{self.process.pid}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "S")

    def type(self, text: str) -> None:
        os.write(self.descriptor, text.encode())

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate(timeout=30)
        os.close(self.descriptor)


@pytest.fixture
def terminal(path: Path) -> Iterator[Terminal]:
    flags = ["--temperature", "0", "--max-tokens", "12", "--ignore-eos", "--quiet"]
    shown = Terminal(
        ["chat", "--model", str(path), "--threads", "1", "--system-prompt", SYSTEM, *flags]
    )
    yield shown
    shown.close()


def test_two_turns_with_their_history(path: Path, terminal: Terminal) -> None:
    llm = LLM(str(path), threads=1)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    for question in ("the rain", "in Spain"):
        terminal.read_until("> ")
        terminal.type("\n")  # an empty line asks nothing
        terminal.read_until("> ")
        terminal.type(question + "\n")
        terminal.read_until(question + "\n")  # the echo
        messages.append({"role": "user", "content": question})
        reply = llm.chat(messages, params)[0].outputs[0].text
        wanted = printable(reply)
        assert terminal.read_until(wanted + "\n") == wanted + "\n"
        messages.append({"role": "assistant", "content": reply})
    terminal.read_until("> ")
    terminal.type("\x04")
    assert terminal.process.wait(30) == 0


def test_ctrl_c_cuts_an_answer_and_drops_a_line(path: Path) -> None:
    shown = Terminal(["chat", "--model", str(path), "--threads", "1", "--ignore-eos", "--quiet"])
    try:
        shown.read_until("> ")
        shown.type("the rain\n")
        shown.read_until("the rain\n")
        while not shown.shown.strip():  # the answer has begun
            shown.shown += os.read(shown.descriptor, 4096).decode(errors="replace")
        shown.process.send_signal(signal.SIGINT)
        shown.read_until("\n> ")
        shown.type("half a li")
        shown.read_until("half a li")
        shown.wait_asking()
        shown.process.send_signal(signal.SIGINT)
        shown.read_until("(Ctrl-D leaves)")
        shown.read_until("> ")
        shown.type("\x04")
        assert shown.process.wait(30) == 0
        assert shown.process.stderr is not None
        assert shown.process.stderr.read() == b""
    finally:
        shown.close()


def chat(path: Path, *arguments: str) -> list[str]:
    return ["chat", "--model", str(path), "--threads", "1", "--quiet", *arguments]


def test_one_question_one_answer(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llm = LLM(str(path), threads=1)
    params = SamplingParams(temperature=0, max_tokens=8)
    want = llm.chat([{"role": "user", "content": "hi"}], params)[0].outputs[0].text
    assert main(chat(path, "-q", "hi", "--temperature", "0", "--max-tokens", "8")) == 0
    assert capsys.readouterr().out == printable(want) + "\n"


def test_a_turn_that_does_not_fit_is_taken_back(path: Path) -> None:
    turns = b"a " * 20_000 + b"\nb\n\xff\nc\n"
    run = subprocess.run(
        command(*chat(path, "--max-tokens", "2", "--ignore-eos")),
        input=turns,
        capture_output=True,
        timeout=60,
        env=environment(),
    )
    assert run.returncode == 0
    refused = run.stderr.decode().splitlines()
    assert len(refused) == 2
    assert "max_model_len=8192" in refused[0]
    assert "surrogate" in refused[1]
    assert len(run.stdout.splitlines()) >= 2
