"""Tensors of a GGUF file under the names, row order and shapes of hub checkpoints.

Converters to GGUF interleave the rows of q and k of llama files, so that rope turns neighbours;
here they are put back into halves. That moves whole rows, so quantized blocks stay as they are.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from drumline.core.errors import CheckpointError
from drumline.models.config import ArchitectureConfig
from drumline.models.gguf_file import GGUFFile, GGUFTensor
from drumline.ops.weights import FLOAT_KINDS, WeightTensor

ROPE_FACTORS = "rope_freqs.weight"

_GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def hub_name(name: str) -> str | None:
    """``blk.3.attn_q.weight`` → ``model.layers.3.self_attn.q_proj.weight``; None if unknown."""
    if name in _GLOBAL:
        return _GLOBAL[name]
    match = _BLOCK.fullmatch(name)
    if match is None or match[2] not in _LAYER:
        return None
    return f"model.layers.{int(match[1])}.{_LAYER[match[2]]}.{match[3]}"


def rope_factors(file: GGUFFile) -> tuple[float, ...]:
    """The divisors of the rotary frequencies, for files that have them, else empty."""
    entry = file.tensors.get(ROPE_FACTORS)
    if entry is None:
        return ()
    if entry.kind != "F32" or len(entry.shape) != 1:
        raise CheckpointError(file.path, f"tensor {ROPE_FACTORS} is not a vector of F32")
    values = tuple(_view(file, entry).tolist())
    if not all(0 < value < float("inf") for value in values):
        raise CheckpointError(file.path, f"tensor {ROPE_FACTORS} has values that are not positive")
    return values


def load_gguf(file: GGUFFile, config: ArchitectureConfig) -> dict[str, WeightTensor]:
    """Every tensor of ``file``. CheckpointError for a name that no architecture here knows."""
    interleaved = file.metadata["general.architecture"] == "llama"
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tensors: dict[str, WeightTensor] = {}
    for entry in file.tensors.values():
        if entry.name == ROPE_FACTORS:
            continue
        name = hub_name(entry.name)
        if name is None:
            raise CheckpointError(file.path, f"unexpected tensor {entry.name}")
        data = _view(file, entry)
        head_count = heads.get(name.split(".")[-2])
        if interleaved and head_count:
            rows = head_count * config.head_dim
            if entry.shape[0] != rows:
                raise CheckpointError(
                    file.path, f"tensor {entry.name} has {entry.shape[0]} rows, expected {rows}"
                )
            data = _halves_from_pairs(data, head_count)
        tensors[name] = WeightTensor(name, entry.shape, entry.kind, data)
    return tensors


def _view(file: GGUFFile, entry: GGUFTensor) -> Tensor:
    """The tensor's bytes in the mapping: floats of its shape, or uint8 rows of blocks."""
    dtype = FLOAT_KINDS.get(entry.kind, torch.uint8)
    count = entry.nbytes // dtype.itemsize
    if count == 0:
        raise CheckpointError(file.path, f"tensor {entry.name} is empty, shape {entry.shape}")
    flat = torch.frombuffer(file.buffer, dtype=dtype, count=count, offset=entry.start)
    if entry.kind in FLOAT_KINDS:
        return flat.view(entry.shape)
    rows = 1
    for axis in entry.shape[:-1]:
        rows *= axis
    return flat.view(rows, -1)


def _halves_from_pairs(rows: Tensor, heads: int) -> Tensor:
    """Reorders axis 0 within each head from (pair, member) to (member, pair); a fresh copy.

    in    x0 y0 x1 y1 x2 y2   (rope turns x_i, y_i)
    out   x0 x1 x2 y0 y1 y2
    """
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape).contiguous()
