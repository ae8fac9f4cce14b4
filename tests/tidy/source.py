"""What the tidy tests share: the source files, their trees, and the names of rooms."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "drumline"

# What decides imports no torch; of these, every one that exists is tested.
DAGGER_ROOMS = ("core", "config", "kvcache", "lockstep", "scheduler", "fleet", "sim")


def rooms() -> list[str]:
    """The packages that exist, by name."""
    return sorted(path.parent.name for path in SOURCE.glob("*/__init__.py"))


def modules() -> list[Path]:
    """Every Python file of the package."""
    return sorted(SOURCE.rglob("*.py"))


def deciding_modules() -> list[Path]:
    """The files of the rooms that decide."""
    return [path for path in modules() if path.relative_to(SOURCE).parts[0] in DAGGER_ROOMS]


@cache
def tree(path: Path) -> ast.Module:
    """The syntax tree of a file, parsed once."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def name(path: Path) -> str:
    """A short name for messages."""
    return str(path.relative_to(ROOT))


def calls(path: Path) -> Iterator[tuple[ast.Call, str]]:
    """Every call of a file with its dotted target: ``time.time``, ``.get``, ``hash``."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call):
            yield node, dotted(node.func)


def dotted(node: ast.expr) -> str:
    """``a.b.c`` of an expression; a leading dot stands for anything that is not a name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    parts.append(node.id if isinstance(node, ast.Name) else "")
    return ".".join(reversed(parts))
