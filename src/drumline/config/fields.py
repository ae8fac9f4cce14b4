"""How one configuration field is declared, read and checked.

A field is declared once, beside its type, with `option(...)`. From that declaration come its flag,
its environment variable, its key in a file, its line in ``--help``, its range and its refusals.
This module knows kinds of values and refuses to know what any field means.

    text       "--max-model-len 8K", DRUMLINE_MAX_MODEL_LEN=8K   → `read_text`
    value      max_model_len: 8192 (file), LLM(max_model_len=…)  → `read_value`
    any        every part checks itself when it is made          → `check`
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from dataclasses import dataclass
from typing import Any, NoReturn

from drumline.config.draft_table import read_table
from drumline.config.sizes import parse_integer, parse_size
from drumline.core.errors import ConfigError

TEXT_LENGTH_MAX = 65536
ITEMS_MAX = 64
SECONDS_MAX = 86400.0


class Kind(enum.StrEnum):
    """What a field holds."""

    TEXT = "text"
    CHOICE = "choice"
    INTEGER = "integer"
    SIZE = "size"  # an integer that may be written 8K or 1.5k
    SECONDS = "seconds"
    NUMBER = "number"  # may have decimals
    SWITCH = "switch"
    TEXTS = "texts"  # a tuple of texts
    INTEGERS = "integers"  # a tuple of whole numbers, each in the range
    TABLE = "table"  # draft lengths by batch size
    OBJECT = "object"  # a JSON object, kept as canonical JSON text


@dataclass(frozen=True, slots=True)
class Option:
    """What is said about a field beside its name, type and default."""

    kind: Kind
    help: str
    short: str | None = None
    choices: tuple[str, ...] = ()
    later: tuple[str, ...] = ()  # choices people know that this release does not have
    low: float | None = None  # inclusive, like high; an int where the field holds one
    high: float | None = None
    unit: str = ""
    # What None means, for fields that may be None. For numbers people type ``auto``; where vLLM
    # reads -1 so, so do we.
    when_none: str = ""
    minus_one_is_none: bool = False
    secret: bool = False


@dataclass(frozen=True, slots=True)
class Field:
    """One row of the flat table: a declared field and the part it belongs to."""

    name: str
    part: str
    default: Any
    option: Option

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "DRUMLINE_" + self.name.upper()

    @property
    def optional(self) -> bool:
        """Whether None is a value: "not set", with the meaning `Option.when_none` gives."""
        return bool(self.option.when_none)

    def refuse(self, value: object, problem: str) -> NoReturn:
        """Raises the `ConfigError` for this field; a secret's value is not repeated."""
        raise ConfigError(self.name, "…" if self.option.secret else value, problem)


def option(
    default: Any,
    kind: Kind,
    help: str,
    *,
    short: str | None = None,
    choices: tuple[str, ...] = (),
    later: tuple[str, ...] = (),
    low: float | None = None,
    high: float | None = None,
    unit: str = "",
    when_none: str = "",
    minus_one_is_none: bool = False,
    secret: bool = False,
) -> Any:
    """A dataclass field that carries its `Option`. ``low`` and ``high`` are inclusive."""
    spec = Option(
        kind=kind,
        help=help,
        short=short,
        choices=choices,
        later=later,
        low=low,
        high=high,
        unit=unit,
        when_none=when_none,
        minus_one_is_none=minus_one_is_none,
        secret=secret,
    )
    return dataclasses.field(default=default, metadata={"option": spec}, repr=not secret)


def fields_of(part: str, cls: type) -> tuple[Field, ...]:
    """The declared fields of one part, in order."""
    return tuple(
        Field(spec.name, part, spec.default, spec.metadata["option"])
        for spec in dataclasses.fields(cls)
    )


# ---------------------------------------------------------------- reading

_TRUE = frozenset({"true", "1", "yes", "on"})
_FALSE = frozenset({"false", "0", "no", "off"})


def read_text(field: Field, text: str) -> Any:
    """The value that ``text`` (a flag's argument, an environment variable) stands for."""
    kind = field.option.kind
    if _is_auto(field, text):
        return None
    try:
        if kind is Kind.INTEGER:
            value: Any = parse_integer(text)
        elif kind is Kind.SIZE:
            value = parse_size(text)
        elif kind is Kind.SECONDS:
            value = float(text)
        elif kind is Kind.SWITCH:
            value = _switch(text)
        elif kind is Kind.TEXTS:
            value = _texts(text)
        elif kind is Kind.OBJECT:
            value = _canonical(json.loads(text, object_pairs_hook=_no_duplicates))
        else:
            value = text
    except RecursionError:
        field.refuse(text[:40], "nested too deeply")
    except ValueError as error:
        problem = str(error)
        if kind is Kind.SECONDS:
            problem = "must be a number of seconds"
        elif isinstance(error, json.JSONDecodeError):
            problem = f"not valid JSON: {error.msg} at character {error.pos}"
        field.refuse(text, problem)
    return check(field, _unset(field, value))


def read_value(field: Field, value: Any) -> Any:
    """The value of a file's key or of a Python argument: typed already, except for sizes, whose
    suffixes have no type of their own, and for lists and objects."""
    kind = field.option.kind
    if isinstance(value, str) and (kind in (Kind.SIZE, Kind.OBJECT) or _is_auto(field, value)):
        return read_text(field, value)
    if kind is Kind.OBJECT and isinstance(value, dict):
        try:
            value = _canonical(value)
        except (TypeError, ValueError) as error:
            field.refuse(value, str(error))
    if kind is Kind.TEXTS:
        if isinstance(value, str):
            value = (value,)
        elif isinstance(value, list):
            value = tuple(value)
    if kind in (Kind.SECONDS, Kind.NUMBER) and type(value) is int:
        value = float(value)
    if kind is Kind.INTEGERS and isinstance(value, list):
        value = tuple(value)
    if kind is Kind.TABLE:
        try:
            value = read_table(value)
        except ValueError as error:
            field.refuse(value, str(error))
    return check(field, _unset(field, value))


