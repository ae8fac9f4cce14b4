"""A target and a drafter without an engine: steps by hand, everything a pass computes recorded."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from drumline.core.params import SamplingParams
from drumline.core.request import Request
from drumline.drafting.base import DrafterContext, DraftRow, PassLedger
from drumline.drafting.registry import drafter_module
from drumline.lockstep.script import pass_sizes
from drumline.models.checkpoint import open_checkpoint
from drumline.models.layers import ModelOutput
from drumline.models.registry import model_module
from drumline.ops.base import PagedBatch
from drumline.ops.reference import ReferenceOps
from drumline.sampling.draft import DraftSampler

BLOCK = 4
BLOCKS = 64
LENGTH = 96


def settings(method: str, model: Path | None, k: int = 3, **more: Any) -> Any:
    """A speculative config as drafters read it."""
    values = {
        "method": method,
        "model": None if model is None else str(model),
        "revision": None,
        "num_speculative_tokens": k,
        "disable_padded_drafter_batch": False,
        "draft_sample_method": "greedy",
        "rejection_sample_method": "match",
        "max_model_len": None,
    }
    return SimpleNamespace(**(values | more))


@dataclass(slots=True)
class Piece:
    """One row of a step: so many of the sequence's next tokens are committed, and ``rejected``
    drafts were computed beside them. ``slots``: blocks given; None as many as drafts need."""

    sequence: Sequence
    count: int
    k: int = 0
    rejected: tuple[int, ...] = ()
    short: bool = False  # no block for the new token
    samples: bool = True


@dataclass(slots=True)
class Sequence:
    """``tokens`` is the truth, given beforehand; ``computed`` how far the target is."""

    number: int
    tokens: list[int]
    block_ids: tuple[int, ...]
    computed: int = 0
    fresh: bool = True


@dataclass(slots=True)
class Recorded:
    """One pass: ids, positions, slots and hidden rows of its live tokens."""

    ids: list[int]
    positions: list[int]
    slots: list[int]
    x: Tensor


@dataclass(slots=True)
class World:
    """Made by `build`. ``passes`` holds what every call of the network took and gave."""

    target: Any
    drafter: Any
    ledger: PassLedger
    ops: ReferenceOps
    cache: Any
    passes: list[Recorded] = field(default_factory=list)
    shared: bool = False  # whether other ranks take part in the passes
    free: list[int] = field(default_factory=list)
    next_number: int = 0

    def sequence(self, tokens: list[int]) -> Sequence:
        count = -(-(len(tokens) + 12) // BLOCK)
        blocks, self.free = tuple(self.free[:count]), self.free[count:]
        self.next_number += 1
        return Sequence(self.next_number, tokens, blocks)

    def run_target(self, pieces: list[Piece]) -> ModelOutput:
        ids, positions, slots, starts = [], [], [], [0]
        for piece in pieces:
            s = piece.sequence
            said = s.tokens[s.computed : s.computed + piece.count] + list(piece.rejected)
            for offset, token in enumerate(said):
                p = s.computed + offset
                ids.append(token)
                positions.append(p)
                slots.append(s.block_ids[p // BLOCK] * BLOCK + p % BLOCK)
            starts.append(len(ids))
        batch = PagedBatch(
            torch.tensor(positions),
            torch.tensor(slots),
            tuple(starts),
            tuple(piece.sequence.block_ids for piece in pieces),
        )
        taps = tuple(range(self.target.kv_spec.layers + 1))
        return self.target.forward(torch.tensor(ids), batch, self.cache, taps)

    def step(self, pieces: list[Piece], draft_k: int) -> list[tuple[int, ...]]:
        """The target computes, the drafter drafts; sequences move on."""
        output = self.run_target(pieces) if pieces else None
        rows, offset = [], 0
        for piece in pieces:
            s = piece.sequence
            end = s.computed + piece.count
            blocks = s.block_ids
            if piece.short:
                assert end % BLOCK == 0, "a block ends where the new token begins"
                blocks = blocks[: end // BLOCK]
            rows.append(
                DraftRow(
                    request=request(s),
                    committed=s.tokens[: end + 1],
                    start=s.computed,
                    count=piece.count,
                    offset=offset,
                    block_ids=blocks,
                    k=piece.k,
                    fresh=s.fresh,
                    width=piece.count + len(piece.rejected),
                    samples=piece.samples,
                )
            )
            offset += piece.count + len(piece.rejected)
        shapes = [(row.width, row.samples) for row in rows]
        self.ledger.begin(pass_sizes(self.drafter.traits, shapes, draft_k), self.shared)
        proposal = self.drafter.propose(rows, output, draft_k)
        self.ledger.end()
        for piece in pieces:
            piece.sequence.computed += piece.count
            piece.sequence.fresh = False
        return list(proposal.drafts)

    def entries(self, sequence: Sequence) -> dict[int, Tensor]:
        """The last hidden row that was made for each slot of a sequence, by position."""
        found = {}
        for recorded in self.passes:
            for at, slot in enumerate(recorded.slots):
                if slot >= 0 and slot // BLOCK in sequence.block_ids:
                    block = sequence.block_ids.index(slot // BLOCK)
                    found[block * BLOCK + slot % BLOCK] = recorded.x[at]
        return found


def request(sequence: Sequence) -> Request:
    params = SamplingParams.from_mapping({"temperature": 0.0})
    return Request(sequence.number, (sequence.tokens[0],), params, 1000, seed=5)


def build(
    method: str, target: Path, draft: Path | None, *, own_range: int | None = None, **more: Any
) -> World:
    """A fresh target, drafter and caches; blocks come in a shuffled order. ``own_range``:
    ``max_model_len`` of the speculative config."""
    checkpoint = open_checkpoint(target)
    ops = ReferenceOps("cpu")
    module = model_module(checkpoint.config.model_type)
    model = module.Model(checkpoint.config, checkpoint.tensors, ops, LENGTH)
    spec = model.kv_spec
    cache = ops.allocate_kv(spec.layers, BLOCKS, BLOCK, spec.kv_heads, spec.head_dim, "float32")
    ledger = PassLedger()
    speculative = settings(method, draft, max_model_len=own_range, **more)

    def make_sampler(sharpening: float = 1.0, token_table: Any = None) -> DraftSampler:
        how = speculative.draft_sample_method
        return DraftSampler(checkpoint.config.vocab_size, how, sharpening, token_table)

    context = DrafterContext(
        speculative=speculative,
        checkpoint=checkpoint,
        target=model,
        ops=ops,
        max_model_len=LENGTH,
        num_kv_blocks=BLOCKS,
        block_size=BLOCK,
        kv_cache_dtype="float32",
        ledger=ledger,
        make_draft_sampler=make_sampler,
    )
    drafter: Any = drafter_module(method).load(context)
    free = list(range(BLOCKS))
    random.Random(4).shuffle(free)
    world = World(model, drafter, ledger, ops, cache, free=free)
    if hasattr(drafter, "network"):
        _record(world)
    return world


def _record(world: World) -> None:
    network = world.drafter.network
    plain = network.forward

    def forward(
        ids: Tensor, hidden: Tensor, batch: PagedBatch, cache: Any, *read_at: Iterable[int]
    ) -> Tensor:
        x = plain(ids, hidden, batch, cache, *read_at)
        world.passes.append(
            Recorded(ids.tolist(), batch.positions.tolist(), batch.slots.tolist(), x.clone())
        )
        for rows in read_at:  # of what was not asked for, nothing may be used
            unread = torch.ones(len(x), dtype=torch.bool)
            unread[list(rows)] = False
            x[unread] = torch.nan
        return x

    network.forward = forward


def random_tokens(seed: int, count: int, vocab: int = 128) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(5, vocab) for _ in range(count)]
