"""What drafters have in common that read tokens and run no model: no taps, no passes, no files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from drumline.core.traits import DrafterTraits
from drumline.drafting.base import DraftRow, Proposal
from drumline.models.checkpoint import Checkpoint
from drumline.models.layers import ModelOutput


class HostDrafter:
    """Base of drafters that look at committed tokens alone. What they keep can be made anew from
    those, so they need not see a step in which they may not draft.

    A subclass gives ``method`` and `draft`, and extends `forget` if it keeps anything.
    """

    method = "host"

    def __init__(self) -> None:
        self.traits = DrafterTraits(method=self.method, reads_hidden=False)
        self.taps: tuple[int, ...] = ()

    def propose(
        self, rows: Sequence[DraftRow], output: ModelOutput | None, draft_k: int
    ) -> Proposal:
        return Proposal(tuple(tuple(self.draft(row)) if row.k else () for row in rows))

    def draft(self, row: DraftRow) -> Sequence[int]:
        """At most ``row.k`` guesses for the positions from ``row.length`` on; never called with
        ``k`` 0."""
        raise NotImplementedError

    def forget(self, number: int) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is open."""


def no_facts(speculative: Any, checkpoint: Checkpoint) -> Mapping[str, Any]:
    """The facts of a host drafter: no weights, no cache, no positions of its own."""
    return {}
