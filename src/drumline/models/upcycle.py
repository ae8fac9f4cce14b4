"""A dense checkpoint as a mixture of experts that gives the same answers.

    expert e   rows e of gate and up, columns e of down times N       e: the e-th N-th of the width
    router     zeros: every expert gets the weight 1/N, and every token takes all N

so that the weighted sum is the dense feed-forward, but for rounding. The result is a Mixtral: a
real model to try expert and data parallelism with. Quantized weights come out as float32, since
rounding them once more would change what the model says; floats stay what they are. A next-token
module that drafts for the model is rewritten alike: a drafter with experts, like its target.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drumline.core.errors import ConfigError
from drumline.models.checkpoint import Checkpoint, open_checkpoint
from drumline.models.config import (
    ArchitectureConfig,
    Fields,
    RopeScaling,
    SamplingDefaults,
    read_json,
)
from drumline.models.hub_config import read_architecture
from drumline.models.registry import CAUSAL_LM
from drumline.models.safetensors_loader import INDEX, SINGLE
from drumline.ops.weights import FLOAT_KINDS, WeightTensor

SHARD_BYTES = 1 << 30
SOURCES = ("llama", "mistral")  # whose attention Mixtral's is


def upcycle(model: str | Path, experts: int, output: str | Path) -> Path:
    """Writes the checkpoint at ``model`` (a folder or GGUF file) with ``experts`` experts to the
    folder ``output``, which must be new or empty, and returns it. ConfigError names what does not
    fit."""
    checkpoint = open_checkpoint(model)
    _check(checkpoint.config, experts, "model")
    folder = _new_folder(output)
    _write_json(folder / "config.json", _config(checkpoint.config, experts))
    _write_json(folder / "generation_config.json", _generation(checkpoint.config))
    checkpoint.tokenizer().save(folder)
    _write_shards(folder, _tensors(checkpoint, experts))
    return folder


def upcycle_mtp(head: str | Path, experts: int, output: str | Path) -> Path:
    """Writes the next-token module in the folder ``head`` (speculators' spelling, one file) with
    ``experts`` experts in its block to the folder ``output``, which must be new or empty, and
    returns it. It drafts what the dense one drafts. ConfigError names what does not fit."""
    source = Path(head)
    values = read_json(source / "config.json")
    kind, layers = values.get("speculators_model_type"), values.get("transformer_layer_config")
    if kind != "mtp" or not isinstance(layers, dict):
        raise ConfigError("mtp", str(head), "not a next-token module in speculators' spelling")
    if not (source / SINGLE).is_file():
        raise ConfigError("mtp", str(head), f"has no file {SINGLE}")
    fields = Fields(source / "config.json", layers, "transformer_layer_config.")
    config = read_architecture(fields)
    _check(config, experts, "mtp")
    folder = _new_folder(output)
    mixture = _config(config, experts)
    del mixture["architectures"]
    _write_json(folder / "config.json", {**values, "transformer_layer_config": mixture})
    tensors: dict[str, Tensor] = {}
    for name, data in load_file(source / SINGLE).items():
        tensors |= _parts(name, data, experts)
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    return folder


def _check(config: ArchitectureConfig, experts: int, what: str) -> None:
    if experts < 2:
        raise ConfigError("experts", experts, "must be at least 2")
    if config.intermediate_size % experts:
        raise ConfigError(
            "experts",
            experts,
            f"does not divide the feed-forward's width {config.intermediate_size}",
        )
    kind = config.model_type
    if kind not in SOURCES or config.attention_bias or config.mlp_bias:
        biases = " with biases" if kind in SOURCES else ""
        raise ConfigError(what, f"{kind}{biases}", f"expected one of {', '.join(SOURCES)}")
    if config.rope_scaling is not None and config.rope_scaling.kind == "factors":
        raise ConfigError(what, "rope_freqs.weight", "has no spelling in a config.json")


def _new_folder(output: str | Path) -> Path:
    folder = Path(output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("output", str(output), f"not a folder: {error.strerror}") from None
    if any(folder.iterdir()):
        raise ConfigError("output", str(output), "is not empty")
    return folder


# ---------------------------------------------------------------- tensors


def _tensors(checkpoint: Checkpoint, experts: int) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of the mixture, in the dense checkpoint's order."""
    for name, weight in checkpoint.tensors.items():
        yield from _parts(name, _float(weight), experts).items()


def _parts(name: str, dense: Tensor, experts: int) -> dict[str, Tensor]:
    """What becomes of one tensor of a dense checkpoint or module."""
    prefix, _, part = name.partition(".mlp.")
    if not part:
        return {name: dense}
    block = f"{prefix}.block_sparse_moe"
    projection = part.split(".")[0]
    spelled = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}[projection]
    parts: dict[str, Tensor] = {}
    if projection == "down_proj":
        dense = _scaled(dense, experts)
    if projection == "gate_proj":
        parts[f"{block}.gate.weight"] = torch.zeros((experts, dense.shape[1]), dtype=dense.dtype)
    width = dense.shape[1 if projection == "down_proj" else 0] // experts
    for expert in range(experts):
        own = slice(expert * width, (expert + 1) * width)
        share = dense[:, own] if projection == "down_proj" else dense[own]
        parts[f"{block}.experts.{expert}.{spelled}.weight"] = share.contiguous()
    return parts


