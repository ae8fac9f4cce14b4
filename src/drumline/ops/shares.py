"""What a rank holds of what several ranks share: linears, experts, layers around a backend's own.

Values only; `sharded` computes with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from drumline.ops.base import Experts, FeedForwardWeights, LayerWeights, Linear, MoeWeights, Stack
from drumline.ops.weights import WeightTensor

if TYPE_CHECKING:
    from drumline.ops.native_shared import FusedStack


@dataclass(frozen=True)
class PartialLinear:
    """A linear over a share of the inputs: what it gives must be added over tp."""

    share: Linear

    @property
    def in_features(self) -> int:
        return self.share.in_features

    @property
    def out_features(self) -> int:
        return self.share.out_features

    @property
    def nbytes(self) -> int:
        return self.share.nbytes


@dataclass(frozen=True)
class VocabularyLinear:
    """A table of which this rank holds the rows ``first`` and on, ``width`` at most."""

    share: Linear
    first: int
    vocab: int
    width: int

    @property
    def in_features(self) -> int:
        return self.share.in_features

    @property
    def out_features(self) -> int:
        return self.vocab

    @property
    def nbytes(self) -> int:
        return self.share.nbytes


@dataclass(frozen=True)
class PartialExperts:
    """All experts, each over a share of its width: outputs must be added over tp."""

    share: Experts

    @property
    def count(self) -> int:
        return self.share.count

    @property
    def nbytes(self) -> int:
        return self.share.nbytes


@dataclass(frozen=True)
class SpreadExperts:
    """``count`` experts over the ranks of ep, of which this one holds those from ``first`` on;
    ``share`` is None where it holds none."""

    share: Experts | None
    first: int
    count: int

    @property
    def nbytes(self) -> int:
        return 0 if self.share is None else self.share.nbytes


@dataclass(frozen=True)
class ShardedStack:
    """Layers of which this rank holds a share. ``inner`` has that share as the backend's own, with
    a feed-forward of width one where experts are spread: they are computed here."""

    layers: tuple[LayerWeights, ...]
    inner: Stack
    fused: FusedStack | None = None  # what runs all of it in one call, where that is there

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def whole(self) -> bool:
        """Every block is computed here alone."""
        return not any(map(is_partial, self.layers))


def plain(linear: Linear) -> Linear:
    return linear.share if isinstance(linear, PartialLinear) else linear


def zeros(rows: int, columns: int) -> WeightTensor:
    return WeightTensor("nothing", (rows, columns), "F32", torch.zeros(rows, columns))


def is_partial_block(block: FeedForwardWeights | MoeWeights) -> bool:
    if isinstance(block, FeedForwardWeights):
        return isinstance(block.down, PartialLinear)
    return isinstance(block.experts, PartialExperts | SpreadExperts)


def is_partial(layer: LayerWeights) -> bool:
    return isinstance(layer.attention.o, PartialLinear) or is_partial_block(layer.feed_forward)
