"""What the verbs that run a model share: the engine's flags, the start-up table, speeds."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from drumline.config import EngineConfig
from drumline.config.arguments import add_engine_arguments, engine_arguments

if TYPE_CHECKING:
    from drumline.engine.core import Counters
    from drumline.engine.facts import EngineFacts

SCRIPT_PARTS = ("model", "cache", "scheduler", "parallel", "speculative", "runtime")


def add_script_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """The engine's flags without the server's."""
    add_engine_arguments(parser, SCRIPT_PARTS)


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """Command line over ``DRUMLINE_*`` over ``--config FILE``."""
    file = getattr(args, "config", None)
    return EngineConfig.from_sources(
        engine_arguments(args), os.environ, None if file is None else Path(file)
    )


def have_model(config: EngineConfig) -> None:
    """Finds the model, or fetches it saying so, before anything heavy is imported."""
    from drumline.models.fetch import resolve_model

    resolve_model(config.model.model, config.model.revision, complain)


def print_startup(facts: EngineFacts) -> None:
    """The start-up table on standard error: what runs, and why."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"drumline · {facts.model}", title_justify="left", box=None, pad_edge=False)
    for heading in ("setting", "value", "why"):
        table.add_column(heading, overflow="fold")
    for name, value, reason in facts.startup_rows:
        style = "bold yellow" if reason.startswith("adjusted") else None
        table.add_row(name, value, reason, style=style)
    console = Console(stderr=True, highlight=False, markup=False)
    console.print(table)
    console.print(f"loaded in {facts.load_seconds:.1f} s")
    console.print()


def decode_speed(counters: Counters) -> float:
    """Tokens per second after each request's first, over the time in which any decodes."""
    if counters.decode_seconds <= 0:
        return 0.0
    return counters.decode_tokens / counters.decode_seconds


def complain(message: str) -> None:
    print(message, file=sys.stderr)