def _float(weight: WeightTensor) -> Tensor:
    return weight.data if weight.kind in FLOAT_KINDS else weight.to_float()


def _scaled(down: Tensor, experts: int) -> Tensor:
    """``experts`` times the tensor; in float32 where its own type would round or overflow."""
    exact = down.float() * experts
    same = exact.to(down.dtype)
    return same if torch.equal(same.float(), exact) else exact


def _write_shards(folder: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """One file, or several of about `SHARD_BYTES` with their index."""
    files: list[tuple[Path, list[str]]] = []
    pending: dict[str, Tensor] = {}
    total = 0

    def flush() -> None:
        file = folder / f"part-{len(files)}.safetensors"
        save_file(pending, file, metadata={"format": "pt"})
        files.append((file, list(pending)))
        pending.clear()

    for name, tensor in tensors:
        pending[name] = tensor
        total += tensor.nbytes
        if sum(held.nbytes for held in pending.values()) >= SHARD_BYTES:
            flush()
    if pending:
        flush()
    if len(files) == 1:
        files[0][0].rename(folder / SINGLE)
        return
    weight_map: dict[str, str] = {}
    for number, (file, names) in enumerate(files, start=1):
        named = f"model-{number:05}-of-{len(files):05}.safetensors"
        file.rename(folder / named)
        weight_map |= dict.fromkeys(names, named)
    _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


# ---------------------------------------------------------------- configs


def _config(config: ArchitectureConfig, experts: int) -> dict[str, Any]:
    values: dict[str, Any] = {
        "architectures": [CAUSAL_LM["mixtral"]],
        "model_type": "mixtral",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size // experts,
        "num_local_experts": experts,
        "num_experts_per_tok": experts,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else _rope(config.rope_scaling),
        "sliding_window": config.sliding_window,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) or None,
        "pad_token_id": config.pad_token_id,
    }
    if config.rotary_dim != config.head_dim:
        values["partial_rotary_factor"] = config.rotary_dim / config.head_dim
    return values


def _rope(scaling: RopeScaling) -> dict[str, Any]:
    """The scaling in the spelling of hub configs."""
    values: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind in ("llama3", "yarn"):
        values["original_max_position_embeddings"] = scaling.original_length
    if scaling.kind == "llama3":
        values["low_freq_factor"] = scaling.low_freq_factor
        values["high_freq_factor"] = scaling.high_freq_factor
    if scaling.kind == "yarn":
        values |= {
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "truncate": scaling.truncate,
            "attention_factor": scaling.attention_factor,
        }
    return values


def _generation(config: ArchitectureConfig) -> dict[str, Any]:
    """What the checkpoint's makers suggest, and its ends."""
    values: dict[str, Any] = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
        "pad_token_id": config.pad_token_id,
    }
    suggested: SamplingDefaults = config.sampling
    if suggested.temperature == 0.0:
        values["do_sample"] = False
    else:
        values |= {"do_sample": True, "temperature": suggested.temperature}
    values |= {
        "top_p": suggested.top_p,
        "top_k": suggested.top_k,
        "min_p": suggested.min_p,
        "repetition_penalty": suggested.repetition_penalty,
    }
    return {key: value for key, value in values.items() if value is not None}


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
