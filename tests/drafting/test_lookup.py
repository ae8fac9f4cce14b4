"""Lookup before a network: whose drafts stand in a row, and that nothing is forgotten by halves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from drafting.rows import draft_row
from drumline.core.traits import DrafterTraits
from drumline.drafting.base import DraftRow, Proposal
from drumline.drafting.lookup import LookupFirst
from drumline.drafting.ngram import NgramDrafter
from drumline.models.layers import ModelOutput
from drumline.sampling.distribution import Distribution

DRAWN = Distribution(np.array([90]), np.ones(1))


class Network:
    """Drafts 90, 91, … for every row and notes what it is asked."""

    traits = DrafterTraits(method="network", runs_forward=True, stateful=True)
    taps = (2,)

    def __init__(self, drawn: bool = False) -> None:
        self.drawn = drawn
        self.asked: list[list[int]] = []
        self.forgotten: list[int] = []
        self.closed = False

    def propose(
        self, rows: Sequence[DraftRow], output: ModelOutput | None, draft_k: int
    ) -> Proposal:
        self.asked.append([row.k for row in rows])
        drafts = tuple(tuple(range(90, 90 + row.k)) for row in rows)
        probs = tuple((DRAWN,) * row.k for row in rows) if self.drawn else ()
        return Proposal(drafts, probs)

    def forget(self, number: int) -> None:
        self.forgotten.append(number)

    def close(self) -> None:
        self.closed = True


ROWS = [
    draft_row([1, 2, 3, 9, 1, 2, 3], 3, number=0),  # stood before
    draft_row([1, 2, 3, 4], 2, number=1),  # nothing repeats
    draft_row([5, 6, 5, 6], 0, number=2),  # may not draft
]


def test_rows_that_repeat_copy_and_the_others_are_the_networks() -> None:
    network = Network()
    drafter = LookupFirst(NgramDrafter(2, 3), network)
    assert drafter.propose(ROWS, None, 3) == Proposal(((9, 1, 2), (90, 91), ()))
    assert network.asked == [[3, 2, 0]], "the network's passes are in the script either way"
    assert (drafter.traits, drafter.taps) == (network.traits, network.taps)


def test_a_copy_was_drawn_from_nothing() -> None:
    drafter = LookupFirst(NgramDrafter(2, 3), Network(drawn=True))
    proposal = drafter.propose(ROWS, None, 3)
    assert proposal.probs == ((None, None, None), (DRAWN, DRAWN), ())


def test_both_forget_and_the_network_is_closed() -> None:
    network, ngram = Network(), NgramDrafter(2, 3)
    drafter = LookupFirst(ngram, network)
    drafter.propose(ROWS, None, 3)
    drafter.forget(0)
    assert network.forgotten == [0]
    again = draft_row([1, 2, 3, 9, 1, 2], 1, number=0)  # shorter: only who forgot can take it
    assert drafter.propose([again], None, 1).drafts == ((3,),)
    drafter.close()
    assert network.closed
