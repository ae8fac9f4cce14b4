"""The engine's flags on an argparse parser, all from the one declaration.

A parser of this kind answers any mistake with one line that names it, and the nearest flag there
is, and exit code 2. Flags may be written with underscores. Values stay texts here:
`EngineConfig.from_sources` reads them, so that flags, variables and files have one reading.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from drumline.config.fields import Field, Kind
from drumline.config.parts import FIELDS, PARTS
from drumline.config.refused import REFUSED, REFUSED_SHORT
from drumline.config.sources import nearest

TITLES = {
    "model": "model",
    "cache": "KV cache",
    "scheduler": "scheduling",
    "parallel": "ranks (this release runs one)",
    "speculative": "speculation",
    "runtime": "running",
    "server": "server",
}


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line each. Use it for verbs and sub-verbs alike."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {' '.join(message.split())}", file=sys.stderr)
        raise SystemExit(2)

    def parse_known_args(  # type: ignore[override]
        self,
        args: Sequence[str] | None = None,
        namespace: argparse.Namespace | None = None,
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse does it, but nothing is left over: a stranger is an error that names it."""
        typed = sys.argv[1:] if args is None else list(args)
        end = typed.index("--") if "--" in typed else len(typed)
        typed = [_dashed(arg) for arg in typed[:end]] + typed[end:]
        strangers = self._long_strangers(typed[:end])
        if strangers:  # before argparse, which would complain of missing arguments first
            self.error(self._stranger(strangers))
        known, extras = super().parse_known_args(typed, namespace)
        if extras:
            self.error(self._stranger(extras))
        return known, []

    def _long_strangers(self, typed: list[str]) -> list[str]:
        if any(isinstance(action, argparse._SubParsersAction) for action in self._actions):
            return []  # the sub-verb's parser knows its own flags
        return [
            arg
            for arg in typed
            if arg.startswith("--")
            and arg.partition("=")[0] not in self._option_string_actions
            and " " not in arg  # argparse takes such a text for a value
        ]

    def _stranger(self, extras: list[str]) -> str:
        flag = next((arg for arg in extras if arg.startswith("-") and len(arg) > 1), None)
        if flag is None:
            return f"unexpected argument {extras[0]!r}"
        flag = flag.partition("=")[0]
        name = REFUSED_SHORT.get(flag, flag.removeprefix("--").replace("-", "_"))
        if flag not in self._option_string_actions and name in REFUSED:
            return f"{flag} is refused: {REFUSED[name]}"
        near = nearest(flag, [known for known in self._option_string_actions if known != "-h"])
        return f"unknown flag {flag}" + (f"; did you mean {near}?" if near else "")


def _dashed(arg: str) -> str:
    """``--max_model_len=8`` → ``--max-model-len=8``; anything but a long flag stays as it is."""
    if not arg.startswith("--") or any(letter.isspace() for letter in arg.partition("=")[0]):
        return arg
    flag, equals, value = arg.partition("=")
    return flag.replace("_", "-") + equals + value


def add_engine_arguments(
    parser: argparse.ArgumentParser, parts: Iterable[str] = tuple(PARTS), skip: Iterable[str] = ()
) -> None:
    """Adds ``--config`` and the flags of ``parts``, except the fields named in ``skip``.

    Only flags that were typed appear in the namespace; `engine_arguments` picks them out.
    """
    skipped = frozenset(skip)
    parser.add_argument(
        "--config",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="YAML file of these settings; flags and DRUMLINE_* variables win over it",
    )
    for part in parts:
        group = parser.add_argument_group(TITLES[part])
        for field in FIELDS.values():
            if field.part == part and field.name not in skipped:
                _add(group, field)


def engine_arguments(namespace: argparse.Namespace) -> dict[str, Any]:
    """The engine fields that were typed, by name: the ``cli`` of `EngineConfig.from_sources`."""
    return {name: value for name, value in vars(namespace).items() if name in FIELDS}


def help_line(field: Field) -> str:
    """One sentence of help, with the range and the default."""
    option = field.option
    text = option.help
    if option.when_none:
        text += f" (default: {option.when_none})"
    elif option.kind is Kind.SWITCH:
        text += f" (default: {'on' if field.default else 'off'})"
    elif option.kind is not Kind.TEXTS:
        text += f" (default: {field.default})"
    return text


def _add(group: argparse._ArgumentGroup, field: Field) -> None:
    kind = field.option.kind
    flags = [field.flag] if field.option.short is None else [field.option.short, field.flag]
    text = help_line(field).replace("%", "%%")
    common: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, "help": text}
    if kind is Kind.SWITCH:
        group.add_argument(*flags, action=_Switch, **common)
    elif kind is Kind.TEXTS:
        group.add_argument(*flags, action=_Texts, nargs="+", metavar="TEXT", **common)
    else:
        group.add_argument(*flags, metavar=_metavar(field), **common)


def _metavar(field: Field) -> str:
    if field.option.kind is Kind.CHOICE:
        return "|".join(field.option.choices)
    words = {Kind.INTEGER: "N", Kind.SIZE: "SIZE", Kind.SECONDS: "SECONDS", Kind.OBJECT: "JSON"}
    return words.get(field.option.kind, "TEXT")


class _Switch(argparse.BooleanOptionalAction):
    """``--x`` and ``--no-x``; short forms, which cannot be negated, stay as they are."""

    def format_usage(self) -> str:
        return " | ".join(option for option in self.option_strings)


class _Texts(argparse.Action):
    """Several arguments, or one JSON list, become a tuple of texts."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        alone = values[0] if len(values) == 1 else None
        setattr(namespace, self.dest, alone if alone is not None else tuple(values))
