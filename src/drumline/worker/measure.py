"""What passes cost on this machine, measured before the first request.

Target passes by tokens and draft passes by rows, in microseconds, for whoever weighs one against
the other. Every pass writes to slots that no sequence has yet. Knows no draft length.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from drumline.core.params import SamplingParams
from drumline.core.request import Request
from drumline.drafting.base import DraftRow
from drumline.lockstep.script import pass_sizes
from drumline.models.layers import ModelOutput
from drumline.ops.base import PagedBatch
from drumline.worker.speculator import Speculator
from drumline.worker.worker import Worker

REPEATS = 3  # the fastest counts: what is slower was disturbed


def doubling_sizes(largest: int) -> list[int]:
    """1, 2, 4, …, and ``largest``."""
    sizes = [2**power for power in range(largest.bit_length()) if 2**power < largest]
    return [*sizes, largest]


def target_micros(worker: Worker, tokens_max: int) -> dict[int, int]:
    """Microseconds of a target pass with logits for each token, by the number of tokens, each in
    a block of its own as far as there are blocks."""
    sizes = _sizes(worker, tokens_max)
    return {size: _fastest(partial(_target_pass, worker, size)) for size in sizes}


def draft_micros(worker: Worker, rows_max: int) -> dict[int, int]:
    """Microseconds of one draft pass, by the number of rows; nothing if there are none. Where ranks
    share passes all measure at the same time, those too that leave drafting to another."""
    speculator = worker.speculator
    if speculator is not None and not speculator.traits.passes(1):
        speculator = None
    if speculator is None and worker.script is None:
        return {}
    found = {}
    block_size = worker.cache.block_size
    for size in _sizes(worker, rows_max):
        output = _target_pass(worker, size)
        if speculator is None:
            continue
        found[size] = _fastest(partial(_draft_pass, speculator, block_size, size, output))
    for number in range(1, rows_max + 1):
        if speculator is not None:
            speculator.drafter.forget(-number)
    return found


def _sizes(worker: Worker, largest: int) -> list[int]:
    return doubling_sizes(min(largest, worker.cache.block_count))


def _fastest(call: Callable[[], object]) -> int:
    call()
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return max(1, round(min(seconds) * 1e6))


def _target_pass(worker: Worker, size: int) -> ModelOutput:
    device, block_size = worker.ops.device, worker.cache.block_size
    batch = PagedBatch(
        positions=torch.zeros(size, dtype=torch.int64, device=device),
        slots=torch.arange(size, dtype=torch.int64, device=device) * block_size,
        query_start=tuple(range(size + 1)),
        block_tables=tuple((block,) for block in range(size)),
    )
    ids = torch.zeros(size, dtype=torch.int64, device=device)
    taps = () if worker.speculator is None else worker.speculator.taps
    with torch.inference_mode():
        output = worker.model.forward(ids, batch, worker.cache, taps)
        worker.model.compute_logits(output.hidden)
    return output


def _draft_pass(speculator: Speculator, block_size: int, size: int, output: ModelOutput) -> None:
    """One draft for each of ``size`` sequences of two tokens."""
    rows = [
        DraftRow(
            request=Request(-1 - index, (0,), SamplingParams(temperature=0.0), 8, 0),
            committed=[0, 1],  # nothing to look up: the network's passes are timed
            start=0,
            count=1,
            offset=index,
            block_ids=(index,),
            k=1 if block_size > 2 else 0,
            fresh=True,
            width=1,
        )
        for index in range(size)
    ]
    sizes = pass_sizes(speculator.traits, [(1, True)] * size, 1)
    speculator.ledger.begin(sizes, exact=bool(speculator.traits.groups))
    with torch.inference_mode():
        speculator.drafter.propose(rows, output, 1)
