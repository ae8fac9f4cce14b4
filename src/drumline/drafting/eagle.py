"""EAGLE-1 (Li et al. 2024): a layer that guesses the target's next normed hidden state.

    f      = the target's last hidden state at p, after its final norm
    x      = fc(concat(embedding(token at p + 1), f))
    x      = block(x), the first one without its input norm
    logits = the target's head(x), without a norm between: x stands for a normed hidden state
    f'     = x, for the next pass

The original spelling only: a flat config, ``fc``, ``layers.i.*``, perhaps its own copy of the
target's embedding; ``fc`` has a bias or not, as the file has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from drumline.config import SpeculativeConfig
from drumline.drafting.base import Drafter, DrafterContext
from drumline.drafting.checkpoint import (
    LAYER,
    SHARPENING,
    TYPE,
    check_target,
    check_type,
    check_width,
    checked,
    draft_folder,
    flat_architecture,
    layer_shapes,
    open_config,
    open_files,
    read_sharpening,
    speculators_type,
    weight_bytes,
)
from drumline.drafting.neural import (
    TapDrafter,
    kv_spec_of,
    lean,
    load_layers,
    network_facts,
    positions_of,
    with_entry,
)
from drumline.models.checkpoint import Checkpoint
from drumline.models.config import ArchitectureConfig
from drumline.models.layers import ModelOutput
from drumline.models.rope import build_rope
from drumline.ops.base import KVCache, Linear, PagedBatch
from drumline.ops.weights import WeightTensor

EMBEDDING = "embed_tokens.weight"
BIAS = "fc.bias"
FIRST_NORM = f"{LAYER}0.input_layernorm.weight"


@dataclass(frozen=True, eq=False)
class EagleDraft:
    """An EAGLE-1 checkpoint, compared with its target; layers of ``weights`` under `LAYER`."""

    config: ArchitectureConfig
    weights: Mapping[str, WeightTensor]
    sharpening: float
    weight_bytes: int


def read(speculative: SpeculativeConfig, target: ArchitectureConfig) -> EagleDraft:
    """Opens the folder that the speculative config names. CheckpointError for what is missing,
    too much, or not made for ``target``."""
    folder = draft_folder(speculative)
    fields = open_config(folder)
    if speculators_type(fields) is not None:
        check_type(fields, "eagle")
    config = flat_architecture(fields, (TYPE, SHARPENING, "bias"))
    check_target(fields.path, config, target)
    check_width(fields.path, config.hidden_size, target)
    files = open_files(folder)
    weights = {
        f"model.{name}" if name.startswith("layers.") else name: weight
        for name, weight in files.weights.items()
    }
    hidden = config.hidden_size
    shapes = layer_shapes(config) | {
        EMBEDDING: (config.vocab_size, hidden),
        "fc.weight": (hidden, 2 * hidden),
        BIAS: (hidden,),
    }
    del shapes[FIRST_NORM]
    if not fields.flag("bias", BIAS in weights):
        del shapes[BIAS]
    return EagleDraft(
        config,
        checked(folder, weights, shapes, absent=(EMBEDDING,)),
        read_sharpening(fields),
        weight_bytes(files),
    )


class EagleNetwork:
    """A `DraftNetwork` of the formulas above."""

    def __init__(self, draft: EagleDraft, context: DrafterContext, positions: int) -> None:
        ops, weights, config = context.ops, draft.weights, draft.config
        self.ops = ops
        self.taps: tuple[int, ...] = ()  # the last hidden state comes with every output
        self.kv_spec = kv_spec_of(config)
        self.hidden_size = config.hidden_size
        self.target_norm = context.target.final_norm
        self.target_eps = context.checkpoint.config.rms_norm_eps
        own = weights.get(EMBEDDING)
        self.embedding: Linear = (
            context.target.embedding if own is None else ops.load_embedding(own)
        )
        self.head = context.target.head
        bias = weights.get(BIAS)
        self.fc = ops.load_linear(
            [weights["fc.weight"]], None if bias is None else ops.load_vector(bias)
        )
        # The block wants an input norm, which layer 0 has not; it is never used.
        unused = WeightTensor(FIRST_NORM, (self.hidden_size,), "F32", torch.ones(self.hidden_size))
        layers = with_entry(load_layers(config, {**weights, FIRST_NORM: unused}, ops))
        self.stack = ops.load_stack(layers, build_rope(config, positions, ops.device))

    def streams(self, output: ModelOutput) -> tuple[Tensor, ...]:
        return (output.hidden,)

    def fuse(self, picked: Tensor) -> Tensor:
        return self.ops.rms_norm(picked, self.target_norm, self.target_eps)

    def forward(
        self,
        ids: Tensor,
        hidden: Tensor,
        batch: PagedBatch,
        cache: KVCache,
        read_at: Sequence[int],
    ) -> Tensor:
        ops = self.ops
        x = ops.linear(torch.cat((ops.embedding(ids, self.embedding), hidden), dim=1), self.fc)
        x, _ = ops.run_stack(x, self.stack, batch, cache, entry=x, read_at=read_at)
        return x

    def feed_back(self, x: Tensor) -> Tensor:
        return x

    def compute_logits(self, x: Tensor) -> Tensor:
        return self.ops.linear(x, self.head)


def facts(speculative: SpeculativeConfig, checkpoint: Checkpoint) -> Mapping[str, Any]:
    draft = read(speculative, checkpoint.config)
    return network_facts(draft.config, None, draft.weight_bytes)


def load(context: DrafterContext) -> Drafter:
    draft = read(context.speculative, context.checkpoint.config)
    positions = positions_of(draft.config, context)
    held = lean(draft.weights, context.ops)
    config, weights = context.own_share(draft.config, held)
    draft = replace(draft, config=config, weights=weights)
    network = EagleNetwork(draft, context, positions)
    return TapDrafter(network, context, context.make_draft_sampler(draft.sharpening), positions)
