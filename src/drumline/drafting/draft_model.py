"""Drafting with a smaller model of any supported architecture (Leviathan et al. 2023).

    pass 1       committed tokens from ``start`` to n - 1     logits for position n
    pass 2 .. k  the draft before it                          logits for n + 1 ..

Its keys and values live in the target's own block ids: what was committed is fed in the step that
commits it, so a prefix that the target finds cached is there for the draft model too. Every step
begins at the target's ``start``, the last token of the step before: that feeds the drafts that
were accepted, the last of which the draft model has never read, and a token that had no slot.
Positions from its own range on are never fed, and rows there do not draft.

With `use_heterogeneous_vocab` it reads and speaks through a `VocabMap`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from drumline.config import SpeculativeConfig
from drumline.core.errors import CheckpointError, ConfigError
from drumline.core.traits import DrafterTraits
from drumline.drafting.base import DrafterContext, DraftRow, Proposal, TargetModel
from drumline.drafting.passes import Lane, PassInputs, draw, proposal
from drumline.drafting.vocab_map import VocabMap, same_tokens
from drumline.models.checkpoint import Checkpoint, open_checkpoint
from drumline.models.config import ArchitectureConfig
from drumline.models.fetch import resolve_model
from drumline.models.registry import model_module
from drumline.ops.base import PagedBatch
from drumline.ops.indices import IndexMemory, pick_rows


class Speech:
    """How a draft model of ``size`` tokens reads target tokens and says them. ``columns``: the
    draft ids it may say, as columns of its logits; ``table``: their target ids. Both None where
    ids are one."""

    def __init__(
        self,
        size: int,
        vocab_map: VocabMap | None = None,
        columns: Tensor | None = None,
        table: tuple[int, ...] | None = None,
    ) -> None:
        self.size = size
        self.vocab_map = vocab_map
        self.columns = columns
        self.table = table

    def read(self, token: int) -> int:
        """The draft id for a target id; 0 for a row of the target's head that pads it."""
        if self.vocab_map is not None:
            return self.vocab_map.read(token)
        return token if token < self.size else 0

    def said(self, logits: Tensor) -> Tensor:
        """``[rows, draft rows]`` → ``[rows, what it may say]``."""
        return logits if self.columns is None else logits.index_select(1, self.columns)


class DraftModelDrafter:
    """A `Drafter` around a whole model."""

    def __init__(
        self, model: TargetModel, speech: Speech, context: DrafterContext, positions: int
    ) -> None:
        """``positions``: how many ``model`` can take; its rope reaches exactly so far."""
        self.model = model
        self.speech = speech
        self.ops = context.ops
        self.ledger = context.ledger
        self.positions_max = positions
        self.padded = not context.speculative.disable_padded_drafter_batch
        self._memory = IndexMemory(self.ops.device)
        self.sampler = context.make_draft_sampler(token_table=speech.table)
        spec = model.kv_spec
        self.cache = context.ops.allocate_kv(
            spec.layers,
            context.num_kv_blocks,
            context.block_size,
            spec.kv_heads,
            spec.head_dim,
            context.kv_cache_dtype,
        )
        self.traits = DrafterTraits(
            method=context.speculative.method,
            runs_forward=True,
            stateful=True,
            reads_hidden=False,
            catch_up=1,
            positions_max=positions,
        )
        self.taps: tuple[int, ...] = ()

    def propose(self, rows: Sequence[DraftRow], output: object, draft_k: int) -> Proposal:
        """See `Drafter.propose`; the target's ``output`` is not read."""
        lanes = [Lane(row, self._room(row, draft_k)) for row in rows]
        hidden = self._first_pass(lanes)
        self._draw(lanes, hidden, 0)
        for index in range(1, self.traits.passes(draft_k)):
            hidden = self._next_pass(lanes, index)
            self._draw(lanes, hidden, index)
        return proposal(lanes)

    def forget(self, number: int) -> None:
        self.sampler.forget(number)

    def close(self) -> None:
        """Nothing is open."""

    def _room(self, row: DraftRow, draft_k: int) -> int:
        """Drafts this row gets: its own k, and no position beyond the model's range."""
        return max(0, min(row.k, draft_k, self.positions_max - row.length))

    # ---- passes --------------------------------------------------------------------------

    def _first_pass(self, lanes: Sequence[Lane]) -> Tensor:
        """Everything committed in this step, the new token too where it is drafted from."""
        inputs = PassInputs(self.cache.block_size)
        for lane in lanes:
            row = lane.row
            end = min(row.length if lane.k else row.length - 1, self.positions_max)
            for position in range(row.start, end):
                token = self.speech.read(row.committed[position])
                lane.at = inputs.add(token, position, row.block_ids)
            inputs.close(row.block_ids)
        live = len(inputs.ids)
        if self.padded:
            inputs.mask(sum(max(0, lane.row.width - lane.row.count) for lane in lanes))
        return self._run(inputs, live, [lane.at for lane in lanes if lane.k])

    def _next_pass(self, lanes: Sequence[Lane], index: int) -> Tensor:
        """The last draft of each row that wants another."""
        inputs = PassInputs(self.cache.block_size)
        for lane in lanes:
            if lane.wants(index):
                token = self.speech.read(lane.drafts[-1].token_id)
                position = lane.row.length + index - 1
                lane.at = inputs.add(token, position, lane.row.block_ids)
                inputs.close(lane.row.block_ids)
        live = len(inputs.ids)
        if self.padded:
            inputs.mask(sum(lane.row.samples for lane in lanes) - live)
        return self._run(inputs, live, range(live))

    def _run(self, inputs: PassInputs, live: int, read_at: Sequence[int]) -> Tensor:
        """Issues the pass and computes it, with at least one token; ``[tokens, hidden]``, of which
        the rows at ``read_at`` will be read."""
        self.ledger.issue(live)
        inputs.mask(self.ledger.padding(len(inputs.ids)))
        ids, batch = inputs.laid_out(self._memory)
        ready: PagedBatch = self.ops.prepare(batch, self.cache.block_size)
        return self.model.forward(ids, ready, self.cache, read_at=read_at).hidden

    def _draw(self, lanes: Sequence[Lane], hidden: Tensor, index: int) -> None:
        wanting = [lane for lane in lanes if lane.wants(index)]
        if wanting:
            last = pick_rows(hidden, [lane.at for lane in wanting])
            draw(self.sampler, wanting, self.speech.said(self.model.compute_logits(last)))


