"""Whole numbers as people write them: ``4096``, ``25.6k``, ``8K``, ``2G``.

The reading is vLLM's, so that a command line carries over to the same number:

    k m g t    powers of 1000, decimals allowed (``1.5k`` = 1500, cut to a whole number)
    K M G T    powers of 1024, no decimals (``1K`` = 1024)

This module knows text and numbers; what a number is for, and its range, is the field's affair.
"""

from __future__ import annotations

import re

_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SUFFIXED = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kmgtKMGT])")
_PLAIN = re.compile(r"[+-]?[0-9]+")

# Longer texts are no sizes; the limit also keeps int() from being fed megabytes of digits.
_LENGTH_MAX = 32


def parse_size(text: str) -> int:
    """The number ``text`` stands for. Raises `ValueError` with a sentence on what is allowed."""
    text = text.strip()
    if len(text) > _LENGTH_MAX:
        raise ValueError("too long for a number")
    if suffixed := _SUFFIXED.fullmatch(text):
        number, suffix = suffixed.groups()
        if suffix in _DECIMAL:
            # Through a float and cut, as vLLM does it: 1.001k is 1000 there, so it is here.
            return int(float(number) * _DECIMAL[suffix])
        if "." in number:
            raise ValueError(
                f"decimals go with k, m, g, t only (powers of 1000); "
                f"write {number}{suffix.lower()} or a whole number of {suffix}"
            )
        return int(number) * _BINARY[suffix]
    return parse_integer(text, "must be a whole number, or one with k, m, g, t or K, M, G, T")


def parse_integer(text: str, problem: str = "must be a whole number") -> int:
    """A plain decimal integer; raises `ValueError(problem)` for anything else."""
    text = text.strip()
    if len(text) > _LENGTH_MAX or not _PLAIN.fullmatch(text):
        raise ValueError(problem)
    return int(text)


def format_bytes(count: int) -> str:
    """``count`` bytes for people, in powers of 1024: ``345 B``, ``1.5 MiB``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("the last unit has no upper end")
