"""What the writers of miniature drafts share: their layers' configs, seeded tensors, files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from drumline.core.errors import ConfigError
from drumline.models.config import ArchitectureConfig, Fields
from drumline.models.hub_config import read_architecture
from drumline.models.registry import WITH_EXPERTS, model_module
from drumline.models.safetensors_loader import SINGLE

Shapes = Mapping[str, tuple[int, ...]]
LAYER = "model.layers."


def default_taps(verifier: ArchitectureConfig) -> tuple[int, ...]:
    """An early, a middle and the last residual stream: EAGLE-3's own choice needs five layers."""
    layers = verifier.num_hidden_layers
    return (0, (layers + 1) // 2, layers)


def layer_config(
    verifier: ArchitectureConfig, layer: str, layers: int, hidden: int
) -> dict[str, Any]:
    """A hub config of ``layers`` blocks of type ``layer``, as wide as asked, else as the
    verifier's."""
    if layer not in ("llama", "qwen3", "qwen3_moe"):
        raise ConfigError("layer", layer, "expected llama, qwen3 or qwen3_moe")
    config: dict[str, Any] = {
        "model_type": layer,
        "hidden_size": hidden,
        "intermediate_size": verifier.intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": verifier.num_attention_heads,
        "num_key_value_heads": verifier.num_key_value_heads,
        "head_dim": verifier.head_dim,
        "hidden_act": "silu",
        "vocab_size": verifier.vocab_size,
        "max_position_embeddings": verifier.max_position_embeddings,
        "rms_norm_eps": verifier.rms_norm_eps,
        "rope_theta": verifier.rope_theta,
        "attention_bias": False,
    }
    if layer in WITH_EXPERTS:
        config |= {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": verifier.intermediate_size,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
        }
    return config


def architecture(config: Mapping[str, Any]) -> ArchitectureConfig:
    return read_architecture(Fields(Path("config.json"), config))


def layer_shapes(config: ArchitectureConfig) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = model_module(config.model_type).tensor_shapes(config)
    return {name: shape for name, shape in shapes.items() if name.startswith(LAYER)}


def random_all(
    shapes: Shapes, seed: int, prefixes: Mapping[str, str], gain: float = 2.0
) -> dict[str, Tensor]:
    """Seeded tensors under their names in the file; ``gain`` of matrices, where 1 keeps a
    unit-variance input at unit variance."""
    tensors = {}
    for index, (name, shape) in enumerate(sorted(shapes.items())):
        stored = name
        for ours, theirs in prefixes.items():
            if name.startswith(ours):
                stored = theirs + name.removeprefix(ours)
        tensors[stored] = _random(name, shape, np.random.default_rng([seed, 7, index]), gain)
    return tensors


def _random(name: str, shape: tuple[int, ...], rng: np.random.Generator, gain: float) -> Tensor:
    values = rng.standard_normal(shape, dtype=np.float32)
    if len(shape) == 1:
        mean = 0.0 if name.endswith("bias") else 1.0
        return torch.from_numpy(np.float32(mean) + np.float32(0.2) * values)
    if name.startswith("embed_tokens"):
        return torch.from_numpy(values)
    return torch.from_numpy(np.float32(gain / math.sqrt(shape[1])) * values)


def maps(draft_vocab: int, vocab: int, seed: int) -> dict[str, Tensor]:
    """``d2t`` and ``t2d`` for a seeded choice of target ids; nothing if all are chosen."""
    if not 1 <= draft_vocab <= vocab:
        raise ConfigError("draft_vocab", draft_vocab, f"must be in 1..{vocab}")
    if draft_vocab == vocab:
        return {}
    chosen = np.random.default_rng([seed, 11]).choice(vocab, draft_vocab, replace=False)
    ids = torch.from_numpy(np.sort(chosen).astype(np.int64))
    mask = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
    return {"d2t": ids - torch.arange(draft_vocab), "t2d": mask}


def envelope(algorithm: str, layers: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "speculators_model_type": algorithm,
        "speculators_version": "0.3.0",
        "transformer_layer_config": dict(layers),
        "speculators_config": {
            "algorithm": algorithm,
            "proposal_methods": [method],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": None, "architectures": []},
        },
    }


def write_draft(
    output: str | Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Path:
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    save_file(dict(tensors), folder / SINGLE, metadata={"format": "pt"})
    return folder
