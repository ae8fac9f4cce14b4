"""Which drafts stand, and the tokens that come of them.

    drafts              draft 1 | draft 2 | draft 3
    tokens              draft 1 | other                        corrected: draft 2 does not stand
    tokens              draft 1 | draft 2 | draft 3 | bonus    every draft stands

    match     the target's own token at each position, up to and with the first that is not the
              draft: what comes out does not depend on drafts at all (promise P1)
    standard  rejection sampling, token by token
    block     block verification, the window as a whole

All three give the target's processed distribution, with the history each position really has;
for a greedy request, whose distribution is a point, the three are one. Positions are looked at
from the front and no further than needed. Knows neither how drafts were made nor what becomes of
the tokens.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import torch
from msgspec import Struct

from drumline.sampling.match import Ask, Matcher
from drumline.sampling.rules import Standing, block, standard
from drumline.sampling.sampler import SampledToken, Sampler
from drumline.sampling.window import Window, WindowLogits

_RULES = {"standard": standard, "block": block}


class AcceptMethod(enum.StrEnum):
    """The values of ``rejection_sample_method``."""

    MATCH = "match"
    STANDARD = "standard"
    BLOCK = "block"


class Accepted(Struct, frozen=True):
    """What a window yields: its first ``draft_count`` tokens are drafts that stand, and one more
    follows, unless the window was cut short. With an error there is no token: the request cannot
    go on, its neighbours can."""

    tokens: tuple[SampledToken, ...]
    draft_count: int
    error: str | None = None


class Verifier:
    """Accepts drafts by one method. Uses the sampler's history, noise and log-probabilities."""

    def __init__(self, sampler: Sampler, method: AcceptMethod | str = AcceptMethod.MATCH) -> None:
        self.sampler = sampler
        self.method = AcceptMethod(method)
        self.matcher = None if sampler.make_matcher is None else sampler.make_matcher()

    def verify(self, logits: torch.Tensor, windows: Sequence[Window]) -> list[Accepted]:
        """``[sum of widths, vocab]`` float32, the windows one after another → one entry each.

        Every token carries the log-probabilities that its request asks for, as the same token
        would without speculation. A position without finite logits ends its window; if it is the
        first, the entry is an error. ``logits`` is only read.
        """
        accepted: list[Accepted | None] = [None] * len(windows)
        if self.matcher is not None:
            self._match_at_once(self.matcher, logits, windows, accepted)
        if None in accepted:
            self._step_by_step(logits, windows, accepted)
        return [entry for entry in accepted if entry is not None]

    def forget(self, number: int) -> None:
        """Drops what is kept for a request that ended or was preempted."""
        self.sampler.state.forget(number)
        if self.matcher is not None:
            self.matcher.forget(number)

    def _match_at_once(
        self,
        matcher: Matcher,
        logits: torch.Tensor,
        windows: Sequence[Window],
        accepted: list[Accepted | None],
    ) -> None:
        """Fills in the windows that the matcher takes."""
        asks: list[Ask] = []
        places: list[int] = []
        start = 0
        for at, window in enumerate(windows):
            request, drafts = window.request, window.drafts
            if request.params.logprobs is None and self._matches(window):
                asks.append((request, len(window.committed), drafts, start))
                places.append(at)
            start += len(drafts) + 1
        vocab = self.sampler.vocab_size
        assert logits.nbytes == 4 * start * vocab, "one row of float32 logits per position"
        for at, ids in zip(places, matcher(logits, vocab, asks), strict=True):
            if ids is not None:
                window = windows[at]
                count = len(ids)
                if window.drafts[count - 1 : count] != ids[-1:]:
                    count -= 1  # the last one is the target's own
                accepted[at] = _accepted(window, [SampledToken(token) for token in ids], count)

    def _step_by_step(
        self,
        logits: torch.Tensor,
        windows: Sequence[Window],
        accepted: list[Accepted | None],
    ) -> None:
        """Fills in what is still open."""
        table = self.sampler.host(logits, sum(window.width for window in windows))
        views: list[WindowLogits] = []
        start = 0
        for window in windows:
            views.append(WindowLogits(self.sampler, window, table[start : start + window.width]))
            start += window.width
        left = [at for at, entry in enumerate(accepted) if entry is None]
        matched = [at for at in left if self._matches(windows[at])]
        for at, entry in zip(matched, self._match([views[at] for at in matched]), strict=True):
            accepted[at] = entry
        tested = [at for at in left if accepted[at] is None]
        for at, entry in zip(tested, self._test([views[at] for at in tested]), strict=True):
            accepted[at] = entry

    def _matches(self, window: Window) -> bool:
        return self.method is AcceptMethod.MATCH or window.request.params.greedy

    def _match(self, views: Sequence[WindowLogits]) -> list[Accepted]:
        """All windows together, position by position: a window leaves where it differs."""
        tokens: list[list[SampledToken]] = [[] for _ in views]
        counts = [0] * len(views)
        alive = list(range(len(views)))
        ahead = 0
        while alive:
            asked = [(at, views[at].target(ahead)) for at in alive]
            ready = [(at, target) for at, target in asked if target is not None]
            alive = []
            drawn = self.sampler.tokens([target for _, target in ready])
            for (at, target), token in zip(ready, drawn, strict=True):
                tokens[at].append(self.sampler.report(target, token))
                if views[at].window.drafts[ahead : ahead + 1] == (token,):
                    counts[at] += 1
                    alive.append(at)
            ahead += 1
        return [
            _accepted(view.window, row, count)
            for view, row, count in zip(views, tokens, counts, strict=True)
        ]

    def _test(self, views: Sequence[WindowLogits]) -> list[Accepted]:
        """By the method's rule, window by window; the last tokens are drawn in one go."""
        results: list[Standing] = [_RULES[self.method](view) for view in views]
        drawn = iter(self.sampler.drawer([one.last for one in results if one.last is not None]))
        accepted = []
        for view, one in zip(views, results, strict=True):
            ids = view.window.drafts[: one.draft_count]
            if one.last is not None:
                ids = (*ids, next(drawn))
            tokens = [
                self.sampler.report(target, token)
                for target, token in zip(one.targets, ids, strict=True)
            ]
            accepted.append(_accepted(view.window, tokens, one.draft_count))
        return accepted


def _accepted(window: Window, tokens: list[SampledToken], draft_count: int) -> Accepted:
    if tokens:
        return Accepted(tuple(tokens), draft_count)
    position = len(window.committed)
    return Accepted((), 0, f"the model's logits for position {position} are not finite numbers")
