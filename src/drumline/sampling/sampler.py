"""One token per row, drawn by the row's own key; greedy where the temperature is 0.

Sampling is Gumbel-max (Gumbel 1954; Maddison et al. 2014): the largest of logit / T + noise is a
draw from softmax(logit / T). The noise belongs to (seed, sample, position, token id), so a draw
is the same in any batch, on any rank, after any preemption. Under match acceptance the rows of a
draft window are sampled here like any others, each with the drafts before it as history.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray

from drumline.core.request import PositionLogprobs
from drumline.sampling.draw import Drawer, LogitDraw, draw_tokens
from drumline.sampling.history import SamplingRow, SamplingState
from drumline.sampling.logprobs import position_logprobs
from drumline.sampling.match import MakeMatcher
from drumline.sampling.processors import edit, top_value

Logits = NDArray[np.float32]
Values = NDArray[np.float32] | NDArray[np.float64]


class LogprobsMode(enum.StrEnum):
    """Which logits log-probabilities are taken of; the names are vLLM's."""

    RAW = "raw_logprobs"  # the model's own
    PROCESSED = "processed_logprobs"  # after bans, penalties, temperature and truncation


class SampledToken(Struct, frozen=True):
    """A row's token; log-probabilities if its request asked for them."""

    token_id: int
    logprobs: PositionLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """What the target has to say at one position. ``draw`` is None for a greedy request, whose
    token is ``top``."""

    row: SamplingRow
    raw: Logits
    edited: Logits
    top: int
    draw: LogitDraw | None

    @property
    def processed(self) -> Values:
        """The logits that the token is drawn from: ``[vocab]``."""
        return self.edited if self.draw is None else self.draw.processed


class Sampler:
    """Turns rows of logits into tokens, each row by itself."""

    def __init__(
        self,
        vocab_size: int,
        logprobs_mode: LogprobsMode | str = LogprobsMode.RAW,
        state: SamplingState | None = None,
        drawer: Drawer = draw_tokens,
        make_matcher: MakeMatcher | None = None,
    ) -> None:
        """``drawer`` places the draws, a matcher takes whole windows where it can: in compiled code
        `native_draw.NativeDrawer` and `native_match.NativeMatcher`."""
        self.vocab_size = vocab_size
        self.drawer = drawer
        self.make_matcher = make_matcher
        self.logprobs_mode = LogprobsMode(logprobs_mode)
        self.state = SamplingState() if state is None else state

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        """``[rows, vocab]`` → one token per row. ``logits`` is only read."""
        table = self.host(logits, len(rows))
        targets = [self.target(raw, row) for raw, row in zip(table, rows, strict=True)]
        tokens = self.tokens(targets)
        return [self.report(target, token) for target, token in zip(targets, tokens, strict=True)]

    def tokens(self, targets: Sequence[Target]) -> list[int]:
        """The target's own token at each position."""
        drawn = iter(self.drawer([one.draw for one in targets if one.draw is not None]))
        return [one.top if one.draw is None else next(drawn) for one in targets]

    def host(self, logits: torch.Tensor, count: int) -> Logits:
        """The logits on the host, each row contiguous; no copy where they are so already."""
        assert logits.shape == (count, self.vocab_size), "one row of logits per row to sample"
        assert logits.dtype == torch.float32, "logits are float32"
        table: Logits = logits.detach().cpu().contiguous().numpy()
        return table

    def target(self, raw: Logits, row: SamplingRow) -> Target:
        """What the request makes of one row of logits ``[vocab]``; raises `EngineError` if they
        are no numbers."""
        edited = edit(raw, row, self.state)
        top, maximum = top_value(edited, row)
        draw = None if row.request.params.greedy else LogitDraw(row, edited, maximum)
        return Target(row, raw, edited, top, draw)

    def report(self, target: Target, token: int) -> SampledToken:
        """A token that stands at the target's position, with what its request wants to know."""
        wanted = target.row.request.params.logprobs
        if wanted is None:
            return SampledToken(token)
        values = target.raw if self.logprobs_mode is LogprobsMode.RAW else target.processed
        return SampledToken(token, position_logprobs(values, float(values.max()), token, wanted))

    def prompt_logprobs(
        self, logits: torch.Tensor, next_ids: Sequence[int], wanted: int
    ) -> list[PositionLogprobs]:
        """Reports the prompt's own tokens: row i of ``[rows, vocab]`` is of the position before
        ``next_ids[i]``. Always of the model's own logits; parameters do not act on a prompt."""
        table = self.host(logits, len(next_ids))
        return [
            position_logprobs(row, float(row.max()), token, wanted)
            for row, token in zip(table, next_ids, strict=True)
        ]
