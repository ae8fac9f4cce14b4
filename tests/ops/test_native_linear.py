"""Products on packed weights: every kind, path, tile shape and number against exact arithmetic."""

from __future__ import annotations

import gc
import math
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from drumline.core.cpu import native_available
from drumline.ops.quant import BLOCK_LAYOUTS, bytes_per_row
from drumline.ops.weights import FLOAT_KINDS, WeightTensor

if not native_available():
    pytest.skip("the native module is not built", allow_module_level=True)

from drumline._native import PackedLinear, available_paths

PATHS = available_paths()
QUANTIZED = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K")
KINDS = (*QUANTIZED, *FLOAT_KINDS)
# Where the float16 scales lie in a block, in bytes.
HALVES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def weight(kind: str, outputs: int, columns: int, seed: int) -> WeightTensor:
    """Random weights; of quantized kinds random blocks with sane scales of both signs."""
    draw = torch.Generator().manual_seed(seed)
    if kind in FLOAT_KINDS:
        data = torch.randn(outputs, columns, generator=draw).to(FLOAT_KINDS[kind])
        return WeightTensor("w", (outputs, columns), kind, data)
    nbytes = bytes_per_row(kind, columns)
    blocks = torch.randint(0, 256, (outputs, nbytes), generator=draw, dtype=torch.uint8)
    view = blocks.view(-1, BLOCK_LAYOUTS[kind].nbytes)
    for at in HALVES[kind]:
        scales = (torch.rand(view.shape[0], 1, generator=draw) * 0.1 - 0.05).half()
        view[:, at : at + 2] = scales.view(torch.uint8)
    return WeightTensor("w", (outputs, columns), kind, blocks)


def pack(raw: WeightTensor) -> PackedLinear:
    return PackedLinear(raw.kind, raw.data.data_ptr(), *raw.shape)


def multiply(
    x: Tensor, packed: PackedLinear, path: str, fine: bool = True, threads: int = 1
) -> Tensor:
    out = torch.full((x.shape[0], packed.outputs + 3), math.pi)
    packed.multiply(
        x.data_ptr(), x.shape[0], x.stride(0), out.data_ptr(), out.stride(0), threads, path, fine
    )
    assert (out[:, packed.outputs :] == math.pi).all(), "wrote beyond its outputs"
    return out[:, : packed.outputs].contiguous()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(16, 256), (1, 512), (49, 768), (130, 1536)])
def test_close_to_exact_products(path: str, kind: str, shape: tuple[int, int]) -> None:
    raw = weight(kind, *shape, seed=1)
    x = torch.randn(11, shape[1])
    exact = x.double() @ raw.to_float().double().t()
    for fine in (True, False):
        out = multiply(x, pack(raw), path, fine)
        bound = 2e-2 if kind in QUANTIZED else 1e-5
        assert (out - exact).norm() <= bound * exact.norm()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", QUANTIZED)
def test_what_stands_out_costs_its_neighbours_nothing(path: str, kind: str) -> None:
    """Four columns of a block may be 16 times as large as the others: the others keep the scale
    that they have without them. 8 bits alone leave 16 times the error there."""
    raw = weight(kind, 64, 1024, seed=1)
    quiet = torch.randn(11, 32, 32).clamp(-3, 3)
    quiet[:, :, 9] = 3.0
    far = torch.zeros(11, 32, 8, 4)
    at = torch.arange(11 * 32).view(11, 32) * 5 % 8  # another line in each block of each row
    far.scatter_(2, at[..., None, None].expand(11, 32, 1, 4), torch.randn(11, 32, 1, 4) * 15)
    far = far.clamp(-45, 45).view(11, 32, 32)
    x = torch.where(far != 0, far, quiet).view(11, 1024)
    exact = x.double() @ raw.to_float().double().t()
    error = [(multiply(x, pack(raw), path, fine) - exact).norm() for fine in (True, False)]
    assert error[0] <= 1.5e-3 * exact.norm()
    assert error[1] >= 5 * error[0]


