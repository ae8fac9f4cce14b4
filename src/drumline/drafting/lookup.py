"""A drafter that looks the end of the sequence up first, and asks a network for the rest.

Where the last tokens stood before, what followed them then is often a better guess than a small
network's, and costs nothing; elsewhere the network's drafts stand. For the network a row that was
found is one that may not draft: it takes in what was committed and has no part in later passes,
and passes that no row is left for are not made.

    found, passes of a step of draft length 3     nobody  1 2 3     some  1 2 3     all  1 or none

A copy that is right is right for long, and a network's draft less so: ``miss_tokens`` lets it make
fewer than are copied, and fewer passes. Where other ranks take part in these, they are in
everybody's script, and all are run for every row, whatever was found. Knows no network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from msgspec import structs

from drumline.core.traits import DrafterTraits
from drumline.drafting.base import Drafter, DraftRow, PassLedger, Proposal
from drumline.drafting.ngram import NgramDrafter
from drumline.models.layers import ModelOutput


class LookupFirst:
    """``inner``'s drafts, but those of ``ngram`` in rows where it finds any. ``ledger``: where
    ``inner`` issues its passes. ``miss_tokens``: most drafts of ``inner``; None: as many."""

    def __init__(
        self,
        ngram: NgramDrafter,
        inner: Drafter,
        ledger: PassLedger,
        miss_tokens: int | None = None,
    ) -> None:
        self.ngram = ngram
        self.inner = inner
        self.ledger = ledger
        self.miss_tokens = miss_tokens
        # On no rank a pass is made for drafts that the network may not make.
        self._traits = replace(inner.traits, drafts_max=miss_tokens)

    @property
    def traits(self) -> DrafterTraits:
        return self._traits

    @property
    def taps(self) -> tuple[int, ...]:
        return self.inner.taps

    def propose(
        self, rows: Sequence[DraftRow], output: ModelOutput | None, draft_k: int
    ) -> Proposal:
        looked_up = self.ngram.propose(rows, output, draft_k).drafts
        spares = not self.ledger.exact
        if self.miss_tokens is not None:
            draft_k = min(draft_k, self.miss_tokens)
        wanted = [
            0 if found and spares else min(row.k, draft_k)
            for row, found in zip(rows, looked_up, strict=True)
        ]
        pairs = zip(rows, wanted, strict=True)
        rows = [row if row.k == k else structs.replace(row, k=k) for row, k in pairs]
        if spares:
            draft_k = max(wanted, default=0)
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
