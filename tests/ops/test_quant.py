"""Every GGUF block type against scalar formulas, one element at a time, all bits."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import pytest
import torch

from drumline.ops.quant import BLOCK_LAYOUTS, bytes_per_row, dequantize
from drumline.ops.weights import WeightTensor

F = np.float32


def half(block: bytes, at: int) -> np.float32:
    return F(struct.unpack_from("<e", block, at)[0])


def signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def q8_0(b: bytes, i: int) -> np.float32:
    return half(b, 0) * F(signed(b[2 + i]))


def nibble_32(b: bytes, i: int, at: int) -> int:
    return b[at + i] & 15 if i < 16 else b[at + i - 16] >> 4


def q4_0(b: bytes, i: int) -> np.float32:
    return half(b, 0) * F(nibble_32(b, i, 2) - 8)


def q4_1(b: bytes, i: int) -> np.float32:
    return half(b, 0) * F(nibble_32(b, i, 4)) + half(b, 2)


def scale_min(b: bytes, j: int) -> tuple[int, int]:
    s = b[4:16]
    if j < 4:
        return s[j] & 63, s[j + 4] & 63
    return (s[j + 4] & 15) | (s[j - 4] >> 6) << 4, (s[j + 4] >> 4) | (s[j] >> 6) << 4


def k_weight(b: bytes, group: int, q: int) -> np.float32:
    scale, minimum = scale_min(b, group)
    return (half(b, 0) * F(scale)) * F(q) - half(b, 2) * F(minimum)


def q4_k(b: bytes, i: int) -> np.float32:
    group, lane = divmod(i, 32)
    byte = b[16 + 32 * (group // 2) + lane]
    return k_weight(b, group, byte >> 4 if group % 2 else byte & 15)


def q5_k(b: bytes, i: int) -> np.float32:
    group, lane = divmod(i, 32)
    byte = b[48 + 32 * (group // 2) + lane]
    fifth = (b[16 + lane] >> group) & 1
    return k_weight(b, group, (byte >> 4 if group % 2 else byte & 15) + 16 * fifth)


def q6_k(b: bytes, i: int) -> np.float32:
    part, within = divmod(i, 128)
    quarter, lane = divmod(within, 32)
    byte = b[64 * part + 32 * (quarter % 2) + lane]
    low = byte >> 4 if quarter >= 2 else byte & 15
    high = (b[128 + 32 * part + lane] >> (2 * quarter)) & 3
    scale = signed(b[192 + 8 * part + 2 * quarter + lane // 16])
    return (half(b, 208) * F(scale)) * F((low | high << 4) - 32)


SCALAR: dict[str, Callable[[bytes, int], np.float32]] = {
    "Q8_0": q8_0,
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
}
HALVES = {
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


def random_blocks(kind: str, rows: int, columns: int, seed: int) -> torch.Tensor:
    """Uniform bytes; the half-precision fields are finite, of both signs, subnormals included."""
    rng = np.random.default_rng(seed)
    nbytes = BLOCK_LAYOUTS[kind].nbytes
    blocks = rng.integers(
        0, 256, (rows * columns // BLOCK_LAYOUTS[kind].elements, nbytes), np.uint8
    )
    for at in HALVES[kind]:
        magnitude = 2.0 ** rng.uniform(-26, 8, blocks.shape[0])
        values = (magnitude * rng.choice([-1.0, 1.0], blocks.shape[0])).astype("<f2")
        blocks[:, at : at + 2] = values.view(np.uint8).reshape(-1, 2)
    return torch.from_numpy(blocks.reshape(rows, bytes_per_row(kind, columns)))


def bits(values: torch.Tensor) -> torch.Tensor:
    """Int32 patterns, with the two zeros made equal (0 * -1 has a sign, and it never matters)."""
    return torch.where(values == 0, torch.zeros_like(values), values).contiguous().view(torch.int32)


@pytest.mark.parametrize("kind", sorted(SCALAR))
@pytest.mark.parametrize("seed", range(4))
def test_every_element_equals_the_scalar_formula(kind: str, seed: int) -> None:
    layout = BLOCK_LAYOUTS[kind]
    data = random_blocks(kind, rows=3, columns=512, seed=seed)
    got = dequantize(kind, data)
    raw = data.reshape(-1, layout.nbytes).numpy()
    want = [SCALAR[kind](block.tobytes(), i) for block in raw for i in range(layout.elements)]
    assert got.shape == (3, 512)
    assert got.is_contiguous()
    assert torch.equal(bits(got), bits(torch.tensor(np.array(want, np.float32)).view(3, 512)))


@pytest.mark.parametrize("kind", sorted(SCALAR))
def test_chunks_threads_and_strides_change_no_bit(kind: str) -> None:
    data = random_blocks(kind, rows=700, columns=1024, seed=9)  # more than one chunk
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole = dequantize(kind, data)
        torch.set_num_threads(2)
        assert torch.equal(bits(whole), bits(dequantize(kind, data)))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(bits(whole[5:6]), bits(dequantize(kind, data[5:6])))
    assert torch.equal(bits(whole[::7]), bits(dequantize(kind, data[::7])))


def test_weight_tensors_check_their_storage_and_give_fresh_aligned_floats() -> None:
    blocks = random_blocks("Q4_K", rows=6, columns=256, seed=1)
    weight = WeightTensor("w", (2, 3, 256), "Q4_K", blocks)
    assert weight.to_float().shape == (2, 3, 256)
    assert weight.nbytes == 6 * 144
    for dtype, kind in ((torch.float32, "F32"), (torch.float16, "F16"), (torch.bfloat16, "BF16")):
        stored = torch.randn(5, 3).to(dtype).t()
        out = WeightTensor("v", (3, 5), kind, stored).to_float()
        assert out.dtype == torch.float32
        assert out.is_contiguous()
        assert torch.equal(out, stored.float())
        assert out.data_ptr() != stored.data_ptr()
        assert out.data_ptr() % 64 == 0
    with pytest.raises(AssertionError, match="w: Q4_K"):
        WeightTensor("w", (5, 256), "Q4_K", blocks)


def test_wrong_data_is_refused() -> None:
    with pytest.raises(ValueError, match="Q4_0 packs 32 elements a block, a row has 33"):
        bytes_per_row("Q4_0", 33)
    with pytest.raises(ValueError, match="Q8_0 wants uint8 rows of whole 34-byte blocks"):
        dequantize("Q8_0", torch.zeros(2, 33, dtype=torch.uint8))
    with pytest.raises(KeyError):
        dequantize("IQ2_XS", torch.zeros(1, 64, dtype=torch.uint8))
