"""Multi-token prediction: one next-token module, applied again and again to its own output.

    e      = token_norm(embedding(token at p + 1))        the target's embedding
    x      = proj(concat(e, hidden_norm(h)))              h: the target's last hidden state at p
    x      = final_norm(block(x))
    logits = the target's head(x)
    h'     = x, for the next pass

(DeepSeek-V3 2024; Gloeckle et al. 2024; FastMTP 2025.) What h is differs by dialect:

    speculators   mtp_layers.0.*                 tap N, before the target's final norm
    mtp.*         Qwen3-Next's names, inside a target's checkpoint or in a folder of their own,
                  here on a llama or qwen block   after the target's final norm, as its family does
    layer N       DeepSeek-V3's own: model.layers.{N}.{enorm, hnorm, eh_proj, shared_head.norm, ...}
                  beside its N layers; it too     after the target's final norm

Our extension of the speculators format: ``draft_vocab_size`` below ``vocab_size`` with ``d2t`` and
``t2d``; the head is then the named rows of the target's, gathered when the drafter is loaded.
Without ``model`` the target's own module drafts, or the head that is shipped for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drumline.config import SpeculativeConfig
from drumline.core.errors import CheckpointError
from drumline.drafting.base import Drafter, DrafterContext
from drumline.drafting.checkpoint import (
    LAYER,
    SHARPENING,
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
)
from drumline.drafting.shipped import find_shipped
from drumline.models import deepseek_v3
from drumline.models.checkpoint import Checkpoint, module_prefix
from drumline.models.config import ArchitectureConfig, Fields
from drumline.models.layers import EMBEDDING, HEAD, ModelOutput
from drumline.models.moe import split_fused_experts
from drumline.models.rope import build_rope
from drumline.ops.base import KVCache, Linear, PagedBatch
from drumline.ops.weights import WeightTensor

COUNT = "num_nextn_predict_layers"
OWN = "mtp."  # how a target's checkpoint names its own module
TOKEN_NORM, HIDDEN_NORM = "token_layernorm.weight", "hidden_layernorm.weight"
PROJ, FINAL_NORM = "input_proj.weight", "final_layernorm.weight"
_OWN_NAMES = {
    "fc.weight": PROJ,
    "norm.weight": FINAL_NORM,
    "pre_fc_norm_embedding.weight": TOKEN_NORM,
    "pre_fc_norm_hidden.weight": HIDDEN_NORM,
}
_BESIDE_NAMES = {
    "eh_proj.weight": PROJ,
    "shared_head.norm.weight": FINAL_NORM,
    "enorm.weight": TOKEN_NORM,
    "hnorm.weight": HIDDEN_NORM,
}
# DeepSeek's checkpoints repeat the target's embedding and head beside the module.
_SHARED = {"embed_tokens.weight": EMBEDDING, "shared_head.head.weight": HEAD}


@dataclass(frozen=True, eq=False)
class MtpDraft:
    """A next-token module, compared with its target. ``config`` is that of its one block;
    ``hidden_normed``: its hidden states come after the target's final norm."""

    config: ArchitectureConfig
    hidden_normed: bool
    weights: Mapping[str, WeightTensor]
    table: tuple[int, ...] | None
    envelope: Envelope
    weight_bytes: int


def read(speculative: SpeculativeConfig, checkpoint: Checkpoint) -> MtpDraft:
    """The module that the speculative config names, or the target's own, or the shipped one.
    CheckpointError for what is missing, too much, or not made for the target; ConfigError if
    there is none at all."""
    target = checkpoint.config
    if speculative.model is not None:
        return _read_folder(draft_folder(speculative), target)
    own = _own_module(checkpoint)
    if own is not None:
        return own
    return _read_folder(find_shipped("mtp", checkpoint), target)


def has_own_module(checkpoint: Checkpoint) -> bool:
    """Whether the target's checkpoint has a next-token module of its own."""
    if not checkpoint.path.is_dir():
        return False
    prefix = module_prefix(checkpoint.config)
    return any(name.startswith(prefix) for name in open_files(checkpoint.path).weights)


