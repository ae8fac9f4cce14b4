"""From the joined shape to what everybody does next: one pure function, integers only.

    error                        fail: all leave together
    pause                        no step, work or not
    work                         step, with one draft length and one size for each pass
    stop, or drain completed     leave
    otherwise                    sleep

The same inputs give the same decision on every rank, which is all that keeps ranks together.
Row-level facts (limits, requests with fewer drafts) mask rows and never vote. Knows no rank.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from drumline.core.plan import Mode
from drumline.core.traits import DrafterTraits
from drumline.lockstep.shape import MODE_FIXED, MODE_LIVE, StepShape

LOOK_ROUND = 32  # executed steps between two looks at a neighbouring length


class Turn(enum.StrEnum):
    FAIL = "fail"
    PAUSE = "pause"
    STEP = "step"
    LEAVE = "leave"
    SLEEP = "sleep"


@dataclass(frozen=True, slots=True)
class Rules:
    """What a group knows for good, equal on all ranks. ``passes[k]``: draft passes that replicas
    share in a step of draft length k. ``buckets``: sizes of mode "fixed", ascending; none: sizes
    are always live."""

    num_speculative_tokens: int = 0
    passes: tuple[int, ...] = (0,)
    adaptive: bool = False
    buckets: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.passes) == self.num_speculative_tokens + 1
        assert list(self.buckets) == sorted(set(self.buckets))
        assert all(size >= 1 for size in self.buckets)

    @classmethod
    def of(
        cls,
        num_speculative_tokens: int,
        drafter: DrafterTraits | None,
        adaptive: bool = False,
        buckets: tuple[int, ...] = (),
    ) -> Self:
        """The rules with a drafter. Passes of one that shares no collective with other replicas
        are its replica's own affair."""
        shared = drafter is not None and "ep" in drafter.groups
        passes = tuple(
            drafter.passes(k) if drafter is not None and shared else 0
            for k in range(num_speculative_tokens + 1)
        )
        return cls(num_speculative_tokens, passes, adaptive, buckets)


@dataclass(frozen=True, slots=True)
class Decision:
    """What everybody does. Sizes are those of `StepPlan`; they mean something in a step only.
    ``stop``: what is unfinished ends with this step."""

    turn: Turn
    draft_k: int = 0
    mode: Mode = "live"
    target_size: int = 0
    draft_sizes: tuple[int, ...] = ()
    group_rows: int = 0
    stop: bool = False


def decide(joined: StepShape, rules: Rules) -> Decision:
    """The decision that follows from what all leaders said."""
    turn = next_turn(
        error=joined.error,
        pause=joined.pause,
        work=joined.work,
        stop=joined.stop,
        drain=joined.drain,
    )
    if turn is not Turn.STEP:
        return Decision(turn, stop=joined.stop)
    draft_k = draft_length(joined, rules)
    mode = execution_mode(joined.mode, rules)
    return Decision(
        turn,
        draft_k=draft_k,
        mode=mode,
        target_size=padded(joined.target_tokens, mode, rules.buckets),
        draft_sizes=draft_sizes(joined, rules, draft_k, mode),
        group_rows=joined.rows,
        stop=joined.stop,
    )


def draft_sizes(joined: StepShape, rules: Rules, draft_k: int, mode: Mode) -> tuple[int, ...]:
    """What each draft pass that replicas share is padded to, in a step of this draft length."""
    count = rules.passes[draft_k]
    first = joined.first_pass_tokens[draft_k] if joined.first_pass_tokens else 0
    bounds = (first, *(joined.later_pass_tokens,) * count)[:count]
    return tuple(padded(bound, mode, rules.buckets) for bound in bounds)


def next_turn(*, error: bool, pause: bool, work: bool, stop: bool, drain: bool) -> Turn:
    """What comes next, by the flags alone; see the module for the order."""
    if error:
        return Turn.FAIL
    if pause:
        return Turn.PAUSE
    if work:
        return Turn.STEP
    return Turn.LEAVE if stop or drain else Turn.SLEEP


def draft_length(joined: StepShape, rules: Rules) -> int:
    """How many tokens are drafted: none where no row can bring a draft; what a table gives, the
    least wish of all; what is expected to pay; or as many as are configured."""
    if not joined.drafts:
        return 0
    if rules.adaptive and joined.expected:
        best = most_per_time(joined.expected, joined.micros)
        return look_around(best, joined.step, rules.num_speculative_tokens)
    wish = rules.num_speculative_tokens if joined.wish is None else joined.wish
    return min(wish, rules.num_speculative_tokens)


def most_per_time(tokens: Sequence[int], micros: Sequence[int]) -> int:
    """The draft length with the most tokens per time, the smaller of equals."""
    best = 0
    for k in range(1, len(tokens)):
        if tokens[k] * micros[best] > tokens[best] * micros[k]:
            best = k
    return best


def looks_around(step: int) -> bool:
    """Whether a step tries a neighbouring length: two in a row, because the second one shows what
    a length costs."""
    return step % LOOK_ROUND >= LOOK_ROUND - 2


def look_around(best: int, step: int, num_speculative_tokens: int) -> int:
    """The next longer or shorter length in turns, so that its cost and acceptance are known and
    not believed; else ``best``."""
    if not looks_around(step) or not num_speculative_tokens:
        return best
    aside = best + 1 if step // LOOK_ROUND % 2 else best - 1
    return aside if 0 <= aside <= num_speculative_tokens else 2 * best - aside


def execution_mode(mode: int | None, rules: Rules) -> Mode:
    """The lowest mode anybody asks for; who asks for none holds nobody back."""
    if not rules.buckets or mode == MODE_LIVE:
        return "live"
    assert mode in (None, MODE_FIXED)
    return "fixed"


def padded(size: int, mode: Mode, buckets: Sequence[int]) -> int:
    """What a pass of ``size`` tokens, the most of any rank, is padded to on every rank. At least
    one, so that no collective is empty; above the last bucket sizes are live."""
    size = max(1, size)
    if mode == "fixed":
        for bucket in buckets:
            if size <= bucket:
                return bucket
    return size
