"""Lookup before a network: whose drafts stand in a row, which passes are spared and which never
are, and that nothing is forgotten by halves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from drafting.kit import Ear, check_passes, listen, serve
from drafting.methods import METHODS
from drafting.rows import draft_row
from drafting.world import VOCAB, engine, jobs
from drumline.core.ledger import Ledger
from drumline.core.plan import Row, StepPlan
from drumline.core.traits import Collective, DrafterTraits, ModelTraits, PerToken
from drumline.drafting.base import DraftRow, PassLedger, Proposal
from drumline.drafting.lookup import LookupFirst
from drumline.drafting.ngram import NgramDrafter
from drumline.lockstep.decide import Rules
from drumline.lockstep.script import pass_sizes
from drumline.models.layers import ModelOutput
from drumline.parallel.comm import Comm
from drumline.sampling.distribution import Distribution
from drumline.worker.script import ScriptedPasses, StepScript

TinyPath = Callable[..., Path]
DRAWN = Distribution(np.array([90]), np.ones(1))


class Network:
    """Drafts 90, 91, … for every row, in passes of one token, and notes what it is asked."""

    traits = DrafterTraits(method="network", runs_forward=True, stateful=True)
    taps = (2,)

    def __init__(self, drawn: bool = False) -> None:
        self.drawn = drawn
        self.ledger = PassLedger()
        self.asked: list[tuple[int, list[int]]] = []
        self.forgotten: list[int] = []
        self.closed = False

    def propose(
        self, rows: Sequence[DraftRow], output: ModelOutput | None, draft_k: int
    ) -> Proposal:
        self.asked.append((draft_k, [row.k for row in rows]))
        for _ in range(self.traits.passes(draft_k)):
            self.ledger.issue(1)
        drafts = tuple(tuple(range(90, 90 + row.k)) for row in rows)
        probs = tuple((DRAWN,) * row.k for row in rows) if self.drawn else ()
        return Proposal(drafts, probs)

    def forget(self, number: int) -> None:
        self.forgotten.append(number)

    def close(self) -> None:
        self.closed = True


def behind(network: Network, shared: bool = False, miss: int | None = None) -> LookupFirst:
    """The network behind a lookup, in a step of draft length 3."""
    drafter = LookupFirst(NgramDrafter(2, 3), network, network.ledger, miss)
    network.ledger.begin((8,) * drafter.traits.passes(3), exact=shared)
    return drafter


FOUND = draft_row([1, 2, 3, 9, 1, 2, 3], 3, number=0)
OTHER = draft_row([1, 2, 3, 4], 2, number=1)  # nothing repeats
MUTE = draft_row([5, 6, 5, 6], 0, number=2)  # repeats, and may not draft
ROWS = [FOUND, OTHER, MUTE]


def test_rows_that_repeat_copy_and_the_others_are_the_networks() -> None:
    network = Network()
    drafter = behind(network)
    assert drafter.propose(ROWS, None, 3) == Proposal(((9, 1, 2), (90, 91), ()))
    assert (drafter.traits, drafter.taps) == (network.traits, network.taps)


@pytest.mark.parametrize(
    ("rows", "asked", "passes"),
    [
        ([FOUND], (0, [0]), 1),  # takes in what was committed, no more
        ([FOUND, MUTE], (0, [0, 0]), 1),
        (ROWS, (2, [0, 2, 0]), 2),  # as far as the one that was not found may draft
        ([OTHER, MUTE], (2, [2, 0]), 2),
        ([MUTE], (0, [0]), 1),
        ([], (0, []), 1),
    ],
)
def test_passes_are_made_for_rows_that_were_not_found(
    rows: list[DraftRow], asked: tuple[int, list[int]], passes: int
) -> None:
    network = Network()
    behind(network).propose(rows, None, 3)
    assert network.asked == [asked]
    network.ledger.end()
    assert len(network.ledger.passes) == passes


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("rows", [ROWS, [OTHER], [FOUND]])
def test_the_network_drafts_less_than_is_copied_where_it_is_told_to(
    rows: list[DraftRow], shared: bool
) -> None:
    """In passes that all ranks know of: so many are in the script, whatever is found."""
    network = Network()
    drafter = behind(network, shared, miss=1)
    assert [drafter.traits.passes(k) for k in range(4)] == [1, 1, 1, 1]
    assert drafter.traits == replace(network.traits, drafts_max=1)
    ks, drafts = (1 if shared else 0, 1, 0), ((9, 1, 2), (90,), ())
    assert drafter.propose(rows, None, 3).drafts == tuple(drafts[row.number] for row in rows)
    (asked,) = network.asked
    assert asked == (max(ks[row.number] for row in rows), [ks[row.number] for row in rows])
    network.ledger.end()
    assert len(network.ledger.passes) == 1


def test_two_of_three_passes_are_in_the_script_where_two_drafts_are_the_most() -> None:
    traits = DrafterTraits("network", True, True, drafts_max=2)
    assert [len(pass_sizes(traits, [(1, True)], k)) for k in range(5)] == [1, 1, 2, 2, 2]
    assert Rules.of(4, replace(traits, later_pass=SHARED)).passes == (1, 1, 2, 2, 2)


@pytest.mark.parametrize("rows", [[FOUND], ROWS, [OTHER], []])
def test_passes_that_others_take_part_in_are_made_whatever_was_found(
    rows: list[DraftRow],
) -> None:
    network = Network()
    proposal = behind(network, shared=True).propose(rows, None, 3)
    assert network.asked == [(3, [row.k for row in rows])]
    network.ledger.end()
    assert len(network.ledger.passes) == 3
    assert proposal == behind(Network()).propose(rows, None, 3)


def test_a_copy_was_drawn_from_nothing() -> None:
    proposal = behind(Network(drawn=True)).propose(ROWS, None, 3)
    assert proposal.probs == ((None, None, None), (DRAWN, DRAWN), ())


def test_both_forget_and_the_network_is_closed() -> None:
    network = Network()
    drafter = behind(network)
    drafter.propose(ROWS, None, 3)
    drafter.forget(0)
    assert network.forgotten == [0]
    again = draft_row([1, 2, 3, 9, 1, 2], 1, number=0)  # shorter: only who forgot can take it
    network.ledger.begin((8,))
    assert drafter.propose([again], None, 1).drafts == ((3,),)
    drafter.close()
    assert network.closed


# ---- ledger and script -------------------------------------------------------------------------


def test_only_passes_of_ones_own_are_left_out_and_before_the_first() -> None:
    ledger = PassLedger()
    ledger.begin((4, 2, 2), exact=True)
    with pytest.raises(AssertionError, match="others take part"):
        ledger.shorten(1)
    ledger.begin((4, 2, 2))
    with pytest.raises(AssertionError, match="4 draft passes of 3"):
        ledger.shorten(4)
    ledger.shorten(1)
    ledger.issue(3)
    with pytest.raises(AssertionError, match="not in the script"):
        ledger.issue(1)
    with pytest.raises(AssertionError, match="issued already"):
        ledger.shorten(0)
    ledger.end()


class Alone:
    """A group of one."""

    rank, size = 0, 1


SHARED = ModelTraits(body=(Collective("all_gather", "ep", (PerToken(), 4)),))


@pytest.mark.parametrize("later", [ModelTraits(), SHARED])
def test_the_script_of_a_rank_leaves_out_what_issues_nothing(later: ModelTraits) -> None:
    """A dense drafter on the first rank of a replica: its passes are in that rank's script."""
    ledger = Ledger.in_memory()
    ledger.begin(0, 0)
    script = StepScript(ledger, cast(Comm, Alone()))
    script.drafter = DrafterTraits("network", True, True, later_pass=later)
    row = Row(number=0, start=5, tokens=(1,), block_ids=(0, 1), samples=True)
    script.begin(StepPlan(epoch=0, step=0, rows=(row,), draft_k=3))
    passes = ScriptedPasses(script=script)
    passes.begin((2, 1, 1))
    if later.body:
        with pytest.raises(AssertionError, match="others take part"):
            passes.shorten(1)
        return
    passes.shorten(1)
    passes.issue(1)
    passes.end()
    script.end()


