"""One rank at work: a plan in, a result out.

The worker keeps what a plan does not repeat (requests and their committed tokens) and computes;
it decides nothing. Its copy of a sequence follows the plan: an admission sets it, a row's tokens
extend it, a release drops it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drumline.core.plan import Row, RowResult, StepPlan, StepResult
from drumline.core.request import PositionLogprobs, Request
from drumline.core.traits import DrafterTraits
from drumline.drafting.base import TargetModel
from drumline.models.layers import ModelOutput
from drumline.ops.base import KVCache, Ops
from drumline.ops.indices import IndexMemory, pick_rows
from drumline.sampling.accept import Accepted, Verifier
from drumline.sampling.window import Window
from drumline.worker.inputs import build_inputs
from drumline.worker.script import StepScript
from drumline.worker.speculator import Outcome, Speculator

LOGIT_ROWS_MAX = 64  # rows of [vocab] floats held at once for prompt log-probabilities


@dataclass(slots=True)
class SequenceState:
    """A sequence as this rank knows it: committed ids, prompt first.

    ``fresh`` until the drafter has seen it."""

    request: Request
    token_ids: list[int]
    fresh: bool = True

    def extend(self, row: Row) -> None:
        """Takes over tokens that were committed since the last row."""
        known = len(self.token_ids)
        assert row.start <= known, f"row {row.number} skips positions {known}..{row.start}"
        self.token_ids.extend(row.tokens[known - row.start :])
        end = row.start + len(row.tokens)
        assert tuple(self.token_ids[row.start : end]) == row.tokens, f"row {row.number} differs"


class Worker:
    """Executes plans on one model and one cache. ``[rows]`` in, tokens out."""

    def __init__(
        self,
        model: TargetModel,
        ops: Ops,
        cache: KVCache,
        verifier: Verifier,
        speculator: Speculator | None = None,
        script: StepScript | None = None,
        torch_threads: int | None = None,
    ) -> None:
        """``script``: where other ranks take part in this one's passes. ``torch_threads``: what
        torch computes with from a step on until `rest`; None: what it has anyway."""
        self.model = model
        self.ops = ops
        self.cache = cache
        self.verifier = verifier
        self.sampler = verifier.sampler
        self.speculator = speculator
        self.script = script
        self.torch_threads = torch_threads
        self._threads_before: int | None = None  # torch's, while it has others
        self._memory = IndexMemory(ops.device)
        self._sequences: dict[int, SequenceState] = {}
        self._asking: set[int] = set()  # sequences that want their prompt's log-probabilities
        self._step = 0

    @property
    def traits(self) -> DrafterTraits | None:
        """The drafter's, as it is used here; None without one."""
        return None if self.speculator is None else self.speculator.traits

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs the target over the plan's rows, samples where a row says so, and drafts."""
        self._take_threads()
        self._follow(plan)
        if self.script is not None:
            self.script.begin(plan)
        inputs = build_inputs(
            plan.rows, self.cache.block_size, self.ops.device, plan.target_size, self._memory
        )
        taps = () if self.speculator is None else self.speculator.taps
        offsets, picked = inputs.offsets, inputs.picked
        # Among ranks that share the head its logits are a pass of their own, in the script's order.
        at_once = picked if self.script is None else ()
        read_at = None if self._reads_hidden else picked
        output = self.model.forward(inputs.ids, inputs.batch, self.cache, taps, at_once, read_at)
        prompts: dict[int, tuple[PositionLogprobs, ...]] = {}
        if self._asking:
            prompts = self._prompt_logprobs(plan.rows, offsets, output.hidden)
        logits = output.logits
        if picked and logits is None:
            logits = self.model.compute_logits(pick_rows(output.hidden, picked))
        accepted = {} if logits is None else self._verify(plan.rows, logits)
        drafts = self._draft(plan, offsets, accepted, output)
        if self.script is not None:
            self.script.end()
        results = [
            _result(row, accepted.get(row.number), prompts.get(row.number, ()), drafts)
            for row in plan.rows
        ]
        return StepResult(plan.step, tuple(results))

    def end(self, number: int) -> None:
        """Forgets a sequence that is over or preempted, once. Whoever knows of an end calls it at
        once, so that what a drafter writes is there; the plan that releases it may be far off."""
        if self._sequences.pop(number, None) is None:
            return
        self._asking.discard(number)
        self.verifier.forget(number)
        if self.speculator is not None:
            self.speculator.forget(number, self._step)

    def _take_threads(self) -> None:
        before = torch.get_num_threads()
        if self.torch_threads is not None and self.torch_threads != before:
            torch.set_num_threads(self.torch_threads)
            if self._threads_before is None:
                self._threads_before = before

    def rest(self) -> None:
        """No step is near: torch gets back the threads that it had."""
        if self._threads_before is not None:
            torch.set_num_threads(self._threads_before)
            self._threads_before = None

    def close(self) -> None:
        """Releases what a drafter holds beyond memory."""
        self.rest()
        if self.speculator is not None:
            self.speculator.drafter.close()

    def _follow(self, plan: StepPlan) -> None:
        self._step = plan.step
        for number in plan.released:
            self.end(number)
        for admission in plan.admitted:
            request = admission.request
            self._sequences[request.number] = SequenceState(request, list(admission.token_ids))
            if request.params.prompt_logprobs is not None:
                self._asking.add(request.number)
        if self._knows_all:
            for row in plan.rows:
                self._sequences[row.number].extend(row)

    @property
    def _reads_hidden(self) -> bool:
        """Whether anybody reads hidden states of rows without logits."""
        return bool(self._asking) or (self.traits is not None and self.traits.reads_hidden)

    @property
    def _knows_all(self) -> bool:
        """Whether this rank needs every committed token: one that neither samples nor drafts
        computes what plans say, and is not told of drafts that were accepted."""
        return self.script is None or self.script.leads or self.speculator is not None

    # ---- sampling and drafting -----------------------------------------------------------

    def _verify(self, rows: Sequence[Row], logits: Tensor) -> dict[int, Accepted]:
        """What each sampling row yields: drafts that stand, and the target's own token."""
        windows: list[Window] = []
        for row in rows:
            if row.samples:
                state = self._sequences[row.number]
                probs = () if self.speculator is None else self.speculator.take_probs(row)
                windows.append(Window(state.request, state.token_ids, row.drafts, probs))
        found = self.verifier.verify(logits, windows)  # [sampled rows, vocab]
        return {
            window.request.number: accepted for window, accepted in zip(windows, found, strict=True)
        }

    def _draft(
        self,
        plan: StepPlan,
        offsets: Sequence[int],
        accepted: dict[int, Accepted],
        output: ModelOutput,
    ) -> dict[int, tuple[int, ...]]:
        """Takes the new tokens over and asks the drafter, once per step, for the next ones.

        A row that cannot go on is left out: nothing of it will be read again."""
        if self.speculator is None:
            for number, found in accepted.items():
                tokens = self._sequences[number].token_ids
                tokens.extend(token.token_id for token in found.tokens)
            return {}
        outcomes: list[Outcome] = []
        begins: list[int] = []
        for row, offset in zip(plan.rows, offsets, strict=True):
            state = self._sequences[row.number]
            outcome = accepted.get(row.number)
            if outcome is not None and outcome.error is not None:
                continue
            committed: Sequence[int] = state.token_ids
            if outcome is not None:
                state.token_ids.extend(token.token_id for token in outcome.tokens)
            else:
                committed = state.token_ids[: row.start + len(row.tokens) + 1]
            count = 0 if outcome is None else len(outcome.tokens) - 1
            outcomes.append(Outcome(row, state.request, committed, count, state.fresh))
            begins.append(offset)
            state.fresh = False
        drafts = self.speculator.draft(plan, outcomes, begins, output)
        return {outcome.row.number: found for outcome, found in zip(outcomes, drafts, strict=True)}

    # ---- prompts -------------------------------------------------------------------------

    def _prompt_logprobs(
        self, rows: Sequence[Row], offsets: Sequence[int], hidden: Tensor
    ) -> dict[int, tuple[PositionLogprobs, ...]]:
        """Per row that asks: the prompt tokens at positions start + 1 .. start + len(tokens)."""
        found: dict[int, tuple[PositionLogprobs, ...]] = {}
        for row, offset in zip(rows, offsets, strict=True):
            request = self._sequences[row.number].request
            wanted = request.params.prompt_logprobs
            if wanted is None:
                continue
            prompt = request.prompt_token_ids
            count = min(row.start + len(row.tokens), len(prompt) - 1) - row.start
            if count > 0:
                next_ids = prompt[row.start + 1 : row.start + 1 + count]
                entries: list[PositionLogprobs] = []
                for at in range(0, count, LOGIT_ROWS_MAX):
                    part = hidden[offset + at : offset + min(at + LOGIT_ROWS_MAX, count)]
                    logits = self.model.compute_logits(part)
                    part_ids = next_ids[at : at + part.shape[0]]
                    entries += self.sampler.prompt_logprobs(logits, part_ids, wanted)
                found[row.number] = tuple(entries)
        return found


def _result(
    row: Row,
    accepted: Accepted | None,
    prompt: tuple[PositionLogprobs, ...],
    drafts: dict[int, tuple[int, ...]],
) -> RowResult:
    if accepted is None:
        return RowResult(number=row.number, tokens=(), prompt_logprobs=prompt)
    if accepted.error is not None:
        return RowResult(number=row.number, tokens=(), error=accepted.error)
    return RowResult(
        row.number,
        tuple([token.token_id for token in accepted.tokens]),
        tuple([token.logprobs for token in accepted.tokens if token.logprobs is not None]),
        prompt,
        drafts.get(row.number, ()),
    )
