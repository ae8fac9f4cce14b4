"""Reasons: what was chosen where nothing was asked, and what runs instead of what was asked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Choice:
    """A value that was left open, what it became, and why."""

    field: str
    used: Any
    reason: str


@dataclass(frozen=True, slots=True)
class Adjustment:
    """A value that was asked for, what runs instead, and why."""

    field: str
    asked: Any
    used: Any
    reason: str

    def __str__(self) -> str:
        return f"{self.field}: asked {self.asked}, used {self.used} ({self.reason})"


@dataclass(slots=True)
class Notes:
    """The reasons gathered on the way; local to one call of `resolve`."""

    choices: list[Choice] = field(default_factory=list)
    adjustments: list[Adjustment] = field(default_factory=list)

    def choose(self, name: str, used: Value, reason: str) -> Value:
        self.choices.append(Choice(name, used, reason))
        return used

    def adjust(self, name: str, asked: Any, used: Any, reason: str) -> Any:
        self.adjustments.append(Adjustment(name, asked, used, reason))
        return used
