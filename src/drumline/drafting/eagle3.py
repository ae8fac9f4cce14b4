"""EAGLE-3 (Li et al. 2025): one layer over a few taps of the target and the token that came next.

    f      = fc(concat of taps at p)                fc_norm: a norm per tap first
                                                    norm_before_fc: one over the concat first
    entry  = concat(norm(embedding(token at p + 1)), norm(f))         2H wide, into layer 0 only
    x      = f + attention(entry)                   norm_before_residual: norm(f) + attention
    x      = x + mlp(norm(x))
    logits = lm_head(norm(x))                       over the draft vocabulary
    f'     = x                                      norm_output (3.1): norm(x), for the next pass

Two spellings: speculators (``layers.0.*``, nested config) and the original (``midlayer.*``, flat
config). The embedding may be the target's. So may the head, by our extension of the format: with
``verifier_head`` true there is no ``lm_head.weight``, and the draft vocabulary's rows of the
target's head are gathered when the drafter is loaded. Without ``model`` the head drafts that is
shipped for the target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from drumline.config import SpeculativeConfig
from drumline.core.errors import CheckpointError
from drumline.drafting.base import Drafter, DrafterContext
from drumline.drafting.checkpoint import (
    LAYER,
    TYPE,
    DraftFiles,
    Envelope,
    check_keys,
    check_target,
    check_width,
    checked,
    draft_folder,
    flat_architecture,
    layer_shapes,
    nested_architecture,
    open_config,
    open_files,
    read_envelope,
    read_sharpening,
    read_taps,
    speculators_type,
    token_table,
    weight_bytes,
)
from drumline.drafting.neural import (
    TapDrafter,
    head_rows,
    kv_spec_of,
    lean,
    lean_rows,
    load_layers,
    network_facts,
    positions_of,
    with_entry,
)
from drumline.drafting.shipped import find_shipped
from drumline.models.checkpoint import Checkpoint
from drumline.models.config import ArchitectureConfig, Fields
from drumline.models.layers import HEAD, ModelOutput
from drumline.models.moe import split_fused_experts
from drumline.models.rope import build_rope
from drumline.ops.base import KVCache, Linear, PagedBatch
from drumline.ops.weights import WeightTensor

TAPS = "eagle_aux_hidden_state_layer_ids"
EMBEDDING = "embed_tokens.weight"
HIDDEN_NORM = f"{LAYER}0.hidden_norm.weight"
_FLAT_KEYS = (
    TYPE,
    TAPS,
    "draft_sharpening",
    "draft_vocab_size",
    "eagle_config",
    "fc_norm",
    "norm_before_fc",
    "norm_before_residual",
    "norm_output",
    "target_hidden_size",
    "verifier_head",
)


@dataclass(frozen=True, eq=False)
class Eagle3Draft:
    """An EAGLE-3 checkpoint, compared with its target. ``config``: the draft's own layers.
    ``weights`` have the names of the docstring above, layers under `LAYER`."""

    config: ArchitectureConfig
    taps: tuple[int, ...]
    target_hidden_size: int
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    verifier_head: bool
    weights: Mapping[str, WeightTensor]
    table: tuple[int, ...] | None
    envelope: Envelope
    weight_bytes: int


def read(speculative: SpeculativeConfig, checkpoint: Checkpoint) -> Eagle3Draft:
    """Opens the folder that the speculative config names, or the shipped one. CheckpointError for
    what is missing, too much, or not made for the target; ConfigError if there is none at all."""
    target = checkpoint.config
    if speculative.model is None:
        folder = find_shipped("eagle3", checkpoint)
    else:
        folder = draft_folder(speculative)
    fields = open_config(folder)
    foreign = speculators_type(fields) is None
    if foreign:
        config = flat_architecture(fields, _FLAT_KEYS)
        draft_vocab = fields.integer("draft_vocab_size", config.vocab_size)
        envelope, taps = Envelope(None, read_sharpening(fields)), _foreign_taps(fields, target)
    else:
        envelope = read_envelope(fields, "eagle3")
        config = nested_architecture(fields)
        draft_vocab = fields.integer("draft_vocab_size", 32000)
        taps = read_taps(fields, TAPS, target)
    flags = {
        name: fields.flag(name)
        for name in (
            "norm_before_residual",
            "norm_before_fc",
            "fc_norm",
            "norm_output",
            "verifier_head",
        )
    }
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise fields.fail("fc_norm", "contradicts norm_before_fc: a checkpoint has one of them")
    stated = fields.optional_integer("target_hidden_size", minimum=1)
    if not foreign:
        check_keys(fields)
    check_target(fields.path, config, target)
    if stated is not None:
        check_width(fields.path, stated, target)
    files = open_files(folder)
    table = token_table(files, draft_vocab, target.vocab_size)
    weights = _canonical(files, config)
    _check_fc(files, weights, len(taps), target)
    shapes = _shapes(config, target, len(taps), draft_vocab, flags)
    same_width = config.hidden_size == target.hidden_size
    if flags["verifier_head"] and not same_width:
        raise fields.fail("verifier_head", f"needs the target's hidden size {target.hidden_size}")
    absent = (EMBEDDING,) if same_width else ()
    gathered = 4 * draft_vocab * config.hidden_size if flags["verifier_head"] else 0
    return Eagle3Draft(
        config=config,
        taps=taps,
        target_hidden_size=target.hidden_size,
        weights=checked(folder, weights, shapes, absent),
        table=table,
        envelope=envelope,
        weight_bytes=weight_bytes(files) + gathered,
        **flags,
    )


def _foreign_taps(fields: Fields, target: ArchitectureConfig) -> tuple[int, ...]:
    """Beside the flat keys, or inside ``eagle_config`` as vLLM's tools write it."""
    inner = fields.get("eagle_config")
    if fields.get(TAPS) is None and isinstance(inner, dict):
        return read_taps(Fields(fields.path, inner, prefix="eagle_config."), TAPS, target)
    return read_taps(fields, TAPS, target)


