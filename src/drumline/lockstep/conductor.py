"""Turns what a replica wants into what is executed.

This is the form for one rank, where agreement is a function call: the wish is the decision. The
agreed form, in which leaders exchange their shapes and a step may also be refused, comes with
several ranks and keeps this signature's place in the loop. Knows no request beyond its row.
"""

from __future__ import annotations

from typing import Protocol

from drumline.core.plan import Row, StepPlan, StepProposal


class Conductor(Protocol):
    def seal(self, proposal: StepProposal) -> StepPlan:
        """The plan that every rank of the replica executes next."""
        ...


def may_draft(row: Row) -> bool:
    """Whether the row can bring a draft, even if all it verifies now is turned down."""
    return row.samples and row.draft_max > 0 and row.draft_limit > row.start + len(row.tokens) + 1


class SoloConductor:
    """Numbers the steps of one rank; every sealed plan is taken to be executed.

    Where no row can bring a draft nothing is drafted: nobody waits for the passes of one rank.
    """

    def __init__(self, epoch: int = 0) -> None:
        self._epoch = epoch
        self._step = 0
        self._verify_width = 1  # an epoch's first step has no drafts to verify

    def seal(self, proposal: StepProposal) -> StepPlan:
        width = self._verify_width
        for row in proposal.rows:
            assert len(row.drafts) < width, f"request {row.number} brings drafts of another step"
        draft_k = proposal.draft_wish if any(map(may_draft, proposal.rows)) else 0
        plan = StepPlan(
            epoch=self._epoch,
            step=self._step,
            rows=proposal.rows,
            admitted=proposal.admitted,
            released=proposal.released,
            draft_k=draft_k,
            verify_width=width,
        )
        self._step += 1
        self._verify_width = 1 + draft_k
        return plan
