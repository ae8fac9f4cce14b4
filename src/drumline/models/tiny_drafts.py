"""Seeded miniature draft checkpoints for a miniature target, one writer per method.

They agree with their target by chance only: what they are for is formats, passes and bits. The
same arguments give the same bytes. `tiny` writes the targets.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drumline.core.errors import ConfigError
from drumline.models.config import ArchitectureConfig, Fields
from drumline.models.hub_config import read_architecture, read_hub_config
from drumline.models.registry import WITH_EXPERTS, model_module
from drumline.models.safetensors_loader import INDEX, SINGLE

Shapes = Mapping[str, tuple[int, ...]]
LAYER = "model.layers."


def write_eagle3(
    target: str | Path,
    output: str | Path,
    seed: int,
    *,
    original: bool = False,
    layer: str = "llama",
    layers: int = 1,
    hidden: int | None = None,
    taps: Sequence[int] | None = None,
    draft_vocab: int | None = None,
    tokens: int = 3,
    norm_before_residual: bool = False,
    norm_before_fc: bool = False,
    fc_norm: bool = False,
    norm_output: bool = False,
    embedding: bool = True,
) -> Path:
    """An EAGLE-3 draft for the checkpoint in the folder ``target``: speculators' spelling, or the
    ``original`` one. ``layer``: llama, qwen3 or qwen3_moe. ``hidden``: the draft's own width.
    ``embedding``: it has its own. Returns the folder."""
    verifier = read_hub_config(Path(target))
    if original and layers != 1:
        raise ConfigError("layers", layers, "the original spelling has one")
    width = hidden or verifier.hidden_size
    config = _layer_config(verifier, layer, layers, width)
    taps = default_taps(verifier) if taps is None else tuple(taps)
    draft_vocab = draft_vocab or verifier.vocab_size
    fused = len(taps) * verifier.hidden_size
    shapes = _layer_shapes(_architecture(config))
    for name in ("q_proj", "k_proj", "v_proj"):
        key = f"{LAYER}0.self_attn.{name}.weight"
        shapes[key] = (shapes[key][0], 2 * width)
    shapes |= {
        f"{LAYER}0.hidden_norm.weight": (width,),
        "fc.weight": (width, fused),
        "norm.weight": (width,),
        "lm_head.weight": (draft_vocab, width),
    }
    if embedding:
        shapes["embed_tokens.weight"] = (verifier.vocab_size, width)
    if norm_before_fc:
        shapes["input_norm.weight"] = (fused,)
    if fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (verifier.hidden_size,) for i in range(len(taps))}
    prefix = {f"{LAYER}0.": "midlayer."} if original else {LAYER: "layers."}
    tensors = {**_random_all(shapes, seed, prefix), **_maps(draft_vocab, verifier.vocab_size, seed)}
    own = {
        "draft_vocab_size": draft_vocab,
        "eagle_aux_hidden_state_layer_ids": list(taps),
        "norm_before_residual": norm_before_residual,
        "norm_before_fc": norm_before_fc,
        "fc_norm": fc_norm,
        "norm_output": norm_output,
        "target_hidden_size": verifier.hidden_size,
    }
    if original:
        top = {**config, **own, "architectures": ["LlamaForCausalLMEagle3"]}
    else:
        top = _envelope("eagle3", config, tokens) | own
    return _write(output, top, tensors)


def write_eagle(
    target: str | Path,
    output: str | Path,
    seed: int,
    *,
    layers: int = 1,
    bias: bool = True,
    embedding: bool = False,
) -> Path:
    """An EAGLE-1 draft, in its original spelling. Returns the folder."""
    verifier = read_hub_config(Path(target))
    hidden = verifier.hidden_size
    config = _layer_config(verifier, "llama", layers, hidden)
    shapes = _layer_shapes(_architecture(config)) | {"fc.weight": (hidden, 2 * hidden)}
    del shapes[f"{LAYER}0.input_layernorm.weight"]
    if bias:
        shapes["fc.bias"] = (hidden,)
    if embedding:
        shapes["embed_tokens.weight"] = (verifier.vocab_size, hidden)
    # Without norms between passes a larger gain would grow from draft to draft.
    tensors = _random_all(shapes, seed, {LAYER: "layers."}, gain=0.8)
    return _write(output, {**config, "architectures": ["LlamaForCausalLM"]}, tensors)


def write_mtp(
    target: str | Path,
    output: str | Path,
    seed: int,
    *,
    layer: str = "llama",
    draft_vocab: int | None = None,
    tokens: int = 3,
    own_names: bool = False,
) -> Path:
    """A next-token module in a folder of its own: speculators' spelling, or ``mtp.*`` names with
    ``own_names``. ``draft_vocab`` below the target's is our extension. Returns the folder."""
    verifier = read_hub_config(Path(target))
    config = _layer_config(verifier, layer, 1, verifier.hidden_size)
    if own_names:
        tensors = _module(_architecture(config), seed, "mtp.")
        return _write(output, {**config, "num_nextn_predict_layers": 1}, tensors)
    # A speculators config holds the verifier's layers here, whose number says nothing of its own.
    layers = {**config, "num_hidden_layers": verifier.num_hidden_layers}
    top = _envelope("mtp", layers, tokens) | {"num_nextn_predict_layers": 1}
    tensors = _module(_architecture(config), seed, "mtp_layers.0.")
    if draft_vocab is not None:
        top["draft_vocab_size"] = draft_vocab
        tensors |= _maps(draft_vocab, verifier.vocab_size, seed)
    return _write(output, top, tensors)