def far_numbers(rows: int, blocks: int, seed: int) -> Tensor:
    """Integers that a block keeps as they are: to 127, and in one line to 2032."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randint(-127, 128, (rows, blocks, 8, 4), generator=draw)
    line = torch.randint(0, 8, (rows, blocks, 1, 1), generator=draw)
    far = torch.randint(-2032, 2033, (rows, blocks, 1, 4), generator=draw)
    far[..., 0] = 2032
    x.scatter_(2, line.expand(rows, blocks, 1, 4), far)
    x.scatter_(2, (line + 3).remainder(8).expand(rows, blocks, 1, 4), torch.full_like(far, -127))
    return x.reshape(rows, blocks, 32).float()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("fine", [True, False])
@pytest.mark.parametrize("kind", QUANTIZED)
def test_whole_numbers_lose_nothing(path: str, fine: bool, kind: str) -> None:
    """Activations that are multiples of their block's scale: what is left is float rounding.
    Packing, signs, order of nibbles, minima, zero points and far lines all have to be right."""
    raw = weight(kind, 40, 512, seed=2)
    x = torch.randint(-127, 128, (9, 16, 32)).float()
    x[:, :, 0] = -127
    if fine:
        x = far_numbers(9, 16, seed=2)
    x = (x * 2.0**-12).reshape(9, 512)
    exact = x.double() @ raw.to_float().double().t()
    out = multiply(x, pack(raw), path, fine)
    assert (out - exact).abs().max() <= 3e-6 * exact.abs().max()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("quantum", [0, 255])
def test_the_largest_sums_do_not_overflow(path: str, kind: str, quantum: int) -> None:
    nbytes = BLOCK_LAYOUTS[kind].nbytes
    blocks = torch.full((24, bytes_per_row(kind, 256)), quantum, dtype=torch.uint8)
    for at in HALVES[kind]:
        blocks.view(-1, nbytes)[:, at : at + 2] = torch.tensor([1.0]).half().view(torch.uint8)
    raw = WeightTensor("w", (24, 256), kind, blocks)
    for fine in (True, False):
        for value in (127.0, -127.0, 120.0):
            x = torch.full((5, 8, 32), value)
            x[:, :, 0] = 127.0
            for line in range(8 if fine else 0):
                x[:, line, 4 * line : 4 * line + 4] = 16 * value
                x[:, line, 4 * line] = 2032.0
            exact = x.view(5, 256).double() @ raw.to_float().double().t()
            out = multiply(x.view(5, 256), pack(raw), path, fine)
            assert (out - exact).abs().max() <= 1e-6 * exact.abs().max()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fine", [True, False])
def test_every_row_count_gives_a_row_the_same_bits(path: str, kind: str, fine: bool) -> None:
    packed = pack(weight(kind, 100, 256, seed=3))
    x = torch.randn(64, 256)
    whole = multiply(x, packed, path, fine)
    for rows in range(1, 65):
        assert torch.equal(multiply(x[:rows], packed, path, fine), whole[:rows])
        assert torch.equal(multiply(x[64 - rows :], packed, path, fine), whole[64 - rows :])
        assert torch.equal(multiply(x[:rows], packed, path, fine, threads=2), whole[:rows])
    order = torch.randperm(64)[:17]
    assert torch.equal(multiply(x[order], packed, path, fine, threads=3), whole[order])
    wide = torch.full((64, 261), math.nan)
    wide[:, 5:] = x
    assert torch.equal(multiply(wide[:, 5:], packed, path, fine), whole)


def test_rows_in_several_panels_are_what_they_are_alone() -> None:
    """More rows than stay in the cache while weights pass: they are cut into panels."""
    packed = pack(weight("Q4_1", 33, 2048, seed=4))
    x = torch.randn(300, 2048)
    for path in PATHS[:2]:
        whole = multiply(x, packed, path, threads=2)
        for row in (0, 63, 64, 65, 127, 128, 299):
            assert torch.equal(multiply(x[row : row + 1], packed, path), whole[row : row + 1])


@pytest.mark.skipif(len(PATHS) < 3, reason="one vector path only")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fine", [True, False])
def test_vector_paths_agree_to_the_bit(kind: str, fine: bool) -> None:
    packed = pack(weight(kind, 70, 1024, seed=5))
    x = torch.randn(13, 1024)
    assert torch.equal(multiply(x, packed, PATHS[0], fine), multiply(x, packed, PATHS[1], fine))


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("fine", [True, False])
def test_the_portable_twin_has_the_same_integers(kind: str, fine: bool) -> None:
    """One block alone (half of one of Q6_K) is one product of an exact integer: the same bits."""
    packed = pack(weight(kind, 48, 256, seed=6))
    x = torch.zeros(7, 256)
    x[:, :16] = torch.randn(7, 16)
    outs = [multiply(x, packed, path, fine) for path in PATHS]
    for out in outs[1:]:
        if kind in ("Q4_1", "Q4_K"):  # the minimum is added unrounded or rounded
            torch.testing.assert_close(out, outs[0], rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(out, outs[0])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_makes_its_own_row_none(path: str, kind: str, bad: float) -> None:
    packed = pack(weight(kind, 20, 512, seed=7))
    x = torch.randn(6, 512)
    for fine in (True, False):
        clean = multiply(x, packed, path, fine)
        for column in (0, 31, 300, 511):
            dirty = x.clone()
            dirty[2, column] = bad
            out = multiply(dirty, packed, path, fine)
            assert torch.isnan(out[2]).all()
            out[2] = clean[2]
            assert torch.equal(out, clean)


@pytest.mark.parametrize("path", PATHS)
def test_very_small_and_very_large_activations(path: str) -> None:
    raw = weight("Q8_0", 16, 64, seed=8)
    packed = pack(raw)
    x = torch.randn(1, 64)
    for factor in (1e-20, 1e20):
        out = multiply(x * factor, packed, path)
        exact = (x * factor).double() @ raw.to_float().double().t()
        assert (out - exact).norm() <= 2e-2 * exact.norm()
    tiny = torch.full((1, 64), 1e-42)
    assert torch.equal(multiply(tiny, packed, path), torch.zeros(1, 16))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_come_back_as_the_checkpoint_has_them(kind: str) -> None:
    raw = weight(kind, 37, 512, seed=9)
    packed = pack(raw)
    ids = torch.tensor([36, 0, 5, 5, 17])
    out = torch.empty(5, 512)
    packed.take_rows(ids.data_ptr(), 5, out.data_ptr())
    assert torch.equal(out, raw.to_float()[ids])


@pytest.mark.parametrize("kind", KINDS)
def test_stacked_weights_are_one_weight(kind: str) -> None:
    parts = [weight(kind, outputs, 256, seed=outputs) for outputs in (24, 7, 40)]
    stacked = PackedLinear.stack(
        kind, [part.data.data_ptr() for part in parts], [part.shape[0] for part in parts], 256
    )
    x = torch.randn(5, 256)
    expected = torch.cat([multiply(x, pack(part), PATHS[0]) for part in parts], 1)
    assert torch.equal(multiply(x, stacked, PATHS[0]), expected)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="no native linear for weights of kind Q5_K"):
        PackedLinear("Q5_K", 0, 8, 256)
    with pytest.raises(ValueError, match="whole blocks of 32, not 40"):
        PackedLinear("Q8_0", 0, 8, 40)
    with pytest.raises(ValueError, match="whole blocks of 256, not 288"):
        PackedLinear("Q6_K", 0, 8, 288)
    with pytest.raises(ValueError, match="at least one output"):
        PackedLinear("F32", 0, 0, 8)


def resident() -> int:
    """Bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux tells what is resident")
def test_memory_is_taken_once_and_given_back() -> None:
    """Weights share large pages; what they share goes with the last of them."""
    raw = weight("F32", 256, 1024, seed=10)  # 1 MiB
    before = resident()
    kept = [pack(raw) for _ in range(160)]
    taken = resident() - before
    assert 160 * raw.nbytes <= taken <= 200 * raw.nbytes
    x = torch.randn(3, 1024)
    expected = multiply(x, kept[0], PATHS[0])
    assert all(torch.equal(multiply(x, packed, PATHS[0]), expected) for packed in kept)
    del kept
    gc.collect()
    assert resident() - before <= 40 * raw.nbytes
