"""Prompt lookup (Saxena 2023; also Yang et al. 2023, "Inference with Reference"): what followed the
last time the sequence's end stood somewhere before, follows again.

    sequence   … a b c d e … x a b c        n = 3: "a b c" stood before; the drafts are d e …

The longest n-gram of ``prompt_lookup_max`` down to ``prompt_lookup_min`` tokens that stood before
is taken, and of its places the newest. A continuation may run into its own drafts, as a copy in
Lempel and Ziv's compression does, so that a short period is followed for as long as may be drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drumline.drafting.base import DrafterContext, DraftRow
from drumline.drafting.host import HostDrafter, no_facts

Gram = tuple[int, ...]

facts = no_facts


def load(context: DrafterContext) -> NgramDrafter:
    settings: Any = context.speculative
    return NgramDrafter(settings.prompt_lookup_min, settings.prompt_lookup_max)


class GramIndex:
    """Where each n-gram of one sequence ended last. It grows with the sequence and is never
    rescanned: ``(longest - shortest + 1)`` entries per token at most.

    The n-gram at the very end is not in it until a token follows: it would find itself.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        assert 1 <= shortest <= longest
        self.shortest = shortest
        self.longest = longest
        self._next: dict[Gram, int] = {}  # n-gram → the position after its newest place
        self._count = 0  # n-grams that end before this position are in

    def follow(self, tokens: Sequence[int]) -> None:
        """Takes in what is new of ``tokens``, which only ever grow."""
        assert self._count <= max(0, len(tokens) - 1), "a committed sequence became shorter"
        for end in range(self._count + 1, len(tokens)):
            for size in range(self.shortest, min(self.longest, end) + 1):
                self._next[tuple(tokens[end - size : end])] = end
        self._count = max(0, len(tokens) - 1)

    def find(self, tokens: Sequence[int]) -> int | None:
        """The position after the newest place of the longest n-gram that ends ``tokens``."""
        for size in range(min(self.longest, len(tokens) - 1), self.shortest - 1, -1):
            found = self._next.get(tuple(tokens[len(tokens) - size :]))
            if found is not None:
                return found
        return None

    def __len__(self) -> int:
        return len(self._next)


class NgramDrafter(HostDrafter):
    """Drafts what followed the same words before, in the same sequence."""

    method = "ngram"

    def __init__(self, shortest: int, longest: int) -> None:
        super().__init__()
        self.shortest = shortest
        self.longest = longest
        self._indices: dict[int, GramIndex] = {}

    def draft(self, row: DraftRow) -> Sequence[int]:
        tokens = row.committed
        index = self._indices.get(row.number)
        if index is None:
            index = self._indices[row.number] = GramIndex(self.shortest, self.longest)
        index.follow(tokens)
        found = index.find(tokens)
        if found is None:
            return ()
        drafts = list(tokens[found : found + row.k])
        period = len(tokens) - found
        while len(drafts) < row.k:
            drafts.append(drafts[len(drafts) - period])
        return drafts

    def forget(self, number: int) -> None:
        self._indices.pop(number, None)
