"""A drafter that looks the end of the sequence up first, and asks a network for the rest.

Where the last tokens stood before, what followed them then is often a better guess than a small
network's, and costs nothing; elsewhere the network's drafts stand. The network runs its passes
either way and for every row: they are in the step's script, and its state follows what was
committed. Knows no network.
"""

from __future__ import annotations

from collections.abc import Sequence

from drumline.core.traits import DrafterTraits
from drumline.drafting.base import Drafter, DraftRow, Proposal
from drumline.drafting.ngram import NgramDrafter
from drumline.models.layers import ModelOutput


class LookupFirst:
    """``inner``'s drafts, but those of ``ngram`` in rows where it finds any."""

    def __init__(self, ngram: NgramDrafter, inner: Drafter) -> None:
        self.ngram = ngram
        self.inner = inner

    @property
    def traits(self) -> DrafterTraits:
        return self.inner.traits

    @property
    def taps(self) -> tuple[int, ...]:
        return self.inner.taps

    def propose(
        self, rows: Sequence[DraftRow], output: ModelOutput | None, draft_k: int
    ) -> Proposal:
        proposed = self.inner.propose(rows, output, draft_k)
        drafts, probs = list(proposed.drafts), list(proposed.probs)
        for at, found in enumerate(self.ngram.propose(rows, output, draft_k).drafts):
            if found:
                drafts[at] = found
                if probs:
                    probs[at] = (None,) * len(found)  # nobody drew them
        return Proposal(tuple(drafts), tuple(probs))

    def forget(self, number: int) -> None:
        self.ngram.forget(number)
        self.inner.forget(number)

    def close(self) -> None:
        self.inner.close()
