"""Reading draft checkpoints: what all dialects share, strict both ways.

A draft is a hub folder whose config.json either names its algorithm (``speculators_model_type``)
or is the flat config of a foreign spelling. The modules of the methods say which tensors theirs
has; here they are found, compared and given one meaning:

    tap k        the residual stream of the target after k layers, 0 the embeddings
    token table  target id of each draft id, ascending (files store offsets: id + d2t[id])

Nothing in a checkpoint is executed, and no setting that would change the target's tokens
(lossy acceptance) is taken from one. Knows no network and no sequence.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drumline.config import SpeculativeConfig
from drumline.core.errors import CheckpointError, ConfigError, nearest_name
from drumline.models.config import ArchitectureConfig, Fields, read_json
from drumline.models.fetch import resolve_model
from drumline.models.hub_config import read_architecture
from drumline.models.registry import model_module
from drumline.models.safetensors_loader import safetensors_files
from drumline.ops.weights import WeightTensor

TYPE = "speculators_model_type"
SUPPORTED = ("dflash", "eagle3", "mtp")
SHARPENING = "draft_sharpening"  # our extension of the format: a number of at least 1, or "greedy"
MAPS = ("d2t", "t2d")
LAYER = "model.layers."  # how the blocks of `drumline.models` name their tensors

_KINDS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
# Keys of a draft's own config that say nothing about its computation.
_HARMLESS = frozenset(
    {
        "_name_or_path",
        "architectures",
        "auto_map",
        "dtype",
        "embed_requires_grad",
        "enable_sp_ulysses",
        "has_no_defaults_at_init",
        "id2label",
        "initializer_range",
        "label2id",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "speculators_version",
        "tie_word_embeddings",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)


@dataclass(frozen=True, eq=False)
class DraftFiles:
    """A draft folder, opened. ``weights`` by the file's names, ``maps`` the integer tensors."""

    path: Path
    weights: Mapping[str, WeightTensor]
    maps: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every speculators config says around its algorithm; foreign ones say nothing.

    ``tokens``: the draft length it was made for. ``sharpening``: see `DraftSampler`."""

    tokens: int | None = None
    sharpening: float = 1.0


def tap_from_layer_output(layer: int) -> int:
    """The tap of the output of layer ``layer``, counted from 0 (z-lab's DFlash counts so);
    EAGLE's and speculators' ids are taps already."""
    return layer + 1


def default_taps(layers: int) -> tuple[int, ...]:
    """EAGLE-3's choice for a target of ``layers`` layers (Li et al. 2025)."""
    return (2, layers // 2, layers - 3)


def read_taps(fields: Fields, key: str, target: ArchitectureConfig) -> tuple[int, ...]:
    """The taps under ``key``, or EAGLE-3's where it is null; within the target's depth."""
    value = fields.get(key)
    taps = default_taps(target.num_hidden_layers) if value is None else value
    good = isinstance(taps, Sequence) and not isinstance(taps, str) and len(taps) > 0
    if not good or not all(isinstance(k, int) and not isinstance(k, bool) for k in taps):
        raise fields.fail(key, "expected a list of layer numbers")
    for tap in taps:
        if not 0 <= tap <= target.num_hidden_layers:
            raise fields.fail(
                key, f"tap {tap} is outside 0..{target.num_hidden_layers} of the target's layers"
            )
    return tuple(taps)


# ---------------------------------------------------------------- config.json


def draft_folder(speculative: SpeculativeConfig) -> Path:
    """The folder that ``model`` of the speculative config means. ConfigError if it is not given,
    CheckpointError if it is no folder."""
    if speculative.model is None:
        problem = f"{speculative.method} needs the folder or hub name of a draft checkpoint"
        raise ConfigError("speculative_config.model", None, problem)
    path = resolve_model(speculative.model, speculative.revision)
    if not path.is_dir():
        raise CheckpointError(path, "a draft checkpoint is a folder with config.json")
    return path


def open_config(folder: Path) -> Fields:
    path = folder / "config.json"
    return Fields(path, read_json(path))


def speculators_type(fields: Fields) -> str | None:
    """The algorithm that a config names; None for foreign spellings."""
    return fields.text(TYPE) if fields.get(TYPE) is not None else None


def check_type(fields: Fields, algorithm: str) -> None:
    """CheckpointError unless the config names ``algorithm``."""
    kind = fields.text(TYPE)
    if kind not in SUPPORTED:
        near = nearest_name(kind, SUPPORTED)
        raise fields.fail(TYPE, f"not supported; supported are {', '.join(SUPPORTED)}{near}")
    if kind != algorithm:
        raise fields.fail(TYPE, f"this checkpoint drafts by method {kind}, not {algorithm}")


def read_envelope(fields: Fields, algorithm: str) -> Envelope:
    """The common part of a speculators config. Refuses, by name, acceptance that is lossy."""
    check_type(fields, algorithm)
    values = fields.get("speculators_config")
    if not isinstance(values, dict):
        raise fields.fail("speculators_config", "missing, expected an object")
    inner = Fields(fields.path, values, prefix="speculators_config.")
    if inner.text("algorithm") != algorithm:
        raise inner.fail("algorithm", f"contradicts {TYPE} {algorithm!r}")
    tokens: dict[str, int] = {}
    methods = inner.get("proposal_methods", [])
    if not isinstance(methods, list) or not methods:
        raise inner.fail("proposal_methods", "expected a list of proposal methods")
    for index, method in enumerate(methods):
        if not isinstance(method, dict):
            raise inner.fail("proposal_methods", "expected objects")
        name, count = _proposal_method(
            Fields(fields.path, method, prefix=f"speculators_config.proposal_methods[{index}].")
        )
        tokens[name] = count
    default = inner.text("default_proposal_method", next(iter(tokens)))
    if default not in tokens:
        raise inner.fail("default_proposal_method", f"not one of {', '.join(tokens)}")
    return Envelope(tokens[default], read_sharpening(fields))


def _proposal_method(fields: Fields) -> tuple[str, int]:
    name = fields.text("proposal_type")
    if name != "greedy":
        raise fields.fail("proposal_type", "not supported; supported is greedy")
    if fields.integer("verifier_accept_k", 1) != 1:
        raise fields.fail(
            "verifier_accept_k", "lossy acceptance: drafts would change the target's tokens"
        )
    if fields.number("accept_tolerance", 0.0) != 0.0:
        raise fields.fail(
            "accept_tolerance", "lossy acceptance: drafts would change the target's tokens"
        )
    return name, fields.integer("speculative_tokens")


def read_sharpening(fields: Fields) -> float:
    value = fields.get(SHARPENING, 1.0)
    if value == "greedy":
        return math.inf
    if fields.number(SHARPENING, 1.0) < 1.0:
        raise fields.fail(SHARPENING, 'expected a number of at least 1, or "greedy"')
    return float(value)


def nested_architecture(fields: Fields) -> ArchitectureConfig:
    """The draft's layers, from ``transformer_layer_config``."""
    values = fields.get("transformer_layer_config")
    if not isinstance(values, dict):
        raise fields.fail("transformer_layer_config", "missing, expected an object")
    return _architecture(fields.path, values, "transformer_layer_config.")


def flat_architecture(fields: Fields, own: Collection[str]) -> ArchitectureConfig:
    """The draft's layers, from a flat config whose keys ``own`` are the drafter's."""
    values = {key: value for key, value in fields.values.items() if key not in own}
    return _architecture(fields.path, values, "")


def _architecture(path: Path, values: Mapping[str, Any], prefix: str) -> ArchitectureConfig:
    # A draft's architectures name the drafter's class or the verifier's, never the layers'.
    plain = {
        key: value for key, value in values.items() if key not in ("architectures", "auto_map")
    }
    fields = Fields(path, plain, prefix)
    config = read_architecture(fields)
    if config.latent is not None:
        raise fields.fail("model_type", "drafts as the module of its target's checkpoint alone")
    return config.check(path)


def check_keys(fields: Fields) -> None:
    """CheckpointError for a key that nobody read, unless it is null, false or harmless: flags
    change arithmetic, and a drafter that computes something else is merely slow, in silence."""
    for key in fields.unread(_HARMLESS):
        if fields.values[key] is not False:
            raise fields.fail(key, f"unknown{nearest_name(key, fields.seen)}")


def check_target(path: Path, config: ArchitectureConfig, target: ArchitectureConfig) -> None:
    """CheckpointError unless draft and target have one vocabulary."""
    if config.vocab_size != target.vocab_size:
        raise CheckpointError(
            path, f"vocab_size {config.vocab_size} is not the target's {target.vocab_size}"
        )


def check_width(path: Path, hidden_size: int, target: ArchitectureConfig) -> None:
    """CheckpointError unless a head reads hidden states as wide as the target's."""
    if hidden_size != target.hidden_size:
        raise CheckpointError(
            path,
            f"made for a target of hidden size {hidden_size}, the target's is {target.hidden_size}",
        )


# ---------------------------------------------------------------- tensors


def open_files(folder: Path, single: str | None = None) -> DraftFiles:
    """Every tensor of a draft folder; of the file ``single`` if that is there.
    CheckpointError for broken, absent or doubled ones."""
    weights: dict[str, WeightTensor] = {}
    maps: dict[str, Tensor] = {}
    alone = single is not None and (folder / single).exists()
    for file in [folder / str(single)] if alone else safetensors_files(folder):
        for name, data in _read(file).items():
            if name in weights or name in maps:
                raise CheckpointError(file, f"tensor {name} is there twice")
            if name in MAPS:
                maps[name] = data
            elif data.dtype in _KINDS:
                weights[name] = WeightTensor(name, tuple(data.shape), _KINDS[data.dtype], data)
            else:
                stored = str(data.dtype).removeprefix("torch.")
                raise CheckpointError(file, f"tensor {name} is stored as {stored}, not as floats")
    return DraftFiles(folder, weights, maps)


def _read(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(path, f"not a whole safetensors file: {reason}") from None


def layer_shapes(config: ArchitectureConfig) -> dict[str, tuple[int, ...]]:
    """Names (`LAYER` and on) and shapes of the tensors of the draft's transformer blocks."""
    shapes: dict[str, tuple[int, ...]] = model_module(config.model_type).tensor_shapes(config)
    return {name: shape for name, shape in shapes.items() if name.startswith(LAYER)}


def checked(
    path: Path,
    weights: Mapping[str, WeightTensor],
    expected: Mapping[str, tuple[int, ...]],
    absent: Collection[str] = (),
) -> dict[str, WeightTensor]:
    """``weights`` after comparison with ``expected``, both ways; ``absent`` may be missing."""
    for name, shape in expected.items():
        if name not in weights:
            if name in absent:
                continue
            raise CheckpointError(path, f"missing tensor {name}, expected shape {list(shape)}")
        found = weights[name].shape
        if found != shape:
            raise CheckpointError(
                path, f"tensor {name} has shape {list(found)}, expected {list(shape)}"
            )
    for name in weights:
        if name not in expected and not name.endswith(".rotary_emb.inv_freq"):
            raise CheckpointError(path, f"unexpected tensor {name}")
    return {name: weights[name] for name in expected if name in weights}


def token_table(files: DraftFiles, draft_vocab: int, vocab: int) -> tuple[int, ...] | None:
    """Target ids by draft id, from the offsets ``d2t``; None where the vocabularies are one.

    ``t2d``, a mask over the target's vocabulary, may be absent and must agree where it is there.
    """
    path, d2t, t2d = files.path, files.maps.get("d2t"), files.maps.get("t2d")
    if not 1 <= draft_vocab <= vocab:
        raise CheckpointError(path, f"draft_vocab_size {draft_vocab} is outside 1..{vocab}")
    if d2t is None:
        if draft_vocab == vocab:
            return None
        raise CheckpointError(path, f"missing tensor d2t, expected shape [{draft_vocab}]")
    if tuple(d2t.shape) != (draft_vocab,) or d2t.dtype not in (torch.int64, torch.int32):
        stored = str(d2t.dtype).removeprefix("torch.")
        raise CheckpointError(
            path, f"tensor d2t is {stored} {list(d2t.shape)}, expected integers [{draft_vocab}]"
        )
    table = torch.arange(draft_vocab) + d2t.long()
    low, high = int(table.min()), int(table.max())
    if low < 0 or high >= vocab:
        raise CheckpointError(
            path, f"d2t leads to target ids {low}..{high}, outside 0..{vocab - 1}"
        )
    falls = torch.nonzero(table.diff() <= 0).flatten().tolist()
    if falls:
        at = falls[0] + 1
        raise CheckpointError(
            path, f"d2t is not increasing: draft id {at} stands for {int(table[at])}, "
            f"draft id {at - 1} for {int(table[at - 1])}",
        )  # fmt: skip
    if t2d is not None:
        mask = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, table, True)
        if tuple(t2d.shape) != (vocab,) or not torch.equal(t2d.bool(), mask):
            raise CheckpointError(path, "t2d and d2t name different tokens")
    return None if draft_vocab == vocab else tuple(table.tolist())


def weight_bytes(files: DraftFiles) -> int:
    """What the weights take as the reference ops hold them."""
    return 4 * sum(math.prod(weight.shape) for weight in files.weights.values())
