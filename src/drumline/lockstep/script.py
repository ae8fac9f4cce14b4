"""What a step issues, in order, from the plan and the traits alone.

    target pass        its body, logits, the accepted tokens for the replica's followers
    draft pass 0, 1…   body, logits, the drafted tokens

    pass_sizes(traits, rows, draft_k)      rows: (target tokens, samples) of each row
    draft_pass_sizes(plan, traits)         what a worker runs: the agreed sizes, or its own rows'
    build_script(plan, model, drafter, tp) the passes with their collectives
    Pass.check(issued, …)                  that a rank has issued what its script says

A size is the sum of the rows' bounds, never a count known only after acceptance: so that ranks
which agree on the bounds pad alike, whatever was accepted. Pure; knows no tensors and no ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from drumline.core.errors import Diverged
from drumline.core.ledger import Entry
from drumline.core.plan import StepPlan
from drumline.core.traits import Collective, DrafterTraits, ModelTraits


def pass_sizes(
    traits: DrafterTraits, rows: Iterable[tuple[int, bool]], draft_k: int
) -> tuple[int, ...]:
    """Tokens per draft pass, one entry for each of ``traits.passes(draft_k)``."""
    count = traits.passes(draft_k)
    if not count:
        return ()
    shapes = tuple(rows)
    first, later = (
        sum([traits.pass_bound(index, width, samples, draft_k) for width, samples in shapes])
        for index in (0, 1)  # passes after the first have one bound
    )
    return (first, *(later,) * (count - 1))


def first_pass_bounds(
    traits: DrafterTraits, rows: Sequence[tuple[int, bool]], k_max: int
) -> tuple[int, ...]:
    """Tokens of the first draft pass for each draft length 0..k_max, 0 where there is none."""

    def bound(k: int) -> int:
        if not traits.passes(k):
            return 0
        return sum(traits.pass_bound(0, width, samples, k) for width, samples in rows)

    if traits.in_one_pass:
        return tuple(bound(k) for k in range(k_max + 1))
    if traits.stateful:  # takes what the target took, however much is drafted
        return (bound(0),) * (k_max + 1)
    return (0, *(bound(1),) * k_max)


def draft_pass_sizes(plan: StepPlan, traits: DrafterTraits) -> tuple[int, ...]:
    """Tokens of each draft pass that a worker runs in this step: where the drafter shares
    collectives with other replicas, exactly the plan's; else its own rows'."""
    if plan.agreed and "ep" in traits.groups:
        return plan.draft_sizes
    own = pass_sizes(traits, ((row.width, row.samples) for row in plan.rows), plan.draft_k)
    least = 1 if traits.groups else 0  # no collective is empty
    return tuple(max(least, size) for size in own)


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of a script. ``size`` is what it is padded to; ``body`` must be issued as it
    stands, then any number of ``logits`` (as a whole each), then ``tokens``, if there are any."""

    phase: str
    part: int
    size: int
    body: tuple[Collective, ...] = ()
    logits: tuple[Collective, ...] = ()
    tokens: Collective | None = None

    def check(self, issued: Sequence[Entry], rank: int, step: int) -> None:
        """Raises `Diverged` naming the first operation that is not the script's."""
        wanted: list[Collective] = [*self.body]
        extra = len(issued) - len(self.body) - (self.tokens is not None)
        if self.logits and extra > 0:
            wanted += self.logits * (extra // len(self.logits))
        if self.tokens is not None:
            wanted.append(self.tokens)
        for index in range(max(len(issued), len(wanted))):
            entry = issued[index] if index < len(issued) else None
            script = wanted[index] if index < len(wanted) else None
            if entry is None or script is None or not _matches(entry, script):
                where = f"{self.phase} {self.part} #{index}"
                said = f"{entry or 'nothing'} where the script says {script or 'nothing'}"
                raise Diverged(where, [(rank, said)], step)


def _matches(entry: Entry, script: Collective) -> bool:
    words = (entry.operation, entry.group, entry.dtype)
    if words != (script.operation, script.group, script.dtype):
        return False
    if len(entry.shape) != len(script.shape):
        return False
    pairs = zip(entry.shape, script.shape, strict=True)
    return all(wanted in (None, extent) for extent, wanted in pairs)


def build_script(
    plan: StepPlan, model: ModelTraits, drafter: DrafterTraits | None = None, tp: int = 1
) -> tuple[Pass, ...]:
    """The passes of a step. Accepted and drafted tokens are told within a replica only where its
    followers draft too: others learn them from the next plan."""
    size = plan.target_size or sum(row.width for row in plan.rows)
    sampling = sum(row.samples for row in plan.rows)
    tells = tp > 1 and bool(sampling) and drafter is not None and bool(drafter.groups)
    accepted = Collective("broadcast", "tp", (sampling, plan.verify_width), "int64")
    script = [
        Pass(
            "target",
            0,
            size,
            body=tuple(entry.at(size) for entry in model.body),
            logits=model.logits,
            tokens=accepted if tells else None,
        )
    ]
    if drafter is None:
        return tuple(script)
    count = plan.draft_k if drafter.in_one_pass else 1
    drafted = Collective("broadcast", "tp", (sampling, count), "int64")
    for part, size in enumerate(draft_pass_sizes(plan, drafter)):
        traits = drafter.later_pass if part else drafter.first_pass
        script.append(
            Pass(
                "draft",
                part,
                size,
                body=tuple(entry.at(size) for entry in traits.body),
                logits=traits.logits,
                tokens=drafted if tells and plan.draft_k else None,
            )
        )
    return tuple(script)
