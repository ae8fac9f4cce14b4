"""The compiled operations: close to the reference, and as blind to a row's neighbours as it is."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from drumline.core.cpu import native_available
from drumline.core.errors import ConfigError
from drumline.ops.base import PagedBatch, RopeTable
from drumline.ops.quant import bytes_per_row
from drumline.ops.reference import ReferenceKV, ReferenceOps
from drumline.ops.weights import WeightTensor

if not native_available():
    pytest.skip("the native module is not built", allow_module_level=True)

from drumline._native import PackedLinear, available_paths
from drumline.ops.native import NativeOps

PATHS = available_paths()
QUANTIZED = ("Q4_0", "Q4_1", "Q8_0")
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
KINDS = (*QUANTIZED, *PLAIN)


@pytest.fixture(autouse=True)
def restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def weight(kind: str, outputs: int, columns: int, seed: int) -> WeightTensor:
    """Random weights; of quantized kinds random blocks with sane scales."""
    draw = torch.Generator().manual_seed(seed)
    if kind in PLAIN:
        data = torch.randn(outputs, columns, generator=draw).to(PLAIN[kind])
        return WeightTensor("w", (outputs, columns), kind, data)
    nbytes = bytes_per_row(kind, columns)
    blocks = torch.randint(0, 256, (outputs, nbytes), generator=draw, dtype=torch.uint8)
    per_block = nbytes // (columns // 32)
    scales = (torch.rand(outputs, columns // 32, 2, generator=draw) * 0.1 - 0.05).half()
    view = blocks.view(outputs, columns // 32, per_block)
    halves = 2 if kind == "Q4_1" else 1
    view[:, :, : 2 * halves] = scales[:, :, :halves].contiguous().view(torch.uint8)
    return WeightTensor("w", (outputs, columns), kind, blocks)


def unaligned(x: Tensor) -> Tensor:
    room = torch.empty(x.numel() + 1)
    room[1:] = x.flatten()
    return room[1:].view(x.shape)


def strided(x: Tensor) -> Tensor:
    wide = torch.full((x.shape[0], 2 * x.shape[1]), math.nan)
    wide[:, ::2] = x
    return wide[:, ::2]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(8, 32), (24, 64), (49, 96), (192, 576), (7, 1536)])
def test_linear_is_close_to_the_reference(path: str, kind: str, shape: tuple[int, int]) -> None:
    raw = weight(kind, *shape, seed=1)
    ops = NativeOps(path=path)
    bias = torch.randn(shape[0])
    x = torch.randn(9, shape[1])
    out = ops.linear(x, ops.load_linear([raw], bias))
    exact = x.double() @ raw.to_float().double().t() + bias
    # 8 bits, which leave about 1e-2 of an activation.
    assert (out - exact).norm() <= (2e-2 if kind in QUANTIZED else 1e-5) * exact.norm()


@pytest.mark.parametrize("kind", QUANTIZED)
def test_linear_is_exact_where_activations_are_whole_numbers(kind: str) -> None:
    """Activations that are multiples of their block's scale lose nothing: what is left is float
    rounding. Repacking, signs, nibble order and minima all have to be right for this."""
    raw = weight(kind, 40, 128, seed=2)
    x = torch.randint(-127, 128, (6, 4, 32)).float()
    x[:, :, ::31] = 127.0  # in two lines: neither reaches farther than the others
    x = (x * 0.03125).reshape(6, 128)
    exact = x.double() @ raw.to_float().double().t()
    for path in PATHS:
        ops = NativeOps(path=path)
        out = ops.linear(x, ops.load_linear([raw]))
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_row_count_gives_a_row_the_same_bits(path: str, kind: str) -> None:
    ops = NativeOps(path=path)
    packed = ops.load_linear([weight(kind, 100, 96, seed=3), weight(kind, 24, 96, seed=4)])
    x = torch.randn(64, 96)
    whole = ops.linear(x, packed)
    for rows in range(1, 65):
        assert torch.equal(ops.linear(x[:rows], packed), whole[:rows])
        assert torch.equal(ops.linear(x[64 - rows :], packed), whole[64 - rows :])
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(ops.linear(x, packed), whole)
        assert torch.equal(ops.linear(unaligned(x), packed), whole)
        assert torch.equal(ops.linear(strided(x), packed), whole)
        order = torch.randperm(64)[:17]
        assert torch.equal(ops.linear(x[order], packed), whole[order])


@pytest.mark.skipif(len(PATHS) < 3, reason="one vector path only")
@pytest.mark.parametrize("kind", QUANTIZED)
def test_vector_paths_agree_to_the_bit(kind: str) -> None:
    raw, x = weight(kind, 64, 320, seed=5), torch.randn(5, 320)
    outs = []
    for path in PATHS[:2]:
        ops = NativeOps(path=path)
        outs.append(ops.linear(x, ops.load_linear([raw])))
    assert torch.equal(outs[0], outs[1])


@pytest.mark.parametrize("kind", KINDS)
def test_embedding_rows_are_the_checkpoints(kind: str) -> None:
    raw = weight(kind, 50, 64, seed=6)
    ops = NativeOps()
    table = ops.load_embedding(raw)
    ids = torch.tensor([3, 3, 49, 0])
    assert torch.equal(ops.embedding(ids, table), raw.to_float()[ids])
    reference = ReferenceOps()
    x = torch.randn(2, 64)
    torch.testing.assert_close(
        ops.linear(x, table), reference.linear(x, reference.load_embedding(raw)), rtol=0.1, atol=0.3
    )


def test_kinds_without_a_kernel_are_multiplied_in_float32() -> None:
    blocks = torch.randint(0, 60, (16, bytes_per_row("Q5_K", 256)), dtype=torch.uint8)
    raw = WeightTensor("w", (16, 256), "Q5_K", blocks)
    ops = NativeOps()
    x = torch.randn(3, 256)
    torch.testing.assert_close(
        ops.linear(x, ops.load_linear([raw])), x @ raw.to_float().t(), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("width", [5, 8, 24, 60, 576])
def test_row_operations(path: str, width: int) -> None:
    """Close to the reference; the same bits alone, together, strided and on every path."""
    ops, plain, reference = NativeOps(path=path), NativeOps(path="portable"), ReferenceOps()
    x, scale = torch.randn(40, width) * 3, torch.randn(width)
    gate_up = torch.randn(40, 2 * width) * 6
    angles = torch.randn(300, 4)
    table = RopeTable(angles.cos().contiguous(), angles.sin().contiguous())
    positions = torch.randint(0, 300, (40,))
    heads = torch.randn(40, 3 * 11)

    def rope(rows: Tensor) -> Tensor:
        return ops.rope(rows.view(-1, 3, 11), positions[: rows.shape[0]], table).flatten(1)

    cases: list[tuple[Callable[[Tensor], Tensor], Tensor, Tensor, Tensor]] = [
        (
            lambda rows: ops.rms_norm(rows, scale, 1e-5),
            x,
            plain.rms_norm(x, scale, 1e-5),
            reference.rms_norm(x, scale, 1e-5),
        ),
        (ops.silu_and_mul, gate_up, plain.silu_and_mul(gate_up), reference.silu_and_mul(gate_up)),
        (
            rope,
            heads,
            plain.rope(heads.view(40, 3, 11), positions, table).flatten(1),
            reference.rope(heads.view(40, 3, 11), positions, table).flatten(1),
        ),
    ]
    for op, rows, portable, expected in cases:
        whole = op(rows)
        assert torch.equal(whole, portable)
        torch.testing.assert_close(whole, expected, rtol=2e-6, atol=2e-6)
        assert torch.equal(op(unaligned(rows)), whole)
        for count in (1, 3, 8, 39):
            assert torch.equal(op(rows[:count]), whole[:count])


def test_silu_at_the_ends_of_the_scale() -> None:
    gate = torch.tensor([[-1e4, -100.0, -88.0, -0.0, 0.0, 88.0, 1e4, 3.0, math.inf, -math.inf]])
    out = NativeOps().silu_and_mul(torch.cat((gate, torch.ones_like(gate)), 1))[0]
    assert out[:2].tolist() == [0.0, 0.0] or out[:2].abs().max() < 1e-30
    assert out[5:7].tolist() == [88.0, 1e4]
    assert math.isinf(out[8])
    nan = torch.tensor([[math.nan] * 8 + [1.0] * 8])
    assert torch.isnan(NativeOps().silu_and_mul(nan)).all()


class Sequences:
    """Random queries, keys and values of some sequences in scattered blocks of a shared cache."""

    def __init__(self, lengths: list[int], block_size: int, kv_heads: int, group: int, dim: int):
        self.lengths, self.size, self.kv_heads, self.dim = lengths, block_size, kv_heads, dim
        self.q = [torch.randn(n, kv_heads * group, dim) for n in lengths]
        self.k = [torch.randn(n, kv_heads, dim) for n in lengths]
        self.v = [torch.randn(n, kv_heads, dim) for n in lengths]
        counts = [-(-n // block_size) for n in lengths]
        ids = random.Random(len(lengths)).sample(range(sum(counts) + 2), sum(counts))
        ends = list(itertools.accumulate(counts))
        self.tables = [
            tuple(ids[end - count : end]) for count, end in zip(counts, ends, strict=True)
        ]
        self.blocks = sum(counts) + 2

    def cache(self, ops: ReferenceOps | None = None) -> ReferenceKV:
        cache = (ops or NativeOps()).allocate_kv(
            1, self.blocks, self.size, self.kv_heads, self.dim, "float32"
        )
        cache.keys.fill_(1e4)
        cache.values.fill_(-1e4)
        return cache

    def run(
        self,
        ops: ReferenceOps,
        cache: ReferenceKV,
        pieces: list[tuple[int, int, int]],
        first_key: int = 0,
    ) -> list[Tensor]:
        positions, slots, starts = [], [], [0]
        for index, start, end in pieces:
            positions += range(start, end)
            table = self.tables[index]
            slots += [table[p // self.size] * self.size + p % self.size for p in range(start, end)]
            starts.append(starts[-1] + end - start)
        tables = tuple(self.tables[index] for index, _, _ in pieces)
        batch = PagedBatch(
            torch.tensor(positions), torch.tensor(slots), tuple(starts), tables, first_key
        )
        q, k, v = (torch.cat([x[i][a:b] for i, a, b in pieces]) for x in (self.q, self.k, self.v))
        out = ops.attention(q, k, v, cache, 0, batch, self.dim**-0.5)
        return list(out.split([b - a for _, a, b in pieces]))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("first_key", [0, 1])
def test_attention_is_close_to_the_reference(path: str, first_key: int) -> None:
    for shape in [(16, 3, 3, 64), (4, 1, 1, 8), (8, 2, 4, 12)]:
        data = Sequences([2, 5, 37, 130], *shape)
        pieces = [(index, first_key, length) for index, length in enumerate(data.lengths)]
        native = data.run(NativeOps(path=path), data.cache(), pieces, first_key)
        expected = data.run(ReferenceOps(), data.cache(ReferenceOps()), pieces, first_key)
        for one, other in zip(native, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("threads", [1, 2])
def test_attention_bits_in_random_mixes(path: str, threads: int) -> None:
    """Prefill and decode rows in any mix and order: each position's bits are its own."""
    torch.set_num_threads(threads)
    data = Sequences([1, 3, 16, 17, 40, 90, 90, 5], 8, 2, 3, 16)
    ops, draw = NativeOps(path=path), random.Random(threads)
    whole = [
        data.run(ops, data.cache(), [(index, 0, length)])[0]
        for index, length in enumerate(data.lengths)
    ]
    cache, done = data.cache(), [0] * len(data.lengths)
    while any(at < length for at, length in zip(done, data.lengths, strict=True)):
        open_ones = [i for i, at in enumerate(done) if at < data.lengths[i]]
        chosen = draw.sample(open_ones, draw.randint(1, len(open_ones)))
        pieces = []
        for index in chosen:
            end = min(data.lengths[index], done[index] + draw.choice([1, 1, 2, 7, 30]))
            pieces.append((index, done[index], end))
        for (index, start, end), out in zip(pieces, data.run(ops, cache, pieces), strict=True):
            assert torch.equal(out, whole[index][start:end])
            done[index] = end


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_caches_round_once(path: str, dtype: str) -> None:
    """The same bits as a float32 cache of keys and values that were rounded by torch before."""
    data = Sequences([20], 8, 2, 2, 12)
    ops, kind = NativeOps(path=path), getattr(torch, dtype)
    cache = ops.allocate_kv(1, data.blocks, 8, 2, 12, dtype)
    out = data.run(ops, cache, [(0, 0, 20)])[0]
    data.k = [x.to(kind).float() for x in data.k]
    data.v = [x.to(kind).float() for x in data.v]
    assert torch.equal(out, data.run(ops, data.cache(), [(0, 0, 20)])[0])
    data.v[0].fill_(3e38)  # beyond float16: the largest finite number, never infinity
    data.run(ops, cache, [(0, 0, 20)])
    assert torch.isfinite(cache.values).all()


