"""From a drafter's logits to one draft per row: what the target is likely to say here.

    greedy         the best token
    coupled        argmax(beta * z / T + g) with the target's own noise g at that position, so that
                   draft and target fall together even where both are uncertain
                   (Daliri, Musco, Suresh 2024: drafter-invariant speculative decoding)
    probabilistic  a draw from softmax(beta * z / T) with noise of its own, and that distribution

z are the drafter's logits after what the request does to the target's: bans, bias and penalties
for that position's history, drafts included, and top_k, top_p, min_p. A draft is a guess: a row
of logits that are no numbers, or that leaves no token, gives none. Knows no drafter and no
target, and cannot change a token that is emitted.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import ArrayLike, NDArray

from drumline.core.errors import UsageError
from drumline.core.random import Purpose, purpose_word
from drumline.sampling.distribution import Distribution, distribution
from drumline.sampling.draw import Drawer, LogitDraw, draw_tokens
from drumline.sampling.history import SamplingRow, SamplingState
from drumline.sampling.match import Ask, MakeMatcher, Matcher
from drumline.sampling.noise import TokenTable
from drumline.sampling.processors import edit, edits

Logits = NDArray[np.float32]


class DraftMethod(enum.StrEnum):
    """How drafts are chosen; the values of ``draft_sample_method``."""

    COUPLED = "coupled"
    GREEDY = "greedy"
    PROBABILISTIC = "probabilistic"


class DraftToken(Struct, frozen=True):
    """One draft, as a target token id. ``probs`` is the distribution over target ids that it was
    drawn from; None for a deterministic draft (and for coupled ones, which only match takes)."""

    token_id: int
    probs: Distribution | None = None


class DraftSampler:
    """Chooses drafts, each row by itself.

    ``vocab_size`` is the target's. ``token_table`` ``[draft_vocab]`` gives the target id of each
    draft id, strictly ascending; None: draft ids are target ids. ``sharpening`` is beta, at least
    1 (infinite: greedy); it acts on coupled and probabilistic drafts alike. Raises `UsageError`
    for a table or a sharpening that is out of range.
    """

    def __init__(
        self,
        vocab_size: int,
        method: DraftMethod | str = DraftMethod.COUPLED,
        sharpening: float = 1.0,
        token_table: ArrayLike | None = None,
        state: SamplingState | None = None,
        drawer: Drawer = draw_tokens,
        make_matcher: MakeMatcher | None = None,
    ) -> None:
        if not sharpening >= 1.0:
            raise UsageError(f"sharpening {sharpening!r} is not a number of at least 1")
        self.vocab_size = vocab_size
        self.method = DraftMethod(method)
        self.drawer = drawer
        self.sharpening = float(sharpening)
        self.table = None if token_table is None else _checked_table(token_table, vocab_size)
        self.state = SamplingState() if state is None else state
        self.matcher: Matcher | None = None
        if make_matcher is not None and self.method is not DraftMethod.PROBABILISTIC:
            greedy = self.method is DraftMethod.GREEDY or math.isinf(self.sharpening)
            self.matcher = make_matcher(self.table, self.sharpening, greedy)

    @property
    def draft_vocab_size(self) -> int:
        return self.vocab_size if self.table is None else len(self.table.ids)

    def draw(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[DraftToken | None]:
        """``[rows, draft_vocab]`` float32 → a draft per row, None where the logits give none.

        Each row's ``drafts`` are those already chosen in this step. ``logits`` is only read.
        """
        chosen: list[DraftToken | None] = [None] * len(rows)
        left: Iterable[int] = range(len(rows))
        if self.matcher is not None:
            left = self._match_at_once(self.matcher, logits, rows, chosen)
        if left:
            self._row_by_row(logits, rows, left, chosen)
        return chosen

    def _match_at_once(
        self,
        matcher: Matcher,
        logits: torch.Tensor,
        rows: Sequence[SamplingRow],
        chosen: list[DraftToken | None],
    ) -> list[int]:
        """The drafts of the rows that the matcher takes; returns the others."""
        vocab = self.draft_vocab_size
        assert logits.nbytes == 4 * len(rows) * vocab, "one row of float32 logits per row"
        asks: list[Ask] = [(row.request, row.position, (), at) for at, row in enumerate(rows)]
        left: list[int] = []
        for at, found in enumerate(matcher(logits, vocab, asks)):
            if found is None:
                left.append(at)
            elif found:
                chosen[at] = DraftToken(found[0])
        return left

    def _row_by_row(
        self,
        logits: torch.Tensor,
        rows: Sequence[SamplingRow],
        left: Iterable[int],
        chosen: list[DraftToken | None],
    ) -> None:
        """The drafts of the rows that are ``left``."""
        assert logits.shape == (len(rows), self.draft_vocab_size), "one row of logits per row"
        assert logits.dtype == torch.float32, "logits are float32"
        table: Logits = logits.detach().cpu().contiguous().numpy()
        waiting: list[tuple[int, LogitDraw]] = []
        for index in left:
            row = rows[index]
            edited = self._edit(table[index], row)
            top = int(np.argmax(edited))  # the first of equals; a NaN wins over everything
            maximum = float(edited[top])
            if not math.isfinite(maximum):
                continue
            if self._deterministic(row):
                chosen[index] = DraftToken(self._token(top))
            else:
                waiting.append((index, self._draw(edited, maximum, row)))
        places = self.drawer([draw for _, draw in waiting])
        for (index, draw), place in zip(waiting, places, strict=True):
            probs = distribution(draw) if self.method is DraftMethod.PROBABILISTIC else None
            chosen[index] = DraftToken(self._token(place), probs)

    def forget(self, number: int) -> None:
        """Drops what is kept for a request that ended or was preempted."""
        self.state.forget(number)
        if self.matcher is not None:
            self.matcher.forget(number)

    def _deterministic(self, row: SamplingRow) -> bool:
        return (
            self.method is DraftMethod.GREEDY
            or row.request.params.greedy
            or math.isinf(self.sharpening)
        )

    def _edit(self, logits: Logits, row: SamplingRow) -> Logits:
        """Parameters speak of target ids, so they act on a row spread over the target's."""
        if self.table is None or not edits(row.request):
            return edit(logits, row, self.state)
        wide = np.full(self.vocab_size, -np.inf, dtype=np.float32)
        wide[self.table.ids] = logits
        edited: Logits = edit(wide, row, self.state)[self.table.ids]
        return edited

    def _draw(self, edited: Logits, maximum: float, row: SamplingRow) -> LogitDraw:
        coupled = self.method is DraftMethod.COUPLED
        purpose = Purpose.TARGET if coupled else purpose_word(Purpose.DRAFT, len(row.drafts))
        return LogitDraw(row, edited, maximum, purpose, self.table, self.sharpening)

    def _token(self, place: int) -> int:
        return place if self.table is None else int(self.table.ids[place])


def _checked_table(token_table: ArrayLike, vocab_size: int) -> TokenTable:
    ids = np.asarray(token_table).astype(np.int64)
    if ids.ndim != 1 or len(ids) == 0:
        raise UsageError(f"a token table has one dimension and an entry, not shape {ids.shape}")
    if ids[0] < 0 or ids[-1] >= vocab_size:
        raise UsageError(
            f"token table: ids {ids[0]} to {ids[-1]} are not inside the vocabulary of {vocab_size}"
        )
    falls = np.flatnonzero(np.diff(ids) <= 0)
    if len(falls):
        at = int(falls[0])
        raise UsageError(
            f"token table: draft id {at + 1} stands for {ids[at + 1]}, not above {ids[at]}"
        )
    return TokenTable.of(ids)
