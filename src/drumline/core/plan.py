"""The values of one step: what is proposed, what is decided, what came of it.

Frozen, so that a plan can be shipped to other ranks and replayed. Only the scheduler writes
proposals, only the conductor seals plans, only workers make results.

One row of a plan, for a sequence of 12 committed tokens of which 10 stand in the cache, with
2 drafts and a block size of 4:

    position   0 .......... 9 | 10  11 | 12  13
                in the cache  | tokens | drafts        start = 10, samples = True
    block_ids  [7][3][9][4]                            block of position p: block_ids[p // 4]
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from drumline.core.request import FinishReason, PositionLogprobs, Request


class Row(Struct, frozen=True):
    """One sequence's share of a step.

    ``tokens`` are committed ids at positions ``start``.., ``drafts`` guesses for the positions
    after them. ``samples`` says that ``tokens`` reach the end of what is committed, so that the
    step yields new tokens. ``draft_limit``: the first position that may not hold a draft.
    ``draft_max``: the most drafts this row may get next, whatever the step's draft length; with n
    committed tokens after this step a drafter proposes
    clamp(draft_limit - n, 0, min(draft_k, draft_max)).
    """

    number: int
    start: int
    tokens: tuple[int, ...]
    block_ids: tuple[int, ...]
    samples: bool
    drafts: tuple[int, ...] = ()
    draft_limit: int = 0
    draft_max: int = 0

    @property
    def width(self) -> int:
        return len(self.tokens) + len(self.drafts)


class Admission(Struct, frozen=True):
    """A sequence the workers have not seen, or must see afresh: its request and committed ids."""

    request: Request
    token_ids: tuple[int, ...]


class DraftVote(Struct, frozen=True):
    """What a replica's decoding requests say of a step's draft length; replicas without any say
    nothing. ``wish``: what a table gives, None where no table speaks. ``tokens``: tokens × 1024
    expected of a step, ``micros``: microseconds that it takes, each for draft lengths 0..K; empty
    where nothing is measured."""

    wish: int | None = None
    tokens: tuple[int, ...] = ()
    micros: tuple[int, ...] = ()


class StepProposal(Struct, frozen=True):
    """What this replica's scheduler wants to run next."""

    rows: tuple[Row, ...]
    admitted: tuple[Admission, ...] = ()
    released: tuple[int, ...] = ()
    draft_wish: int = 0  # draft length this replica would choose alone; decoding requests vote
    vote: DraftVote = DraftVote()  # what it tells those with whom it agrees

    @property
    def token_count(self) -> int:
        return sum(row.width for row in self.rows)


Mode = Literal["live", "fixed"]


class StepPlan(Struct, frozen=True):
    """What every rank of the replica executes in step ``step`` of ``epoch``.

    Where replicas agree, ``target_size`` and ``draft_sizes`` are the tokens that the target pass
    and each draft pass are padded to on every rank, at least 1; a plan without rows is then
    executed like any other, and there are exactly ``len(draft_sizes)`` draft passes. A replica
    alone pads nothing: ``target_size`` is 0, ``draft_sizes`` is empty, and the passes are as many
    as the drafter's traits say. ``mode``: sizes as they come, or from a fixed list.
    ``group_rows``: the most rows that any replica has in this step.
    """

    epoch: int
    step: int
    rows: tuple[Row, ...]
    admitted: tuple[Admission, ...] = ()
    released: tuple[int, ...] = ()
    draft_k: int = 0  # what to draft in this step
    verify_width: int = 1  # 1 + draft_k of the last executed step
    mode: Mode = "live"
    target_size: int = 0
    draft_sizes: tuple[int, ...] = ()
    group_rows: int = 0

    @property
    def agreed(self) -> bool:
        """Whether other replicas execute this step, too."""
        return self.target_size > 0

    @property
    def steady(self) -> bool:
        """Nobody was in prefill, here or in another replica, somebody decoded here, and the draft
        length was the same before and in this step."""
        if not self.rows or self.verify_width != 1 + self.draft_k:
            return False
        if self.target_size > self.group_rows * self.verify_width:
            return False
        return all(row.samples and len(row.tokens) == 1 for row in self.rows)

    @property
    def draft_count(self) -> int:
        """Drafts that this step verifies."""
        return sum(len(row.drafts) for row in self.rows)

    @property
    def num_spec_tokens_to_schedule(self) -> int:
        """``draft_k`` under the name that vLLM's scheduler output has for it."""
        return self.draft_k


class RowResult(Struct, frozen=True):
    """What became of one row.

    ``tokens`` were accepted, in order (none if the row does not sample). ``logprobs`` has one
    entry per token if the request asked. ``prompt_logprobs`` has one entry per prompt position in
    ``start + 1 .. start + len(tokens)`` that lies inside the prompt, if it asked.
    """

    number: int
    tokens: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] = ()
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    drafts: tuple[int, ...] = ()
    error: str | None = None  # this request cannot go on; its neighbours can


class StepResult(Struct, frozen=True):
    """The results of a plan's rows, in the plan's order."""

    step: int
    rows: tuple[RowResult, ...]


class SpeculationStats(Struct, frozen=True):
    """What drafts brought. ``drafts``: verify passes of a row with at least one draft.
    ``drafted``: drafts that were verified; ``accepted``: those that became kept tokens, in all and
    ``accepted_per_position`` of a pass, which has an entry per configured draft."""

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_position: tuple[int, ...] = ()

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per verify pass, the target's own included; 1.0 where nothing was drafted."""
        return 1.0 + self.accepted / self.drafts if self.drafts else 1.0


class Event(Struct, frozen=True):
    """What a request's owner is told after a commit: kept tokens, and the end if it came."""

    number: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    cached_token_count: int = 0  # prompt tokens that came from the prefix cache
    error: str | None = None
    speculation: SpeculationStats | None = None  # with the end, where speculation is configured
