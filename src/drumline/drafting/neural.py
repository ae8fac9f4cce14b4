"""Passes of a drafter that has its own keys and values and learns from the target's taps.

    entry at slot p + 1   made of (target's hidden at p, token at p + 1)      p = 0, 1, ...
    pass 1                every entry that this step's committed tokens make possible
    pass 2 .. k           entry at slot n + j: the drafter's own hidden and draft j

Entries live in the target's own block ids, so prefix hits and preemption need no thought beyond
one: slot 0 does not exist, and slot n - 1 may have no block yet. Its hidden row is then carried to
the next step, which has one, so that no entry is ever missing. Entries of drafts are overwritten
from the target's hidden states once those are known.

Where no row drafts, pass 1 would make entries that nobody reads yet. They wait, as carried rows do,
until a row drafts, or a block is full, whose entries the prefix cache may give to another request;
a pass that takes in several steps' entries costs hardly more than one that takes in one step's.
Entries that nobody drafts from need keys and values alone, and say so (``read_at``).
Passes that other ranks take part in are never left out, so there nothing waits.

The rope position of an entry is its slot, as speculators has it; where others count from 0, the
difference to every key is the same, and rope knows only differences.

`TapDrafter` knows slots, rows and passes; a `DraftNetwork` knows weights and no sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from drumline.core.errors import ConfigError
from drumline.core.traits import DrafterTraits
from drumline.drafting.base import DrafterContext, DraftRow, PassLedger, Proposal
from drumline.drafting.passes import Lane, PassInputs, draw, proposal
from drumline.models.checkpoint import Checkpoint
from drumline.models.config import ArchitectureConfig
from drumline.models.layers import EMBEDDING, HEAD, KVSpec, ModelOutput
from drumline.models.quantize import BLOCK, QuantizedTensors
from drumline.models.registry import model_module
from drumline.ops.base import KVCache, LayerWeights, Ops, PagedBatch
from drumline.ops.indices import IndexMemory, pick_rows
from drumline.ops.quant import bytes_per_row
from drumline.ops.quantize import quantize
from drumline.ops.weights import WeightTensor
from drumline.sampling.draft import DraftSampler

Streams = tuple[Tensor, ...]  # what of a target's pass entries are made of, [tokens, width] each
Kept = tuple[Streams, int]  # those of one pass, and which row of them

FIRST_KEY = 1  # slot 0 holds no entry
WAITING_MAX = 32  # entries of a sequence, where blocks are longer than that
LEAN = "Q4_1"  # a head's matrices where quantized ones are multiplied as they are


class DraftNetwork(Protocol):
    """Weights of one drafter. ``hidden`` is the width of what it feeds back to itself."""

    taps: tuple[int, ...]
    kv_spec: KVSpec
    hidden_size: int

    def streams(self, output: ModelOutput) -> Streams:
        """What `fuse` makes entries of, as it is: ``[tokens, width]`` each. It may be kept."""
        ...

    def fuse(self, picked: Tensor) -> Tensor:
        """Rows of all streams, side by side → ``[entries, hidden]``."""
        ...

    def forward(
        self,
        ids: Tensor,
        hidden: Tensor,
        batch: PagedBatch,
        cache: KVCache,
        read_at: Sequence[int],
    ) -> Tensor:
        """One pass: ``[tokens]`` ids and ``[tokens, hidden]`` → ``[tokens, hidden]``, of which the
        rows of the tokens at ascending ``read_at`` will be read."""
        ...

    def feed_back(self, x: Tensor) -> Tensor:
        """What `forward` gave, as the next pass takes it for hidden."""
        ...

    def compute_logits(self, x: Tensor) -> Tensor:
        """What `forward` gave ``[rows, hidden]`` → ``[rows, draft vocab]``."""
        ...


class TapDrafter:
    """A `Drafter` around a `DraftNetwork`; what EAGLE, EAGLE-3 and MTP have in common."""

    def __init__(
        self, network: DraftNetwork, context: DrafterContext, sampler: DraftSampler, positions: int
    ) -> None:
        """``positions``: how many the network can take; its rope reaches exactly so far."""
        self.network = network
        self.ops: Ops = context.ops
        self.ledger: PassLedger = context.ledger
        self.sampler = sampler
        self.positions_max = positions
        self.padded = not context.speculative.disable_padded_drafter_batch
        spec = network.kv_spec
        self.cache = context.ops.allocate_kv(
            spec.layers,
            context.num_kv_blocks,
            context.block_size,
            spec.kv_heads,
            spec.head_dim,
            context.kv_cache_dtype,
        )
        self._traits = DrafterTraits(
            method=context.speculative.method,
            runs_forward=True,
            stateful=True,
            needs_taps=True,
            reads_hidden=not network.taps,
            catch_up=1,
            positions_max=positions,
        )
        self._memory = IndexMemory(self.ops.device)
        self._carried: dict[int, list[Kept]] = {}  # number → what its last entries are made of
        self._filled: dict[int, int] = {}  # number → slots below this hold entries or are carried

    @property
    def traits(self) -> DrafterTraits:
        return self._traits

    @property
    def taps(self) -> tuple[int, ...]:
        return self.network.taps

    def propose(
        self, rows: Sequence[DraftRow], output: ModelOutput | None, draft_k: int
    ) -> Proposal:
        lanes = [Lane(row, self._room(row, draft_k)) for row in rows]
        if lanes and not self.ledger.exact and all(self._can_wait(lane) for lane in lanes):
            self.ledger.shorten(0)
            self._let_wait(lanes, output)
            return proposal(lanes)
        x = self._first_pass(lanes, output)
        self._draw(lanes, x, 0)
        for index in range(1, self.traits.passes(draft_k)):
            x = self._next_pass(lanes, x, index)
            self._draw(lanes, x, index)
        return proposal(lanes)

    def forget(self, number: int) -> None:
        self._carried.pop(number, None)
        self._filled.pop(number, None)
        self.sampler.forget(number)

    def close(self) -> None:
        self._carried.clear()

    def _room(self, row: DraftRow, draft_k: int) -> int:
        """Drafts this row gets: its own k, and no position beyond the drafter's range."""
        return max(0, min(row.k, draft_k, self.positions_max - row.length))

    # ---- entries that wait -----------------------------------------------------------------

    def _can_wait(self, lane: Lane) -> bool:
        """Whether nobody reads the row's new entries before its next step."""
        row, size = lane.row, self.cache.block_size
        first = row.start + 1 - (0 if row.fresh else len(self._carried.get(row.number, ())))
        few = row.length - first <= WAITING_MAX
        return lane.k == 0 and few and first // size == (row.length - 1) // size

    def _let_wait(self, lanes: Sequence[Lane], output: ModelOutput | None) -> None:
        """Keeps the rows of this step's entries for the pass that will make them. They are picked
        and fused there, all in one go."""
        sources: list[int] = []
        numbers: list[int] = []
        for lane in lanes:
            self._begin(lane.row)
            row, end = lane.row, min(lane.row.length, self.positions_max)
            sources += range(row.offset, row.offset + end - row.start - 1)
            numbers += [row.number] * (end - row.start - 1)
            self._filled[row.number] = row.length
        if sources:
            for number, kept in zip(numbers, self._keep(output, sources), strict=True):
                self._carried.setdefault(number, []).append(kept)

    def _keep(self, output: ModelOutput | None, sources: Sequence[int]) -> list[Kept]:
        """Rows of a pass, for later: the pass's own memory unless most of it is somebody else's."""
        assert output is not None, "rows without the target's hidden states"
        streams = self.network.streams(output)
        if len(streams[0]) > 2 * len(sources):
            streams = tuple(pick_rows(stream, sources).clone() for stream in streams)
            sources = range(len(sources))
        return [(streams, source) for source in sources]

    def _begin(self, row: DraftRow) -> None:
        """A row as it comes; asserts that it goes on where the last step left it."""
        if row.fresh:
            self._carried.pop(row.number, None)
            self._filled[row.number] = row.start + 1
        assert self._filled.get(row.number) == row.start + 1, "an entry would be missing"

    # ---- passes --------------------------------------------------------------------------

    def _first_pass(self, lanes: Sequence[Lane], output: ModelOutput | None) -> Tensor:
        """Entries of everything committed in this step, or waiting; ``[tokens, hidden]``."""
        inputs = PassInputs(self.cache.block_size)
        sources: list[int] = []  # rows of the output; -1 - i is the i-th of `carried`
        carried: list[Kept] = []
        carry: list[tuple[int, int]] = []  # (number, row of the output)
        for lane in lanes:
            row = lane.row
            self._begin(row)
            end = min(row.length, self.positions_max)
            waiting = self._carried.pop(row.number, [])
            for slot, waited in enumerate(waiting, row.start + 1 - len(waiting)):
                if slot < end:
                    lane.at = inputs.add(row.committed[slot], slot, row.block_ids)
                    carried.append(waited)
                    sources.append(-len(carried))
            for slot in range(row.start + 1, end):
                source = row.offset + slot - row.start - 1
                if slot == row.length - 1 and slot >= len(row.block_ids) * inputs.block_size:
                    assert lane.k == 0, "a row without a slot for its new token cannot draft"
                    carry.append((row.number, source))
                    continue
                lane.at = inputs.add(row.committed[slot], slot, row.block_ids)
                sources.append(source)
            inputs.close(row.block_ids)
            self._filled[row.number] = row.length
        live = len(inputs.ids)
        # The script counts one carried entry for each row; of a pass of one's own it is no bound.
        told = live if self.ledger.exact else live - len(carried)
        if self.padded:  # what was rejected, with the hidden states that it had
            rejected = [
                lane.row.offset + at
                for lane in lanes
                for at in range(lane.row.count, lane.row.width)
            ]
            inputs.mask(len(rejected))
            sources += rejected
        hidden = self._gather(output, sources, carried, carry)
        return self._run(inputs, hidden, told, [lane.at for lane in lanes if lane.k])

    def _gather(
        self,
        output: ModelOutput | None,
        sources: Sequence[int],
        carried: Sequence[Kept],
        carry: Sequence[tuple[int, int]],
    ) -> Tensor:
        """Hidden rows of the entries ``[sources, hidden]``; notes those that must wait."""
        if carry:
            kept = self._keep(output, [source for _, source in carry])
            self._carried |= {number: [row] for (number, _), row in zip(carry, kept, strict=True)}
        if not sources:
            return torch.zeros((0, self.network.hidden_size), device=self.ops.device)
        own = [source for source in sources if source >= 0]
        parts: list[tuple[Streams, list[int]]] = []
        if own:
            assert output is not None, "rows without the target's hidden states"
            parts.append((self.network.streams(output), own))
        order = list(range(len(own)))
        if carried:
            order = self._add_carried(parts, sources, carried)
        columns = [
            torch.cat([pick_rows(streams[index], rows) for streams, rows in parts])
            for index in range(len(parts[0][0]))
        ]
        picked = pick_rows(torch.cat(columns, dim=1), order)
        return self.network.fuse(picked)

    @staticmethod
    def _add_carried(
        parts: list[tuple[Streams, list[int]]], sources: Sequence[int], carried: Sequence[Kept]
    ) -> list[int]:
        """Adds what waited, pass by pass, to what this one gives; returns where in all of it each
        source's row is."""
        passes: dict[int, tuple[Streams, list[int]]] = {}
        within = []
        for streams, row in carried:
            _, rows = passes.setdefault(id(streams), (streams, []))
            within.append(len(rows))
            rows.append(row)
        count = sum(len(rows) for _, rows in parts)
        begins = {}
        for key, (_, rows) in passes.items():
            begins[key] = count
            count += len(rows)
        parts += passes.values()
        own = iter(range(len(sources)))
        return [
            next(own) if source >= 0 else begins[id(carried[-1 - source][0])] + within[-1 - source]
            for source in sources
        ]

    def _next_pass(self, lanes: Sequence[Lane], x: Tensor, index: int) -> Tensor:
        """One token per row: its last draft, with the hidden that drafted it."""
        inputs = PassInputs(self.cache.block_size)
        picked: list[int] = []
        for lane in lanes:
            if not lane.wants(index):
                continue
            picked.append(lane.at)
            slot = lane.row.length + index - 1
            lane.at = inputs.add(lane.drafts[-1].token_id, slot, lane.row.block_ids)
            inputs.close(lane.row.block_ids)
        live = len(inputs.ids)
        if self.padded and live:
            masked = sum(lane.row.samples for lane in lanes) - live
            inputs.mask(masked)
            picked += picked[:1] * masked
        hidden = self.network.feed_back(pick_rows(x, picked))
        return self._run(inputs, hidden, live, range(live))

    def _run(self, inputs: PassInputs, hidden: Tensor, live: int, read_at: Sequence[int]) -> Tensor:
        """Issues the pass, with ``live`` tokens, and computes it, with at least one token."""
        self.ledger.issue(live)
        laid_out = len(inputs.ids)
        missing = self.ledger.padding(laid_out)
        if missing:
            inputs.mask(missing)
            hidden = torch.cat((hidden, hidden.new_zeros((missing, hidden.shape[1]))))
        ids, batch = inputs.laid_out(self._memory, FIRST_KEY)
        batch = self.ops.prepare(batch, self.cache.block_size)
        return self.network.forward(ids, hidden, batch, self.cache, read_at)

    def _draw(self, lanes: Sequence[Lane], x: Tensor, index: int) -> None:
        """The drafts of pass ``index``, of rows that want one."""
        wanting = [lane for lane in lanes if lane.wants(index)]
        if wanting:
            last = pick_rows(x, [lane.at for lane in wanting])
            draw(self.sampler, wanting, self.network.compute_logits(last))