def _unset(field: Field, value: Any) -> Any:
    minus_one = field.option.minus_one_is_none and type(value) is int and value == -1
    return None if minus_one else value


def _is_auto(field: Field, text: str) -> bool:
    numeric = field.option.kind in (Kind.INTEGER, Kind.SIZE)
    return numeric and field.optional and text.strip().lower() == "auto"


def _switch(text: str) -> bool:
    word = text.strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ValueError("must be true or false")


def _texts(text: str) -> tuple[Any, ...]:
    if text.lstrip().startswith("["):
        items = json.loads(text)
        return tuple(items)
    return tuple(item.strip() for item in text.split(","))


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON readers keep the last of two equal keys in silence; we name them."""
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f"{key} stands there twice")
    return dict(pairs)


def _canonical(value: Any) -> str:
    if not isinstance(value, dict):
        raise ValueError("must be a JSON object")
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


# ---------------------------------------------------------------- checking


def check(field: Field, value: Any) -> Any:
    """``value`` itself if it is one this field can hold; raises `ConfigError` otherwise."""
    if value is None:
        if not field.optional:
            field.refuse(value, f"must be set; leave it out for the default {field.default!r}")
        return value
    _CHECKS[field.option.kind](field, value)
    return value


def _check_text(field: Field, value: Any) -> None:
    if not isinstance(value, str):
        field.refuse(value, f"must be a text, not {_kind_name(value)}")
    if not value.strip():
        field.refuse(value, "must not be empty")
    if len(value) > TEXT_LENGTH_MAX:
        field.refuse(value[:40] + "…", f"longer than {TEXT_LENGTH_MAX} characters")
    if "\0" in value:
        field.refuse(value, "must not contain a null character")


def _check_choice(field: Field, value: Any) -> None:
    allowed = "must be one of " + ", ".join(field.option.choices)
    if not isinstance(value, str):
        field.refuse(value, allowed)
    if value in field.option.later:
        field.refuse(value, "not in this release; " + allowed)
    if value not in field.option.choices:
        field.refuse(value, allowed)


def _check_integer(field: Field, value: Any) -> None:
    if type(value) is not int:
        field.refuse(value, f"must be a whole number, not {_kind_name(value)}")
    _check_range(field, value)


def _check_seconds(field: Field, value: Any) -> None:
    if type(value) is not float and type(value) is not int:
        field.refuse(value, f"must be a number of seconds, not {_kind_name(value)}")
    if not math.isfinite(value):
        field.refuse(value, "must be a finite number of seconds")
    _check_range(field, value)


def _check_number(field: Field, value: Any) -> None:
    if type(value) is not float or not math.isfinite(value):
        field.refuse(value, f"must be a number, not {_kind_name(value)}")
    _check_range(field, value)


def _check_integers(field: Field, value: Any) -> None:
    if not isinstance(value, tuple) or not value:
        field.refuse(value, "must be a list of whole numbers")
    if len(value) > ITEMS_MAX:
        field.refuse(f"{len(value)} items", f"must be at most {ITEMS_MAX} items")
    for item in value:
        _check_integer(field, item)


def _check_table(field: Field, value: Any) -> None:
    try:
        table = read_table(value)
    except ValueError as error:
        field.refuse(value, str(error))
    if table != value:
        field.refuse(value, "must be a tuple of (start, end, K) in ascending order")


def _check_switch(field: Field, value: Any) -> None:
    if type(value) is not bool:
        field.refuse(value, f"must be true or false, not {_kind_name(value)}")


def _check_texts(field: Field, value: Any) -> None:
    if not isinstance(value, tuple):
        field.refuse(value, f"must be a list of texts, not {_kind_name(value)}")
    if len(value) > ITEMS_MAX:
        field.refuse(f"{len(value)} items", f"must be at most {ITEMS_MAX} items")
    for item in value:
        _check_text(field, item)


def _check_object(field: Field, value: Any) -> None:
    _check_text(field, value)


def _check_range(field: Field, value: float) -> None:
    low, high = field.option.low, field.option.high
    unit = f" {field.option.unit}" if field.option.unit else ""
    if low is not None and value < low:
        auto = " (or auto)" if _is_auto(field, "auto") else ""
        field.refuse(value, f"must be at least {low}{unit}{auto}")
    if high is not None and value > high:
        field.refuse(value, f"must be at most {high}{unit}")


def _kind_name(value: object) -> str:
    if isinstance(value, bool):
        return "true/false"
    names = {"str": "a text", "int": "a whole number", "float": "a decimal number"}
    kind = type(value).__name__
    return names.get(kind, f"a {kind}")


_CHECKS = {
    Kind.TEXT: _check_text,
    Kind.CHOICE: _check_choice,
    Kind.INTEGER: _check_integer,
    Kind.SIZE: _check_integer,
    Kind.SECONDS: _check_seconds,
    Kind.NUMBER: _check_number,
    Kind.INTEGERS: _check_integers,
    Kind.TABLE: _check_table,
    Kind.SWITCH: _check_switch,
    Kind.TEXTS: _check_texts,
    Kind.OBJECT: _check_object,
}
