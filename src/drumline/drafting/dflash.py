"""Drafting a block in one pass, by DFlash (`dflash_network` says what is computed).

    context   every computed position p < n - 1, from the target's taps, at slot p
    block     positions n - 1 (the anchor, the last token), n, ...: as long as what is drafted

Keys and values of the block stand at its own slots until the next step overwrites them, from the
target's hidden states where tokens were committed. One pass in every step, which at k = 0 only
writes the context.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from msgspec import structs
from torch import Tensor

from drumline.config import SpeculativeConfig
from drumline.core.traits import DrafterTraits
from drumline.drafting import checkpoint as files
from drumline.drafting.base import DrafterContext, DraftRow, Proposal
from drumline.drafting.dflash_network import (
    DFlashConfig,
    DFlashNetwork,
    absent_tensors,
    read_config,
    tensor_shapes,
)
from drumline.drafting.passes import Lane, PassInputs, draw, proposal
from drumline.models.checkpoint import Checkpoint
from drumline.models.config import ArchitectureConfig
from drumline.models.layers import ModelOutput
from drumline.ops.indices import index_tensor
from drumline.ops.weights import WeightTensor


class DFlashDrafter:
    """A `Drafter` around a `DFlashNetwork`: one pass per step."""

    def __init__(
        self,
        network: DFlashNetwork,
        context: DrafterContext,
        positions: int,
        table: Sequence[int] | None,
    ) -> None:
        """``positions``: how many the network can take; its rope reaches exactly so far."""
        self.network = network
        self.ops = context.ops
        self.ledger = context.ledger
        self.positions_max = positions
        self.padded = not context.speculative.disable_padded_drafter_batch
        self.sampler = context.make_draft_sampler(network.config.sharpening, table)
        spec = network.kv_spec
        self.cache = context.ops.allocate_kv(
            spec.layers,
            context.num_kv_blocks,
            context.block_size,
            spec.kv_heads,
            spec.head_dim,
            context.kv_cache_dtype,
        )
        self.taps = network.config.taps
        self.traits = DrafterTraits(
            method=context.speculative.method,
            runs_forward=True,
            stateful=True,
            needs_taps=True,
            reads_hidden=False,
            in_one_pass=True,
            queries_ahead=1,
            positions_max=positions,
        )

    def propose(
        self, rows: Sequence[DraftRow], output: ModelOutput | None, draft_k: int
    ) -> Proposal:
        """See `Drafter.propose`."""
        lanes = [Lane(row, self._room(row, draft_k)) for row in rows]
        sources, positions, slots = self._context(lanes)
        inputs = self._blocks(lanes)
        self.ledger.issue(len(sources) + len(inputs.ids))
        if self.ledger.exact:  # sizes follow from the script, so context counts as if it were fed
            inputs.mask(self.ledger.padding(len(inputs.ids)))
        if sources:
            assert output is not None, "rows without the target's hidden states"
            index = self._index(sources)
            taps = torch.cat([output.taps[tap].index_select(0, index) for tap in self.taps], 1)
            self.network.write_context(taps, self._index(positions), self._index(slots), self.cache)
        if inputs.ids:
            self._draft(lanes, inputs)
        return proposal(lanes)

    def forget(self, number: int) -> None:
        self.sampler.forget(number)

    def close(self) -> None:
        """Nothing is open."""

    def _room(self, row: DraftRow, draft_k: int) -> int:
        """Drafts this row gets: its own k, its block, and no position beyond the range."""
        room = min(row.k, draft_k, self.network.config.tokens_max)
        return max(0, min(room, self.positions_max - row.length))

    def _context(self, lanes: Sequence[Lane]) -> tuple[list[int], list[int], list[int]]:
        """Rows of the target's output that become context, their positions and slots (-1 for
        rejected drafts, which a padded batch carries along)."""
        sources: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        size = self.cache.block_size
        for lane in lanes:
            row = lane.row
            width = max(row.width, row.count) if self.padded else row.count
            for ahead in range(min(width, self.positions_max - row.start)):
                position = row.start + ahead
                sources.append(row.offset + ahead)
                positions.append(position)
                block, offset = divmod(position, size)
                kept = ahead < row.count
                slots.append(row.block_ids[block] * size + offset if kept else -1)
        return sources, positions, slots

    def _blocks(self, lanes: Sequence[Lane]) -> PassInputs:
        """Anchor and masks of every row that drafts; ``lane.at`` is the slot of its first draft."""
        config = self.network.config
        inputs = PassInputs(self.cache.block_size)
        for lane in lanes:
            if not lane.k:
                continue
            row = lane.row
            anchor = row.length - 1
            last = anchor + lane.k - 1 + config.first_slot
            for position in range(anchor, last + 1):
                token = row.committed[anchor] if position == anchor else config.mask_token_id
                at = inputs.add(token, position, row.block_ids, reach=last)
                if position == anchor + config.first_slot:
                    lane.at = at
            inputs.close(row.block_ids)
        return inputs

    def _draft(self, lanes: Sequence[Lane], inputs: PassInputs) -> None:
        device, size = self.ops.device, self.cache.block_size
        whole = inputs.batch(device)
        positions = self._index(inputs.positions)
        causal = self.ops.prepare(structs.replace(whole, positions=positions), size)
        x = self.network.forward(
            self._index(inputs.ids), positions, self.ops.prepare(whole, size), causal, self.cache
        )
        starts: dict[int, int] = {}  # row of the call → its first row of logits
        picked: list[int] = []
        for number, lane in enumerate(lanes):
            starts[number] = len(picked)
            picked += range(lane.at, lane.at + lane.k)
        if not picked:
            return
        logits = self.network.compute_logits(x.index_select(0, self._index(picked)))
        for ahead in range(max(lane.k for lane in lanes)):
            wanting = [number for number, lane in enumerate(lanes) if lane.wants(ahead)]
            if wanting:
                rows = self._index([starts[number] + ahead for number in wanting])
                draw(self.sampler, [lanes[n] for n in wanting], logits.index_select(0, rows))

    def _index(self, values: Sequence[int]) -> Tensor:
        return index_tensor(values, self.ops.device)


# ---------------------------------------------------------------- loading


def facts(speculative: SpeculativeConfig, checkpoint: Checkpoint) -> Mapping[str, Any]:
    """See `DrafterModule.facts`."""
    folder = files.draft_folder(speculative)
    config = read_config(files.open_config(folder), checkpoint.config)
    layers = config.layers
    return {
        "layers": layers.num_hidden_layers,
        "kv_heads": layers.num_key_value_heads,
        "head_dim": layers.head_dim,
        "positions_max": _positions(config, speculative),
        "default_tokens": config.default_tokens or config.tokens_max,
        "tokens_max": config.tokens_max,
        "weight_bytes": files.weight_bytes(files.open_files(folder)),
    }


def load(context: DrafterContext) -> DFlashDrafter:
    """See `DrafterModule.load`."""
    folder = files.draft_folder(context.speculative)
    target = context.checkpoint.config
    config = read_config(files.open_config(folder), target)
    positions = min(_positions(config, context.speculative), context.max_model_len)
    weights, table = _open(folder, config, target)
    layers, share = context.own_share(config.layers, weights)
    network = DFlashNetwork(
        replace(config, layers=layers),
        share,
        context.ops,
        positions,
        context.target.embedding,
        context.target.head,
    )
    return DFlashDrafter(network, context, positions, table)


def _positions(config: DFlashConfig, speculative: SpeculativeConfig) -> int:
    asked = speculative.max_model_len
    longest = config.layers.max_context_length
    return longest if asked is None else min(asked, longest)


def _open(
    folder: Path, config: DFlashConfig, target: ArchitectureConfig
) -> tuple[dict[str, WeightTensor], tuple[int, ...] | None]:
    opened = files.open_files(folder)
    expected = tensor_shapes(config, target)
    weights = files.checked(folder, opened.weights, expected, absent_tensors(config, target))
    return weights, files.token_table(opened, config.draft_vocab, target.vocab_size)
