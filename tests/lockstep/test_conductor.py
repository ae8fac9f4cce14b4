"""Conductors, of one rank and of a group: numbers, lengths, deadlines, and one exchange each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from drumline.core.errors import EngineError, RankLost
from drumline.core.ledger import Ledger
from drumline.core.plan import DraftVote, Row, StepPlan, StepProposal
from drumline.lockstep.conductor import (
    Deadlines,
    GroupConductor,
    Rest,
    SoloConductor,
    Standing,
)
from drumline.lockstep.decide import Rules
from drumline.lockstep.shape import MODE_FIXED, StepShape, Vector, length

from .world import MTP


def row(samples: bool, drafts: tuple[int, ...] = ()) -> Row:
    return Row(0, 0, (1,), (0,), samples, drafts, draft_limit=9, draft_max=3)


def test_steps_are_numbered_and_widths_follow_the_last_step() -> None:
    conductor = SoloConductor(epoch=3)
    prefill = StepProposal(rows=(row(False),), draft_wish=3)
    decode = StepProposal(rows=(row(True),), draft_wish=3)
    sealed = [conductor.seal(proposal) for proposal in (prefill, decode, prefill, decode)]
    plans = [plan for plan in sealed if isinstance(plan, StepPlan)]
    assert [(plan.epoch, plan.step) for plan in plans] == [(3, 0), (3, 1), (3, 2), (3, 3)]
    assert [plan.draft_k for plan in plans] == [0, 3, 0, 3]
    assert [plan.verify_width for plan in plans] == [1, 1, 4, 1]


def test_what_was_proposed_is_what_is_planned() -> None:
    proposal = StepProposal(rows=(row(True),), released=(4,), draft_wish=1)
    plan = SoloConductor().seal(proposal)
    assert isinstance(plan, StepPlan)
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
        plan = SoloConductor().seal(StepProposal(rows=rows, draft_wish=3))
        assert isinstance(plan, StepPlan)
        assert plan.draft_k == draft_k


EMPTY = StepProposal(rows=())
ABLE = Row(0, 4, (1,), (0,), True, (), draft_limit=9, draft_max=3)


def test_one_rank_rests_by_the_same_rules() -> None:
    full = StepProposal(rows=(row(True),), draft_wish=3)
    conductor = SoloConductor()
    assert conductor.seal(EMPTY, Standing(work=False)) is Rest.SLEEP
    assert conductor.seal(EMPTY, Standing(work=True)) is Rest.SLEEP
    assert conductor.seal(full, Standing(pause=True)) is Rest.PAUSE
    assert conductor.seal(EMPTY, Standing(work=False, drain=True)) is Rest.LEAVE
    assert conductor.seal(EMPTY, Standing(work=True, drain=True)) is Rest.SLEEP
    assert conductor.seal(EMPTY, Standing(work=False, stop=True)) is Rest.LEAVE
    trouble = EngineError("a follower broke")
    with pytest.raises(EngineError) as caught:
        conductor.seal(full, Standing(error=trouble))
    assert caught.value is trouble
    assert conductor.next_step == 0
    plan = conductor.seal(full, Standing(stop=True))
    assert isinstance(plan, StepPlan)
    assert conductor.stop_agreed
    assert (plan.step, plan.target_size, plan.agreed) == (0, 0, False)


class Other:
    """A channel whose other member says ``says``, or does not come."""

    ranks = (0, 2)

    def __init__(self, **says: object) -> None:
        self.says = says
        self.timeouts: list[float] = []
        self.lost: RankLost | None = None

    def exchange(self, vector: Vector, timeout: float) -> Sequence[Vector]:
        self.timeouts.append(timeout)
        if self.lost is not None:
            raise self.lost
        head = StepShape.decode(vector)
        idle = StepShape(head.step, head.epoch, head.config_digest)
        idle = replace(idle, ledger_step=head.ledger_step, ledger_digest=head.ledger_digest)
        return [vector, replace(idle, **self.says).encode(3)]  # type: ignore[arg-type]


def group(channel: Other) -> GroupConductor:
    return GroupConductor(
        channel,
        Rules.of(3, MTP),
        Ledger.in_memory(0),
        config_digest=5,
        drafter=MTP,
        deadlines=Deadlines(5.0, 0.5),
    )


def test_a_deadline_grows_with_what_the_others_may_still_execute() -> None:
    """Tokens that were agreed, the other's too; none after a rest."""
    channel = Other(work=True, target_tokens=40, first_pass_tokens=(40,) * 4, later_pass_tokens=2)
    conductor = group(channel)
    plan = conductor.seal(StepProposal(rows=(ABLE,)))
    assert isinstance(plan, StepPlan)
    assert (plan.target_size, plan.draft_sizes) == (40, (40, 2, 2))
    channel.says = {}
    conductor.seal(EMPTY, Standing(work=False))
    conductor.seal(EMPTY, Standing(work=False))
    assert channel.timeouts == [5.0, 5.0 + 0.5 * 84, 5.0]
    assert conductor.exchange_count == conductor.next_step == 3


