"""What ranks of one replica tell each other within a step: accepted tokens and drafts.

The first rank alone samples and draws; the others compute the same passes and are told what became
of them, so that they can make the next pass. Where they do not draft, the next plan tells them.
Knows no rule of acceptance and no noise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from numpy.typing import ArrayLike

from drumline.sampling.accept import Accepted, Verifier
from drumline.sampling.draft import DraftMethod, DraftSampler, DraftToken
from drumline.sampling.history import SamplingRow
from drumline.sampling.sampler import SampledToken, Sampler
from drumline.sampling.window import Window
from drumline.worker.script import StepScript

UNTOLD = "is told by the next plan"


class SharedVerifier(Verifier):
    """A `Verifier` of one rank of several that share a replica."""

    def __init__(self, sampler: Sampler, method: str, script: StepScript) -> None:
        super().__init__(sampler, method)
        self._script = script

    def verify(self, logits: torch.Tensor, windows: Sequence[Window]) -> list[Accepted]:
        script = self._script
        if script.leads:
            found = super().verify(logits, windows)
            if script.tells:
                script.share([[token.token_id for token in one.tokens] for one in found])
            return found
        if not script.tells:
            return [Accepted((), 0, UNTOLD)] * len(windows)
        return [_accepted(row) for row in script.share(())]


def _accepted(row: Sequence[int]) -> Accepted:
    """A row without tokens is one that cannot go on; its leader has the reason."""
    if not row:
        return Accepted((), 0, "cannot go on")
    return Accepted(tuple(SampledToken(token, None) for token in row), len(row) - 1)


class SharedDraftSampler(DraftSampler):
    """A `DraftSampler` of one rank of several that share a replica. Where all drafts come of one
    pass nobody computes with them, and the others draw nothing."""

    def __init__(
        self,
        vocab_size: int,
        method: DraftMethod | str,
        sharpening: float,
        token_table: ArrayLike | None,
        sampler: Sampler,
        script: StepScript,
    ) -> None:
        super().__init__(
            vocab_size,
            method,
            sharpening,
            token_table,
            sampler.state,
            sampler.drawer,
            sampler.make_matcher,
        )
        self._script = script

    def draw(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[DraftToken | None]:
        script = self._script
        drafter = script.drafter
        told = script.tells and drafter is not None and not drafter.in_one_pass
        if script.leads:
            found = super().draw(logits, rows)
            if told:
                script.share([[] if token is None else [token.token_id] for token in found])
            return found
        if not told:
            return [None] * len(rows)
        shared = script.share(())[: len(rows)]
        return [DraftToken(row[0]) if row else None for row in shared]
