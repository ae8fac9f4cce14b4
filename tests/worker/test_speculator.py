"""The worker's side of the contract: rows as the diagram in `drafting.base` draws them, the clamp,
distributions that live for one step, passes that must be the script's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drafting.methods import METHODS
from drafting.world import VOCAB, engine, tell
from drumline.core.params import SamplingParams
from drumline.core.plan import Row, StepPlan
from drumline.core.request import Request
from drumline.core.traits import DrafterTraits
from drumline.drafting.base import DraftRow, PassLedger, Proposal
from drumline.models.layers import ModelOutput
from drumline.sampling.distribution import Distribution
from drumline.worker.measure import doubling_sizes, draft_micros, target_micros
from drumline.worker.speculator import Outcome, Speculator

TinyPath = Callable[..., Path]
OUTPUT = ModelOutput(torch.zeros(0, 8))


class Recording:
    """Answers what it is told to, and keeps what it was asked."""

    taps: tuple[int, ...] = ()

    def __init__(self, answer: Callable[[Sequence[DraftRow]], Proposal], **traits: Any) -> None:
        self.traits = DrafterTraits(method="recording", **traits)
        self.answer = answer
        self.rows: list[DraftRow] = []
        self.issue: Callable[[], None] = lambda: None

    def propose(
        self, rows: Sequence[DraftRow], output: ModelOutput | None, draft_k: int
    ) -> Proposal:
        self.rows = list(rows)
        self.issue()
        return self.answer(rows)

    def forget(self, number: int) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is open."""


def full(rows: Sequence[DraftRow]) -> Proposal:
    return Proposal(tuple((7,) * row.k for row in rows))


def request(number: int) -> Request:
    return Request(number, (1, 2, 3), SamplingParams(), 50, 0)


def plan_of(*rows: Row, step: int = 0, k: int = 3) -> StepPlan:
    return StepPlan(epoch=0, step=step, rows=rows, draft_k=k)


def row_of(number: int, **given: Any) -> Row:
    values = {"start": 9, "tokens": (4,), "block_ids": (0, 1, 2, 3), "samples": True}
    values |= {"draft_limit": 40, "draft_max": 3}
    return Row(number=number, **(values | given))


@pytest.mark.parametrize(
    ("given", "accepted", "draft_k", "k"),
    [
        ({}, 0, 3, 3),
        ({}, 0, 2, 2),  # the step's length
        ({"draft_max": 1}, 0, 3, 1),  # the request's own
        ({"draft_limit": 12}, 0, 3, 1),  # n is 11: one position is left
        ({"draft_limit": 11}, 0, 3, 0),
        ({"draft_limit": 0}, 0, 3, 0),  # far past it
        ({"drafts": (5, 6), "draft_limit": 14}, 0, 3, 3),
        ({"drafts": (5, 6), "draft_limit": 14}, 2, 3, 1),  # what was accepted takes room
        ({"samples": False}, 0, 3, 0),
    ],
)
def test_the_clamp(given: dict[str, Any], accepted: int, draft_k: int, k: int) -> None:
    drafter = Recording(full)
    speculator = Speculator(drafter, PassLedger(), VOCAB)
    row = row_of(0, **given)
    outcome = Outcome(row, request(0), [0] * (11 + accepted), accepted, False)
    (drafts,) = speculator.draft(plan_of(row, k=draft_k), [outcome], [0], OUTPUT)
    assert drafts == (7,) * k
    (seen,) = drafter.rows
    assert seen.k == k
    assert seen.length == 11 + accepted
    assert seen.count == 1 + accepted
    assert seen.width == 1 + len(row.drafts)


def test_distributions_live_for_one_executed_step() -> None:
    mass = Distribution(np.array([7]), np.ones(1))

    def drawn(rows: Sequence[DraftRow]) -> Proposal:
        drafts = full(rows).drafts
        return Proposal(drafts, tuple((mass,) * len(row) for row in drafts))

    speculator = Speculator(Recording(drawn), PassLedger(), VOCAB)
    one, two = row_of(1), row_of(2)

    def step(*rows: Row) -> None:
        outcomes = [Outcome(row, request(row.number), [0] * 11, 0, False) for row in rows]
        speculator.draft(plan_of(*rows), outcomes, [0] * len(rows), OUTPUT)

    assert speculator.take_probs(one) == ()
    step(one, two)
    assert speculator.take_probs(row_of(1, drafts=(7, 7, 7))) == (mass,) * 3
    assert speculator.take_probs(row_of(1, drafts=(7,))) == (mass,)  # trimmed
    step(two)
    assert speculator.take_probs(row_of(1, drafts=(7, 7))) == ()
    assert speculator.take_probs(row_of(2, drafts=(7, 7))) == (mass,) * 2
    speculator.forget(2, 5)
    assert speculator.take_probs(row_of(2, drafts=(7, 7))) == ()