# ---- with a network of weights -----------------------------------------------------------------


class Unsparing(LookupFirst):
    """As if every pass were shared: the network drafts for every row, found or not."""

    def propose(
        self, rows: Sequence[DraftRow], output: ModelOutput | None, draft_k: int
    ) -> Proposal:
        ledger, self.ledger = self.ledger, PassLedger(exact=True)
        try:
            return super().propose(rows, output, draft_k)
        finally:
            self.ledger = ledger


def heard_of(target: Path, config: dict[str, Any], sparing: bool, **settings: Any) -> Ear:
    llm = engine(target, config, **settings)
    ear = listen(llm)
    assert isinstance(ear.inner, LookupFirst)
    if not sparing:
        own = ear.inner
        ear.inner = Unsparing(own.ngram, own.inner, own.ledger, own.miss_tokens)
    serve(llm, jobs(True, longest=3))
    return ear


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("miss", [1, 2])
def test_an_engine_makes_as_many_passes_as_the_network_may_draft(
    tiny_path: TinyPath, miss: int, padded: bool
) -> None:
    target = tiny_path(arch="llama", seed=3, vocab=VOCAB)
    own = METHODS["mtp after lookup"]
    limited = replace(own, config=lambda path: {**own.config(path), "lookup_miss_tokens": miss})
    check_passes(target, limited, 3, padded)


@pytest.mark.parametrize(
    ("name", "padded"),
    [("eagle3", True), ("mtp", False), ("draft_model", True), ("dflash", True), ("medusa", True)],
)
def test_a_network_that_was_spared_passes_drafts_the_same_afterwards(
    tiny_path: TinyPath, name: str, padded: bool
) -> None:
    """Its state after steps with hits is that of one that drafted all the time: to the last
    draft of every row in every step, and with them what is accepted."""
    target = tiny_path(arch="llama", seed=3, vocab=VOCAB)
    config = METHODS[name].speculative(
        target, 3, prompt_lookup_min=1, disable_padded_drafter_batch=not padded
    )
    spared, whole = (heard_of(target, config, sparing, max_num_seqs=2) for sparing in (True, False))
    assert [(one.rows, one.drafts) for one in spared.heard] == [
        (one.rows, one.drafts) for one in whole.heard
    ]
    counts = [sum(len(one.passes) for one in ear.heard) for ear in (spared, whole)]
    if name == "dflash":
        assert counts[0] == counts[1], "one pass takes in and drafts"
    else:
        assert counts[0] < counts[1]
    mixed = [one for one in spared.heard if len(set(one.repeats)) == 2]
    assert any(one.asked_of_network(lookup=True) for one in mixed)
