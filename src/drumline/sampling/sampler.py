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
from numpy.typing import NDArray

from drumline.core.request import PositionLogprobs, Request
from drumline.sampling.draw import Draw, draw_tokens
from drumline.sampling.history import SamplingRow, SamplingState
from drumline.sampling.logprobs import position_logprobs
from drumline.sampling.processors import edit, scale, top_value, truncate

Logits = NDArray[np.float32]
Values = NDArray[np.float32] | NDArray[np.float64]


class LogprobsMode(enum.StrEnum):
    """Which logits log-probabilities are taken of; the names are vLLM's."""

    RAW = "raw_logprobs"  # the model's own
    PROCESSED = "processed_logprobs"  # after bans, penalties, temperature and truncation


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A row's token; log-probabilities if its request asked for them."""

    token_id: int
    logprobs: PositionLogprobs | None = None


class Sampler:
    """Turns rows of logits into tokens, each row by itself."""

    def __init__(
        self,
        vocab_size: int,
        logprobs_mode: LogprobsMode | str = LogprobsMode.RAW,
        state: SamplingState | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.logprobs_mode = LogprobsMode(logprobs_mode)
        self.state = SamplingState() if state is None else state

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        """``[rows, vocab]`` → one token per row. ``logits`` is only read."""
        table = self._table(logits, len(rows))
        sampled: list[SampledToken | None] = [None] * len(rows)
        draws = []
        for index, row in enumerate(rows):
            edited = edit(table[index], row, self.state)
            token, maximum = top_value(edited, row)
            params = row.request.params
            if params.greedy:
                logprobs = self._logprobs(table[index], edited, row.request, token)
                sampled[index] = SampledToken(token, logprobs)
            else:
                scaled = scale(edited, maximum, params.temperature)
                draws.append(Draw(index, row, scaled, truncate(edited, scaled, params)))
        for draw, token in zip(draws, draw_tokens(draws), strict=True):
            logprobs = self._logprobs(table[draw.index], draw.processed, draw.row.request, token)
            sampled[draw.index] = SampledToken(token, logprobs)
        return [token for token in sampled if token is not None]

    def prompt_logprobs(
        self, logits: torch.Tensor, next_ids: Sequence[int], wanted: int
    ) -> list[PositionLogprobs]:
        """Reports the prompt's own tokens: row i of ``[rows, vocab]`` is of the position before
        ``next_ids[i]``. Always of the model's own logits; parameters do not act on a prompt."""
        table = self._table(logits, len(next_ids))
        return [
            position_logprobs(row, float(row.max()), token, wanted)
            for row, token in zip(table, next_ids, strict=True)
        ]

    def _table(self, logits: torch.Tensor, count: int) -> Logits:
        """The logits on the host, each row contiguous; no copy where they are so already."""
        assert logits.shape == (count, self.vocab_size), "one row of logits per row to sample"
        assert logits.dtype == torch.float32, "logits are float32"
        table: Logits = logits.detach().cpu().contiguous().numpy()
        return table

    def _logprobs(
        self, raw: Logits, processed: Values, request: Request, token: int
    ) -> PositionLogprobs | None:
        wanted = request.params.logprobs
        if wanted is None:
            return None
        values = raw if self.logprobs_mode is LogprobsMode.RAW else processed
        return position_logprobs(values, float(values.max()), token, wanted)