# ---------------------------------------------------------------- loading


def facts(speculative: SpeculativeConfig, checkpoint: Checkpoint) -> Mapping[str, Any]:
    """See `DrafterModule.facts`."""
    draft = _open(speculative)
    config = draft.config
    return {
        "layers": config.num_hidden_layers,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "positions_max": _positions(config, speculative),
        "weight_bytes": 4 * sum(math.prod(weight.shape) for weight in draft.tensors.values()),
    }


def load(context: DrafterContext) -> DraftModelDrafter:
    """See `DrafterModule.load`. ConfigError for a draft model that speaks other tokens."""
    draft = _open(context.speculative)
    speech = _speech(context, draft)
    positions = min(_positions(draft.config, context.speculative), context.max_model_len)
    module = model_module(draft.config.model_type)
    config, tensors = context.own_share(draft.config, draft.tensors)
    model: TargetModel = module.Model(config, tensors, context.ops, positions)
    return DraftModelDrafter(model, speech, context, positions)


def _open(speculative: SpeculativeConfig) -> Checkpoint:
    if speculative.model is None:
        raise ConfigError("speculative_config.model", None, "draft_model needs a checkpoint")
    return open_checkpoint(resolve_model(speculative.model, speculative.revision))


def _positions(config: ArchitectureConfig, speculative: SpeculativeConfig) -> int:
    """The model's own range, or less where ``max_model_len`` of the speculative config says so."""
    asked = speculative.max_model_len
    longest = config.max_context_length
    return longest if asked is None else min(asked, longest)


def _speech(context: DrafterContext, draft: Checkpoint) -> Speech:
    target_size, draft_size = context.checkpoint.config.vocab_size, draft.config.vocab_size
    if context.speculative.use_heterogeneous_vocab:
        found = VocabMap(context.checkpoint.tokenizer(), draft.tokenizer(), target_size, draft_size)
        columns = torch.tensor(found.draft_ids, device=context.ops.device)
        return Speech(draft_size, found, columns, found.target_ids)
    _check_vocabulary(context.checkpoint, draft)
    if target_size == draft_size:
        return Speech(draft_size)
    # Rows beyond the tokenizer's tokens pad a head; models of one family pad differently.
    shared = min(target_size, draft_size)
    columns = torch.arange(shared, device=context.ops.device)
    return Speech(draft_size, None, columns, tuple(range(shared)))


def _check_vocabulary(target: Checkpoint, draft: Checkpoint) -> None:
    """Ids must mean the same. A folder without a tokenizer is taken at its vocabulary's size."""
    sizes = target.config.vocab_size, draft.config.vocab_size
    way_out = "; use_heterogeneous_vocab maps tokens between vocabularies"
    try:
        ours, theirs = target.tokenizer(), draft.tokenizer()
    except CheckpointError as error:
        if sizes[0] == sizes[1]:
            return
        raise ConfigError(
            "speculative_config.model",
            str(draft.path),
            f"its vocab_size {sizes[1]} is not the target's {sizes[0]}, and without both "
            f"tokenizers tokens cannot be compared ({error.problem}){way_out}",
        ) from None
    if not same_tokens(ours, theirs, max(ours.vocab_size, theirs.vocab_size)):
        raise ConfigError(
            "speculative_config.model",
            str(draft.path),
            f"its tokens ({theirs.vocab_size}) are not the target's ({ours.vocab_size}){way_out}",
        )
