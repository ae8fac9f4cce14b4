"""How many tokens to draft in a step: one fixed number, a table, or what pays.

    static     num_speculative_tokens, always
    table      by the number of decoding requests
    adaptive   the K with the most expected tokens per time, K = 0 included

What is chosen alone follows from the same vote that is told to those with whom one agrees.
Integers throughout, so that equal inputs give equal lengths on every rank: probabilities and
tokens are counted in 1/1024, times in microseconds. A wish is pure: asked twice, it is the same.
This module knows nothing of limits and blocks, which mask rows and never vote.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from drumline.config.draft_table import clamp_table, read_table
from drumline.config.speculative import PREFIX, SpeculativeConfig
from drumline.core.errors import ConfigError
from drumline.core.plan import DraftVote
from drumline.lockstep.decide import look_around, looks_around, most_per_time
from drumline.scheduler.acceptance import UNIT, Acceptance
from drumline.scheduler.draft_cost import CostCurve

SILENT = DraftVote()


class DraftLength(Protocol):
    """Chooses a step's draft length and learns from executed steps. ``lookup``: the table that
    lengths follow, if they follow one. ``only_proposed``: what was asked of a drafter and not
    proposed teaches nothing, because asking cost nothing."""

    @property
    def lookup(self) -> DraftTable | None: ...

    @property
    def only_proposed(self) -> bool: ...

    def vote(self, decoding: Sequence[int]) -> DraftVote:
        """What is told of a step in which these requests decode, by number; nobody: nothing."""
        ...

    def choose(self, vote: DraftVote) -> int:
        """K for a step with this vote and no other. One that says nothing: the longest there is,
        because nobody's batch speaks against it."""
        ...

    def row_max(self, number: int) -> int:
        """The most drafts that pay for one request, in the step wished for last."""
        ...

    def observe(self, number: int, asked_count: int, accepted_count: int) -> None:
        """A request was asked for so many drafts, and so many of them were right."""
        ...

    def observe_seconds(self, rows: int, draft_k: int, draft_count: int, seconds: float) -> None:
        """A pure decode step, K the same before and in it, that verified so many drafts of all its
        rows together took so long."""
        ...

    def executed(self) -> None:
        """A step came to its end; older observations weigh less."""
        ...

    def forget(self, number: int) -> None:
        """The request has ended."""
        ...


@dataclass(frozen=True, slots=True)
class StaticDraftLength:
    """The same length in every step."""

    num_speculative_tokens: int

    @property
    def lookup(self) -> DraftTable | None:
        return None

    @property
    def only_proposed(self) -> bool:
        return False

    def vote(self, decoding: Sequence[int]) -> DraftVote:
        return SILENT

    def choose(self, vote: DraftVote) -> int:
        return self.num_speculative_tokens if vote.wish is None else vote.wish

    def row_max(self, number: int) -> int:
        return self.num_speculative_tokens

    def observe(self, number: int, asked_count: int, accepted_count: int) -> None:
        """Nothing is learned."""

    def observe_seconds(self, rows: int, draft_k: int, draft_count: int, seconds: float) -> None:
        """Nothing is learned."""

    def executed(self) -> None:
        """Nothing fades."""

    def forget(self, number: int) -> None:
        """Nothing is kept."""


