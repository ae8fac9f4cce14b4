"""From what was typed to values: the command line, environment variables, a YAML file.

The first that names a field wins, in this order: command line, environment, file, default. Every
name is known or refused, with the nearest known one; every error says where the value came from.
This module reads and refuses; what values mean together is `resolve`'s affair.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from drumline.config.fields import Field, read_text, read_value
from drumline.config.parts import FIELDS
from drumline.config.refused import REFUSED
from drumline.core.errors import ConfigError

PREFIX = "DRUMLINE_"
FILE_BYTES_MAX = 1 << 20

# Variables that begin like ours and are no engine fields.
OTHER_VARIABLES: dict[str, str] = {
    "DRUMLINE_CACHE": "folder that embedded models are fetched into",
}

Given = dict[str, tuple[Any, str]]  # field name → (value, where it came from)


def collect(
    cli: Mapping[str, Any], env: Mapping[str, str], file: Path | None, words: str = "command line"
) -> Given:
    """Every field that was asked for, with its value and where it came from.

    ``cli`` maps field names to texts (flags) or typed values (Python arguments); None there means
    "not given". Raises `ConfigError` naming field, value and source.
    """
    given: Given = {}
    if file is not None:
        given.update(from_file(file))
    given.update(from_environment(env))
    given.update(from_arguments(cli, words))
    return given


def from_arguments(cli: Mapping[str, Any], words: str) -> Given:
    """Flags (texts) or Python arguments (typed values) by field name."""
    given: Given = {}
    for name, value in cli.items():
        field = _field(name, name, words)
        if value is None and not field.optional:
            continue
        read = read_text if isinstance(value, str) and words == "command line" else read_value
        given[name] = (read(field, value), words)
    return given


def from_environment(env: Mapping[str, str]) -> Given:
    """``DRUMLINE_*`` variables. An empty one is an error: unset it instead."""
    given: Given = {}
    for variable in sorted(env):
        if not variable.startswith(PREFIX) or variable in OTHER_VARIABLES:
            continue
        name = variable.removeprefix(PREFIX).lower()
        field = _field(name, variable, "environment")
        if not env[variable].strip():
            raise ConfigError(variable, env[variable], "must not be empty; unset it instead")
        given[name] = (_told(field, env[variable], variable, text=True), variable)
    return given


def from_file(path: Path) -> Given:
    """A YAML mapping of field names, written with dashes or underscores."""
    given: Given = {}
    seen: dict[str, str] = {}
    for key, value in _load(path).items():
        if not isinstance(key, str):
            raise ConfigError("config", str(path), f"key {key!r} must be a text")
        name = key.replace("-", "_")
        field = _field(name, key, str(path))
        if name in seen:
            raise ConfigError("config", str(path), f"{seen[name]} and {key} are the same field")
        seen[name] = key
        given[name] = (_told(field, value, str(path), text=False), str(path))
    return given


def unknown(name: str, typed: str, words: str) -> NoReturn:
    """Raises the `ConfigError` for a name that is no field: refused by name, or unknown."""
    if name in REFUSED:
        raise ConfigError(typed, "…", f"refused: {REFUSED[name]} ({words})")
    near = nearest(name, FIELDS)
    hint = f"; did you mean {near}?" if near else ""
    raise ConfigError(typed, "…", f"unknown name ({words}){hint}")


def nearest(name: str, known: Mapping[str, Any] | list[str]) -> str | None:
    """The known name most like ``name``, if one is alike at all."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def _field(name: str, typed: str, words: str) -> Field:
    field = FIELDS.get(name)
    if field is None:
        unknown(name, typed, words)
    return field


def _told(field: Field, value: Any, source: str, *, text: bool) -> Any:
    """Reads one value; an error says which variable or file it stood in."""
    try:
        return read_text(field, value) if text else read_value(field, value)
    except ConfigError as error:
        raise ConfigError(error.field, error.value, f"{error.problem} (from {source})") from None


def _load(path: Path) -> dict[Any, Any]:
    import yaml  # here, because most starts have no file and should not pay for it

    try:
        with path.open("rb") as stream:
            raw = stream.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError("config", str(path), error.strerror or "cannot be read") from None
    if len(raw) > FILE_BYTES_MAX:
        raise ConfigError("config", str(path), f"larger than {FILE_BYTES_MAX} bytes")
    try:
        node = yaml.compose(raw.decode("utf-8"), Loader=yaml.SafeLoader)
        if isinstance(node, yaml.MappingNode):
            _refuse_duplicates(node, path)
        content = yaml.safe_load(raw)
    except UnicodeDecodeError:
        raise ConfigError("config", str(path), "is not UTF-8 text") from None
    except yaml.MarkedYAMLError as error:
        at = f" at line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError("config", str(path), f"is not YAML: {error.problem}{at}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError("config", str(path), f"is not YAML: {_one_line(error)}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError("config", str(path), "must be a mapping of field names to values")
    return content


def _refuse_duplicates(node: Any, path: Path) -> None:
    """YAML loaders keep the last of two equal keys in silence; we name them."""
    keys: list[str] = []
    for key, _ in node.value:
        if key.value in keys:
            line = key.start_mark.line + 1
            raise ConfigError("config", str(path), f"{key.value} stands there twice (line {line})")
        keys.append(key.value)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