def test_the_exchange_is_in_the_ring() -> None:
    channel = Other()
    conductor = group(channel)
    conductor.seal(EMPTY, Standing(work=False))
    channel.lost = RankLost(2, 1, "agree", "exchange", "has not come within 5 s")
    with pytest.raises(RankLost):
        conductor.seal(EMPTY)
    first, second = conductor._ledger.ring().records
    assert (first.step, first.completed, second.step, second.completed) == (0, True, 1, False)
    assert str(second.entry) == f"agree #0: all_gather over agreement of 2x{length(3)}"
    assert conductor.next_step == 1, "an exchange that failed was none"


def test_what_is_told() -> None:
    vote = DraftVote(2, (1, 2, 3, 4), (5, 6, 7, 8))
    rows = (ABLE, Row(1, 0, (1, 2, 3), (0,), False))
    conductor = group(Other())
    conductor.mode_ready = True
    shape = conductor.shape_of(StepProposal(rows=rows, vote=vote), Standing(drain=True))
    assert shape == StepShape(
        step=0,
        epoch=0,
        config_digest=5,
        drain=True,
        work=True,
        drafts=True,
        rows=2,
        target_tokens=4,
        later_pass_tokens=1,
        first_pass_tokens=(4, 4, 4, 4),
        micros=(5, 6, 7, 8),
        wish=2,
        mode=MODE_FIXED,
        expected=(1, 2, 3, 4),
    )
    # Nothing to run: nothing is said that would decide for others.
    silent = conductor.shape_of(EMPTY, Standing(work=False))
    assert silent == StepShape(step=0, epoch=0, config_digest=5)


def test_drafts_of_another_step_are_a_groups_mistake_too() -> None:
    with pytest.raises(AssertionError, match="drafts of another step"):
        group(Other()).seal(StepProposal(rows=(row(True, (5,)),)))


def test_another_ranks_trouble_is_everybodys_end() -> None:
    with pytest.raises(RankLost, match="rank 2 lost in step 0, agree, exchange") as caught:
        group(Other(error=True)).seal(StepProposal(rows=(ABLE,)))
    assert caught.value.rank == 2


def test_a_rank_in_trouble_says_what_it_is_however_the_exchange_ends() -> None:
    """The others may have seen its flag, and ended all waits, before it is out of the exchange."""
    channel, own = Other(), EngineError("a broken disk")
    channel.lost = RankLost(2, 0, "agree", "exchange", "aborted")
    with pytest.raises(EngineError, match="a broken disk") as caught:
        group(channel).seal(StepProposal(rows=(ABLE,)), Standing(work=True, error=own))
    assert caught.value is own
    with pytest.raises(RankLost, match="aborted"):
        group(channel).seal(StepProposal(rows=(ABLE,)), Standing(work=True))
