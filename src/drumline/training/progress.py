"""How far a long run is: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

LINE_SECONDS = 15.0

Writer = Callable[[int, str], object]


class OutOfTime(Exception):
    """The time that was granted is over; what is done is kept, and the same command goes on."""


class Progress:
    """One stage at a time. ``deadline`` by the monotonic clock, None for no limit."""

    def __init__(self, deadline: float | None = None, out: TextIO | None = None) -> None:
        self.deadline = deadline
        self.out = sys.stderr if out is None else out

    def tick(self) -> None:
        """Raises `OutOfTime` once the deadline has passed."""
        if self.deadline is not None and time.monotonic() >= self.deadline:
            raise OutOfTime

    def say(self, line: str) -> None:
        print(line, file=self.out, flush=True)

    @contextmanager
    def stage(self, name: str, total: int, done: int = 0) -> Iterator[Stage]:
        if self.out.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[text]}"),
            )
            with Bar(*columns, console=Console(file=self.out)) as bar:
                task = bar.add_task(name, total=total, completed=done, text="")
                yield Stage(
                    lambda at, text: bar.update(task, completed=at, text=text), float("-inf")
                )
        else:
            self.say(f"{name}: {done}/{total}")
            stage = Stage(lambda at, text: self.say(f"{name}: {at}/{total} {text}"), LINE_SECONDS)
            yield stage
            stage.finish()


class Stage:
    """Where one stage stands; writes at most every ``every`` seconds, and its last word."""

    def __init__(self, write: Writer, every: float) -> None:
        self._write = write
        self._every = every
        self._last = time.monotonic()
        self._pending: tuple[int, str] | None = None

    def at(self, done: int, text: str = "") -> None:
        self._pending = (done, text)
        if time.monotonic() - self._last >= self._every:
            self.finish()

    def finish(self) -> None:
        if self._pending is not None:
            self._write(*self._pending)
        self._pending = None
        self._last = time.monotonic()