def _canonical(files: DraftFiles, config: ArchitectureConfig) -> dict[str, WeightTensor]:
    """Both spellings under one: layers as the models here name them."""
    found: dict[str, WeightTensor] = {}
    for name, weight in files.weights.items():
        if name.startswith("midlayer."):
            name = f"{LAYER}0.{name.removeprefix('midlayer.')}"
        elif name.startswith("layers."):
            name = f"model.{name}"
        if name in found:
            raise CheckpointError(files.path, f"tensor {name} is there in two spellings")
        found[name] = weight
    return split_fused_experts(files.path, found) if config.experts is not None else found


def _check_fc(
    files: DraftFiles,
    weights: Mapping[str, WeightTensor],
    taps: int,
    target: ArchitectureConfig,
) -> None:
    """A head made for another target is best known by the width of its fc."""
    fc = weights.get("fc.weight")
    if fc is None or len(fc.shape) != 2:
        return
    if fc.shape[1] % taps:
        raise CheckpointError(files.path, f"fc reads {fc.shape[1]} numbers, not {taps} taps' worth")
    check_width(files.path, fc.shape[1] // taps, target)


def _shapes(
    config: ArchitectureConfig,
    target: ArchitectureConfig,
    taps: int,
    draft_vocab: int,
    flags: Mapping[str, bool],
) -> dict[str, tuple[int, ...]]:
    hidden, fused = config.hidden_size, taps * target.hidden_size
    shapes = layer_shapes(config)
    for name in ("q_proj", "k_proj", "v_proj"):
        key = f"{LAYER}0.self_attn.{name}.weight"
        shapes[key] = (shapes[key][0], 2 * hidden)
    shapes |= {
        HIDDEN_NORM: (hidden,),
        "fc.weight": (hidden, fused),
        "norm.weight": (hidden,),
        HEAD: (draft_vocab, hidden),
        EMBEDDING: (config.vocab_size, hidden),
    }
    if flags["verifier_head"]:
        del shapes[HEAD]
    if flags["norm_before_fc"]:
        shapes["input_norm.weight"] = (fused,)
    if flags["fc_norm"]:
        shapes |= {f"fc_norm.{i}.weight": (target.hidden_size,) for i in range(taps)}
    return shapes


class Eagle3Network:
    """A `DraftNetwork` of the formulas above."""

    def __init__(self, draft: Eagle3Draft, context: DrafterContext, positions: int) -> None:
        ops, weights, config = context.ops, draft.weights, draft.config
        self.ops = ops
        self.taps = draft.taps
        self.kv_spec = kv_spec_of(config)
        self.hidden_size = config.hidden_size
        self.eps = config.rms_norm_eps
        self.norm_before_residual = draft.norm_before_residual
        self.norm_output = draft.norm_output
        own = weights.get(EMBEDDING)
        self.embedding: Linear = (
            context.target.embedding if own is None else ops.load_embedding(own)
        )
        self.tap_norms = [
            ops.load_vector(weights[f"fc_norm.{i}.weight"])
            for i in range(len(draft.taps) if draft.fc_norm else 0)
        ]
        self.input_norm = (
            ops.load_vector(weights["input_norm.weight"]) if draft.norm_before_fc else None
        )
        self.fc = ops.load_linear([weights["fc.weight"]])
        self.hidden_norm = ops.load_vector(weights[HIDDEN_NORM])
        layers = load_layers(config, weights, ops)
        self.token_norm = layers[0].attention.norm  # the first layer's own input norm
        rope = build_rope(config, positions, ops.device)
        self.stack = ops.load_stack(with_entry(layers), rope)
        self.norm = ops.load_vector(weights["norm.weight"])
        self.head = self._load_head(draft, context)

    def _load_head(self, draft: Eagle3Draft, context: DrafterContext) -> Linear:
        """Its own rows, or the draft vocabulary's of the target's."""
        if not draft.verifier_head:
            return self.ops.load_linear([draft.weights[HEAD]])
        if draft.table is None:
            return context.target.head
        rows = head_rows(context.checkpoint, draft.table)
        return self.ops.load_linear([lean_rows(rows, self.ops)])

    def streams(self, output: ModelOutput) -> tuple[Tensor, ...]:
        return tuple(output.taps[tap] for tap in self.taps)

    def fuse(self, picked: Tensor) -> Tensor:
        ops = self.ops
        if self.tap_norms:
            parts = zip(picked.chunk(len(self.taps), dim=1), self.tap_norms, strict=True)
            normed = [ops.rms_norm(part, norm, self.eps) for part, norm in parts]
            picked = torch.cat(normed, dim=1)
        if self.input_norm is not None:
            return ops.norm_linear(picked, self.input_norm, self.eps, self.fc)
        return ops.linear(picked, self.fc)  # [entries, hidden]

    def forward(
        self,
        ids: Tensor,
        hidden: Tensor,
        batch: PagedBatch,
        cache: KVCache,
        read_at: Sequence[int],
    ) -> Tensor:
        ops = self.ops
        assert self.token_norm is not None
        token = ops.rms_norm(ops.embedding(ids, self.embedding), self.token_norm, self.eps)
        normed = ops.rms_norm(hidden, self.hidden_norm, self.eps)
        entry = torch.cat((token, normed), dim=1)  # [tokens, 2 * hidden]
        residual = normed if self.norm_before_residual else hidden
        x, _ = ops.run_stack(residual, self.stack, batch, cache, entry=entry, read_at=read_at)
        return x

    def feed_back(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.norm, self.eps) if self.norm_output else x

    def compute_logits(self, x: Tensor) -> Tensor:
        return self.ops.norm_linear(x, self.norm, self.eps, self.head)


def facts(speculative: SpeculativeConfig, checkpoint: Checkpoint) -> Mapping[str, Any]:
    draft = read(speculative, checkpoint)
    return network_facts(draft.config, draft.envelope.tokens, draft.weight_bytes)


def load(context: DrafterContext) -> Drafter:
    draft = read(context.speculative, context.checkpoint)
    positions = positions_of(draft.config, context)
    held = lean(draft.weights, context.ops)
    config, weights = context.own_share(draft.config, held)
    draft = replace(draft, config=config, weights=weights)
    network = Eagle3Network(draft, context, positions)
    sampler = context.make_draft_sampler(draft.envelope.sharpening, draft.table)
    return TapDrafter(network, context, sampler, positions)
