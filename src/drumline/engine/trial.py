"""What a trial changes in a rank, for tests and `bench.hang`: how it schedules, how it works.

Nobody else uses it; a trial is never part of a configuration.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from drumline.core.plan import StepProposal
from drumline.engine.messages import Trial
from drumline.kvcache import BlockPool
from drumline.lockstep.mutants import Mutant
from drumline.scheduler import Scheduler
from drumline.worker.mutants import MutantWorker, nudge
from drumline.worker.worker import Worker


class HeldScheduler(Scheduler):
    """Proposes nothing for the first ``held`` steps in which it has work, as if what its requests
    wait for had not come."""

    def __init__(self, *arguments: Any, held: int) -> None:
        super().__init__(*arguments)
        self.held = held

    def propose(self) -> StepProposal:
        if self.held and self.has_work:
            self.held -= 1
            self._proposed = ()
            return StepProposal(rows=(), released=tuple(self._released))
        return super().propose()


class OwnCapacityScheduler(Scheduler):
    """Hands out as many ``blocks`` as this rank has, whatever the ranks of its replica settled."""

    def __init__(self, settings: Any, pool: BlockPool, *more: Any, blocks: int) -> None:
        super().__init__(settings, BlockPool(blocks, pool.block_size), *more)


def scheduler_of(trial: Trial, rank: int) -> Callable[..., Scheduler]:
    """What makes a leader's scheduler."""
    held = dict(trial.held).get(rank, 0)
    if held:
        return partial(HeldScheduler, held=held)
    if Mutant.OWN_CAPACITY in trial.mutants:
        return partial(OwnCapacityScheduler, blocks=trial.kv_blocks[rank])
    return Scheduler


def worker_of(worker: Worker, trial: Trial, rank: int) -> Worker:
    """A rank's worker as it serves, once it is loaded and surveyed."""
    if trial.mutants:
        worker = MutantWorker(worker, map(Mutant, trial.mutants))
    nudged = dict(trial.nudged).get(rank)
    if nudged is not None:
        nudge(worker, nudged)
    return worker