def test_infinite_keys_of_a_former_owner_stay_masked() -> None:
    data = Sequences([5], 16, 1, 1, 8)
    clean = data.run(NativeOps(), data.cache(), [(0, 0, 5)])[0]
    poison = Sequences([16], 16, 1, 1, 8)
    poison.tables = data.tables
    poison.k[0].fill_(math.inf)
    poison.v[0].fill_(math.nan)
    cache = data.cache()
    poison.run(NativeOps(), cache, [(0, 0, 16)])
    assert torch.isfinite(cache.values[0, data.tables[0][0]]).all()
    assert torch.equal(data.run(NativeOps(), cache, [(0, 0, 5)])[0], clean)


def test_refusals() -> None:
    table = NativeOps().load_embedding(weight("Q8_0", 5, 32, seed=1))
    for wrong in (-1, 5):
        with pytest.raises(IndexError, match=f"no row {wrong} in a table of 5"):
            NativeOps().embedding(torch.tensor([0, wrong]), table)
    with pytest.raises(ConfigError, match="path"):
        NativeOps(path="abacus")
    with pytest.raises(ValueError, match="no native linear"):
        PackedLinear("Q5_K", 0, 8, 256)
    with pytest.raises(ValueError, match="whole blocks"):
        PackedLinear("Q8_0", 0, 8, 40)
