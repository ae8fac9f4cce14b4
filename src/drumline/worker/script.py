"""What a rank issues in a step, written to its ledger and held against the step's script.

The script follows from the plan and from what passes issue on this mesh, which `survey` has learnt.
At the end of every pass the rank compares; it never goes on after a difference. Where ranks share
a replica, its first one tells the others what was accepted and drafted, where they draft too.
Decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from drumline.core.ledger import Ledger
from drumline.core.plan import StepPlan
from drumline.core.traits import DrafterTraits, ModelTraits
from drumline.drafting.base import PassLedger
from drumline.lockstep.script import Pass, build_script
from drumline.parallel.comm import Comm

NONE = -1  # where a table of tokens holds none


@dataclass
class StepScript:
    """One rank's. ``model`` and ``drafter``: what passes issue; the survey sets them."""

    ledger: Ledger
    tp: Comm
    model: ModelTraits = field(default_factory=ModelTraits)
    drafter: DrafterTraits | None = None
    surveying: bool = False
    faults: frozenset[tuple[int, str]] = frozenset()  # (step, place) where a trial breaks this rank
    _plan: StepPlan | None = None
    _passes: tuple[Pass, ...] = ()
    _index: int = -1
    _told: bool = field(default=False)

    @property
    def leads(self) -> bool:
        return self.tp.rank == 0

    @property
    def tells(self) -> bool:
        """Whether this pass ends with tokens for the others of the replica."""
        return not self.surveying and self._index >= 0 and self._now.tokens is not None

    @property
    def _now(self) -> Pass:
        return self._passes[self._index]

    def begin(self, plan: StepPlan) -> None:
        """A step starts with its target pass."""
        self._plan = plan
        self._passes = build_script(plan, self.model, self.drafter, self.tp.size)
        self._index = -1
        self._enter()

    def draft_pass(self) -> None:
        """A draft pass starts, after the pass before it."""
        if not self.surveying:
            self._leave()
            self._enter()
            self._break_at(f"draft {self._now.part}")

    def shorten(self, count: int) -> None:
        """Leaves draft passes after the first ``count`` out, none of which issues anything."""
        left_out = self._passes[1 + count :]
        assert not any(one.body or one.logits or one.tokens for one in left_out), (
            "a pass that others take part in is never left out"
        )
        self._passes = self._passes[: 1 + count]

    def end(self) -> None:
        """The last pass is over, and the step."""
        self._leave()
        self._break_at("end")
        assert self._index == len(self._passes) - 1, "a pass was not made"
        self._index = -1
        self.ledger.end()

    def share(self, rows: Sequence[Sequence[int]]) -> list[list[int]]:
        """Rows of tokens, one for each that samples, as the replica's first rank has them; what
        the others bring is not looked at."""
        collective = self._now.tokens
        assert collective is not None
        assert not self._told, "tokens are told once in a pass"
        count, width = (extent for extent in collective.shape if isinstance(extent, int))
        table = torch.full((count, width), NONE, dtype=torch.int64)
        if self.leads:
            for index, row in enumerate(rows):
                table[index, : len(row)] = torch.tensor(row, dtype=torch.int64)
        self._told = True
        told: list[list[int]] = self.tp.broadcast(table, 0).tolist()
        return [[token for token in row if token != NONE] for row in told]

    def _break_at(self, place: str) -> None:
        if (self.ledger.step, place) in self.faults:
            raise RuntimeError(f"injected at {place}")

    def _enter(self) -> None:
        self._index += 1
        assert self._index < len(self._passes), "a pass that the script does not have"
        self._told = False
        self.ledger.enter(self._now.phase, self._now.part)

    def _leave(self) -> None:
        if self.tells and not self._told:
            self.share(())
        self._now.check(self.ledger.leave(), self.ledger.rank, self.ledger.step)


@dataclass(slots=True)
class ScriptedPasses(PassLedger):
    """A `PassLedger` whose passes are those of a script."""

    script: StepScript | None = None
    on_pass: Callable[[int], object] | None = None  # told of every pass before it, by number

    def issue(self, tokens: int) -> int:
        if self.on_pass is not None:
            self.on_pass(len(self.passes))
        if self.script is not None:
            self.script.draft_pass()
        return PassLedger.issue(self, tokens)

    def shorten(self, count: int) -> None:
        PassLedger.shorten(self, count)
        if self.script is not None:
            self.script.shorten(count)
