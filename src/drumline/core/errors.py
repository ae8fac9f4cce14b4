"""The one exception tree, drawn here, so that callers can catch at any level.

    DrumlineError
    ├── UsageError                 what was asked cannot be done; the command line exits with 2
    │   ├── ConfigError            a flag, key, environment variable or combination
    │   ├── CheckpointError        a model folder or file: missing, truncated, wrong shape
    │   └── RequestError           one request: prompt, sampling parameter, limit
    │       └── PromptTooLong
    ├── Refused                    a limit holds: a full queue, a closing engine (HTTP 503)
    └── EngineError                the engine broke; requests in flight end with ``error``
        ├── DeadlineExceeded       a wait ran past its deadline
        ├── EngineDead             the process that serves steps is gone
        ├── RankLost               a rank died, stalled, or said that it cannot go on
        ├── GroupEnded             a collective was ended by somebody else, who says why
        └── Diverged               ranks that must be equal are not

Every message is one line that names the thing, its value and what is allowed. Our own mistakes
are assertions and are not in this tree. This module knows nothing of any other room.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


def nearest_name(name: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for the known name closest to a misspelt one, or nothing."""
    near = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


class DrumlineError(Exception):
    """Root of everything drumline raises on purpose."""


class UsageError(DrumlineError, ValueError):
    """What was asked for cannot be done as asked. Exit code 2, HTTP 400."""


class ConfigError(UsageError):
    """A configuration field with a value that is unknown, out of range or in conflict.

    ``field`` is the name the user typed (``max_model_len``), ``value`` what it was set to.
    """

    def __init__(self, field: str, value: Any, problem: str) -> None:
        self.field = field
        self.value = value
        self.problem = problem
        super().__init__(f"{field}={value!r}: {problem}")


class CheckpointError(UsageError):
    """A checkpoint that cannot be read as a model. ``path`` is the file or folder at fault."""

    def __init__(self, path: object, problem: str) -> None:
        self.path = str(path)
        self.problem = problem
        super().__init__(f"{path}: {problem}")


class RequestError(UsageError):
    """One request that cannot be served as asked. ``param`` is the field at fault, if one is."""

    def __init__(self, problem: str, *, param: str | None = None) -> None:
        self.param = param
        self.problem = problem
        super().__init__(f"{param}: {problem}" if param else problem)


class PromptTooLong(RequestError):
    """The prompt leaves no room for a single output token under ``max_model_len``."""


class Refused(DrumlineError):
    """A limit holds right now: the queue is full, or the engine takes no more requests."""


class EngineError(DrumlineError):
    """The engine itself failed; what was in flight ends with finish reason ``error``."""


class DeadlineExceeded(EngineError):
    """A wait ran past its deadline. ``what`` names the wait, ``seconds`` its limit."""

    def __init__(self, what: str, seconds: float) -> None:
        self.what = what
        self.seconds = seconds
        super().__init__(f"{what}: nothing after {seconds:g} s")


class EngineDead(EngineError):
    """The process that serves steps has ended; its last words are in the message."""


class RankLost(EngineError):
    """A rank that others wait for does not come. The fields say what it, or who waits for it,
    was at: ``phase`` is one of `drumline.core.ledger.PHASES`, ``reason`` what is known of why."""

    def __init__(self, rank: int, step: int, phase: str, operation: str, reason: str) -> None:
        self.rank = rank
        self.step = step
        self.phase = phase
        self.operation = operation
        self.reason = reason
        super().__init__(f"rank {rank} lost in step {step}, {phase}, {operation}: {reason}")


class GroupEnded(EngineError):
    """A wait for other ranks was ended from outside, or broke without saying at whom. Whoever
    ended it has the reason."""


class Diverged(EngineError):
    """Ranks that must agree do not. ``values`` has one pair (rank, value) for each of them,
    ascending; ``what`` names the thing that differs, ``step`` when it was seen."""

    def __init__(self, what: str, values: Iterable[tuple[int, object]], step: int) -> None:
        self.what = what
        self.values = tuple(sorted(values, key=lambda pair: pair[0]))
        self.step = step
        listed = ", ".join(f"rank {rank} has {value}" for rank, value in self.values)
        super().__init__(f"step {step}: {what} differs: {listed}")
