"""Decisions as they were made before ranks agreed, each to be switched on by name.

    skip-drafter-locally     a batch that comes near the drafter's limit skips the drafter
    choose-k-locally         the draft length is the own batch's wish
    idle-target-only         a rank without rows runs the target and no draft pass
    pad-before-exchange      passes are padded to the own count
    return-on-empty-queue    a rank without rows does not come to the exchange
    sleep-alone              a rank without rows sleeps, whatever was decided

Each of them makes ranks wait for each other for ever; tests and ``bench hang --policy local`` show
that it is caught and named. All of them live in here: the conductor itself knows no such switch.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import replace

from drumline.core.plan import Row, StepPlan, StepProposal
from drumline.lockstep.conductor import WORKING, GroupConductor, Rest, Sealed, Standing
from drumline.lockstep.decide import draft_sizes, padded


class Mutant(enum.StrEnum):
    SKIP_DRAFTER_LOCALLY = "skip-drafter-locally"
    CHOOSE_K_LOCALLY = "choose-k-locally"
    IDLE_TARGET_ONLY = "idle-target-only"
    PAD_BEFORE_EXCHANGE = "pad-before-exchange"
    RETURN_ON_EMPTY_QUEUE = "return-on-empty-queue"
    SLEEP_ALONE = "sleep-alone"


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
        sealed = self.inner.seal(proposal, standing)
        if isinstance(sealed, Rest):
            return sealed
        if idle and Mutant.SLEEP_ALONE in self.mutants:
            return Rest.SLEEP
        plan = self._mutate(sealed, proposal)
        self.inner.note_executed(plan)
        return plan

    def _mutate(self, plan: StepPlan, proposal: StepProposal) -> StepPlan:
        joined, rules = self.inner.last_joined, self.inner.rules
        assert joined is not None
        if Mutant.CHOOSE_K_LOCALLY in self.mutants:
            k = proposal.draft_wish
            plan = replace(plan, draft_k=k, draft_sizes=draft_sizes(joined, rules, k, plan.mode))
        if Mutant.SKIP_DRAFTER_LOCALLY in self.mutants and plan.draft_sizes:
            fits = input_fits_in_drafter(
                plan.rows, plan.verify_width - 1, plan.draft_k, self._drafter_max_model_len
            )
            if not fits:
                self.skip_count += 1
                plan = replace(plan, draft_k=0, draft_sizes=())
        if Mutant.IDLE_TARGET_ONLY in self.mutants and not plan.rows:
            plan = replace(plan, draft_sizes=())
        if Mutant.PAD_BEFORE_EXCHANGE in self.mutants:
            own = padded(proposal.token_count, plan.mode, rules.buckets)
            plan = replace(plan, target_size=own)
        return plan


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
