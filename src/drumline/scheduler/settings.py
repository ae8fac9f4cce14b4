"""The limits the scheduler decides under, and what can never fit them.

Plain numbers, resolved before they come here; relations between them are asserted in one place.
Knows no flag, no environment and no checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from drumline.config import Resolved
from drumline.core.errors import PromptTooLong, RequestError
from drumline.core.request import Request
from drumline.core.traits import DrafterTraits
from drumline.kvcache import blocks_for

Policy = Literal["fcfs", "priority"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """``max_waiting`` bounds the queue. ``drafter_range`` is the number of positions a drafter can
    take, already shortened by one for block drafters; None: no limit of its own.
    ``drafter_recomputes_one``: it needs taps, so that after a prefix hit the last matched position
    is computed again. ``drafter_keeps_state``: it has entries of its own in a sequence's slots.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting: int = 2**20
    policy: Policy = "fcfs"
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    long_prefill_token_threshold: int = 0  # most prompt tokens of one request per step; 0: no limit
    num_speculative_tokens: int = 0
    drafter_range: int | None = None
    drafter_recomputes_one: bool = False
    drafter_keeps_state: bool = False

    def __post_init__(self) -> None:
        assert self.max_model_len >= 2, "a prompt token and an output token"
        assert self.max_num_seqs >= 1
        assert self.max_num_batched_tokens >= 1
        assert self.max_waiting >= 1
        assert self.policy in ("fcfs", "priority")
        assert self.long_prefill_token_threshold >= 0
        assert self.num_speculative_tokens >= 0
        assert self.drafter_range is None or self.drafter_range >= 0
        # Without chunks a prefill runs whole, after a preemption with its output too.
        assert self.enable_chunked_prefill or self.max_num_batched_tokens >= self.max_model_len

    @property
    def seat_count(self) -> int:
        """Requests that may run at once: each of them gets at least one token in every step."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)


def scheduler_settings(resolved: Resolved, drafter: DrafterTraits | None) -> SchedulerSettings:
    """The settings of an engine with this drafter; None: nobody drafts."""
    assert (drafter is None) == (resolved.speculation is None), "a drafter is asked for, or none"
    config = resolved.config
    return SchedulerSettings(
        max_model_len=resolved.max_model_len,
        max_num_seqs=resolved.max_num_seqs,
        max_num_batched_tokens=resolved.max_num_batched_tokens,
        max_waiting=config.server.max_num_queued_reqs + config.scheduler.max_num_seqs,
        policy="priority" if config.scheduler.scheduling_policy == "priority" else "fcfs",
        enable_chunked_prefill=config.scheduler.enable_chunked_prefill,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        num_speculative_tokens=resolved.num_speculative_tokens,
        drafter_range=None if drafter is None else drafter.drafter_range,
        drafter_recomputes_one=drafter is not None and drafter.needs_taps,
        drafter_keeps_state=drafter is not None and drafter.stateful,
    )


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request must fit into; intake asks, and the scheduler asks again."""

    max_model_len: int
    block_count: int
    block_size: int


def check_fits(request: Request, limits: Limits) -> None:
    """Raises `RequestError` for a request that could never run to its end, even alone."""
    prompt_count = len(request.prompt_token_ids)
    if prompt_count == 0:
        raise RequestError("the prompt has no tokens", param="prompt")
    if prompt_count >= limits.max_model_len:
        raise PromptTooLong(
            f"{prompt_count} tokens leave no room for output under "
            f"max_model_len={limits.max_model_len}",
            param="prompt",
        )
    if request.max_tokens < 1:
        raise RequestError(f"{request.max_tokens} is below 1", param="max_tokens")
    if request.length_max > limits.max_model_len:
        raise RequestError(
            f"{prompt_count} prompt tokens + {request.max_tokens} exceed "
            f"max_model_len={limits.max_model_len}",
            param="max_tokens",
        )
    block_count = blocks_for(request.length_max, limits.block_size)
    if block_count > limits.block_count:
        raise RequestError(
            f"{prompt_count} prompt tokens + {request.max_tokens} need {block_count} KV blocks of "
            f"{limits.block_size} tokens; the whole cache has {limits.block_count}",
            param="max_tokens",
        )
