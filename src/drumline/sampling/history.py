"""What a row has behind it: its request, its committed tokens, the drafts before its position.

    prompt ........ | outputs ..... | drafts ..      position of the new token = their total
    committed = prompt + outputs                     the history of penalties = all of it

`SamplingState` keeps counts per request so that a long history is not counted anew at each step.
It follows whatever tokens it is shown: drafts come, are rejected and go; a preempted request
comes back; a count is never trusted beyond the tokens it was made from. Knows no logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from drumline.core.request import Request

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One position of one sequence that wants a token.

    ``committed`` is the prompt and the kept outputs (the caller's own list will do: it is only
    read during a call); ``drafts`` are the guesses between it and the new token's position.
    """

    request: Request
    committed: Sequence[int]
    drafts: tuple[int, ...] = ()

    @property
    def position(self) -> int:
        """The absolute position of the new token."""
        return len(self.committed) + len(self.drafts)

    @property
    def output_count(self) -> int:
        return self.position - len(self.request.prompt_token_ids)

    def outputs(self) -> list[int]:
        """All output tokens before the new one, drafts included."""
        outputs = list(self.committed[len(self.request.prompt_token_ids) :])
        outputs.extend(self.drafts)
        return outputs

    def last_outputs(self, count: int) -> tuple[int, ...]:
        """The last ``count`` outputs before the new one, or fewer if there are fewer."""
        count = min(count, self.output_count)
        from_committed = max(count - len(self.drafts), 0)
        tail = tuple(self.committed[len(self.committed) - from_committed :])
        return tail + self.drafts[len(self.drafts) - (count - from_committed) :]


class TokenCounts:
    """How often each token stands in one request's outputs, and which stand in its prompt."""

    def __init__(self, prompt: tuple[int, ...]) -> None:
        self.prompt = prompt
        self.prompt_ids: Ids = np.unique(np.asarray(prompt, dtype=np.int64))
        self._tokens: list[int] = []
        self._slot: dict[int, int] = {}  # token id → its place in the arrays below
        self._ids: Ids = np.zeros(16, dtype=np.int64)
        self._counts: Ids = np.zeros(16, dtype=np.int64)

    def follow(self, outputs: list[int]) -> None:
        """Makes the counts those of ``outputs``, at the cost of what differs from before."""
        kept = common_prefix(self._tokens, outputs)
        for token in self._tokens[kept:]:
            self._counts[self._slot[token]] -= 1
        del self._tokens[kept:]
        for token in outputs[kept:]:
            slot = self._place(token)  # may move the arrays, so it comes first
            self._counts[slot] += 1
        self._tokens.extend(outputs[kept:])

    def output_ids(self) -> tuple[Ids, Ids]:
        """The distinct output tokens and how often each came, both ``[distinct]``."""
        used = len(self._slot)
        alive = np.flatnonzero(self._counts[:used])
        return self._ids[alive], self._counts[alive]

    def seen_ids(self) -> Ids:
        """The distinct tokens of prompt and outputs."""
        return np.union1d(self.prompt_ids, self.output_ids()[0])

    def _place(self, token: int) -> int:
        slot = self._slot.get(token)
        if slot is None:
            slot = self._slot[token] = len(self._slot)
            if slot == len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[slot] = token
        return slot


class SamplingState:
    """The worker's counts per request number. A cache: forgetting an entry changes no result."""

    def __init__(self) -> None:
        self._counts: dict[int, TokenCounts] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def counts(self, row: SamplingRow) -> TokenCounts:
        """The counts of ``row``'s history; valid until the next row of the same request."""
        number, prompt = row.request.number, row.request.prompt_token_ids
        entry = self._counts.get(number)
        if entry is None or (entry.prompt is not prompt and entry.prompt != prompt):
            entry = self._counts[number] = TokenCounts(prompt)
        entry.follow(row.outputs())
        return entry

    def forget(self, number: int) -> None:
        """Drops what is kept for a request that ended or was preempted."""
        self._counts.pop(number, None)


def common_prefix(one: list[int], other: list[int]) -> int:
    """How many leading elements are equal; a few slice comparisons, also for long lists."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:  # the first `low` agree, the first `high` do not
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low
