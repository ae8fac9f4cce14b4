"""Parts of weights, as ranks that share a layer hold them, and what a product with one means.

    rows of [out, in]        outputs are a share: nothing else changes, so it is a plain weight
    columns of [out, in]     `ColumnShard`: outputs are partial sums, added over the ranks
    rows of [vocab, hidden]  `VocabularyShard`: logits of a share of the ids, embeddings of those

Cutting makes views of mapped files, so that a rank reads its own part alone. Quantized columns are
cut between blocks; where that is not possible the part becomes float32, and says the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from drumline.ops.quant import BLOCK_LAYOUTS
from drumline.ops.weights import FLOAT_KINDS, WeightTensor


@dataclass(frozen=True, eq=False)
class ColumnShard(WeightTensor):
    """Columns of a weight whose other columns other ranks hold."""


@dataclass(frozen=True, eq=False)
class VocabularyShard(WeightTensor):
    """Rows ``first`` and on of a table of ``vocab`` rows, of which every rank but the last has
    ``width``."""

    first: int
    vocab: int
    width: int


def rows(weight: WeightTensor, part: range) -> WeightTensor:
    """Rows of a matrix, or entries of a vector."""
    shape = (len(part), *weight.shape[1:])
    return WeightTensor(weight.name, shape, weight.kind, weight.data[part.start : part.stop])


def columns(weight: WeightTensor, part: range) -> ColumnShard:
    """Columns of ``[out, in]``."""
    shape = (weight.shape[0], len(part))
    if weight.kind in FLOAT_KINDS:
        data = weight.data[:, part.start : part.stop]
        return ColumnShard(weight.name, shape, weight.kind, data)
    layout = BLOCK_LAYOUTS[weight.kind]
    if part.start % layout.elements or part.stop % layout.elements:
        data = weight.to_float()[:, part.start : part.stop].contiguous()
        return ColumnShard(weight.name, shape, "F32", data)
    first, last = (at // layout.elements * layout.nbytes for at in (part.start, part.stop))
    return ColumnShard(weight.name, shape, weight.kind, weight.data[:, first:last])


def columns_of_block(kind: str) -> int:
    """Columns that are stored together."""
    return 1 if kind in FLOAT_KINDS else BLOCK_LAYOUTS[kind].elements
