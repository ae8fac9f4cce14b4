"""What a trial changes in a leader, for tests: when it runs nothing though it has work.

Nobody else uses it; a trial is never part of a configuration.
"""

from __future__ import annotations

from typing import Any

from drumline.core.plan import StepProposal
from drumline.scheduler import Scheduler


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