def add_mtp(target: str | Path, seed: int) -> None:
    """Adds a next-token module of its own to the checkpoint in the folder ``target``."""
    folder = Path(target)
    if (folder / INDEX).exists():
        raise ConfigError("shards", "several", "a next-token module is added to one file only")
    config = read_hub_config(folder)
    experts = (0,) if config.experts is not None else ()
    block = replace(config, num_hidden_layers=1, expert_layers=experts)
    tensors = load_file(folder / SINGLE)
    dtype = next(iter(tensors.values())).dtype
    module = {name: data.to(dtype) for name, data in _module(block, seed, "mtp.").items()}
    save_file(tensors | module, folder / SINGLE, metadata={"format": "pt"})
    path = folder / "config.json"
    values = json.loads(path.read_text(encoding="utf-8")) | {"num_nextn_predict_layers": 1}
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def write_medusa(
    target: str | Path,
    output: str | Path,
    seed: int,
    *,
    heads: int = 3,
    layers: int = 1,
    original: bool = True,
    bias: bool = False,
) -> Path:
    """Medusa heads: the ``original`` spelling (always with biases), or vLLM's. Returns the
    folder."""
    verifier = read_hub_config(Path(target))
    hidden, vocab = verifier.hidden_size, verifier.vocab_size
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(heads):
        for layer in range(layers):
            block = f"{head}.{layer}.linear" if original else f"blocks.{head}.layers.{layer}"
            shapes[f"{block}.weight"] = (hidden, hidden)
            if original or bias:
                shapes[f"{block}.bias"] = (hidden,)
        out = f"{head}.{layers}" if original else f"lm_heads.{head}"
        shapes[f"{out}.weight"] = (vocab, hidden)
    config: dict[str, Any] = {"medusa_num_heads": heads, "medusa_num_layers": layers}
    if not original:
        config = {
            "model_type": "medusa",
            "hidden_size": hidden,
            "vocab_size": vocab,
            "num_heads": heads,
            "num_hidden_layers": layers,
            "medusa_fc_bias": bias,
        }
    return _write(output, config, _random_all(shapes, seed, {}))


