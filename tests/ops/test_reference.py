"""Promise P1 at its root: a row's bits depend on the row alone, in every reference operation."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from drumline.ops.base import PagedBatch, RopeTable
from drumline.ops.reference import ReferenceKV, ReferenceOps
from drumline.ops.sums import tree_sum, tree_sum_last
from drumline.ops.weights import WeightTensor

OPS = ReferenceOps()
SHAPES = [(96, 32), (64, 96), (128, 64), (192, 576), (576, 1536), (49, 7), (1000, 100)]


@pytest.fixture(autouse=True)
def restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def weight(shape: tuple[int, ...], seed: int) -> WeightTensor:
    data = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return WeightTensor(name="w", shape=shape, kind="F32", data=data)


def unaligned(x: Tensor) -> Tensor:
    """The same values at an address that is 4 bytes past every vector boundary."""
    room = torch.empty(x.numel() + 1)
    room[1:] = x.flatten()
    return room[1:].view(x.shape)


def strided(x: Tensor) -> Tensor:
    """The same values in a view that is not contiguous."""
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), math.nan)
    wide[..., ::2] = x
    return wide[..., ::2]


def assert_row_invariant(op: Callable[[Tensor], Tensor], x: Tensor, seed: int) -> None:
    """``op`` maps rows to rows. Any selection, order, layout and thread count: the same bits."""
    chooser = random.Random(seed)
    whole = op(x)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert torch.equal(op(x), whole)
        assert torch.equal(op(unaligned(x)), whole)
        assert torch.equal(op(strided(x)), whole)
        for count in {1, 2, 3, 15, 16, 17, 33, x.shape[0], chooser.randint(1, x.shape[0])}:
            rows = torch.tensor(chooser.sample(range(x.shape[0]), count))
            assert torch.equal(op(x[rows]), whole[rows]), (threads, count)


@pytest.mark.parametrize("shape", SHAPES)
def test_linear_rows_do_not_see_each_other(shape: tuple[int, int]) -> None:
    packed = OPS.load_linear([weight(shape, 1)], torch.randn(shape[0]))
    assert_row_invariant(lambda x: OPS.linear(x, packed), torch.randn(64, shape[1]), 2)


def test_every_row_count_gives_the_same_linear() -> None:
    packed = OPS.load_linear([weight((192, 576), 3)])
    x = torch.randn(64, 576)
    whole = OPS.linear(x, packed)
    for rows in range(1, 65):
        assert torch.equal(OPS.linear(x[:rows], packed), whole[:rows])
        assert torch.equal(OPS.linear(x[64 - rows :], packed), whole[64 - rows :])


def test_linear_stacks_weights_and_agrees_with_torch() -> None:
    one, two = weight((96, 64), 4), weight((32, 64), 5)
    packed = OPS.load_linear([one, two])
    x = torch.randn(5, 64)
    expected = x @ torch.cat((one.data, two.data)).t()
    torch.testing.assert_close(OPS.linear(x, packed), expected, rtol=1e-5, atol=1e-5)
    assert (packed.in_features, packed.out_features, packed.nbytes) == (64, 128, 128 * 64 * 4)


@pytest.mark.parametrize("width", [7, 32, 64, 96, 100, 576, 2048])
def test_norm_and_activation_rows_do_not_see_each_other(width: int) -> None:
    scale = torch.randn(width)
    x = torch.randn(64, width) * 3
    assert_row_invariant(lambda x: OPS.rms_norm(x, scale, 1e-5), x, width)
    assert_row_invariant(OPS.silu_and_mul, torch.randn(64, 2 * width) * 4, width)
    norm = torch.nn.functional.rms_norm(x, (width,), scale, 1e-5)
    torch.testing.assert_close(OPS.rms_norm(x, scale, 1e-5), norm, rtol=1e-5, atol=1e-5)


def test_rope_turns_by_position_alone() -> None:
    angles = torch.randn(700, 8)
    table = RopeTable(cos=angles.cos(), sin=angles.sin())
    positions = torch.randint(0, 700, (64,))
    x = torch.randn(64, 3 * 20)

    def rope(rows: Tensor) -> Tensor:
        at = torch.tensor([int((x == row).all(1).nonzero()) for row in rows])
        return OPS.rope(rows.reshape(-1, 3, 20), positions[at], table).flatten(1)

    assert_row_invariant(rope, x, 6)
    turned = rope(x).view(64, 3, 20)
    assert torch.equal(turned[..., 16:], x.view(64, 3, 20)[..., 16:])  # beyond rope_dim


def test_trees_ignore_appended_zeros() -> None:
    for width in range(1, 70):
        x = torch.randn(5, width, 3)
        whole = tree_sum(x, 1)
        padded = torch.cat((x, torch.zeros(5, 70 - width, 3)), 1)
        assert torch.equal(tree_sum(padded, 1), whole)
        torch.testing.assert_close(whole, x.double().sum(1).float(), rtol=1e-5, atol=1e-5)
        flat = x.movedim(1, 2)
        torch.testing.assert_close(tree_sum_last(flat)[..., 0], whole, rtol=1e-5, atol=1e-5)


class Cache:
    """Sequences of random keys, values and queries in a paged cache with scattered blocks."""

    def __init__(self, lengths: list[int], block_size: int, kv_heads: int, group: int, dim: int):
        self.lengths, self.block_size = lengths, block_size
        self.heads, self.kv_heads, self.dim = kv_heads * group, kv_heads, dim
        self.q = [torch.randn(n, self.heads, dim) for n in lengths]
        self.k = [torch.randn(n, kv_heads, dim) for n in lengths]
        self.v = [torch.randn(n, kv_heads, dim) for n in lengths]
        needed = [-(-n // block_size) for n in lengths]
        self.block_count = sum(needed) + 3
        ids = random.Random(sum(lengths)).sample(range(self.block_count), sum(needed))
        self.tables = []
        for count in needed:
            self.tables.append(tuple(ids[:count]))
            ids = ids[count:]

    def fresh(self, dtype: str = "float32") -> ReferenceKV:
        cache = OPS.allocate_kv(
            1, self.block_count, self.block_size, self.kv_heads, self.dim, dtype
        )
        cache.keys.fill_(1e4)  # what freed blocks hold must not matter
        cache.values.fill_(-1e4)
        return cache

    def run(self, cache: ReferenceKV, pieces: list[tuple[int, int, int]]) -> list[Tensor]:
        """Attends positions ``start..end`` of sequences, as one batch."""
        positions, slots, starts = [], [], [0]
        for index, start, end in pieces:
            positions += range(start, end)
            table = self.tables[index]
            slots += [
                table[p // self.block_size] * self.block_size + p % self.block_size
                for p in range(start, end)
            ]
            starts.append(starts[-1] + end - start)
        batch = PagedBatch(
            positions=torch.tensor(positions),
            slots=torch.tensor(slots),
            query_start=tuple(starts),
            block_tables=tuple(self.tables[index] for index, _, _ in pieces),
        )
        stacked = (torch.cat([x[i][a:b] for i, a, b in pieces]) for x in (self.q, self.k, self.v))
        q, k, v = stacked
        out = OPS.attention(q, k, v, cache, 0, batch, self.dim**-0.5)
        return list(out.split([b - a for _, a, b in pieces]))

    def whole(self, index: int) -> Tensor:
        return self.run(self.fresh(), [(index, 0, self.lengths[index])])[0]


def test_attention_agrees_with_torch() -> None:
    for block_size, kv_heads, group, dim in [(16, 3, 3, 64), (4, 1, 1, 8), (8, 2, 4, 16)]:
        cache = Cache([1, 5, 37, 130], block_size, kv_heads, group, dim)
        for index, length in enumerate(cache.lengths):
            q, k, v = (x[index].transpose(0, 1) for x in (cache.q, cache.k, cache.v))
            expected = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            )
            expected = expected.transpose(0, 1).reshape(length, -1)
            torch.testing.assert_close(cache.whole(index), expected, rtol=1e-4, atol=1e-5)


def test_attention_bits_for_every_length() -> None:
    """Alone or beside others, as prefill or decode: one length after the other up to 600."""
    cache = Cache([600, 31], 16, 1, 3, 16)
    whole, other = cache.whole(0), cache.whole(1)
    paged = cache.fresh()
    for position in range(600):
        pieces = [(0, position, position + 1)]
        if position < 31:
            pieces.insert(position % 2, (1, position, position + 1))
        out = dict(zip([p[0] for p in pieces], cache.run(paged, pieces), strict=True))
        assert torch.equal(out[0][0], whole[position]), position
        if position < 31:
            assert torch.equal(out[1][0], other[position]), position


@pytest.mark.parametrize("chunk", [*range(1, 12), 16, 17, 31, 64, 100, 150])
@pytest.mark.parametrize("threads", [1, 2])
def test_attention_bits_for_every_chunk_size(chunk: int, threads: int) -> None:
    cache = Cache([150, 97, 64, 3], 8, 2, 2, 16)
    whole = [cache.whole(index) for index in range(4)]
    torch.set_num_threads(threads)
    paged, done = cache.fresh(), [0, 0, 0, 0]
    while any(at < length for at, length in zip(done, cache.lengths, strict=True)):
        pieces = [
            (index, at, min(at + chunk + index, cache.lengths[index]))
            for index, at in enumerate(done)
            if at < cache.lengths[index]
        ]
        for (index, start, end), out in zip(pieces, cache.run(paged, pieces), strict=True):
            assert torch.equal(out, whole[index][start:end])
            done[index] = end


def test_attention_over_many_rows_and_long_contexts() -> None:
    """64 decode rows at once, and more items than are held in memory at a time."""
    cache = Cache([1 + 37 * i % 601 for i in range(64)] + [4000], 16, 1, 2, 8)
    paged = cache.fresh()
    whole = [cache.whole(index) for index in range(65)]
    for index, length in enumerate(cache.lengths):
        if length > 1:
            cache.run(paged, [(index, 0, length - 1)])
    pieces = [(index, length - 1, length) for index, length in enumerate(cache.lengths)]
    for order in (pieces, pieces[::-1], pieces[7:40] + pieces[64:]):
        for (index, _, _), out in zip(order, cache.run(paged, order), strict=True):
            assert torch.equal(out[0], whole[index][-1])


def test_a_poisoned_neighbour_in_a_block_stays_where_it_is() -> None:
    """Stale infinities in the tail of a block are masked, and masked means no NaN either."""
    cache = Cache([5], 16, 1, 1, 8)
    clean = cache.whole(0)
    paged = cache.fresh()
    poison = Cache([16], 16, 1, 1, 8)
    poison.tables = cache.tables
    poison.k[0].fill_(math.inf)
    poison.v[0].fill_(math.nan)
    poison.run(paged, [(0, 0, 16)])
    assert torch.equal(cache.run(paged, [(0, 0, 5)])[0], clean)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_cache_rounds_keys_and_values_once(dtype: str) -> None:
    cache = Cache([40], 8, 2, 2, 16)
    out = cache.run(cache.fresh(dtype), [(0, 0, 40)])[0]
    kind = getattr(torch, dtype)
    cache.k = [x.to(kind).float() for x in cache.k]
    cache.v = [x.to(kind).float() for x in cache.v]
    assert torch.equal(out, cache.whole(0))


def test_tokens_without_a_slot_write_nothing() -> None:
    cache = Cache([4], 4, 1, 1, 8)
    paged = cache.fresh()
    before = paged.keys.clone()
    batch = PagedBatch(
        positions=torch.tensor([0]),
        slots=torch.tensor([-1]),
        query_start=(0, 1),
        block_tables=(cache.tables[0],),
    )
    OPS.attention(cache.q[0][:1], cache.k[0][:1], cache.v[0][:1], paged, 0, batch, 1.0)
    assert torch.equal(paged.keys, before)
