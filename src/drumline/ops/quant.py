"""Dequantization of GGUF block types to float32, in vectorised torch.

Written from the published ggml block layouts (ggml-common.h describes the structures). Each
type packs a fixed number of consecutive elements of a row into one block:

    kind  elements bytes  layout (fp16 = IEEE half, little endian)
    Q8_0      32     34   d fp16, q int8[32]                                   w = d*q
    Q4_0      32     18   d fp16, nibbles[16]                                  w = d*(q-8)
    Q4_1      32     20   d fp16, m fp16, nibbles[16]                          w = d*q + m
    Q4_K     256    144   d fp16, dmin fp16, scales[12], nibbles[128]          w = (d*s)*q - dmin*m
    Q5_K     256    176   d fp16, dmin fp16, scales[12], high[32], nibbles[128]
    Q6_K     256    210   low[128], high[64], s int8[16], d fp16               w = (d*s)*(q-32)

Every product of a scale and a quantum is exact in float32 or rounded once, in the order of the
formulas above, so the result does not depend on chunking, threads or fused multiply-add.
This module knows nothing of files, names or models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_CHUNK_ELEMENTS = 1 << 19  # 2 MiB of float32 at a time stays in the second-level cache


@dataclass(frozen=True)
class BlockLayout:
    """How many elements one block holds, and in how many bytes."""

    elements: int
    nbytes: int


BLOCK_LAYOUTS: dict[str, BlockLayout] = {
    "Q8_0": BlockLayout(32, 34),
    "Q4_0": BlockLayout(32, 18),
    "Q4_1": BlockLayout(32, 20),
    "Q4_K": BlockLayout(256, 144),
    "Q5_K": BlockLayout(256, 176),
    "Q6_K": BlockLayout(256, 210),
}


def bytes_per_row(kind: str, columns: int) -> int:
    """Bytes of one row of `columns` elements. ValueError if blocks do not divide the row."""
    layout = BLOCK_LAYOUTS[kind]
    if columns % layout.elements:
        raise ValueError(f"{kind} packs {layout.elements} elements a block, a row has {columns}")
    return columns // layout.elements * layout.nbytes


def dequantize(kind: str, data: Tensor) -> Tensor:
    """``[rows, bytes_per_row]`` uint8 blocks → ``[rows, columns]`` float32, contiguous, fresh.

    Raises KeyError for a kind that is not in `BLOCK_LAYOUTS`, ValueError for data of another
    dtype, rank or row length.
    """
    layout = BLOCK_LAYOUTS[kind]
    if data.dtype != torch.uint8 or data.dim() != 2 or data.shape[1] % layout.nbytes:
        raise ValueError(
            f"{kind} wants uint8 rows of whole {layout.nbytes}-byte blocks, "
            f"got {data.dtype} {tuple(data.shape)}"
        )
    rows, columns = data.shape[0], data.shape[1] // layout.nbytes * layout.elements
    out = torch.empty(rows, columns, dtype=torch.float32, device=data.device)
    blocks = data.contiguous().view(-1, layout.nbytes)
    flat = out.view(-1, layout.elements)
    step = _CHUNK_ELEMENTS // layout.elements
    expand = _EXPAND[kind]
    for start in range(0, blocks.shape[0], step):
        expand(blocks[start : start + step], flat[start : start + step])
    return out


def _halves(field: Tensor) -> Tensor:
    """``[blocks, 2 * n]`` bytes → ``[blocks, n]`` float32."""
    return field.contiguous().view(torch.float16).float()


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks[:, 2:].contiguous().view(torch.int8))
    out.mul_(_halves(blocks[:, :2]))


def _unpack_nibbles(packed: Tensor, out: Tensor) -> None:
    """``[blocks, groups, n]`` bytes → ``[blocks, groups, 2, n]``: low nibbles, then high ones."""
    out[:, :, 0].copy_(packed & 15)
    out[:, :, 1].copy_(packed >> 4)


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    _unpack_nibbles(blocks[:, 2:].contiguous().view(-1, 1, 16), out.view(-1, 1, 2, 16))
    out.sub_(8.0).mul_(_halves(blocks[:, :2]))


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    scale = _halves(blocks[:, :4])
    _unpack_nibbles(blocks[:, 4:].contiguous().view(-1, 1, 16), out.view(-1, 1, 2, 16))
    out.mul_(scale[:, 0:1]).add_(scale[:, 1:2])


def _scales_and_mins(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The 12 bytes of a K block → eight 6-bit scales and eight 6-bit minima, float32.

    byte     0..3                 4..7                 8..11
    bits     [s4..7 high][s0..3]  [m4..7 high][m0..3]  [m4..7 low][s4..7 low]
             2 bits      6 bits   2 bits      6 bits   4 bits     4 bits
    """
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), 1)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), 1)
    return scales.float(), minima.float()


def _scale_k(blocks: Tensor, out: Tensor) -> None:
    """Quanta in `out` → weights, for the K types with eight (scale, minimum) pairs a block."""
    head = _halves(blocks[:, :4])
    scales, minima = _scales_and_mins(blocks[:, 4:16])
    groups = out.view(-1, 8, 32)
    groups.mul_((scales * head[:, 0:1]).unsqueeze(-1))
    groups.sub_((minima * head[:, 1:2]).unsqueeze(-1))


def _q4_k(blocks: Tensor, out: Tensor) -> None:
    _unpack_nibbles(blocks[:, 16:144].contiguous().view(-1, 4, 32), out.view(-1, 4, 2, 32))
    _scale_k(blocks, out)


def _q5_k(blocks: Tensor, out: Tensor) -> None:
    low = blocks[:, 48:176].contiguous().view(-1, 4, 32)
    high = blocks[:, 16:48].contiguous()
    quanta = out.view(-1, 8, 32)
    for group in range(8):  # bit `group` of high[l] is the fifth bit of element l of the group
        nibble = low[:, group // 2] >> 4 if group % 2 else low[:, group // 2] & 15
        quanta[:, group].copy_(nibble | (((high >> group) & 1) << 4))
    _scale_k(blocks, out)


def _q6_k(blocks: Tensor, out: Tensor) -> None:
    low = blocks[:, :128].contiguous().view(-1, 2, 2, 32)  # halves of 128, then of 64 bytes' halves
    high = blocks[:, 128:192].contiguous().view(-1, 2, 32)
    quanta = out.view(-1, 2, 4, 32)
    for group in range(4):
        byte = low[:, :, group % 2]
        nibble = byte >> 4 if group >= 2 else byte & 15
        quanta[:, :, group].copy_(nibble | (((high >> (2 * group)) & 3) << 4))
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float() * _halves(blocks[:, 208:210])
    out.sub_(32.0).view(-1, 16, 16).mul_(scales.unsqueeze(-1))


_EXPAND: dict[str, Callable[[Tensor, Tensor], None]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
