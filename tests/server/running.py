"""A real ``drumline serve`` in a process of its own, and waits that have deadlines."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]
START_SECONDS = 90.0
STOP_SECONDS = 30.0
READY = re.compile(r"ready on (http://\S+), engine in process (\d+)")
LISTENING = re.compile(r"listening on (http://[^\s,]+)")


def environment(**more: str) -> dict[str, str]:
    """One thread, this tree's sources, no settings of the person who runs the tests."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DRUMLINE_")}
    if "DRUMLINE_CACHE" in os.environ:
        clean["DRUMLINE_CACHE"] = os.environ["DRUMLINE_CACHE"]
    return {**clean, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", **more}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "drumline.cli.main", *arguments]


def wait_until(what: Callable[[], Any], seconds: float = 20.0) -> Any:
    """The first true value of ``what``; fails with its name after the deadline."""
    deadline = time.monotonic() + seconds
    while not (value := what()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what.__name__}"
        time.sleep(0.01)
    return value


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def children(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Server:
    """Use as a context manager; leaving it ends whatever still runs."""

    def __init__(self, *arguments: str, wait_ready: bool = True, **env: str) -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            command("serve", *arguments, "--port", "0", "--threads", "1"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(**env),
            start_new_session=True,
        )
        self._pump = threading.Thread(target=self._read, daemon=True)
        self._pump.start()
        try:
            self.url = self._wait_line(LISTENING).group(1)
            if wait_ready:
                self.engine_pid = int(self._wait_line(READY).group(2))
        except BaseException:
            self.kill()
            raise
        self.client = httpx.Client(base_url=self.url, timeout=60.0)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)

    def _wait_line(self, pattern: re.Pattern[str]) -> re.Match[str]:
        def found() -> re.Match[str] | None:
            match = pattern.search("".join(self.lines))
            assert match or self.process.poll() is None, f"it ended: {self.log}"
            return match

        match = wait_until(found, START_SECONDS)
        assert isinstance(match, re.Match)
        return match

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.kill()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(STOP_SECONDS)
        self._pump.join(STOP_SECONDS)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, seconds: float = STOP_SECONDS) -> int:
        """The exit code; all of its output has been read then."""
        code = self.process.wait(seconds)
        self._pump.join(STOP_SECONDS)
        return code

    def health(self) -> dict[str, Any]:
        body: dict[str, Any] = self.client.get("/health").json()
        return body

    def wait_idle(self, seconds: float = 20.0) -> None:
        """Until no request runs or waits and every block is free."""

        def idle() -> bool:
            health = self.health()
            return (health["running"], health["waiting"], health["kv_usage"]) == (0, 0, 0.0)

        wait_until(idle, seconds)

    def wait_running(self, count: int = 1, seconds: float = 20.0) -> None:
        def running() -> bool:
            return int(self.health()["running"]) >= count

        wait_until(running, seconds)
