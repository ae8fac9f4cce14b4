"""Tensors of a hub folder: ``model.safetensors``, or shards listed by an index file.

Files are mapped, not read; formats that can carry code (pickles) are never opened.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from drumline.core.errors import CheckpointError
from drumline.models.config import read_json
from drumline.ops.weights import WeightTensor

_KINDS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def safetensors_files(folder: Path) -> list[Path]:
    """The weight files of ``folder``, in the order of their names. CheckpointError if none."""
    index = folder / INDEX
    if not index.exists():
        if (folder / SINGLE).exists():
            return [folder / SINGLE]
        pickles = sorted(p.name for p in folder.glob("pytorch_model*.bin"))
        hint = f"; {pickles[0]} is a pickle, which is never loaded" if pickles else ""
        raise CheckpointError(folder, f"no {SINGLE} and no {INDEX}{hint}")
    files = [folder / name for name in sorted(set(_weight_map(index).values()))]
    for file in files:
        if not file.exists():
            raise CheckpointError(index, f"names {file.name}, which is not there")
    return files


def _weight_map(index: Path) -> dict[str, str]:
    weights = read_json(index).get("weight_map")
    if not isinstance(weights, dict) or not weights:
        raise CheckpointError(index, "weight_map missing or empty")
    for name, file in weights.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(index, f"weight_map[{name!r}] {file!r} is not a file name")
    return weights


def load_safetensors(folder: Path) -> dict[str, WeightTensor]:
    """Every tensor of ``folder``. CheckpointError for broken, absent or contradicting files."""
    index = folder / INDEX
    tensors: dict[str, WeightTensor] = {}
    home: dict[str, str] = {}
    for file in safetensors_files(folder):
        for name, weight in _load_file(file).items():
            if name in tensors:
                raise CheckpointError(file, f"tensor {name} is also in {home[name]}")
            tensors[name], home[name] = weight, file.name
    if index.exists():
        listed = _weight_map(index)
        for name, file_name in listed.items():
            if home.get(name) != file_name:
                raise CheckpointError(index, f"tensor {name} is not in {file_name}")
        for name in tensors:
            if name not in listed:
                raise CheckpointError(index, f"tensor {name} of {home[name]} is not listed")
    return tensors


def _load_file(path: Path) -> dict[str, WeightTensor]:
    tensors: dict[str, WeightTensor] = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118, it is no mapping
                if not name.isprintable():
                    raise CheckpointError(path, f"tensor name {name[:80]!r} is not printable text")
                data = file.get_tensor(name)
                if data.dtype not in _KINDS:
                    stored = str(data.dtype).removeprefix("torch.")
                    raise CheckpointError(
                        path, f"tensor {name} is stored as {stored}, supported are F32, F16, BF16"
                    )
                tensors[name] = WeightTensor(name, tuple(data.shape), _KINDS[data.dtype], data)
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        if isinstance(error, CheckpointError):
            raise
        reason = " ".join(str(error).split())
        raise CheckpointError(path, f"not a whole safetensors file: {reason}") from None
    return tensors
