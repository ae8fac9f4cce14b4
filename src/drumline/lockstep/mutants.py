"""Decisions as they were made before ranks agreed, each to be switched on by name.

A leader's own, in here (`MutantConductor`):

    skip-drafter-locally     a batch that comes near the drafter's limit skips the drafter
    choose-k-locally         the draft length is the own batch's wish
    choose-mode-locally      sizes from the list only where the own rank has rows and is ready
    idle-target-only         a rank without rows runs the target and no draft pass
    idle-drafts-once         a rank without rows runs one draft pass, however long drafts are
    idle-votes-live          a rank without rows says that it is not ready for sizes from the list
    pad-before-exchange      passes are padded to the own count
    unpadded-under-table     where a table speaks, sizes are not those of the list
    reuse-target-size        draft passes after the first are padded to the target's size
    widen-while-decoding     who only decodes takes every row for as wide as a row can be
    return-on-empty-queue    a rank without rows does not come to the exchange
    sleep-alone              a rank without rows sleeps, whatever was decided
    leave-untold             a rank in trouble leaves and does not say so

A worker's (`worker.mutants`):

    return-on-zero-tokens    a step without rows of the own is not executed
    gate-whole-batch         one row near the drafter's limit makes token 0 of everybody's drafts
    keep-stale-drafts        who gets no drafts keeps those of the step before
    feed-one-token           the drafter is fed one token of each row, however many were accepted
    sample-alone             ranks of one replica each draw the target's tokens
    draw-alone               ranks of one replica each draw the drafts
    propose-fewer-alone      a follower finds one draft less than its leader
    propose-other-alone      a follower finds other drafts than its leader
    swallow-errors           what breaks within a step is kept quiet

A scheduler's (`engine.trial`):

    own-capacity             blocks are counted by rank, not by the least of a replica's ranks

Most make ranks wait for each other for ever, the others cost acceptance or work and nothing else.
Tests and ``bench hang --policy local`` show how each is caught: docs/cases.md. Whoever decides in
earnest knows no such switch; all of them are wrapped around it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import replace

from msgspec import structs

from drumline.core.plan import Mode, Row, StepPlan, StepProposal
from drumline.lockstep.channel import AgreementChannel
from drumline.lockstep.conductor import WORKING, GroupConductor, Rest, Sealed, Standing
from drumline.lockstep.decide import draft_sizes, padded
from drumline.lockstep.shape import MODE_LIVE, StepShape, Vector, length


class Mutant(enum.StrEnum):
    SKIP_DRAFTER_LOCALLY = "skip-drafter-locally"
    CHOOSE_K_LOCALLY = "choose-k-locally"
    CHOOSE_MODE_LOCALLY = "choose-mode-locally"
    IDLE_TARGET_ONLY = "idle-target-only"
    IDLE_DRAFTS_ONCE = "idle-drafts-once"
    IDLE_VOTES_LIVE = "idle-votes-live"
    PAD_BEFORE_EXCHANGE = "pad-before-exchange"
    UNPADDED_UNDER_TABLE = "unpadded-under-table"
    REUSE_TARGET_SIZE = "reuse-target-size"
    WIDEN_WHILE_DECODING = "widen-while-decoding"
    RETURN_ON_EMPTY_QUEUE = "return-on-empty-queue"
    SLEEP_ALONE = "sleep-alone"
    LEAVE_UNTOLD = "leave-untold"
    RETURN_ON_ZERO_TOKENS = "return-on-zero-tokens"
    GATE_WHOLE_BATCH = "gate-whole-batch"
    KEEP_STALE_DRAFTS = "keep-stale-drafts"
    FEED_ONE_TOKEN = "feed-one-token"
    SAMPLE_ALONE = "sample-alone"
    DRAW_ALONE = "draw-alone"
    PROPOSE_FEWER_ALONE = "propose-fewer-alone"
    PROPOSE_OTHER_ALONE = "propose-other-alone"
    SWALLOW_ERRORS = "swallow-errors"
    OWN_CAPACITY = "own-capacity"


def input_fits_in_drafter(
    rows: Sequence[Row], scheduled_drafts: int, draft_k: int, drafter_max_model_len: int
) -> bool:
    """The old gate, one for the whole batch: the longest sequence with the draft slots scheduled
    for it in this step, before any is trimmed, and ``draft_k`` more must fit.

    ``scheduled_drafts``: draft slots of a decoding row, which is ``verify_width - 1``.
    """
    longest = 0
    for row in rows:
        committed = row.start + len(row.tokens)
        decodes = row.samples and len(row.tokens) == 1
        longest = max(longest, committed + (scheduled_drafts if decodes else 0))
    return longest + draft_k <= drafter_max_model_len


class MutantConductor:
    """A leader of an agreement group that decides some things alone.

    ``drafter_max_model_len``: what the old gate compares with. ``skip_count``: steps in which it
    skipped the drafter although there were drafts to make.
    """

    def __init__(
        self,
        inner: GroupConductor,
        mutants: Iterable[Mutant],
        drafter_max_model_len: int = 2**31,
    ) -> None:
        self.inner = inner
        self.mutants = frozenset(mutants)
        self.skip_count = 0
        self._drafter_max_model_len = drafter_max_model_len
        if Mutant.IDLE_VOTES_LIVE in self.mutants:
            inner._channel = IdleVotesLive(inner._channel)

    @property
    def stop_agreed(self) -> bool:
        return self.inner.stop_agreed

    @property
    def next_step(self) -> int:
        return self.inner.next_step

    @property
    def epoch(self) -> int:
        return self.inner.epoch

    def seal(self, proposal: StepProposal, standing: Standing = WORKING) -> Sealed:
        idle = not proposal.rows
        ends = standing.stop or standing.drain or standing.error is not None
        if idle and Mutant.RETURN_ON_EMPTY_QUEUE in self.mutants and not ends:
            return Rest.SLEEP
        if standing.error is not None and Mutant.LEAVE_UNTOLD in self.mutants:
            return Rest.LEAVE
        sealed = self.inner.seal(proposal, standing)
        if isinstance(sealed, Rest):
            return sealed
        if idle and Mutant.SLEEP_ALONE in self.mutants:
            return Rest.SLEEP
        plan = self._mutate(sealed, proposal)
        self.inner.note_executed(plan)
        return plan

    def _mutate(self, plan: StepPlan, proposal: StepProposal) -> StepPlan:
        if Mutant.CHOOSE_K_LOCALLY in self.mutants:
            plan = self._of_length(plan, proposal.draft_wish)
        if Mutant.SKIP_DRAFTER_LOCALLY in self.mutants and plan.draft_sizes:
            plan = self._gated(plan)
        if not plan.rows and Mutant.IDLE_TARGET_ONLY in self.mutants:
            plan = structs.replace(plan, draft_sizes=())
        if not plan.rows and Mutant.IDLE_DRAFTS_ONCE in self.mutants:
            plan = structs.replace(
                plan, draft_k=min(plan.draft_k, 1), draft_sizes=plan.draft_sizes[:1]
            )
        if Mutant.CHOOSE_MODE_LOCALLY in self.mutants:
            ready = bool(plan.rows) and self.inner.mode_ready
            plan = self._in_mode(plan, "fixed" if ready else "live")
        if Mutant.UNPADDED_UNDER_TABLE in self.mutants and self._joined.wish is not None:
            plan = self._in_mode(plan, "live")
        if Mutant.REUSE_TARGET_SIZE in self.mutants:
            later = (plan.target_size,) * len(plan.draft_sizes[1:])
            plan = structs.replace(plan, draft_sizes=(*plan.draft_sizes[:1], *later))
        if Mutant.PAD_BEFORE_EXCHANGE in self.mutants:
            plan = self._of_size(plan, proposal.token_count)
        if Mutant.WIDEN_WHILE_DECODING in self.mutants and _decodes(plan.rows):
            widest = 1 + self.inner.rules.num_speculative_tokens
            plan = self._of_size(plan, widest * len(plan.rows))
        return plan

    @property
    def _joined(self) -> StepShape:
        joined = self.inner.last_joined
        assert joined is not None, "a plan was sealed"
        return joined

    def _of_length(self, plan: StepPlan, k: int) -> StepPlan:
        sizes = draft_sizes(self._joined, self.inner.rules, k, plan.mode)
        return structs.replace(plan, draft_k=k, draft_sizes=sizes)

    def _of_size(self, plan: StepPlan, count: int) -> StepPlan:
        return structs.replace(plan, target_size=padded(count, plan.mode, self.inner.rules.buckets))

    def _in_mode(self, plan: StepPlan, mode: Mode) -> StepPlan:
        sizes = draft_sizes(self._joined, self.inner.rules, plan.draft_k, mode)
        plan = structs.replace(plan, mode=mode, draft_sizes=sizes)
        return self._of_size(plan, self._joined.target_tokens)

    def _gated(self, plan: StepPlan) -> StepPlan:
        fits = input_fits_in_drafter(
            plan.rows, plan.verify_width - 1, plan.draft_k, self._drafter_max_model_len
        )
        if fits:
            return plan
        self.skip_count += 1
        return structs.replace(plan, draft_k=0, draft_sizes=())


def _decodes(rows: Sequence[Row]) -> bool:
    """All rows, and there are some."""
    return bool(rows) and all(row.samples and len(row.tokens) == 1 for row in rows)


class IdleVotesLive:
    """An `AgreementChannel` on which a rank without rows votes for sizes as they come."""

    def __init__(self, inner: AgreementChannel) -> None:
        self.inner = inner

    @property
    def ranks(self) -> Sequence[int]:
        return self.inner.ranks

    def exchange(self, vector: Vector, timeout: float) -> Sequence[Vector]:
        shape = StepShape.decode(vector)
        if not shape.rows:
            k_max = (len(vector) - length(0)) // (length(1) - length(0))
            vector = replace(shape, mode=MODE_LIVE).encode(k_max)
        return self.inner.exchange(vector, timeout)


class GateWatch:
    """A leader of an agreement group that only watches: ``failures`` holds the steps with drafts
    to make in which the old gate of `input_fits_in_drafter` would have skipped the drafter."""

    def __init__(self, inner: GroupConductor, drafter_max_model_len: int) -> None:
        self.inner = inner
        self.failures: list[int] = []
        self._drafter_max_model_len = drafter_max_model_len

    @property
    def stop_agreed(self) -> bool:
        return self.inner.stop_agreed

    @property
    def next_step(self) -> int:
        return self.inner.next_step

    @property
    def epoch(self) -> int:
        return self.inner.epoch

    def seal(self, proposal: StepProposal, standing: Standing = WORKING) -> Sealed:
        sealed = self.inner.seal(proposal, standing)
        if isinstance(sealed, StepPlan) and sealed.draft_k:
            fits = input_fits_in_drafter(
                sealed.rows, sealed.verify_width - 1, sealed.draft_k, self._drafter_max_model_len
            )
            if not fits:
                self.failures.append(sealed.step)
        return sealed