@dataclass(frozen=True, slots=True)
class DraftTable:
    """Draft length by batch size: call it, or index it as vLLM's list. Sizes start at 1."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]

    def __call__(self, batch_size: int) -> int:
        assert batch_size >= 1, f"a batch of {batch_size} drafts nothing"
        return self.lengths[bisect_right(self.starts, batch_size) - 1]

    __getitem__ = __call__


def dynamic_sd_lookup(table: Any, num_speculative_tokens: int) -> DraftTable:
    """The lookup of a table ``[[start, end, K], …]``.

    Ranges are inclusive, gaps and the tail carry the previous K on, and no K is above
    ``num_speculative_tokens``. Raises `ValueError` for what is no such table.
    """
    entries = clamp_table(read_table(table), num_speculative_tokens)
    return DraftTable(
        tuple(start for start, _, _ in entries), tuple(length for _, _, length in entries)
    )


@dataclass(frozen=True, slots=True)
class TableDraftLength(StaticDraftLength):
    """By the number of decoding requests; prompts in pieces do not count."""

    table: DraftTable

    @property
    def lookup(self) -> DraftTable:
        return self.table

    def vote(self, decoding: Sequence[int]) -> DraftVote:
        return DraftVote(self.table(len(decoding)) if decoding else None)


class AdaptiveDraftLength:
    """The K that maximises expected tokens per second, by measured acceptance and cost.

    Acceptance fades towards its prior with executed steps, so that K = 0, which measures nothing,
    is left again. A request that does worse than the others gets fewer drafts: its k-th draft is
    asked for only while its chance is worth the time of verifying it. Of every 32 steps two take
    the next longer or shorter length, so that its cost and acceptance are known and not believed.

    With ``only_proposed`` chances and costs are those of steps in which drafts were proposed, half
    of what was asked or more: a step without any costs and brings what one of K = 0 does, whatever
    was asked, and speaks for no length and against none.
    """

    def __init__(
        self,
        num_speculative_tokens: int,
        costs: CostCurve,
        acceptance: Acceptance | None = None,
        only_proposed: bool = False,
    ) -> None:
        self.lookup = None
        self.only_proposed = only_proposed
        self.num_speculative_tokens = num_speculative_tokens
        self.costs = costs
        self.acceptance = acceptance or Acceptance(num_speculative_tokens)
        self._step = 0
        self._worth = 0  # least chance, in 1/1024, that pays for verifying one more draft

    def expected_tokens(self, decoding: Sequence[int]) -> tuple[int, ...]:
        """Tokens × 1024 that a step of each draft length 0..K is expected to bring."""
        sums = [UNIT * len(decoding)] * (self.num_speculative_tokens + 1)
        for number in decoding:
            gained = 0
            for position, chance in enumerate(self.acceptance.chances(number)):
                gained += chance
                sums[position + 1] += gained
        return tuple(sums)

    def vote(self, decoding: Sequence[int]) -> DraftVote:
        if not decoding:
            return SILENT
        return DraftVote(None, self.expected_tokens(decoding), self.costs.micros(len(decoding)))

    def choose(self, vote: DraftVote) -> int:
        self._worth = 0
        if not vote.tokens:
            return self.num_speculative_tokens
        best = most_per_time(vote.tokens, vote.micros)
        if looks_around(self._step):
            return look_around(best, self._step, self.num_speculative_tokens)
        if best:
            row_count = vote.tokens[0] // UNIT
            per_draft = max(0, vote.micros[best] - vote.micros[best - 1]) // row_count
            self._worth = per_draft * vote.tokens[best] // vote.micros[best]
        return best

    def row_max(self, number: int) -> int:
        chances = self.acceptance.chances(number)
        count = 0
        while count < len(chances) and chances[count] >= self._worth:
            count += 1
        return count

    def observe(self, number: int, asked_count: int, accepted_count: int) -> None:
        self.acceptance.observe(number, asked_count, accepted_count)

    def observe_seconds(self, rows: int, draft_k: int, draft_count: int, seconds: float) -> None:
        self.costs.observe(rows, draft_k, round(seconds * 1_000_000), draft_count)

    def executed(self) -> None:
        self._step += 1
        self.acceptance.fade()

    def forget(self, number: int) -> None:
        self.acceptance.forget(number)


def make_draft_length(
    spec: SpeculativeConfig | None, costs: CostCurve | None = None, data_parallel_size: int = 1
) -> DraftLength:
    """What a resolved speculative config asks for; ``costs`` are needed by adaptive alone.

    Several replicas either agree on each step's length, to which this one adds its wish, or are
    told by ``dp_draft_length`` to take the static one.
    """
    if spec is None:
        return StaticDraftLength(0)
    count = spec.num_speculative_tokens
    if count is None:
        raise ConfigError(PREFIX + "num_speculative_tokens", None, "must be given")
    if data_parallel_size > 1 and spec.dp_draft_length == "static":
        return StaticDraftLength(count)
    if spec.draft_length == "table":
        table = spec.num_speculative_tokens_per_batch_size
        return TableDraftLength(count, dynamic_sd_lookup(table, count))
    if spec.draft_length == "adaptive":
        assert costs is not None, "an adaptive draft length needs measured costs"
        # A lookup finds nothing most of the time, which costs nothing.
        looks_up = spec.runs_on_host or spec.lookup_miss_tokens is not None
        return AdaptiveDraftLength(count, costs, only_proposed=looks_up)
    return StaticDraftLength(count)
