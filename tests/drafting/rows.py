"""Rows for drafters that read tokens alone."""

from __future__ import annotations

from collections.abc import Sequence

from drumline.core.params import SamplingParams
from drumline.core.request import Request
from drumline.drafting.base import DraftRow


def draft_row(tokens: Sequence[int], k: int, number: int = 0, prompt_count: int = 1) -> DraftRow:
    """A sequence with these committed tokens that may draft k."""
    prompt = tuple(tokens[:prompt_count])
    return DraftRow(
        request=Request(number, prompt, SamplingParams(), 100, 0),
        committed=list(tokens),
        start=len(tokens) - 2,
        count=1,
        offset=0,
        block_ids=(),
        k=k,
        width=1,
    )
