"""Medusa (Cai et al. 2024): head i guesses the token i + 2 positions after the hidden state's.

    h        = the target's last hidden state at n - 2, after its final norm
    head i   h = h + silu(linear(h)), once per layer; logits = out(h): the draft for n + i

    original   {i}.{j}.linear.{weight,bias}, {i}.{layers}.weight, perhaps under ``medusa_head.``
    vLLM       blocks.{i}.layers.{j}.weight (a bias if ``medusa_fc_bias``), lm_heads.{i}.weight

All heads read the same state, so there is one pass, nothing to keep, and no position. Drafts are
a chain, not a tree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drumline.config import SpeculativeConfig
from drumline.core.errors import CheckpointError, ConfigError
from drumline.core.traits import DrafterTraits
from drumline.drafting.base import Drafter, DrafterContext, DraftRow, Proposal
from drumline.drafting.checkpoint import (
    check_type,
    check_width,
    checked,
    draft_folder,
    open_config,
    open_files,
    read_sharpening,
    speculators_type,
    weight_bytes,
)
from drumline.drafting.passes import Lane, draw, proposal
from drumline.models.checkpoint import Checkpoint
from drumline.models.config import ArchitectureConfig, Fields
from drumline.models.layers import ModelOutput
from drumline.ops.base import Linear
from drumline.ops.indices import index_tensor
from drumline.ops.weights import WeightTensor
from drumline.sampling.draft import DraftSampler

SINGLE = "medusa_lm_head.safetensors"


@dataclass(frozen=True, eq=False)
class MedusaDraft:
    """A Medusa checkpoint, compared with its target. ``weights`` have the original names."""

    heads: int
    layers: int
    bias: bool
    weights: Mapping[str, WeightTensor]
    sharpening: float
    weight_bytes: int


def read(speculative: SpeculativeConfig, target: ArchitectureConfig) -> MedusaDraft:
    """Opens the folder that the speculative config names. CheckpointError for what is missing,
    too much, or not made for ``target``."""
    folder = draft_folder(speculative)
    fields = open_config(folder)
    if speculators_type(fields) is not None:
        check_type(fields, "medusa")
    original = fields.get("medusa_num_heads") is not None
    if original:
        heads, layers = fields.integer("medusa_num_heads"), fields.integer("medusa_num_layers", 1)
        bias = True
    else:
        heads, layers = fields.integer("num_heads"), fields.integer("num_hidden_layers", 1)
        bias = fields.flag("medusa_fc_bias")
    _check_sizes(fields, target)
    files = open_files(folder, SINGLE)
    hidden, vocab = target.hidden_size, target.vocab_size
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(heads):
        for layer in range(layers):
            shapes[f"{head}.{layer}.linear.weight"] = (hidden, hidden)
            if bias:
                shapes[f"{head}.{layer}.linear.bias"] = (hidden,)
        shapes[f"{head}.{layers}.weight"] = (vocab, hidden)
    weights: dict[str, WeightTensor] = {}
    for name, weight in files.weights.items():
        plain = name.removeprefix("medusa_head.") if original else _original_name(name, layers)
        if plain in weights:
            raise CheckpointError(folder, f"tensor {name} is there in two spellings")
        weights[plain] = weight
    return MedusaDraft(
        heads=heads,
        layers=layers,
        bias=bias,
        weights=checked(folder, weights, shapes),
        sharpening=read_sharpening(fields),
        weight_bytes=weight_bytes(files),
    )


def _check_sizes(fields: Fields, target: ArchitectureConfig) -> None:
    """Sizes are stated by vLLM's spelling only."""
    hidden = fields.optional_integer("hidden_size", minimum=1)
    if hidden is not None:
        check_width(fields.path, hidden, target)
    for key in ("vocab_size", "truncated_vocab_size"):
        vocab = fields.optional_integer(key, minimum=1)
        if vocab is not None and vocab != target.vocab_size:
            raise fields.fail(key, f"not the target's {target.vocab_size}")


def _original_name(name: str, layers: int) -> str:
    """vLLM's names in the original's; others as they are."""
    parts = name.split(".")
    if parts[0] == "blocks" and len(parts) == 5:  # blocks.{i}.layers.{j}.weight
        return f"{parts[1]}.{parts[3]}.linear.{parts[4]}"
    if parts[0] == "lm_heads" and len(parts) == 3:
        return f"{parts[1]}.{layers}.{parts[2]}"
    return name


