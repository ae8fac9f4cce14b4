"""Seeded miniature draft checkpoints for a miniature target, one writer per method.

They agree with their target by chance only: what they are for is formats, passes and bits. The
same arguments give the same bytes. `tiny` writes the targets.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from drumline.core.errors import ConfigError
from drumline.models.checkpoint import module_prefix
from drumline.models.config import ArchitectureConfig
from drumline.models.hub_config import read_hub_config
from drumline.models.layers import EMBEDDING, HEAD
from drumline.models.safetensors_loader import INDEX, SINGLE
from drumline.models.tiny_pieces import (
    LAYER,
    architecture,
    default_taps,
    envelope,
    layer_config,
    layer_shapes,
    maps,
    random_all,
    write_draft,
)


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
    verifier_head: bool = False,
) -> Path:
    """An EAGLE-3 draft for the checkpoint in the folder ``target``: speculators' spelling, or the
    ``original`` one. ``layer``: llama, qwen3 or qwen3_moe. ``hidden``: the draft's own width.
    ``embedding``: it has its own. ``verifier_head``: its head is the target's. Returns the
    folder."""
    verifier = read_hub_config(Path(target))
    if original and layers != 1:
        raise ConfigError("layers", layers, "the original spelling has one")
    width = hidden or verifier.hidden_size
    config = layer_config(verifier, layer, layers, width)
    taps = default_taps(verifier) if taps is None else tuple(taps)
    draft_vocab = draft_vocab or verifier.vocab_size
    fused = len(taps) * verifier.hidden_size
    shapes = layer_shapes(architecture(config))
    for name in ("q_proj", "k_proj", "v_proj"):
        key = f"{LAYER}0.self_attn.{name}.weight"
        shapes[key] = (shapes[key][0], 2 * width)
    shapes |= {
        f"{LAYER}0.hidden_norm.weight": (width,),
        "fc.weight": (width, fused),
        "norm.weight": (width,),
        "lm_head.weight": (draft_vocab, width),
    }
    if verifier_head:
        del shapes["lm_head.weight"]
    if embedding:
        shapes["embed_tokens.weight"] = (verifier.vocab_size, width)
    if norm_before_fc:
        shapes["input_norm.weight"] = (fused,)
    if fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (verifier.hidden_size,) for i in range(len(taps))}
    prefix = {f"{LAYER}0.": "midlayer."} if original else {LAYER: "layers."}
    tensors = {**random_all(shapes, seed, prefix), **maps(draft_vocab, verifier.vocab_size, seed)}
    own = {
        "draft_vocab_size": draft_vocab,
        "eagle_aux_hidden_state_layer_ids": list(taps),
        "norm_before_residual": norm_before_residual,
        "norm_before_fc": norm_before_fc,
        "fc_norm": fc_norm,
        "norm_output": norm_output,
        "target_hidden_size": verifier.hidden_size,
        "verifier_head": verifier_head,
    }
    if original:
        top = {**config, **own, "architectures": ["LlamaForCausalLMEagle3"]}
    else:
        top = envelope("eagle3", config, tokens) | own
    return write_draft(output, top, tensors)


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
    config = layer_config(verifier, "llama", layers, hidden)
    shapes = layer_shapes(architecture(config)) | {"fc.weight": (hidden, 2 * hidden)}
    del shapes[f"{LAYER}0.input_layernorm.weight"]
    if bias:
        shapes["fc.bias"] = (hidden,)
    if embedding:
        shapes["embed_tokens.weight"] = (verifier.vocab_size, hidden)
    # Without norms between passes a larger gain would grow from draft to draft.
    tensors = random_all(shapes, seed, {LAYER: "layers."}, gain=0.8)
    return write_draft(output, {**config, "architectures": ["LlamaForCausalLM"]}, tensors)


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
    config = layer_config(verifier, layer, 1, verifier.hidden_size)
    if own_names:
        tensors = _module(architecture(config), seed, "mtp.")
        return write_draft(output, {**config, "num_nextn_predict_layers": 1}, tensors)
    # A speculators config holds the verifier's layers here, whose number says nothing of its own.
    layers = {**config, "num_hidden_layers": verifier.num_hidden_layers}
    top = envelope("mtp", layers, tokens) | {"num_nextn_predict_layers": 1}
    tensors = _module(architecture(config), seed, "mtp_layers.0.")
    if draft_vocab is not None:
        top["draft_vocab_size"] = draft_vocab
        tensors |= maps(draft_vocab, verifier.vocab_size, seed)
    return write_draft(output, top, tensors)


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
    prefix = module_prefix(config)
    module = {name: data.to(dtype) for name, data in _module(block, seed, prefix).items()}
    if prefix != "mtp.":  # DeepSeek's checkpoints repeat what the module shares
        head = EMBEDDING if config.tie_word_embeddings else HEAD
        module[f"{prefix}embed_tokens.weight"] = tensors[EMBEDDING].clone()
        module[f"{prefix}shared_head.head.weight"] = tensors[head].clone()
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
    return write_draft(output, config, random_all(shapes, seed, {}))


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
    config = layer_config(verifier, "qwen3", layers, verifier.hidden_size)
    config["max_position_embeddings"] = length
    if sliding:
        kinds = ("full_attention", "sliding_attention")
        config["layer_types"] = [kinds[layer in sliding] for layer in range(layers)]
        config |= {"sliding_window": length, "use_sliding_window": True}
    taps = default_taps(verifier)[1:] if taps is None else tuple(taps)
    vocab = draft_vocab or verifier.vocab_size
    shapes = layer_shapes(architecture(config)) | {
        "fc.weight": (verifier.hidden_size, len(taps) * verifier.hidden_size),
        "hidden_norm.weight": (verifier.hidden_size,),
        "norm.weight": (verifier.hidden_size,),
    }
    if embedding:
        shapes["embed_tokens.weight"] = (verifier.vocab_size, verifier.hidden_size)
    if head or vocab < verifier.vocab_size:
        shapes["lm_head.weight"] = (vocab, verifier.hidden_size)
    tensors = {
        **random_all(shapes, seed, {LAYER: "layers."}),
        **maps(vocab, verifier.vocab_size, seed),
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
        return write_draft(output, top, tensors)
    own = {
        "aux_hidden_state_layer_ids": list(taps),
        "block_size": block_size,
        "mask_token_id": mask_token_id,
        "draft_vocab_size": vocab,
        "sample_from_anchor": sample_from_anchor,
        "sliding_window_non_causal": sliding_window_non_causal,
    }
    top = envelope("dflash", config, block_size - (0 if sample_from_anchor else 1)) | own
    return write_draft(output, top, tensors)


# The names of a module's parts: projection, norms of token and hidden state, final norm.
_PARTS = {
    "mtp.": ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"),
    "mtp_layers.0.": ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm"),
}
_PARTS_BESIDE = ("eh_proj", "enorm", "hnorm", "shared_head.norm")


def _module(config: ArchitectureConfig, seed: int, prefix: str) -> dict[str, Tensor]:
    """A next-token module under ``prefix``: ``mtp.``, speculators' own, or DeepSeek's layer, whose
    names are one block's but for ``mtp.layers.0.*``."""
    hidden, names = config.hidden_size, _PARTS.get(prefix, _PARTS_BESIDE)
    parts: dict[str, tuple[int, ...]] = {f"{prefix}{name}.weight": (hidden,) for name in names[1:]}
    parts[f"{prefix}{names[0]}.weight"] = (hidden, 2 * hidden)
    block = f"{prefix}layers.0." if prefix == "mtp." else prefix
    return random_all(layer_shapes(config) | parts, seed, {f"{LAYER}0.": block})
