"""Requests as the scheduler sees them, and what becomes of them.

A `Request` is complete: ids, limits, seed. It knows no text, tokenizer or connection; whoever
made it keeps those beside its number.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct

from drumline.core.params import SamplingParams


class FinishReason(enum.StrEnum):
    STOP = "stop"  # an EOS or stop token, or a stop string
    LENGTH = "length"  # max_tokens or max_model_len reached, exactly
    ABORT = "abort"  # cancelled by its owner
    ERROR = "error"  # the engine broke


@dataclass(frozen=True, slots=True)
class Request:
    """One sample of one user request.

    ``number`` is unique per engine and ascending in order of arrival; every tie is broken by it.
    ``max_tokens`` is resolved: prompt + max_tokens never exceeds max_model_len.
    ``stop_token_ids`` holds EOS ids too, unless ignore_eos. ``bad_words`` are token sequences.
    """

    number: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    seed: int
    sample_index: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()
    priority: int = 0  # lower runs earlier, under the priority policy
    num_speculative_tokens: int | None = None  # most drafts per step; None: as configured, 0: off

    @property
    def length_max(self) -> int:
        return len(self.prompt_token_ids) + self.max_tokens

    @property
    def reads_cache(self) -> bool:
        """A request that reports prompt logprobs must compute every prompt position."""
        return self.params.prompt_logprobs is None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability (natural) of one token at one position. ``rank`` counts from 1."""

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The token that stands at a position, and the best alternatives, best first."""

    token: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


class Verdict(Struct, frozen=True):
    """How many of the newly accepted tokens are kept, and why the request ends, if it does.

    ``stop_reason`` is the stop string or stop token id that ended it (None for EOS)."""

    kept: int
    reason: FinishReason | None = None
    stop_reason: int | str | None = None


class Finish(Protocol):
    """Judges accepted tokens: detokeniser, stop strings, stop ids, limits. Made at intake."""

    def judge(self, request: Request, output_count: int, tokens: Sequence[int]) -> Verdict:
        """``output_count`` tokens were kept before; ``tokens`` are new, in order. A token that
        ends the request is kept and counted; what follows it is not. A stop inside the limit
        wins over the limit; beyond it the limit wins."""
        ...