def load_layers(
    config: ArchitectureConfig, weights: Mapping[str, WeightTensor], ops: Ops
) -> list[LayerWeights]:
    """The draft's transformer blocks: those of the architecture that its config names."""
    load_layer = model_module(config.model_type).load_layer
    return [load_layer(config, weights, ops, index) for index in range(config.num_hidden_layers)]


def lean(weights: Mapping[str, WeightTensor], ops: Ops) -> Mapping[str, WeightTensor]:
    """A head's matrices in blocks of 4 bits, where the backend multiplies such: a pass of one layer
    takes its time for reading them. A draft is a guess, and nothing that is emitted changes."""
    if ops.name != "native":
        return weights
    try:
        return QuantizedTensors(weights, LEAN)
    except ConfigError:  # they are in blocks already, or no row is of whole blocks
        return weights


def lean_rows(rows: WeightTensor, ops: Ops) -> WeightTensor:
    """The same for rows of the target's head, whatever they are stored as."""
    if ops.name != "native" or rows.shape[1] % BLOCK:
        return rows
    if rows.nbytes <= rows.shape[0] * bytes_per_row(LEAN, rows.shape[1]):
        return rows
    return WeightTensor(rows.name, rows.shape, LEAN, quantize(LEAN, rows.to_float()))


def head_rows(checkpoint: Checkpoint, table: tuple[int, ...]) -> WeightTensor:
    """The rows of the target's head that ``table`` names, as the checkpoint stores them."""
    tensors = checkpoint.tensors
    head = tensors[EMBEDDING if checkpoint.config.tie_word_embeddings else HEAD]
    rows = head.data.index_select(0, torch.tensor(table))
    return WeightTensor(head.name, (len(table), head.shape[1]), head.kind, rows)


def with_entry(layers: Sequence[LayerWeights]) -> list[LayerWeights]:
    """The same layers, the first without its input norm: it takes an ``entry`` as it comes."""
    first = replace(layers[0], attention=replace(layers[0].attention, norm=None))
    return [first, *layers[1:]]


def positions_of(config: ArchitectureConfig, context: DrafterContext) -> int:
    """Positions a drafter takes: its checkpoint's, what ``max_model_len`` of the speculative
    config allows, and never more than the target's."""
    asked = context.speculative.max_model_len
    return min(config.max_context_length, context.max_model_len, asked or context.max_model_len)


def network_facts(
    config: ArchitectureConfig, tokens: int | None, weight_bytes: int
) -> dict[str, Any]:
    """`DrafterFacts` of a drafter whose layers are ``config``'s."""
    return {
        "layers": config.num_hidden_layers,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "positions_max": config.max_context_length,
        "default_tokens": tokens,
        "weight_bytes": weight_bytes,
    }


def kv_spec_of(config: ArchitectureConfig) -> KVSpec:
    return KVSpec(config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
