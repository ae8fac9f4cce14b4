"""Quantization to GGUF blocks, byte for byte against the gguf package."""

from __future__ import annotations

import math

import gguf
import pytest
import torch

from drumline.ops.quant import bytes_per_row, dequantize
from drumline.ops.quantize import QUANTIZERS, quantize


def rows(seed: int) -> torch.Tensor:
    """Rows of many sizes, with zeros, halves between quanta, ties of magnitude and outliers."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(300, 96, generator=draw) * torch.logspace(-4, 3, 300).unsqueeze(1)
    x[3] = 0.0
    x[4, :32] = torch.arange(32) / 2.0 - 8
    x[5, 32:64] = torch.tensor([-4.0, 4.0] * 16)
    x[6, 64:] = torch.tensor([4.0, -4.0] * 16)
    x[7] = 127.0
    x[7, ::2] = torch.arange(48) + 0.5
    x[8, 40] = 500.0
    x[9] = -1.25
    return x


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_the_same_bytes_as_gguf(kind: str) -> None:
    for seed in range(3):
        x = rows(seed)
        expected = gguf.quants.quantize(x.numpy(), gguf.GGMLQuantizationType[kind])
        assert quantize(kind, x).numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_values_come_back_within_a_step(kind: str) -> None:
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(4))
    blocks = quantize(kind, x)
    assert blocks.shape == (64, bytes_per_row(kind, 256))
    error = (dequantize(kind, blocks) - x).view(64, 8, 32).abs().amax(2)
    spread = x.view(64, 8, 32)
    step = {
        "Q8_0": spread.abs().amax(2) / 254,
        "Q4_1": (spread.amax(2) - spread.amin(2)) / 30,
        "Q4_0": spread.abs().amax(2) / 8,  # the end opposite to the extreme is cut at 7/8
    }[kind]
    assert (error <= step * 1.01 + 1e-3).all()


def test_many_blocks_and_strided_rows() -> None:
    x = torch.randn(1200, 1024, generator=torch.Generator().manual_seed(5))
    whole = quantize("Q4_1", x)
    assert torch.equal(quantize("Q4_1", x[::7]), whole[::7])
    assert torch.equal(quantize("Q4_1", x[:, :64]), whole[:, : bytes_per_row("Q4_1", 64)])


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_refusals(kind: str) -> None:
    with pytest.raises(ValueError, match="32 elements a block, a row has 40"):
        quantize(kind, torch.zeros(2, 40))
    with pytest.raises(ValueError, match="wants float32 rows"):
        quantize(kind, torch.zeros(2, 32, dtype=torch.float16))
    for bad in (math.nan, math.inf, -1e8):
        x = torch.zeros(2, 64)
        x[1, 40] = bad
        with pytest.raises(ValueError, match="not a finite number"):
            quantize(kind, x)
    with pytest.raises(KeyError):
        quantize("Q4_K", torch.zeros(2, 256))
