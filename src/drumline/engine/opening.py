"""What every engine starts from: the checkpoint, the resolved configuration, the tokenizer.

Whoever leads an engine resolves; ranks are told what was resolved and open the files again. Knows
no weights and no process.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from drumline.config import EngineConfig, ModelFacts, Resolved, read_machine, resolve
from drumline.config.speculative import PREFIX
from drumline.core.errors import ConfigError
from drumline.drafting.registry import drafter_facts
from drumline.engine.facts import with_template
from drumline.models.checkpoint import Checkpoint, open_checkpoint
from drumline.models.fetch import resolve_model
from drumline.models.tokenizer import Tokenizer

# Medusa's heads draw between products, and of a class of the user's own nobody knows what it does.
NOT_OVER_TP = ("medusa", "custom_class")


@dataclass(frozen=True, eq=False)
class Opened:
    """A checkpoint at ``path`` and how it is going to run."""

    path: Path
    checkpoint: Checkpoint
    resolved: Resolved

    def tokenizer(self) -> Tokenizer:
        return with_template(self.checkpoint.tokenizer(), self.resolved.config)


def open_engine(config: EngineConfig) -> Opened:
    """Finds the model and resolves the configuration on this machine. Raises `UsageError`."""
    path = resolve_model(config.model.model, config.model.revision)
    checkpoint = open_checkpoint(path, config.model.quantization)
    drafter = None
    if config.speculation is not None:
        drafter = drafter_facts(config.speculation, checkpoint, config.device)
    machine = read_machine()
    native = machine.native_ops and config.runtime.ops_backend != "reference"
    resolved = resolve(config, model_facts(checkpoint, native), machine, drafter)
    _refuse_unshared(resolved)
    return Opened(path, checkpoint, resolved)


def _refuse_unshared(resolved: Resolved) -> None:
    """What ranks that share a replica cannot draft with yet."""
    spec, tp = resolved.speculation, resolved.mesh.tp
    if spec is None or tp == 1:
        return
    if spec.method in NOT_OVER_TP:
        problem = f"drafts with tensor_parallel_size=1 only, not {tp}"
        raise ConfigError(f"{PREFIX}method", spec.method, problem)


def model_facts(checkpoint: Checkpoint, native: bool = False) -> ModelFacts:
    """What `resolve` must know of a checkpoint; weights count as the backend will hold them: the
    reference ops in float32, the native ones about as they are stored."""
    config = checkpoint.config
    scaling = config.rope_scaling
    dense = sum(4 * math.prod(weight.shape) for weight in checkpoint.stored.values())
    return ModelFacts(
        model_type=config.model_type,
        max_position_embeddings=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        num_hidden_layers=config.num_hidden_layers,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        rope_type="default" if scaling is None else scaling.kind,
        rope_factor=1.0 if scaling is None else scaling.factor,
        original_max_position_embeddings=None if scaling is None else scaling.original_length,
        weight_bytes=checkpoint.weight_bytes if native else dense,
        num_attention_heads=0 if config.latent is None else config.num_attention_heads,
        num_experts=0 if config.experts is None else config.experts.count,
    )
