"""The learning curve: a CSV always, a picture where matplotlib is installed."""

from __future__ import annotations

import csv
import importlib.util
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from drumline.core.errors import UsageError


@dataclass(frozen=True, slots=True)
class Point:
    """``loss``: the mean since the point before. ``length``: mean acceptance length on held-out
    conversations, nan between measurements. ``tokens`` and ``seconds`` are totals."""

    step: int
    tokens: int
    seconds: float
    learning_rate: float
    loss: float
    length: float


def write_curve(path: Path, points: Sequence[Point]) -> None:
    names = [field.name for field in fields(Point)]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows(astuple(point) for point in points)


def read_curve(path: Path) -> list[Point]:
    """The points of a file, none if there is no file. `UsageError` if it is not a curve."""
    if not path.exists():
        return []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return [
                Point(int(row["step"]), int(row["tokens"]), float(row["seconds"]),
                      float(row["learning_rate"]), float(row["loss"]), float(row["length"]))
                for row in csv.DictReader(file)
            ]  # fmt: skip
    except (KeyError, ValueError, TypeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not a learning curve, remove it: {error!r}") from None


def can_plot() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def plot_curve(path: Path, points: Sequence[Point], title: str) -> None:
    """Loss and acceptance length over tokens, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    left = figure.add_subplot()
    tokens = [point.tokens for point in points]
    left.plot(tokens, [point.loss for point in points], color="tab:gray", label="loss")
    left.set(xlabel="tokens trained on", ylabel="cross entropy with the target (nats)", title=title)
    right = left.twinx()
    measured = [point for point in points if point.length == point.length]
    right.plot(
        [point.tokens for point in measured],
        [point.length for point in measured],
        color="tab:red",
        marker="o",
        label="acceptance length",
    )
    right.set_ylabel("tokens per pass, held out", color="tab:red")
    figure.savefig(path, dpi=120)
