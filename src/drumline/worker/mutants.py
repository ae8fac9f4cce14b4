"""Decisions of `lockstep.mutants` that a rank's worker takes, switched on by name.

`MutantWorker` is made of a worker that is loaded and surveyed, and takes its place; what it wraps
knows nothing of it. `nudge` is no fault: it makes one rank compute a little otherwise, as another
machine would, so that a test can tell who decides. For trials only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import structs
from torch import Tensor

from drumline.core.errors import EngineError
from drumline.core.plan import Row, RowResult, StepPlan, StepResult
from drumline.drafting.base import Drafter, DraftRow, Proposal
from drumline.lockstep.mutants import Mutant
from drumline.models.layers import ModelOutput
from drumline.sampling.accept import Accepted, Verifier
from drumline.sampling.draft import DraftSampler, DraftToken
from drumline.sampling.history import SamplingRow
from drumline.worker.worker import Worker

PROPOSES_ALONE_FROM = 5  # the step from which a follower's drafts are not its leader's


class MutantWorker(Worker):
    """A rank's worker that takes some decisions alone."""

    def __init__(self, inner: Worker, mutants: Iterable[Mutant]) -> None:
        super().__init__(
            inner.model,
            inner.ops,
            inner.cache,
            inner.verifier,
            inner.speculator,
            inner.script,
            inner.torch_threads,
        )
        self.mutants = frozenset(mutants)
        self._follows = inner.script is not None and not inner.script.leads
        self._published: dict[int, tuple[int, ...]] = {}
        speculator = inner.speculator
        if speculator is not None and Mutant.FEED_ONE_TOKEN in self.mutants:
            speculator.drafter = OneTokenDrafter(speculator.drafter)
        if self._follows and Mutant.SAMPLE_ALONE in self.mutants:
            self.verifier = Verifier(self.sampler, inner.verifier.method)
        if self._follows and Mutant.DRAW_ALONE in self.mutants:
            _replace_draft_sampler(inner, DrawsAlone)

    def execute(self, plan: StepPlan) -> StepResult:
        if not plan.rows and Mutant.RETURN_ON_ZERO_TOKENS in self.mutants:
            return StepResult(step=plan.step, rows=())
        if self._follows and plan.step >= PROPOSES_ALONE_FROM:
            plan = structs.replace(plan, rows=tuple(map(self._own_drafts, plan.rows)))
        try:
            return super().execute(plan)
        except EngineError:
            raise
        except Exception as error:
            if Mutant.SWALLOW_ERRORS not in self.mutants:
                raise
            ended = (RowResult(number=row.number, tokens=(), error=str(error)) for row in plan.rows)
            return StepResult(step=plan.step, rows=tuple(ended))

    def _own_drafts(self, row: Row) -> Row:
        """The row with what a search of this rank's own has found."""
        if Mutant.PROPOSE_FEWER_ALONE in self.mutants:
            row = structs.replace(row, drafts=row.drafts[:-1])
        if Mutant.PROPOSE_OTHER_ALONE in self.mutants:
            # Far away, so that another rank's shard of the vocabulary has it.
            size = self.sampler.vocab_size
            row = structs.replace(row, drafts=tuple((one + size // 2) % size for one in row.drafts))
        return row

    def _draft(
        self,
        plan: StepPlan,
        offsets: Sequence[int],
        accepted: dict[int, Accepted],
        output: ModelOutput,
    ) -> dict[int, tuple[int, ...]]:
        found = super()._draft(plan, offsets, accepted, output)
        if Mutant.GATE_WHOLE_BATCH in self.mutants and not self._fits(plan):
            found = {number: (0,) * len(drafts) for number, drafts in found.items()}
        if Mutant.KEEP_STALE_DRAFTS in self.mutants:
            found = {
                number: drafts or self._published.get(number, ())
                for number, drafts in found.items()
            }
            self._published = found
        return found

    def _fits(self, plan: StepPlan) -> bool:
        """Whether the longest sequence of the batch and the drafts to come are in the drafter's
        range."""
        reach = None if self.traits is None else self.traits.positions_max
        longest = max((row.start + row.width for row in plan.rows), default=0)
        return reach is None or longest + plan.draft_k <= reach


class OneTokenDrafter:
    """A `Drafter` that takes every row that decodes for one with a single token, the newest."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.traits = inner.traits
        self.taps = inner.taps

    def propose(
        self, rows: Sequence[DraftRow], output: ModelOutput | None, draft_k: int
    ) -> Proposal:
        return self.inner.propose([_newest_token(row) for row in rows], output, draft_k)

    def forget(self, number: int) -> None:
        self.inner.forget(number)

    def close(self) -> None:
        self.inner.close()


def _newest_token(row: DraftRow) -> DraftRow:
    if row.fresh or not row.samples:
        return row
    return structs.replace(row, start=row.start + row.count, offset=row.offset + row.count, count=0)


class DrawsAlone:
    """A draft sampler's draws, by this rank for itself."""

    def __init__(self, inner: DraftSampler) -> None:
        self.inner = inner

    def draw(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[DraftToken | None]:
        return DraftSampler.draw(self.inner, logits, rows)

    def forget(self, number: int) -> None:
        self.inner.forget(number)


# ---------------------------------------------------------------- a machine of another kind


def nudge(worker: Worker, amount: float) -> None:
    """From now on this rank's logits of odd tokens, in target and drafter, are higher by
    ``amount``."""
    worker.model = _Nudged(worker.model, amount)
    if worker.speculator is not None:
        _replace_draft_sampler(worker, lambda inner: _NudgedDraws(inner, amount))


class _Nudged:
    """A `TargetModel` but for its logits."""

    def __init__(self, inner: Any, amount: float) -> None:
        self._inner = inner
        self._amount = amount

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return _odd_higher(self._inner.compute_logits(hidden), self._amount)


class _NudgedDraws:
    """A draft sampler that is given other logits."""

    def __init__(self, inner: Any, amount: float) -> None:
        self._inner = inner
        self._amount = amount

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def draw(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[DraftToken | None]:
        drawn: list[DraftToken | None] = self._inner.draw(_odd_higher(logits, self._amount), rows)
        return drawn


def _odd_higher(logits: Tensor, amount: float) -> Tensor:
    logits = logits.clone()
    logits[:, 1::2] += amount
    return logits


def _replace_draft_sampler(worker: Worker, make: Any) -> None:
    """Where a drafter draws its drafts itself, from logits."""
    assert worker.speculator is not None
    drafter: Any = worker.speculator.drafter
    if hasattr(drafter, "sampler"):
        drafter.sampler = make(drafter.sampler)
