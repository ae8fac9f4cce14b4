"""A drafter that looks the end of the sequence up first, and asks a network for the rest.

Where the last tokens stood before, what followed them then is often a better guess than a small
network's, and costs nothing; elsewhere the network's drafts stand. For the network a row that was
found is one that may not draft: it takes in what was committed and has no part in later passes,
and passes that no row is left for are not made.

    found, passes of a step of draft length 3     nobody  1 2 3     some  1 2 3     all  1

Where other ranks take part in the network's passes it runs all of them for every row, whatever was
found: they are in everybody's script. Knows no network.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from drumline.core.traits import DrafterTraits
from drumline.drafting.base import Drafter, DraftRow, PassLedger, Proposal
from drumline.drafting.ngram import NgramDrafter
from drumline.models.layers import ModelOutput


class LookupFirst:
    """``inner``'s drafts, but those of ``ngram`` in rows where it finds any. ``ledger``: where
    ``inner`` issues its passes."""

    def __init__(self, ngram: NgramDrafter, inner: Drafter, ledger: PassLedger) -> None:
        self.ngram = ngram
        self.inner = inner
        self.ledger = ledger

    @property
    def traits(self) -> DrafterTraits:
        return self.inner.traits

    @property
    def taps(self) -> tuple[int, ...]:
        return self.inner.taps

    def propose(
        self, rows: Sequence[DraftRow], output: ModelOutput | None, draft_k: int
    ) -> Proposal:
        looked_up = self.ngram.propose(rows, output, draft_k).drafts
        if any(looked_up) and not self.ledger.exact:
            rows = [
                replace(row, k=0) if found else row
                for row, found in zip(rows, looked_up, strict=True)
            ]
            draft_k = max(row.k for row in rows)
            self.ledger.shorten(self.traits.passes(draft_k))
        proposed = self.inner.propose(rows, output, draft_k)
        drafts, probs = list(proposed.drafts), list(proposed.probs)
        for at, found in enumerate(looked_up):
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
