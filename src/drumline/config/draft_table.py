"""Draft lengths by batch size: ``[[start, end, K], …]``, as vLLM writes them.

    [[1, 4, 3], [8, 16, 1]]        1–4 requests draft 3 tokens, 8–16 draft 1;
                                   5–7 and 17… carry the last K before them on

Ranges are inclusive and may stand in any order. This module checks a table and cuts it to the
configured draft length; what a batch is, is the scheduler's affair.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

Entry = tuple[int, int, int]
Table = tuple[Entry, ...]

ENTRIES_MAX = 256
BATCH_SIZE_MAX = 2**20


def read_table(value: Any) -> Table:
    """The entries in ascending order. Raises `ValueError` with a sentence on what is wrong."""
    if not isinstance(value, list | tuple):
        raise ValueError("must be a list of [start, end, K]")
    if not value:
        raise ValueError("must not be empty; leave it out for one draft length")
    if len(value) > ENTRIES_MAX:
        raise ValueError(f"must have at most {ENTRIES_MAX} entries, not {len(value)}")
    table = tuple(sorted(_read_entry(entry) for entry in value))
    if table[0][0] != 1:
        raise ValueError(f"the first range must start at 1, not {table[0][0]}")
    for (_, end, _), (start, _, _) in pairwise(table):
        if start <= end:
            raise ValueError(f"ranges overlap at {start}")
    return table


def _read_entry(entry: Any) -> Entry:
    numbers = tuple(entry) if isinstance(entry, list | tuple) else ()
    if len(numbers) != 3 or any(type(number) is not int for number in numbers):
        raise ValueError(f"{entry!r} must be three whole numbers: start, end, K")
    start, end, k = numbers
    if start > end:
        raise ValueError(f"{list(numbers)} starts after it ends")
    if start < 1:
        raise ValueError(f"{list(numbers)} starts below 1; ranges must start at 1")
    if end > BATCH_SIZE_MAX:
        raise ValueError(f"{list(numbers)} ends above {BATCH_SIZE_MAX}")
    if k < 0:
        raise ValueError(f"{list(numbers)} has a negative K; 0 is no drafts")
    return start, end, k


def clamp_table(table: Table, num_speculative_tokens: int) -> Table:
    """The same ranges with no K above the configured draft length."""
    return tuple((start, end, min(k, num_speculative_tokens)) for start, end, k in table)
