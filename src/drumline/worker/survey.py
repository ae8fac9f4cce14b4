"""What passes issue on this mesh, learnt once before the first step: their collectives, in order.

Every pass is run with two sizes; what grows with the size is an extent per token. All ranks of a
group survey at the same time, and so use every group once. From then on a pass that issues anything
else ends the group. Nothing is written to a cache: all tokens are padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from drumline.core.errors import EngineError
from drumline.core.ledger import Entry, Ledger
from drumline.core.params import SamplingParams
from drumline.core.request import Request
from drumline.core.traits import Collective, ModelTraits, PerToken
from drumline.drafting.base import DraftRow
from drumline.models.layers import ModelOutput
from drumline.worker.inputs import build_inputs
from drumline.worker.script import ScriptedPasses, StepScript
from drumline.worker.speculator import Speculator
from drumline.worker.worker import Worker

SIZES = (5, 7)  # no extent of a model is both
_LOGIT_ROWS = 3


def survey(worker: Worker, script: StepScript) -> None:
    """Fills in what the script knows of target and drafter."""
    ledger = script.ledger
    script.surveying = True
    with torch.inference_mode():
        bodies = [_issued(ledger, lambda size=size: _target(worker, size)) for size in SIZES]  # type: ignore[misc]
        output = _target(worker, _LOGIT_ROWS)
        logits = _issued(ledger, lambda: worker.model.compute_logits(output.hidden))
        script.model = ModelTraits(
            _scaled(*bodies), tuple(_of_rows(entry, _LOGIT_ROWS) for entry in logits)
        )
        speculator = worker.speculator
        if speculator is not None and speculator.traits.runs_forward:
            passes = [_draft_passes(worker, speculator, size) for size in SIZES]
            first, later = (_scaled(*pair) for pair in zip(*passes, strict=True))
            said = _draft_logits(worker, speculator) if script.tp.size > 1 else ()
            speculator.traits = replace(
                speculator.traits,
                first_pass=ModelTraits(first, said),
                later_pass=ModelTraits(later, said),
            )
            script.drafter = speculator.traits
            if not script.leads and not speculator.traits.groups:
                worker.speculator = script.drafter = None  # its leader drafts alone
    script.surveying = False


def _issued(ledger: Ledger, call: Callable[[], object]) -> tuple[Entry, ...]:
    ledger.enter("warmup")
    call()
    return ledger.leave()


def _target(worker: Worker, size: int) -> ModelOutput:
    taps = () if worker.speculator is None else worker.speculator.taps
    inputs = build_inputs((), worker.cache.block_size, worker.ops.device, size)
    return worker.model.forward(inputs.ids, inputs.batch, worker.cache, taps)


def _draft_passes(
    worker: Worker, speculator: Speculator, size: int
) -> tuple[tuple[Entry, ...], tuple[Entry, ...]]:
    """What a first and a later pass of so many tokens issue, none of them alive."""
    traits, ledger = speculator.traits, speculator.ledger
    k = 1 if traits.in_one_pass else 2
    seen: list[tuple[Entry, ...]] = []
    assert isinstance(ledger, ScriptedPasses)
    assert ledger.script is not None
    record = ledger.script.ledger
    output = _target(worker, size)

    def note(index: int) -> None:
        if index:
            seen.append(record.leave())
        record.enter("warmup")

    ledger.begin((size,) * traits.passes(k), exact=True)
    ledger.on_pass = note
    speculator.drafter.propose((), output, k)
    seen.append(record.leave())
    ledger.on_pass = None
    ledger.end()
    return seen[0], seen[-1] if len(seen) > 1 else ()


def _draft_logits(worker: Worker, speculator: Speculator) -> tuple[Collective, ...]:
    """What computing logits of drafts issues: what a pass with a row has beyond one without."""
    ledger = speculator.ledger
    assert isinstance(ledger, ScriptedPasses)
    assert ledger.script is not None
    record = ledger.script.ledger
    row = DraftRow(
        request=Request(-1, (0,), SamplingParams(temperature=0.0), 8, 0),
        committed=[0, 0],
        start=0,
        count=1,
        offset=0,
        block_ids=(0, 1),
        k=1,
        fresh=True,
        width=1,
    )
    issued = []
    for rows in ((), (row,)):
        output = _target(worker, SIZES[0])
        ledger.begin((SIZES[0],), exact=True)
        record.enter("warmup")
        speculator.drafter.propose(rows, output, 1)
        issued.append(record.leave())
    speculator.drafter.forget(-1)
    without, whole = issued
    return tuple(_of_rows(entry, 1) for entry in whole[len(without) :])


def _scaled(small: Sequence[Entry], large: Sequence[Entry]) -> tuple[Collective, ...]:
    """The collectives of a pass by its size, from those of two sizes."""
    found = []
    if len(small) != len(large):
        raise EngineError(
            f"a pass of {SIZES[0]} tokens issues {len(small)} collectives, one of "
            f"{SIZES[1]} issues {len(large)}"
        )
    for one, other in zip(small, large, strict=True):
        words = (one.operation, one.group, one.dtype)
        assert words == (other.operation, other.group, other.dtype)
        shape = tuple(_extent(a, b) for a, b in zip(one.shape, other.shape, strict=True))
        found.append(Collective(one.operation, one.group, shape, one.dtype))
    return tuple(found)


def _extent(small: int, large: int) -> int | PerToken:
    if small == large:
        return small
    count, rest = divmod(small, SIZES[0])
    assert not rest
    assert large == count * SIZES[1], "an extent is a multiple of the tokens, or fixed"
    return PerToken(count)


def _of_rows(entry: Entry, rows: int) -> Collective:
    """With the count of rows that have logits left open: it is the replica's own."""
    assert entry.shape[0] == rows, f"{entry} for {rows} rows of logits"
    return Collective(entry.operation, entry.group, (None, *entry.shape[1:]), entry.dtype)
