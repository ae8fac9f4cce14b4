"""Seeded miniature checkpoints in hub format, for tests, demonstrations and bug reports.

The weights are random, scaled so that logits spread (standard deviation about 2) and greedy
continuations wander instead of repeating one token. The same arguments give the same bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from torch import Tensor

from drumline.core.errors import CheckpointError, ConfigError
from drumline.models.config import ArchitectureConfig
from drumline.models.gguf_tokenizer import QWEN2_SPLIT, split_pre_tokenizer
from drumline.models.hub_config import read_hub_config
from drumline.models.layers import FINAL_NORM
from drumline.models.registry import CAUSAL_LM, model_module
from drumline.models.safetensors_loader import INDEX, SINGLE
from drumline.models.tiny_config import BOS, EOS, PAD, UNK, base_config, expert_config
from drumline.models.tokenizer import BYTE_ALPHABET, frame

SPECIALS = ("<unk>", "<s>", "<|im_end|>", "<|im_start|>", "<pad>")
VOCAB_MIN = 16
WITHOUT_CHOICE = ("mistral", "mixtral", "qwen2")  # of biases on their attention

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_PAIRS = "th he in er an re on at en nd ti es or te of ed is it al ar st to nt ng"
_TRIPLES = "the and ing ion ent"
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_tiny(
    arch: str,
    output: str | Path,
    seed: int,
    *,
    vocab: int = 128,
    hidden: int = 32,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    intermediate: int = 64,
    max_position_embeddings: int = 512,
    rope_theta: float = 10000.0,
    rope_scaling: Mapping[str, Any] | None = None,
    dtype: str = "float32",
    tied: bool = False,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    experts: int | None = None,
    experts_per_token: int | None = None,
    norm_topk_prob: bool = True,
    mlp_only_layers: Sequence[int] = (),
    shards: int = 1,
) -> Path:
    """Writes a checkpoint of ``arch`` (a name of `registry.MODULES`) to the folder ``output``.

    Architectures with experts have ``experts`` (4, deepseek_v3 8) of width ``intermediate`` in
    every layer that is not listed in ``mlp_only_layers`` (deepseek_v3: the first), and
    ``experts_per_token`` (2) of them for each token. ``rope_scaling`` is written as given, in the
    spelling of hub configs. Returns the folder. ConfigError names the argument that is out of
    range or in conflict.
    """
    sizes = {
        "hidden": hidden,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "intermediate": intermediate,
        "max_position_embeddings": max_position_embeddings,
        "shards": shards,
    }
    _check_arch(arch, attention_bias, mlp_bias)
    _check_sizes(sizes, vocab, seed, head_dim, dtype)
    config = base_config(arch, sizes, vocab, head_dim) | {
        "rope_theta": rope_theta,
        "rope_scaling": None if rope_scaling is None else dict(rope_scaling),
        "tie_word_embeddings": tied,
        "torch_dtype": dtype,
    }
    config |= {"attention_bias": attention_bias} if arch not in WITHOUT_CHOICE else {}
    config |= {"mlp_bias": mlp_bias} if arch == "llama" else {}
    config |= expert_config(
        arch, sizes, experts, experts_per_token, norm_topk_prob, mlp_only_layers
    )
    folder = _empty_folder(output)
    _write_json(folder / "config.json", config)
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": BOS, "eos_token_id": [EOS], "pad_token_id": PAD},
    )
    try:
        read = read_hub_config(folder)
    except CheckpointError as error:
        raise ConfigError("rope_scaling", rope_scaling, error.problem) from None
    _write_weights(folder, read, seed, _DTYPES[dtype], shards)
    _write_tokenizer(folder, arch, vocab, max_position_embeddings)
    return folder


def _check_arch(arch: str, attention_bias: bool, mlp_bias: bool) -> None:
    if arch not in CAUSAL_LM:
        raise ConfigError("arch", arch, f"expected one of {', '.join(sorted(CAUSAL_LM))}")
    if arch != "llama" and mlp_bias:
        raise ConfigError("mlp_bias", mlp_bias, f"{arch} has no biases in its feed-forward")
    if arch in WITHOUT_CHOICE and attention_bias:
        raise ConfigError("attention_bias", attention_bias, f"not a choice that {arch} has")


def _empty_folder(output: str | Path) -> Path:
    """The folder to write to, without the weight files of an earlier run."""
    folder = Path(output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("output", str(output), f"not a folder: {error.strerror}") from None
    for stale in (*folder.glob("model*.safetensors"), folder / INDEX):
        stale.unlink(missing_ok=True)
    return folder


def _check_sizes(
    sizes: Mapping[str, int], vocab: int, seed: int, head_dim: int | None, dtype: str
) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise ConfigError(name, value, "must be at least 1")
    if vocab < VOCAB_MIN:
        raise ConfigError("vocab", vocab, f"must be at least {VOCAB_MIN}")
    if seed < 0:
        raise ConfigError("seed", seed, "must not be negative")
    if dtype not in _DTYPES:
        raise ConfigError("dtype", dtype, f"expected one of {', '.join(_DTYPES)}")
    hidden, heads, kv_heads = sizes["hidden"], sizes["heads"], sizes["kv_heads"]
    if hidden % heads:  # transformers insists on it, even where head_dim is given
        raise ConfigError("heads", heads, f"must divide hidden={hidden}")
    if heads % kv_heads:
        raise ConfigError("kv_heads", kv_heads, f"must divide heads={heads}")
    width = hidden // heads if head_dim is None else head_dim
    if width < 2 or width % 2:
        raise ConfigError("head_dim", width, "must be even and at least 2, since rope turns pairs")


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_weights(
    folder: Path, config: ArchitectureConfig, seed: int, dtype: torch.dtype, shards: int
) -> None:
    shapes: dict[str, tuple[int, ...]] = model_module(config.model_type).tensor_shapes(config)
    if shards > len(shapes):
        raise ConfigError("shards", shards, f"the checkpoint has {len(shapes)} tensors only")
    tensors = {
        name: _random(name, shape, config, np.random.default_rng([seed, index])).to(dtype)
        for index, (name, shape) in enumerate(sorted(shapes.items()))
    }
    if shards == 1:
        save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
        return
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        part = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _random(
    name: str, shape: tuple[int, ...], config: ArchitectureConfig, rng: np.random.Generator
) -> Tensor:
    """Gains are relative to keeping a unit-variance input at unit variance."""
    values = rng.standard_normal(shape, dtype=np.float32)
    tied = config.tie_word_embeddings
    if name.endswith("norm.weight"):
        mean = np.float32(8 if tied and name == FINAL_NORM else 1)
        if "self_attn" in name:  # qwen3's norms of q and k, which set how sharp attention is
            mean = np.float32(2)
        return torch.from_numpy(mean * (1 + np.float32(0.15) * values))
    if name.endswith("e_score_correction_bias"):  # beside scores in 0..1
        return torch.from_numpy(np.float32(0.1) * values)
    if name.endswith(".bias"):
        return torch.from_numpy(np.float32(0.3) * values)
    if "embed_tokens" in name:
        # Tied to the head: small, or every token would predict itself; the final norm makes up.
        std = 0.25 / math.sqrt(config.hidden_size) if tied else 1.0
        return torch.from_numpy(np.float32(std) * values)
    gains = {"q_proj": 2.0, "k_proj": 2.0, "v_proj": 2.0, "o_proj": 2.5, "down_proj": 2.0}
    gains |= {"gate": 2.0, "w2": 2.0}  # a router with opinions; mixtral's name of down_proj
    gain = gains.get(name.split(".")[-2], 2.0 if name.startswith("lm_head") else 1.0)
    return torch.from_numpy(np.float32(gain / math.sqrt(shape[1])) * values)


def _vocabulary(size: int) -> tuple[list[str], list[tuple[str, str]]]:
    """At most ``size`` tokens, specials first, and the merges that make the longer ones.

    ASCII comes before common English pairs, these before the other bytes; from 281 tokens on
    every byte has one, so that all of Unicode survives. Pairs and triples of letters fill the rest.
    """
    spelling = {byte: char for char, byte in BYTE_ALPHABET.items()}
    letters = "abcdefghijklmnopqrstuvwxyz"
    ascii_order = letters + " \n.,'?!0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    first = [ord(char) for char in ascii_order]
    first += [byte for byte in (9, *range(0x20, 0x7F)) if byte not in first]
    others = [byte for byte in range(256) if byte not in first]
    tokens = [*SPECIALS, *(spelling[byte] for byte in first)]
    merges: list[tuple[str, str]] = []

    def merge(left: str, right: str) -> None:
        new = left + right not in known and {left, right} <= known
        if new and len(tokens) < size:
            known.add(left + right)
            tokens.append(left + right)
            merges.append((left, right))

    known = set(tokens)
    if len(tokens) < size:
        for pair in _PAIRS.split():
            merge(pair[0], pair[1])
        tokens += [spelling[byte] for byte in others][: size - len(tokens)]
        for triple in _TRIPLES.split():
            merge(triple[:2], triple[2])
        for pair in (a + b for a in letters for b in letters):
            merge(pair[0], pair[1])
        for triple in (a + b + c for a in letters for b in letters for c in letters):
            merge(triple[:2], triple[2])
    return tokens[:size], merges


def _write_tokenizer(folder: Path, arch: str, vocab: int, length: int) -> None:
    tokens, merges = _vocabulary(vocab)
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    qwen = arch.startswith("qwen")
    unk = None if qwen else SPECIALS[UNK]  # their families drop what they cannot spell
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token=unk))
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIALS])
    if qwen:
        backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = split_pre_tokenizer(QWEN2_SPLIT)
    else:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    with_bos = not qwen  # as their families do
    frame(backend, SPECIALS[BOS] if with_bos else None, None)
    backend.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": with_bos,
            "bos_token": SPECIALS[BOS],
            "eos_token": SPECIALS[EOS],
            "unk_token": SPECIALS[UNK],
            "pad_token": SPECIALS[PAD],
            "model_max_length": length,
            "clean_up_tokenization_spaces": False,
            "chat_template": ("{{ bos_token }}" if with_bos else "") + _CHAT_TEMPLATE,
        },
    )
