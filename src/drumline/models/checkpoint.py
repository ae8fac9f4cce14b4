"""`open_checkpoint`: a folder or file → configuration, tensors and tokenizer, strict both ways.

A tensor that the architecture needs and the checkpoint lacks is an error that names it, and so
is one that the architecture does not know. What may be absent or extra is listed here, in full:

    lm_head.weight                       extra if tied, when it equals the embedding
    *.rotary_emb.inv_freq                extra: a buffer of old checkpoints, computed anyway
    mtp.*, model.layers.{N}.* (deepseek) extra: a next-token module, read if it drafts;
                                         N is the layer after the last
    rope_freqs.weight (GGUF)             extra: read as rope scaling of kind ``factors``
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from drumline.core.errors import CheckpointError
from drumline.models.config import ArchitectureConfig
from drumline.models.gguf_config import read_gguf_config
from drumline.models.gguf_file import GGUFFile, read_gguf
from drumline.models.gguf_loader import load_gguf, rope_factors
from drumline.models.gguf_tokenizer import gguf_tokenizer
from drumline.models.hub_config import read_hub_config
from drumline.models.hub_tokenizer import hub_tokenizer
from drumline.models.layers import EMBEDDING, HEAD
from drumline.models.moe import split_fused_experts
from drumline.models.quantize import QuantizedTensors
from drumline.models.registry import model_module
from drumline.models.safetensors_loader import load_safetensors
from drumline.models.tokenizer import Tokenizer
from drumline.ops.weights import WeightTensor


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """An opened checkpoint. ``tensors`` are views of mapped files under hub names, exactly those
    the architecture needs, quantized on the way where that was asked for. ``digest`` is equal for
    equal files wherever they lie, and cheap: it covers configuration, names, shapes, kinds and the
    ends of every tensor, not all bytes."""

    path: Path
    config: ArchitectureConfig
    tensors: Mapping[str, WeightTensor]
    digest: str
    gguf: GGUFFile | None = None

    @property
    def stored(self) -> Mapping[str, WeightTensor]:
        """``tensors`` as the files have them."""
        return self.tensors.stored if isinstance(self.tensors, QuantizedTensors) else self.tensors

    @property
    def weight_bytes(self) -> int:
        """Of all tensors, as they are handed out."""
        if isinstance(self.tensors, QuantizedTensors):
            return self.tensors.nbytes
        return sum(weight.nbytes for weight in self.tensors.values())

    def tokenizer(self) -> Tokenizer:
        """Builds the tokenizer. CheckpointError if it is absent, broken or not supported."""
        if self.gguf is not None:
            return gguf_tokenizer(self.path, self.gguf.metadata)
        return hub_tokenizer(self.path)


def open_checkpoint(path: str | Path, quantization: str | None = None) -> Checkpoint:
    """Opens a hub folder or a ``.gguf`` file. CheckpointError in one line for what is wrong.

    ``quantization``: a kind of `QuantizedTensors` in small letters, whose ConfigError it may raise.
    """
    path = Path(path)
    if path.is_dir():
        config = read_hub_config(path)
        tensors = load_safetensors(path)
        if config.experts is not None:
            tensors = split_fused_experts(path, tensors)
        gguf = None
    elif path.is_file():
        gguf = read_gguf(path)
        factors = rope_factors(gguf)
        config = read_gguf_config(path, gguf.metadata, gguf.tensors, factors)
        if factors and len(factors) != config.rotary_dim // 2:
            raise CheckpointError(
                path,
                f"rope_freqs.weight has {len(factors)} values, expected {config.rotary_dim // 2}",
            )
        tensors = load_gguf(gguf, config)
    else:
        raise CheckpointError(path, "no such file or folder")
    tensors = _checked(path, config, tensors)
    digest = _digest(config, tensors)
    frozen: Mapping[str, WeightTensor] = MappingProxyType(tensors)
    if quantization is not None:
        frozen = QuantizedTensors(frozen, quantization.upper())
    return Checkpoint(path, config, frozen, digest, gguf)


def _checked(
    path: Path, config: ArchitectureConfig, tensors: dict[str, WeightTensor]
) -> dict[str, WeightTensor]:
    """The tensors that the architecture needs, after comparing names and shapes both ways."""
    if config.num_hidden_layers > len(tensors):  # or listing the names would never end
        problem = f"{config.num_hidden_layers} layers, but only {len(tensors)} tensors"
        raise CheckpointError(path, problem)
    expected: dict[str, tuple[int, ...]] = model_module(config.model_type).tensor_shapes(config)
    for name, shape in expected.items():
        if name not in tensors:
            raise CheckpointError(path, f"missing tensor {name}, expected shape {list(shape)}")
        found = tensors[name].shape
        if found != shape:
            raise CheckpointError(
                path, f"tensor {name} has shape {list(found)}, expected {list(shape)}"
            )
    for name in tensors:
        if name in expected or name.endswith(".rotary_emb.inv_freq"):
            continue
        if name.startswith(("mtp.", module_prefix(config))):
            continue
        if name == HEAD and _same(tensors[HEAD], tensors[EMBEDDING]):
            continue
        reason = ": embeddings are tied, and it differs from them" if name == HEAD else ""
        raise CheckpointError(path, f"unexpected tensor {name}{reason}")
    return {name: tensors[name] for name in expected}


def module_prefix(config: ArchitectureConfig) -> str:
    """How the family names its own next-token module inside a checkpoint."""
    beside = config.model_type == "deepseek_v3"
    return f"model.layers.{config.num_hidden_layers}." if beside else "mtp."


def _same(a: WeightTensor, b: WeightTensor) -> bool:
    return a.kind == b.kind and a.shape == b.shape and torch.equal(a.data, b.data)


def _digest(config: ArchitectureConfig, tensors: Mapping[str, WeightTensor]) -> str:
    digest = hashlib.sha256(config.as_json().encode())
    for name, weight in sorted(tensors.items()):
        digest.update(f"{name} {weight.kind} {weight.shape}\n".encode())
        flat = weight.data.reshape(-1).view(torch.uint8)
        digest.update(flat[:64].numpy().tobytes())
        digest.update(flat[-64:].numpy().tobytes())
    return digest.hexdigest()