def write_dflash(
    target: str | Path,
    output: str | Path,
    seed: int,
    *,
    flat: bool = False,
    layers: int = 2,
    taps: Sequence[int] | None = None,
    block_size: int = 6,
    mask_token_id: int = 0,
    draft_vocab: int | None = None,
    sample_from_anchor: bool = False,
    embedding: bool = False,
    head: bool = False,
    sliding: Sequence[int] = (),
    sliding_window_non_causal: bool = False,
    max_position_embeddings: int | None = None,
) -> Path:
    """A DFlash draft in speculators' spelling, or z-lab's ``flat`` one. ``embedding``, ``head``:
    it has its own. ``sliding``: layers with sliding attention, whose window is the draft's whole
    length. Returns the folder."""
    verifier = read_hub_config(Path(target))
    length = max_position_embeddings or verifier.max_position_embeddings
    config = _layer_config(verifier, "qwen3", layers, verifier.hidden_size)
    config["max_position_embeddings"] = length
    if sliding:
        kinds = ("full_attention", "sliding_attention")
        config["layer_types"] = [kinds[layer in sliding] for layer in range(layers)]
        config |= {"sliding_window": length, "use_sliding_window": True}
    taps = default_taps(verifier)[1:] if taps is None else tuple(taps)
    vocab = draft_vocab or verifier.vocab_size
    shapes = _layer_shapes(_architecture(config)) | {
        "fc.weight": (verifier.hidden_size, len(taps) * verifier.hidden_size),
        "hidden_norm.weight": (verifier.hidden_size,),
        "norm.weight": (verifier.hidden_size,),
    }
    if embedding:
        shapes["embed_tokens.weight"] = (verifier.vocab_size, verifier.hidden_size)
    if head or vocab < verifier.vocab_size:
        shapes["lm_head.weight"] = (vocab, verifier.hidden_size)
    tensors = {
        **_random_all(shapes, seed, {LAYER: "layers."}),
        **_maps(vocab, verifier.vocab_size, seed),
    }
    if flat:
        top = config | {
            "architectures": ["DFlashDraftModel"],
            "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
            "block_size": block_size,
            "num_target_layers": verifier.num_hidden_layers,
            "dflash_config": {
                "mask_token_id": mask_token_id,
                "target_layer_ids": [tap - 1 for tap in taps],
            },
        }
        return _write(output, top, tensors)
    own = {
        "aux_hidden_state_layer_ids": list(taps),
        "block_size": block_size,
        "mask_token_id": mask_token_id,
        "draft_vocab_size": vocab,
        "sample_from_anchor": sample_from_anchor,
        "sliding_window_non_causal": sliding_window_non_causal,
    }
    top = _envelope("dflash", config, block_size - (0 if sample_from_anchor else 1)) | own
    return _write(output, top, tensors)


# ---------------------------------------------------------------- pieces


def default_taps(verifier: ArchitectureConfig) -> tuple[int, ...]:
    """An early, a middle and the last residual stream: EAGLE-3's own choice needs five layers."""
    layers = verifier.num_hidden_layers
    return (0, (layers + 1) // 2, layers)


def _layer_config(
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


def _architecture(config: Mapping[str, Any]) -> ArchitectureConfig:
    return read_architecture(Fields(Path("config.json"), config))


def _layer_shapes(config: ArchitectureConfig) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = model_module(config.model_type).tensor_shapes(config)
    return {name: shape for name, shape in shapes.items() if name.startswith(LAYER)}


def _module(config: ArchitectureConfig, seed: int, prefix: str) -> dict[str, Tensor]:
    """A next-token module: ``mtp.`` names or speculators' own, which are one block's."""
    hidden, own = config.hidden_size, prefix == "mtp."
    names = (
        ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        if own
        else ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")
    )
    shapes = _layer_shapes(config) | {f"{prefix}{name}.weight": (hidden,) for name in names[1:]}
    shapes[f"{prefix}{names[0]}.weight"] = (hidden, 2 * hidden)
    return _random_all(shapes, seed, {f"{LAYER}0.": f"{prefix}layers.0." if own else prefix})


def _random_all(
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


def _maps(draft_vocab: int, vocab: int, seed: int) -> dict[str, Tensor]:
    """``d2t`` and ``t2d`` for a seeded choice of target ids; nothing if all are chosen."""
    if not 1 <= draft_vocab <= vocab:
        raise ConfigError("draft_vocab", draft_vocab, f"must be in 1..{vocab}")
    if draft_vocab == vocab:
        return {}
    chosen = np.random.default_rng([seed, 11]).choice(vocab, draft_vocab, replace=False)
    ids = torch.from_numpy(np.sort(chosen).astype(np.int64))
    mask = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
    return {"d2t": ids - torch.arange(draft_vocab), "t2d": mask}


def _envelope(algorithm: str, layers: Mapping[str, Any], tokens: int) -> dict[str, Any]:
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


def _write(output: str | Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    save_file(dict(tensors), folder / SINGLE, metadata={"format": "pt"})
    return folder
