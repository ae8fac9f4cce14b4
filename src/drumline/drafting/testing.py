"""Drafters for tests, by dotted path or by hand: what each does is known beforehand.

    oracle    the target's own next tokens: everything is accepted
    liar      never the target's next token: nothing is accepted
    random    tokens from a seed: a few are accepted, by chance
    scripted  right for so many positions as a list says, step by step, then wrong
    brittle   an oracle that raises when it is asked for a position outside its range

They read the true outputs from ``outputs``: the whole sequence, prompt first, for each prompt and
sample. Where it is not known they draft token 0, or what their seed says. As custom classes they
find it in `TRUTH`, which a test fills.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from drumline.core.request import Request
from drumline.core.traits import DrafterTraits
from drumline.drafting.base import DraftRow
from drumline.drafting.host import HostDrafter

Key = tuple[tuple[int, ...], int, int]  # prompt, seed, sample index
Outputs = Mapping[Key, Sequence[int]]

TRUTH: dict[Key, Sequence[int]] = {}


def key_of(request: Request) -> Key:
    """What tells the true output of a request, in any engine."""
    return request.prompt_token_ids, request.seed, request.sample_index


class TestingDrafter(HostDrafter):
    """Reads the truth; counts what it was asked, for a test to look at."""

    __test__ = False  # pytest collects no drafters

    def __init__(self, speculative: Any = None, context: Any = None, outputs: Outputs = TRUTH):
        super().__init__()
        self.outputs = outputs
        self.calls = 0
        self.forgotten: list[int] = []

    def true(self, row: DraftRow) -> list[int]:
        """The target's next ``row.k`` tokens, as far as they are known."""
        known = self.outputs.get(key_of(row.request), ())
        return list(known[row.length : row.length + row.k])

    def draft(self, row: DraftRow) -> Sequence[int]:
        self.calls += 1
        return self.guess(row, self.true(row))

    def guess(self, row: DraftRow, true: list[int]) -> list[int]:
        raise NotImplementedError

    def forget(self, number: int) -> None:
        self.forgotten.append(number)


def wrong(token: int) -> int:
    """Any other token."""
    return token - 1 if token else 1


class Oracle(TestingDrafter):
    method = "oracle"

    def guess(self, row: DraftRow, true: list[int]) -> list[int]:
        return true + [0] * (row.k - len(true))


class Liar(TestingDrafter):
    method = "liar"

    def guess(self, row: DraftRow, true: list[int]) -> list[int]:
        return [wrong(token) for token in true]


class Random(TestingDrafter):
    """Each draft a function of the seed, the request and the position."""

    method = "random"
    vocab = 16

    def guess(self, row: DraftRow, true: list[int]) -> list[int]:
        number = row.request.seed * 1_000_003 + row.length
        return [random.Random(number + ahead).randrange(self.vocab) for ahead in range(row.k)]


class Scripted(TestingDrafter):
    """``accepted[i]``: how many of the drafts of a request's i-th proposal are right; the list
    starts over at its end. A proposal is counted by output tokens, so preemption changes nothing.
    """

    method = "scripted"
    accepted: Sequence[int] = (3, 1, 0, 2, 8, 1, 0)

    def guess(self, row: DraftRow, true: list[int]) -> list[int]:
        at = row.length - len(row.request.prompt_token_ids)
        right = self.accepted[at % len(self.accepted)]
        return true[:right] + [wrong(token) for token in true[right:]]


class Brittle(Oracle):
    """Takes positions below ``positions_max`` only; a sequence may grow past it without drafts."""

    method = "brittle"
    positions_max = 32

    def __init__(self, speculative: Any = None, context: Any = None, outputs: Outputs = TRUTH):
        super().__init__(speculative, context, outputs)
        self.traits = DrafterTraits(method=self.method, positions_max=self.positions_max)

    @classmethod
    def facts(cls, speculative: Any, checkpoint: Any) -> dict[str, Any]:
        return {"positions_max": cls.positions_max}

    def guess(self, row: DraftRow, true: list[int]) -> list[int]:
        last = row.length + row.k - 1
        if last >= self.positions_max:
            raise IndexError(f"position {last} is outside 0..{self.positions_max - 1}")
        return super().guess(row, true)
