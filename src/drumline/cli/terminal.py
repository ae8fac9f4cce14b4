"""Text as a terminal may show it."""

from __future__ import annotations

import unicodedata


def printable(text: str) -> str:
    """Control characters are shown as U+FFFD, so that a terminal does not obey what a model, or a
    file, makes it print. Line breaks and tabs stay."""
    return "".join(
        char
        if char in "\n\t" or unicodedata.category(char) != "Cc"
        else "\N{REPLACEMENT CHARACTER}"
        for char in text
    )