def test_probs_that_do_not_match_drafts_are_refused() -> None:
    speculator = Speculator(
        Recording(lambda rows: Proposal(((7, 7),), ((None,),))), PassLedger(), VOCAB
    )
    row = row_of(0)
    with pytest.raises(Exception, match="probs that do not match"):
        speculator.draft(plan_of(row), [Outcome(row, request(0), [], 0, False)], [0], OUTPUT)


@pytest.mark.parametrize("passes", [0, 2, 4])
def test_a_drafter_that_leaves_the_script_is_not_contained(passes: int) -> None:
    """Others would wait for its passes: its error is the worker's."""
    ledger = PassLedger()
    drafter = Recording(full, runs_forward=True, stateful=True)
    drafter.issue = lambda: [ledger.issue(1) for _ in range(passes)] and None
    speculator = Speculator(drafter, ledger, VOCAB)
    row = row_of(0)
    with pytest.raises(AssertionError, match="the script says 3|not in the script"):
        speculator.draft(plan_of(row), [Outcome(row, request(0), [], 0, False)], [0], OUTPUT)


@pytest.mark.parametrize(
    ("configured", "own", "ahead", "positions"),
    [(None, None, 0, None), (20, None, 0, 20), (20, 12, 0, 12), (12, 20, 1, 11), (None, 9, 1, 8)],
)
def test_the_range_is_the_narrower_one(
    configured: int | None, own: int | None, ahead: int, positions: int | None
) -> None:
    drafter = Recording(full, positions_max=own, queries_ahead=ahead)
    speculator = Speculator(drafter, PassLedger(), VOCAB, configured)
    assert speculator.traits.drafter_range == positions


def test_rows_are_what_the_target_computed(tiny_path: TinyPath) -> None:
    """Through an engine with taps, pieces and accepted drafts: every (hidden at p, token at p + 1)
    is handed over once, in order, from the first position that was not cached."""
    target = tiny_path(arch="llama", seed=3, vocab=VOCAB)
    llm = engine(
        target,
        METHODS["scripted"].speculative(target, 3),
        max_num_batched_tokens=8,
        max_num_seqs=3,
    )
    speculator = llm.core.worker.speculator
    assert speculator is not None
    inner = speculator.drafter
    seen: dict[int, list[tuple[int, int, int, bool]]] = {}

    class Noting(Recording):
        taps = (1,)

        def propose(
            self, rows: Sequence[DraftRow], output: ModelOutput | None, draft_k: int
        ) -> Proposal:
            assert output is not None
            assert set(output.taps) == {1}
            assert output.hidden.shape[0] == sum(row.width for row in executed[-1])
            for row in rows:
                assert len(row.committed) == row.length
                assert row.count <= row.width
                entry = (row.start, row.count, row.offset, row.fresh)
                seen.setdefault(row.number, []).append(entry)
            return inner.propose(rows, output, draft_k)

    executed: list[tuple[Row, ...]] = []
    execute = llm.core.worker.execute

    def noted(plan: StepPlan) -> Any:
        executed.append(plan.rows)
        return execute(plan)

    llm.core.worker.execute = noted  # type: ignore[method-assign]
    speculator.drafter = Noting(full)
    prompts = [tuple(range(5, 25)), tuple(range(5, 19)), (40, 41)]
    params = SamplingParams(temperature=0.0, max_tokens=9, seed=1, ignore_eos=True)
    for prompt, output in zip(prompts, engine(target).generate(prompts, params), strict=True):
        tell(prompt, params, output.outputs[0].token_ids)
    llm.generate(prompts, params)
    llm.generate(prompts[:1], params)
    for number, entries in seen.items():
        prompt = prompts[number % 3]
        starts = [start for start, *_ in entries]
        assert [fresh for *_, fresh in entries] == [True] + [False] * (len(entries) - 1)
        ends = [start + count for start, count, *_ in entries]
        assert starts[1:] == ends[:-1]
        assert ends[-1] == len(prompt) + 9 - 1
        if number < 3:
            assert starts[0] == 0 or number == 1
    assert seen[3][0][0] == 16  # four blocks of the prompt were cached
    assert any(count > 1 for entries in seen.values() for start, count, *_ in entries if start > 22)


def test_passes_are_timed_where_nothing_stands_yet(tiny_path: TinyPath) -> None:
    """An adaptive engine measures before its first request, and serves the same tokens after."""
    target = tiny_path(arch="llama", seed=3, vocab=VOCAB)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=10)
    (plain,) = engine(target).generate([(5, 6, 7)], params)
    for name in ("eagle3", "draft_model", "ngram"):
        speculative = METHODS[name].speculative(target, 3, draft_length="adaptive")
        llm = engine(target, speculative)
        (output,) = llm.generate([(5, 6, 7)], params)
        assert output.outputs[0].token_ids == plain.outputs[0].token_ids
        times = target_micros(llm.core.worker, 6)
        assert list(times) == doubling_sizes(6) == [1, 2, 4, 6]
        assert min(times.values()) > 0
        drafts = draft_micros(llm.core.worker, 3)
        assert list(drafts) == ([] if name == "ngram" else [1, 2, 3])
