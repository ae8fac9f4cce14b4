"""The conductor of one rank: numbers, lengths, and nothing decided twice."""

from __future__ import annotations

import pytest

from drumline.core.plan import Row, StepProposal
from drumline.lockstep.conductor import SoloConductor


def row(samples: bool, drafts: tuple[int, ...] = ()) -> Row:
    return Row(0, 0, (1,), (0,), samples, drafts, draft_limit=9, draft_max=3)


def test_steps_are_numbered_and_widths_follow_the_last_step() -> None:
    conductor = SoloConductor(epoch=3)
    prefill = StepProposal(rows=(row(False),), draft_wish=3)
    decode = StepProposal(rows=(row(True),), draft_wish=3)
    plans = [conductor.seal(proposal) for proposal in (prefill, decode, prefill, decode)]
    assert [(plan.epoch, plan.step) for plan in plans] == [(3, 0), (3, 1), (3, 2), (3, 3)]
    assert [plan.draft_k for plan in plans] == [0, 3, 0, 3]
    assert [plan.verify_width for plan in plans] == [1, 1, 4, 1]


def test_what_was_proposed_is_what_is_planned() -> None:
    proposal = StepProposal(rows=(row(True),), released=(4,), draft_wish=1)
    plan = SoloConductor().seal(proposal)
    assert (plan.rows, plan.admitted, plan.released) == (proposal.rows, (), (4,))


def test_drafts_of_another_step_are_our_mistake() -> None:
    with pytest.raises(AssertionError, match="drafts of another step"):
        SoloConductor().seal(StepProposal(rows=(row(True, (5,)),), draft_wish=3))


def test_nobody_drafts_where_no_row_can() -> None:
    """One rank waits for no passes of another: a row past its limit, or without drafts of its
    own, is no reason to draft; one that can is enough."""
    able = Row(0, 4, (1,), (0,), True, (), draft_limit=7, draft_max=1)
    full = Row(1, 4, (1,), (0,), True, (), draft_limit=6, draft_max=3)
    off = Row(2, 4, (1,), (0,), True, (), draft_limit=0, draft_max=0)
    prefill = Row(3, 4, (1,), (0,), False, (), draft_limit=0, draft_max=0)
    for rows, draft_k in (
        ((able,), 3),
        ((full,), 0),
        ((off,), 0),
        ((prefill,), 0),
        ((full, off, prefill), 0),
        ((full, off, able), 3),
    ):
        assert SoloConductor().seal(StepProposal(rows=rows, draft_wish=3)).draft_k == draft_k