class MedusaDrafter:
    """All drafts of a row from the hidden state that gave its newest token."""

    def __init__(self, draft: MedusaDraft, context: DrafterContext, sampler: DraftSampler) -> None:
        ops, weights = context.ops, draft.weights
        self.ops = ops
        self.ledger = context.ledger
        self.sampler = sampler
        self.target_norm = context.target.final_norm
        self.target_eps = context.checkpoint.config.rms_norm_eps
        self.taps: tuple[int, ...] = ()
        self._traits = DrafterTraits(
            method=context.speculative.method, runs_forward=True, in_one_pass=True
        )
        self.blocks: list[list[Linear]] = []
        self.heads: list[Linear] = []
        for head in range(draft.heads):
            names = [f"{head}.{layer}.linear" for layer in range(draft.layers)]
            biases = [
                ops.load_vector(weights[f"{name}.bias"]) if draft.bias else None for name in names
            ]
            self.blocks.append(
                [
                    ops.load_linear([weights[f"{name}.weight"]], bias)
                    for name, bias in zip(names, biases, strict=True)
                ]
            )
            self.heads.append(ops.load_linear([weights[f"{head}.{draft.layers}.weight"]]))

    @property
    def traits(self) -> DrafterTraits:
        return self._traits

    def propose(
        self, rows: Sequence[DraftRow], output: ModelOutput | None, draft_k: int
    ) -> Proposal:
        lanes = [Lane(row, min(row.k, draft_k)) for row in rows]
        live = [lane for lane in lanes if lane.k > 0]
        if self.traits.passes(draft_k):
            self.ledger.issue(len(live))
        if not live:
            return proposal(lanes)
        assert output is not None, "rows without the target's hidden states"
        for at, lane in enumerate(live):
            lane.at = at
        state = self._read(output, [lane.row.offset + lane.row.count - 1 for lane in live])
        for head in range(max(lane.k for lane in live)):
            wanting = [lane for lane in live if lane.wants(head)]
            if wanting:
                picked = self._index([lane.at for lane in wanting])
                logits = self.compute_logits(state.index_select(0, picked), head)
                draw(self.sampler, wanting, logits)
        return proposal(lanes)

    def _read(self, output: ModelOutput, rows: Sequence[int]) -> Tensor:
        """Hidden states of those rows after the target's final norm: ``[rows, hidden]``."""
        last = output.hidden.index_select(0, self._index(rows))
        return self.ops.rms_norm(last, self.target_norm, self.target_eps)

    def _index(self, values: Sequence[int]) -> Tensor:
        return index_tensor(values, self.ops.device)

    def compute_logits(self, state: Tensor, head: int) -> Tensor:
        """``[rows, hidden]`` after the target's final norm → ``[rows, vocab]`` of one head."""
        for block in self.blocks[head]:
            gate = self.ops.linear(state, block)
            # Ops know silu as silu(gate) * up only; a one is exact.
            gated = self.ops.silu_and_mul(torch.cat((gate, torch.ones_like(gate)), dim=1))
            state = self.ops.add(state, gated)
        return self.ops.linear(state, self.heads[head])

    def forget(self, number: int) -> None:
        self.sampler.forget(number)

    def close(self) -> None:
        """Nothing is open."""


def facts(speculative: SpeculativeConfig, checkpoint: Checkpoint) -> Mapping[str, Any]:
    draft = read(speculative, checkpoint.config)
    return {
        "default_tokens": draft.heads,
        "tokens_max": draft.heads,
        "weight_bytes": draft.weight_bytes,
    }


def load(context: DrafterContext) -> Drafter:
    draft = read(context.speculative, context.checkpoint.config)
    wanted = context.speculative.num_speculative_tokens
    assert wanted is not None, "resolve gives every method a draft length"
    if wanted > draft.heads:
        problem = f"the checkpoint has {draft.heads} heads, each drafts one token"
        raise ConfigError("speculative_config.num_speculative_tokens", wanted, problem)
    return MedusaDrafter(draft, context, context.make_draft_sampler(draft.sharpening))