def _own_module(checkpoint: Checkpoint) -> MtpDraft | None:
    """The module inside the target's checkpoint, if it has one."""
    if not has_own_module(checkpoint):
        return None
    files = open_files(checkpoint.path)
    prefix = module_prefix(checkpoint.config)
    names = [name for name in files.weights if name.startswith(prefix)]
    fields = open_config(checkpoint.path)
    _check_count(fields)
    own = DraftFiles(files.path, {name: files.weights[name] for name in names}, {})
    if prefix == OWN:
        weights = _own_weights(own, _one_block(checkpoint.config))
    else:
        weights = _beside_weights(own, prefix, checkpoint)
    return _draft(own, _one_block(checkpoint.config), weights, True, None, Envelope())


def _read_folder(folder: Path, target: ArchitectureConfig) -> MtpDraft:
    fields = open_config(folder)
    _check_count(fields)
    if speculators_type(fields) is None:
        own = (TYPE, SHARPENING, COUNT)
        config = _one_block(flat_architecture(fields, own))
        envelope, hidden_normed = Envelope(None, read_sharpening(fields)), True
        draft_vocab, files = config.vocab_size, open_files(folder)
        weights = _own_weights(files, config)
    else:
        envelope, hidden_normed = read_envelope(fields, "mtp"), False
        config = _one_block(nested_architecture(fields))
        draft_vocab = fields.integer("draft_vocab_size", config.vocab_size)
        check_keys(fields)
        files = open_files(folder)
        weights = _speculators_weights(files, config)
    check_target(fields.path, config, target)
    check_width(fields.path, config.hidden_size, target)
    table = token_table(files, draft_vocab, target.vocab_size)
    return _draft(files, config, weights, hidden_normed, table, envelope)


def _draft(
    files: DraftFiles,
    config: ArchitectureConfig,
    weights: Mapping[str, WeightTensor],
    hidden_normed: bool,
    table: tuple[int, ...] | None,
    envelope: Envelope,
) -> MtpDraft:
    hidden = config.hidden_size
    shapes = layer_shapes(config) | {
        TOKEN_NORM: (hidden,),
        HIDDEN_NORM: (hidden,),
        PROJ: (hidden, 2 * hidden),
        FINAL_NORM: (hidden,),
    }
    good = checked(files.path, weights, shapes)
    rows = 0 if table is None else len(table) * hidden
    size = weight_bytes(files) + 4 * rows
    return MtpDraft(config, hidden_normed, good, table, envelope, size)


def _check_count(fields: Fields) -> None:
    if fields.integer(COUNT, 1, minimum=0) != 1:
        raise fields.fail(COUNT, "not supported; supported is 1, applied once per draft")


def _one_block(config: ArchitectureConfig) -> ArchitectureConfig:
    """The config of the module's block: a speculators config gives the whole target's here."""
    experts = (0,) if config.experts is not None else ()
    return replace(config, num_hidden_layers=1, expert_layers=experts)


def _own_weights(files: DraftFiles, config: ArchitectureConfig) -> dict[str, WeightTensor]:
    found: dict[str, WeightTensor] = {}
    for name, weight in files.weights.items():
        if not name.startswith(OWN):
            raise CheckpointError(files.path, f"unexpected tensor {name}")
        plain = name.removeprefix(OWN)
        if plain.startswith("layers."):
            found[f"model.{plain}"] = weight
        else:
            found[_OWN_NAMES.get(plain, name)] = weight
    return _split(files.path, found, config)


def _beside_weights(
    files: DraftFiles, prefix: str, checkpoint: Checkpoint
) -> dict[str, WeightTensor]:
    """DeepSeek's names. CheckpointError for an embedding or head that is not the target's, which
    is what sharing them means."""
    found: dict[str, WeightTensor] = {}
    for name, weight in files.weights.items():
        plain = name.removeprefix(prefix)
        if plain in _SHARED:
            tied = checkpoint.config.tie_word_embeddings
            target = checkpoint.stored[EMBEDDING if tied else _SHARED[plain]]
            if target.shape != weight.shape or not torch.equal(target.data, weight.data):
                raise CheckpointError(files.path, f"tensor {name} differs from {target.name}")
        else:
            found[_BESIDE_NAMES.get(plain, f"{LAYER}0.{plain}")] = weight
    return _split(files.path, found, checkpoint.config)


