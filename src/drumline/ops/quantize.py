"""Quantization of float32 rows to GGUF blocks, bit for bit as ggml's reference rounds.

    kind    of a block of 32           quantum
    Q8_0    d = largest / 127          round(x / d), halves away from zero
    Q4_0    d = extreme / -8           trunc(x / d + 8.5), at most 15
    Q4_1    d = (max - min) / 15       trunc((x - min) / d + 0.5), at most 15

``extreme`` is the value of largest magnitude, the first of several, sign kept. Divisions by d are
products with 1 / d, which is taken before d is rounded to float16, and 0 where d is no normal
number. Every operation is rounded to float32. Knows nothing of names or models.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from drumline.ops.quant import BLOCK_LAYOUTS, bytes_per_row

QUANTIZERS: tuple[str, ...] = ("Q8_0", "Q4_1", "Q4_0")

_CHUNK_ROWS = 1 << 14  # blocks at a time: temporaries of a few MiB


def quantize(kind: str, rows: Tensor) -> Tensor:
    """``[rows, columns]`` float32 → ``[rows, bytes_per_row]`` uint8.

    Raises KeyError for a kind that is not in `QUANTIZERS`, ValueError for values of another dtype
    or rank, for rows that are not whole blocks, and for a value that no float16 scale can hold
    (not a number, infinite, or too large).
    """
    encode = _QUANTIZE[kind]
    if rows.dtype != torch.float32 or rows.dim() != 2:
        raise ValueError(f"{kind} wants float32 rows, got {rows.dtype} {tuple(rows.shape)}")
    nbytes = bytes_per_row(kind, rows.shape[1])
    layout = BLOCK_LAYOUTS[kind]
    blocks = rows.contiguous().view(-1, layout.elements)
    out = torch.empty(blocks.shape[0], layout.nbytes, dtype=torch.uint8)
    for start in range(0, blocks.shape[0], _CHUNK_ROWS):
        part = slice(start, start + _CHUNK_ROWS)
        encode(blocks[part], out[part])
    return out.view(rows.shape[0], nbytes)


def _put_half(values: Tensor, out: Tensor) -> None:
    """``[blocks, 1]`` float32 → two bytes each."""
    halves = values.half()
    if not bool(torch.isfinite(halves).all()):
        raise ValueError("a weight is not a finite number that float16 scales can hold")
    out.copy_(halves.view(torch.uint8))


def _inverse(d: Tensor) -> Tensor:
    return torch.where(d.abs() < torch.finfo(torch.float32).tiny, 0.0, 1.0 / d)


def _put_nibbles(quanta: Tensor, out: Tensor) -> None:
    """``[blocks, 32]`` 0..15 → ``[blocks, 16]``: element i low, element i + 16 high."""
    whole = quanta.clamp(0, 15).to(torch.uint8)
    out.copy_(whole[:, :16] | (whole[:, 16:] << 4))


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    d = blocks.abs().amax(1, keepdim=True) / 127
    _put_half(d, out[:, :2])
    scaled = blocks * _inverse(d)
    # Halves away from zero; adding 0.5 would round what lies just under it up.
    whole = scaled.trunc()
    whole += ((scaled - whole).abs() >= 0.5) * scaled.sign()
    out[:, 2:].copy_(whole.to(torch.int8).view(torch.uint8))


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    first = blocks.abs().argmax(1, keepdim=True)
    d = blocks.gather(1, first) / -8
    _put_half(d, out[:, :2])
    _put_nibbles((blocks * _inverse(d) + 8.5).trunc(), out[:, 2:])


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    least = blocks.amin(1, keepdim=True)
    d = (blocks.amax(1, keepdim=True) - least) / 15
    _put_half(d, out[:, :2])
    _put_half(least, out[:, 2:4])
    _put_nibbles(((blocks - least) * _inverse(d) + 0.5).trunc(), out[:, 4:])


_QUANTIZE: dict[str, Callable[[Tensor, Tensor], None]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
}
