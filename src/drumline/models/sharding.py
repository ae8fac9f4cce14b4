"""A rank's share of a checkpoint: its own configuration, and its parts of the tensors.

    q, k, v; MLA's q_b and kv_b     rows of the own heads
    o                               columns of the own heads; its bias on the first rank alone
    gate, up; w1, w3                rows of the own part of the width
    down; w2                        columns of it; its bias on the first rank alone
    embedding, head                 rows of the own token ids
    the rest                        whole: norms, routers, what makes latent vectors
    experts                         each cut like a feed-forward; whole where they are spread over
                                    ranks instead, and then so is what all tokens share

A model built of the share computes partial sums, which `drumline.ops.sharded` adds up. Parts are
views of mapped files, made when they are asked for. Knows no rank but the own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from drumline.models.config import ArchitectureConfig
from drumline.models.layers import EMBEDDING, HEAD
from drumline.models.quantize import QuantizedTensors
from drumline.ops.shard_weights import VocabularyShard, columns, columns_of_block, rows
from drumline.ops.weights import WeightTensor
from drumline.parallel.shards import head_split, vocabulary_split, vocabulary_width, width_split

_BY_WIDTH = ("gate_proj", "up_proj", "w1", "w3")
_SUMMED = ("o_proj", "down_proj", "w2")


@dataclass(frozen=True)
class Share:
    """``rank`` of ``size`` ranks that share each layer. ``spread_experts``: experts are spread
    over ranks whole."""

    rank: int = 0
    size: int = 1
    spread_experts: bool = False


WHOLE = Share()


def shard_config(
    config: ArchitectureConfig, tensors: Mapping[str, WeightTensor], share: Share
) -> ArchitectureConfig:
    """What a rank's layers look like to itself: fewer heads, narrower feed-forwards.

    ``tensors`` are asked how their columns are stored. ConfigError where there is nothing to cut.
    """
    if share.size == 1:
        return config
    heads = len(_heads(config, share))
    local = replace(
        config,
        num_attention_heads=heads,
        num_key_value_heads=_kv_heads(config, share),
        intermediate_size=len(_width(config, tensors, share, config.intermediate_size)),
    )
    experts = config.experts
    if experts is None or share.spread_experts:
        return local
    shared = experts.shared_width
    return replace(
        local,
        experts=replace(
            experts,
            width=len(_width(config, tensors, share, experts.width)),
            shared_width=len(_width(config, tensors, share, shared)) if shared else 0,
        ),
    )


def _heads(config: ArchitectureConfig, share: Share) -> range:
    """Heads that share a key stay together; where all share one latent key any may part."""
    groups = config.num_key_value_heads if config.latent is None else config.num_attention_heads
    return head_split(config.num_attention_heads, groups, share.size, share.rank)


def _kv_heads(config: ArchitectureConfig, share: Share) -> int:
    if config.latent is not None:
        return config.num_key_value_heads
    per_group = config.num_attention_heads // config.num_key_value_heads
    return len(_heads(config, share)) // per_group


def _width(
    config: ArchitectureConfig, tensors: Mapping[str, WeightTensor], share: Share, width: int
) -> range:
    """The part of a feed-forward's width. Every matrix of the checkpoint is cut at the same
    places, so at blocks of the largest kind that stores their columns."""
    plain = tensors.stored if isinstance(tensors, QuantizedTensors) else tensors
    names = [name for name in tensors if name.endswith((".down_proj.weight", ".w2.weight"))]
    kinds = {_kind(tensors, name) for name in names if plain[name].shape[1] == width}
    block = math.lcm(*map(columns_of_block, sorted(kinds)), 1)
    return width_split(width, share.size, share.rank, block)


def _kind(tensors: Mapping[str, WeightTensor], name: str) -> str:
    """How a weight's columns are stored; to ask for the weight may be to quantize it."""
    return tensors.kind_of(name) if isinstance(tensors, QuantizedTensors) else tensors[name].kind


class ShardedTensors(Mapping[str, WeightTensor]):
    """A rank's parts of ``tensors``, under their names; each is cut when it is asked for."""

    def __init__(
        self, config: ArchitectureConfig, tensors: Mapping[str, WeightTensor], share: Share
    ) -> None:
        self._config = config
        self._tensors = tensors
        self._share = share
        widths = {config.intermediate_size}
        if config.experts is not None:
            widths |= {config.experts.width, config.experts.shared_width} - {0}
        self._widths = {width: _width(config, tensors, share, width) for width in sorted(widths)}

    def __getitem__(self, name: str) -> WeightTensor:
        weight = self._tensors[name]
        return weight if self._share.size == 1 else self._part(name, weight)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def _part(self, name: str, weight: WeightTensor) -> WeightTensor:
        if name in (EMBEDDING, HEAD):
            return self._vocabulary(weight)
        if name.count(".") < 2:
            return weight
        *prefix, projection, kind = name.split(".")
        if self._share.spread_experts and any(part.endswith("experts") for part in prefix):
            return weight
        if kind == "bias" and projection in _SUMMED:
            return weight if self._share.rank == 0 else _nothing(weight)
        if "self_attn" in prefix:
            return self._attention(projection, weight)
        if projection in _BY_WIDTH:
            return rows(weight, self._widths[weight.shape[0]])
        return columns(weight, self._widths[weight.shape[1]]) if projection in _SUMMED else weight

    def _attention(self, projection: str, weight: WeightTensor) -> WeightTensor:
        config, latent = self._config, self._config.latent
        own = _heads(config, self._share)
        if latent is None:
            query = key = value = config.head_dim
            per_group = config.num_attention_heads // config.num_key_value_heads
            keys = range(own.start // per_group, own.stop // per_group)
            sizes = {"q_proj": (own, query), "k_proj": (keys, key), "v_proj": (keys, value)}
        else:
            query, value = latent.plain_dim + config.rotary_dim, latent.value_dim
            pair = (own, latent.plain_dim + value)
            sizes = {"q_proj": (own, query), "q_b_proj": (own, query), "kv_b_proj": pair}
        if projection == "o_proj":
            return columns(weight, _times(own, value))
        if projection not in sizes:
            return weight
        heads, size = sizes[projection]
        return rows(weight, _times(heads, size))

    def _vocabulary(self, weight: WeightTensor) -> WeightTensor:
        vocab, share = weight.shape[0], self._share
        part = vocabulary_split(vocab, share.size, share.rank)
        own = rows(weight, part)
        width = vocabulary_width(vocab, share.size)
        return VocabularyShard(own.name, own.shape, own.kind, own.data, part.start, vocab, width)


def _times(part: range, size: int) -> range:
    return range(part.start * size, part.stop * size)


def _nothing(bias: WeightTensor) -> WeightTensor:
    return WeightTensor(bias.name, bias.shape, "F32", torch.zeros(bias.shape))
