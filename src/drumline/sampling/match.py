"""The seam to compiled match acceptance: what is asked of it, and what it says.

A `Matcher` is a quicker way to what `accept.Verifier` and `draft.DraftSampler` work out step by
step, for the requests it takes; with none the tokens are the same. Knows no way of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from drumline.core.request import Request
from drumline.sampling.noise import TokenTable

Ask = tuple[Request, int, tuple[int, ...], int]
"""(request, position of the window's first token, drafts, the window's first row of logits)."""


class Matcher(Protocol):
    def __call__(
        self, logits: Tensor, vocab: int, asks: Sequence[Ask]
    ) -> list[tuple[int, ...] | None]:
        """``[rows, vocab]`` → for each window its own tokens up to and with the first that is not
        the draft, and none from a position on whose logits are no finite numbers. None: ask
        elsewhere."""
        ...

    def forget(self, number: int) -> None:
        """Drops what is kept for a request that ended or was preempted."""
        ...


class MakeMatcher(Protocol):
    def __call__(
        self, table: TokenTable | None = None, sharpening: float = 1.0, greedy: bool = False
    ) -> Matcher: ...