def _speculators_weights(files: DraftFiles, config: ArchitectureConfig) -> dict[str, WeightTensor]:
    found: dict[str, WeightTensor] = {}
    special = (TOKEN_NORM, HIDDEN_NORM, PROJ, FINAL_NORM)
    for name, weight in files.weights.items():
        plain = name.removeprefix("mtp_layers.0.")
        if plain == name:
            raise CheckpointError(files.path, f"unexpected tensor {name}")
        found[plain if plain in special else f"{LAYER}0.{plain}"] = weight
    return _split(files.path, found, config)


def _split(
    path: Path, weights: dict[str, WeightTensor], config: ArchitectureConfig
) -> dict[str, WeightTensor]:
    return split_fused_experts(path, weights) if config.experts is not None else weights


class MtpNetwork:
    """A `DraftNetwork` of the formulas above."""

    def __init__(self, draft: MtpDraft, context: DrafterContext, positions: int) -> None:
        ops, weights, config = context.ops, draft.weights, draft.config
        self.ops = ops
        self.taps: tuple[int, ...] = ()  # the last hidden state comes with every output
        self.kv_spec = kv_spec_of(config)
        self.hidden_size = config.hidden_size
        self.eps = config.rms_norm_eps
        self.target_norm = context.target.final_norm if draft.hidden_normed else None
        self.target_eps = context.checkpoint.config.rms_norm_eps
        self.embedding: Linear = context.target.embedding
        self.token_norm = ops.load_vector(weights[TOKEN_NORM])
        self.hidden_norm = ops.load_vector(weights[HIDDEN_NORM])
        self.proj = ops.load_linear([weights[PROJ]])
        self.run = self._load_block(config, weights, positions)
        self.final_norm = ops.load_vector(weights[FINAL_NORM])
        self.head: Linear = context.target.head
        if draft.table is not None:
            self.head = ops.load_linear(
                [lean_rows(head_rows(context.checkpoint, draft.table), ops)]
            )

    def _load_block(
        self, config: ArchitectureConfig, weights: Mapping[str, WeightTensor], positions: int
    ) -> Callable[[Tensor, PagedBatch, KVCache, Sequence[int]], Tensor]:
        """The module's transformer block."""
        ops = self.ops
        if config.latent is not None:
            layers = deepseek_v3.Layers(config, weights, ops, positions)
            return lambda x, batch, cache, _: layers.run(x, batch, cache).hidden
        stack = ops.load_stack(
            load_layers(config, weights, ops), build_rope(config, positions, ops.device)
        )
        return lambda x, batch, cache, read_at: ops.run_stack(
            x, stack, batch, cache, read_at=read_at
        )[0]

    def streams(self, output: ModelOutput) -> tuple[Tensor, ...]:
        return (output.hidden,)

    def fuse(self, picked: Tensor) -> Tensor:
        if self.target_norm is None:
            return picked
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
        token = ops.rms_norm(ops.embedding(ids, self.embedding), self.token_norm, self.eps)
        normed = ops.rms_norm(hidden, self.hidden_norm, self.eps)
        x = ops.linear(torch.cat((token, normed), dim=1), self.proj)  # [tokens, hidden]
        x = self.run(x, batch, cache, read_at)
        return ops.rms_norm(x, self.final_norm, self.eps)

    def feed_back(self, x: Tensor) -> Tensor:
        return x

    def compute_logits(self, x: Tensor) -> Tensor:
        return self.ops.linear(x, self.head)


def facts(speculative: SpeculativeConfig, checkpoint: Checkpoint) -> Mapping[str, Any]:
    draft = read(speculative, checkpoint)
    return network_facts(draft.config, draft.envelope.tokens, draft.weight_bytes)


def load(context: DrafterContext) -> Drafter:
    draft = read(context.speculative, context.checkpoint)
    positions = positions_of(draft.config, context)
    held = lean(draft.weights, context.ops)
    config, weights = context.own_share(draft.config, held)
    draft = replace(draft, config=config, weights=weights)
    network = MtpNetwork(draft, context, positions)
    sampler = context.make_draft_sampler(draft.envelope.sharpening, draft.table)
    return TapDrafter(network, context, sampler, positions)
