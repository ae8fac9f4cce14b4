"""One rank at work: a plan in, a result out.

The worker keeps what a plan does not repeat (requests and their committed tokens) and computes;
it decides nothing. Its copy of a sequence follows the plan: an admission sets it, a row's tokens
extend it, a release drops it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from drumline.core.plan import Row, RowResult, StepPlan, StepResult
from drumline.core.request import PositionLogprobs, Request
from drumline.ops.base import KVCache, Ops
from drumline.sampling.history import SamplingRow
from drumline.sampling.sampler import SampledToken, Sampler
from drumline.worker.inputs import build_inputs
from drumline.worker.target import TargetModel

LOGIT_ROWS_MAX = 64  # rows of [vocab] floats held at once for prompt log-probabilities


@dataclass(slots=True)
class SequenceState:
    """A sequence as this rank knows it: committed ids, prompt first."""

    request: Request
    token_ids: list[int]

    def extend(self, row: Row) -> None:
        """Takes over tokens that were committed since the last row."""
        known = len(self.token_ids)
        assert row.start <= known, f"row {row.number} skips positions {known}..{row.start}"
        self.token_ids.extend(row.tokens[known - row.start :])


class Worker:
    """Executes plans on one model and one cache. ``[rows]`` in, tokens out."""

    def __init__(self, model: TargetModel, ops: Ops, cache: KVCache, sampler: Sampler) -> None:
        self.model = model
        self.ops = ops
        self.cache = cache
        self.sampler = sampler
        self._sequences: dict[int, SequenceState] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs the target over the plan's rows and samples where a row says so."""
        self._follow(plan)
        inputs = build_inputs(plan.rows, self.cache.block_size, self.ops.device)
        batch = self.ops.prepare(inputs.batch, self.cache.block_size)
        hidden = self.model.forward(inputs.ids, batch, self.cache).hidden  # [tokens, hidden]
        prompts = self._prompt_logprobs(plan.rows, hidden)
        sampled = self._sample(plan.rows, hidden)
        rows = tuple(
            self._result(row, sampled.get(row.number), prompts.get(row.number, ()))
            for row in plan.rows
        )
        return StepResult(step=plan.step, rows=rows)

    def _follow(self, plan: StepPlan) -> None:
        for number in plan.released:
            self._sequences.pop(number, None)
            self.sampler.state.forget(number)
        for admission in plan.admitted:
            state = SequenceState(admission.request, list(admission.token_ids))
            self._sequences[admission.request.number] = state
        for row in plan.rows:
            self._sequences[row.number].extend(row)

    # ---- sampling ------------------------------------------------------------------------

    def _sample(self, rows: Iterable[Row], hidden: Tensor) -> dict[int, list[SampledToken]]:
        """The target's own token after the last committed position and after each draft."""
        picked: list[int] = []
        windows: list[SamplingRow] = []
        offset = 0
        for row in rows:
            if row.samples:
                state = self._sequences[row.number]
                first = offset + len(row.tokens) - 1
                for ahead in range(len(row.drafts) + 1):
                    picked.append(first + ahead)
                    drafts = row.drafts[:ahead]
                    windows.append(SamplingRow(state.request, state.token_ids, drafts))
            offset += row.width
        if not picked:
            return {}
        index = torch.tensor(picked, device=hidden.device)
        logits = self.model.compute_logits(hidden.index_select(0, index))  # [picked, vocab]
        finite = torch.isfinite(logits.amax(dim=1)).tolist()
        if not all(finite):
            good = _before_first_bad(windows, finite)
            logits, windows = logits[good], [windows[at] for at in good]
        sampled: dict[int, list[SampledToken]] = {}
        for window, token in zip(windows, self.sampler.sample(logits, windows), strict=True):
            sampled.setdefault(window.request.number, []).append(token)
        return sampled

    def _result(
        self, row: Row, sampled: list[SampledToken] | None, prompt: tuple[PositionLogprobs, ...]
    ) -> RowResult:
        """Match acceptance: the target's tokens, up to and including the first that differs from
        its draft. A position without finite logits ends the window, or the request."""
        if not row.samples:
            return RowResult(number=row.number, tokens=(), prompt_logprobs=prompt)
        if not sampled:
            position = row.start + len(row.tokens)
            return RowResult(
                number=row.number,
                tokens=(),
                error=f"the model's logits for position {position} are not finite numbers",
            )
        kept = sampled[: _accepted(row.drafts, sampled) + 1]
        return RowResult(
            number=row.number,
            tokens=tuple(token.token_id for token in kept),
            logprobs=tuple(token.logprobs for token in kept if token.logprobs is not None),
            prompt_logprobs=prompt,
        )

    # ---- prompts -------------------------------------------------------------------------

    def _prompt_logprobs(
        self, rows: Iterable[Row], hidden: Tensor
    ) -> dict[int, tuple[PositionLogprobs, ...]]:
        """Per row that asks: the prompt tokens at positions start + 1 .. start + len(tokens)."""
        found: dict[int, tuple[PositionLogprobs, ...]] = {}
        offset = 0
        for row in rows:
            request = self._sequences[row.number].request
            wanted = request.params.prompt_logprobs
            prompt = request.prompt_token_ids
            count = min(row.start + len(row.tokens), len(prompt) - 1) - row.start
            if wanted is not None and count > 0:
                next_ids = prompt[row.start + 1 : row.start + 1 + count]
                entries: list[PositionLogprobs] = []
                for at in range(0, count, LOGIT_ROWS_MAX):
                    part = hidden[offset + at : offset + min(at + LOGIT_ROWS_MAX, count)]
                    logits = self.model.compute_logits(part)
                    part_ids = next_ids[at : at + part.shape[0]]
                    entries += self.sampler.prompt_logprobs(logits, part_ids, wanted)
                found[row.number] = tuple(entries)
            offset += row.width
        return found


def _accepted(drafts: tuple[int, ...], sampled: list[SampledToken]) -> int:
    """How many leading drafts are what the target drew itself."""
    count = 0
    while count < min(len(drafts), len(sampled) - 1) and sampled[count].token_id == drafts[count]:
        count += 1
    return count


def _before_first_bad(windows: list[SamplingRow], finite: list[bool]) -> list[int]:
    """Indices of windows that come before their request's first one without finite logits."""
    bad: set[int] = set()
    good = []
    for at, window in enumerate(windows):
        if not finite[at]:
            bad.add(window.request.number)
        elif window.request.number not in bad:
            good.append(at)
    return good
