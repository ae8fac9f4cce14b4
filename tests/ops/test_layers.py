"""Whole layers in one operation: close to the reference, bits that are each token's own, the seam
where ranks add up their shares, and what is picked from logits."""

from __future__ import annotations

import itertools
import math
import random
import resource
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from drumline.core.cpu import native_available
from drumline.ops import load_ops
from drumline.ops.base import (
    AttentionWeights,
    DecoderWeights,
    FeedForwardWeights,
    KVCache,
    LayerWeights,
    Linear,
    MoeWeights,
    Ops,
    PagedBatch,
    RopeTable,
)
from drumline.ops.quantize import quantize
from drumline.ops.weights import WeightTensor

if not native_available():
    pytest.skip("the native module is not built", allow_module_level=True)

from drumline._native import available_paths
from drumline.ops.native import NativeOps

PATHS = available_paths()
HIDDEN, DIM, WIDTH, POSITIONS = 48, 16, 40, 420


@dataclass(frozen=True)
class Shape:
    """What a stack of three layers is made of."""

    heads: int = 6
    kv_heads: int = 2
    bias: bool = False
    head_norms: bool = False
    experts: int = 0
    entry: int = 0  # width of what layer 0 attends to; 0: the stream itself


SHAPES = {
    "llama": Shape(),
    "biases": Shape(bias=True),
    "head norms": Shape(heads=4, kv_heads=4, head_norms=True),
    "many heads": Shape(heads=14, kv_heads=1),
    "experts": Shape(experts=5, head_norms=True),
    "entry": Shape(entry=2 * HIDDEN),
}


class Maker:
    """Weights from a seed, the same for every backend."""

    def __init__(self, ops: Ops, seed: int = 0) -> None:
        self.ops = ops
        self.random = torch.Generator().manual_seed(seed)

    def weight(self, *shape: int) -> WeightTensor:
        data = torch.randn(shape, generator=self.random) / math.sqrt(shape[-1])
        return WeightTensor("w", shape, "F32", data)

    def vector(self, size: int) -> Tensor:
        return 1 + 0.2 * torch.randn(size, generator=self.random)

    def layer(self, shape: Shape, index: int) -> LayerWeights:
        q, kv = shape.heads * DIM, shape.kv_heads * DIM
        entry = shape.entry if index == 0 else 0
        columns = entry or HIDDEN
        parts = [self.weight(q, columns), self.weight(kv, columns), self.weight(kv, columns)]
        attention = AttentionWeights(
            norm=None if entry else self.vector(HIDDEN),
            qkv=self.ops.load_linear(parts, self.vector(q + 2 * kv) if shape.bias else None),
            o=self.ops.load_linear([self.weight(HIDDEN, q)], self._bias(shape)),
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=DIM,
            eps=1e-5,
            q_norm=self.vector(DIM) if shape.head_norms else None,
            k_norm=self.vector(DIM) if shape.head_norms else None,
        )
        # Layers with experts and without stand in one stack.
        if shape.experts and index != 1:
            return LayerWeights(attention, self._experts(shape.experts))
        both = [self.weight(WIDTH, HIDDEN), self.weight(WIDTH, HIDDEN)]
        gate_up = self.ops.load_linear(both, self.vector(2 * WIDTH) if shape.bias else None)
        down = self.ops.load_linear([self.weight(HIDDEN, WIDTH)], self._bias(shape))
        return LayerWeights(attention, FeedForwardWeights(self.vector(HIDDEN), gate_up, down, 1e-5))

    def _bias(self, shape: Shape) -> Tensor | None:
        return self.vector(HIDDEN) if shape.bias else None

    def _experts(self, count: int) -> MoeWeights:
        gate_up = [[self.weight(WIDTH, HIDDEN), self.weight(WIDTH, HIDDEN)] for _ in range(count)]
        down = [self.weight(HIDDEN, WIDTH) for _ in range(count)]
        router = self.ops.load_linear([self.weight(count, HIDDEN)])
        experts = self.ops.load_experts(gate_up, down)
        return MoeWeights(self.vector(HIDDEN), router, experts, 2, True, 1e-5)


class World:
    """A stack on a backend, and sequences whose tokens go through it in any pieces."""

    def __init__(
        self,
        ops: Ops,
        shape: Shape,
        lengths: list[int],
        block_size: int,
        dtype: str = "float32",
        layers: int = 3,
    ) -> None:
        self.ops, self.lengths, self.size = ops, lengths, block_size
        angles = torch.arange(POSITIONS)[:, None] * 0.3 ** torch.arange(DIM // 2)
        rope = RopeTable(angles.cos().contiguous(), angles.sin().contiguous())
        maker = Maker(ops)
        self.stack = ops.load_stack([maker.layer(shape, index) for index in range(layers)], rope)
        counts = [-(-length // block_size) for length in lengths]
        ids = random.Random(len(lengths)).sample(range(sum(counts)), sum(counts))
        ends = list(itertools.accumulate(counts))
        self.tables = [tuple(ids[e - c : e]) for c, e in zip(counts, ends, strict=True)]
        self.cache = ops.allocate_kv(3, sum(counts), block_size, shape.kv_heads, DIM, dtype)
        draw = torch.Generator().manual_seed(7)
        self.x = [torch.randn((n, HIDDEN), generator=draw) for n in lengths]
        self.entry = [torch.randn((n, shape.entry), generator=draw) for n in lengths]
        self.enters = shape.entry > 0

    def batch(self, pieces: list[tuple[int, int, int]]) -> PagedBatch:
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        for index, start, end in pieces:
            positions += range(start, end)
            table = self.tables[index]
            slots += [table[p // self.size] * self.size + p % self.size for p in range(start, end)]
            starts.append(starts[-1] + end - start)
        tables = tuple(self.tables[index] for index, _, _ in pieces)
        return PagedBatch(torch.tensor(positions), torch.tensor(slots), tuple(starts), tables)

    def rows(self, of: list[Tensor], pieces: list[tuple[int, int, int]]) -> Tensor:
        return torch.cat([of[index][start:end] for index, start, end in pieces])

    def run(
        self,
        pieces: list[tuple[int, int, int]],
        taps: tuple[int, ...] = (),
        read_at: list[int] | None = None,
    ) -> list[Tensor]:
        """The stream after all layers, then at each of ``taps``."""
        x, batch = self.rows(self.x, pieces), self.batch(pieces)
        entry = self.rows(self.entry, pieces) if self.enters else None
        kept = x.clone()
        out, tapped = self.ops.run_stack(x, self.stack, batch, self.cache, taps, entry, read_at)
        assert torch.equal(x.view(torch.int32), kept.view(torch.int32)), (
            "what came in was written to"
        )
        assert sorted(tapped) == sorted(set(taps))
        return [out, *(tapped[tap] for tap in taps)]

    def whole(self) -> list[Tensor]:
        return [self.run([(i, 0, length)])[0] for i, length in enumerate(self.lengths)]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", SHAPES)
def test_close_to_the_reference(path: str, name: str) -> None:
    lengths = [1, 5, 40, 300]
    pieces = [(index, 0, length) for index, length in enumerate(lengths)]
    ours = World(NativeOps(path=path), SHAPES[name], lengths, 16)
    theirs = World(load_ops("reference", "cpu"), SHAPES[name], lengths, 16)
    for one, other in zip(ours.run(pieces, (0, 2, 3)), theirs.run(pieces, (0, 2, 3)), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("name", SHAPES)
def test_bits_in_random_mixes(path: str, threads: int, name: str) -> None:
    """Prefill and decode rows in any mix, order, chunking: each token's bits are its own, at taps
    too. Long sequences alone in a call are attended to in chunks apart."""
    world = World(NativeOps(path=path), SHAPES[name], [1, 3, 17, 128, 129, 140, 300, 5], 16)
    whole = world.whole()
    torch.set_num_threads(threads)
    draw, done = random.Random(threads), [0] * len(world.lengths)
    while any(at < length for at, length in zip(done, world.lengths, strict=True)):
        left = [i for i, at in enumerate(done) if at < world.lengths[i]]
        pieces = []
        for index in draw.sample(left, draw.randint(1, min(3, len(left)))):
            end = min(world.lengths[index], done[index] + draw.choice([1, 2, 4, 7, 30, 150]))
            pieces.append((index, done[index], end))
        out, tapped = world.run(pieces, (3,))
        assert torch.equal(out, tapped)
        sizes = [end - start for _, start, end in pieces]
        for (index, start, end), rows in zip(pieces, out.split(sizes), strict=True):
            assert torch.equal(rows, whole[index][start:end]), (index, start, end)
            done[index] = end


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["llama", "entry", "experts"])
def test_threads_with_rows_of_their_own_give_the_same_bits(path: str, name: str) -> None:
    """From a few rows per thread on, each thread takes some through all of a layer."""
    lengths = [40, 1, 31, 9, 120]
    for rows in (7, 8, 9, 31, 64, 65, 201):
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            world = World(NativeOps(path=path), SHAPES[name], lengths, 16)
            pieces, left = [], rows
            for index, length in enumerate(lengths):
                pieces.append((index, 0, min(left, length)))
                left -= pieces[-1][2]
                if left == 0:
                    break
            found.append(world.run(pieces, (0, 1, 2, 3)))
        for other in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True)), rows


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("name", SHAPES)
def test_rows_that_are_read_do_not_notice_those_that_are_not(
    path: str, threads: int, layers: int, name: str
) -> None:
    """What is read, tapped and kept in the cache is the same to the bit, whatever is left out."""
    torch.set_num_threads(threads)
    lengths, taps = [9, 1, 140], tuple(range(layers))
    pieces = [(0, 0, 9), (1, 0, 1), (2, 0, 120)]
    later = [(0, 8, 9), (2, 120, 140)]
    world = World(NativeOps(path=path), SHAPES[name], lengths, 16, layers=layers)
    whole = world.run(pieces, (*taps, layers))
    kept = [part.clone() for part in _memory(world.cache)]
    after = world.run(later)
    draw = random.Random(layers)
    several = [sorted(draw.sample(range(130), count)) for count in (2, 64, 66, 130)]
    for read_at in ([], [129], [8, 9, 129], *several):
        for part in _memory(world.cache):
            part.fill_(0)
        found = world.run(pieces, taps, read_at)
        assert torch.equal(found[0][read_at], whole[0][read_at]), read_at
        assert all(torch.equal(a, b) for a, b in zip(found[1:], whole[1:], strict=False))
        assert all(torch.equal(a, b) for a, b in zip(_memory(world.cache), kept, strict=True))
        assert torch.equal(world.run(later)[0], after[0])
        if layers == 1 and 2 * len(read_at) <= 130:  # half or more are left out indeed
            left = [row for row in range(130) if row not in read_at]
            assert torch.equal(found[0][left], world.rows(world.x, pieces)[left])
    # Who taps the end reads it.
    assert torch.equal(world.run(pieces, (layers,), [3])[1], whole[0])


@pytest.mark.parametrize("path", PATHS)
def test_queries_and_keys_of_several_kinds_are_told_apart(path: str) -> None:
    """A stack whose q, k and v are stored in kinds of their own, cut where no group of 16 ends."""
    ops, draw = NativeOps(path=path), torch.Generator().manual_seed(3)
    dim, heads, kv_heads = 10, 6, 3  # 60 + 30 + 30 outputs

    def part(kind: str, rows: int) -> WeightTensor:
        data = torch.randn((rows, 64), generator=draw) / 8
        raw = data if kind == "F32" else quantize(kind, data)
        return WeightTensor("w", (rows, 64), kind, raw)

    rope = RopeTable(torch.rand(40, dim // 2), torch.rand(40, dim // 2))
    for kinds in (("Q8_0", "Q4_1", "F32"), ("Q4_0",) * 3, ("F32", "F32", "Q8_0")):
        sizes = (heads * dim, kv_heads * dim, kv_heads * dim)
        qkv = ops.load_linear([part(*one) for one in zip(kinds, sizes, strict=True)])
        o = ops.load_linear(
            [WeightTensor("o", (64, 60), "F32", torch.randn((64, 60), generator=draw))]
        )
        attention = AttentionWeights(torch.ones(64), qkv, o, heads, kv_heads, dim, 1e-5)
        both = ops.load_linear([part("Q8_0", 64), part("Q8_0", 64)])
        block = FeedForwardWeights(torch.ones(64), both, ops.load_linear([part("Q4_1", 64)]), 1e-5)
        stack = ops.load_stack([LayerWeights(attention, block)], rope)
        x, places = torch.randn((33, 64), generator=draw), torch.arange(33)
        batch = PagedBatch(places, places, (0, 33), ((0,),))
        caches = [ops.allocate_kv(1, 1, 40, kv_heads, dim, "float16") for _ in range(2)]
        whole, _ = ops.run_stack(x, stack, batch, caches[0])
        for read_at in ([], [32], [0, 7, 20]):
            found, _ = ops.run_stack(x, stack, batch, caches[1], read_at=read_at)
            assert torch.equal(found[read_at], whole[read_at]), (kinds, read_at)
            assert all(map(torch.equal, _memory(caches[0]), _memory(caches[1])))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize("size", [1, 8, 16, 32])
def test_what_nobody_has_written_is_not_seen(path: str, dtype: str, size: int) -> None:
    """Keys are read in whole units, beyond the last one that counts: whatever lies there."""
    outs = []
    for value in (0, 0xFF):  # 0xFF: no number
        world = World(NativeOps(path=path), SHAPES["llama"], [3, 17, 140], size, dtype)
        for part in (world.cache.keys, world.cache.values):
            part.view(torch.uint8).fill_(value)
        outs.append(world.run([(0, 0, 3), (1, 0, 16), (2, 0, 139)]))
        outs[-1] += world.run([(1, 16, 17), (2, 139, 140)])
    assert all(torch.isfinite(out).all() for out in outs[1])
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))


@pytest.mark.parametrize("size", [1, 3, 8, 24, 40, 160])
def test_bits_do_not_depend_on_how_often_a_prompt_is_cut(size: int) -> None:
    """Blocks that lie across the chunks of 128 keys, or hold several of them."""
    world = World(NativeOps(), SHAPES["llama"], [290], size)
    whole = world.whole()[0]
    for step in (1, 64, 129):
        parts = [world.run([(0, at, min(at + step, 290))])[0] for at in range(0, 290, step)]
        assert torch.equal(torch.cat(parts), whole), step


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize("name", ["biases", "experts"])
def test_shares_of_ranks_meet_between_product_and_residual(backend: str, name: str) -> None:
    """Block by block, each added to the stream afterwards: the same bits as in one operation."""
    world = World(load_ops(backend, "cpu"), SHAPES[name], [9, 33], 8)
    pieces = [(0, 0, 9), (1, 0, 33)]
    whole = world.run(pieces)[0]
    ops, stack, batch = world.ops, world.stack, world.batch(pieces)
    x = world.rows(world.x, pieces)
    for index in range(len(stack)):
        x = ops.add(x, ops.attend(x, stack, index, batch, world.cache))
        x = ops.add(x, ops.feed_forward(x, stack, index))
    assert torch.equal(x, whole)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("width", [32, 352, 40])
@pytest.mark.parametrize("bias", [True, False])
def test_a_gated_block_has_the_bits_of_its_products(path: str, width: int, bias: bool) -> None:
    """Of quantized weights, where each thread goes on with its own columns of gate and up from one
    product into the next, if they are whole blocks of it (not of 40 columns: those are plain)."""
    ops, draw = NativeOps(path=path), torch.Generator().manual_seed(width)

    def stacked(kind: str, columns: int, *outputs: int) -> Linear:
        some = [torch.randn((n, columns), generator=draw) for n in outputs]
        packed = [one if kind == "F32" else quantize(kind, one) for one in some]
        weights = [
            WeightTensor("w", (n, columns), kind, data)
            for n, data in zip(outputs, packed, strict=True)
        ]
        return ops.load_linear(weights, torch.randn(sum(outputs), generator=draw) if bias else None)

    attention = AttentionWeights(
        norm=None,
        qkv=stacked("F32", 64, 32, 32, 32),
        o=stacked("F32", 32, 64),
        heads=2,
        kv_heads=2,
        head_dim=DIM,
        eps=1e-5,
    )
    gate_up = stacked("Q4_1", 64, width, width)
    down = stacked("Q8_0" if width % 32 == 0 else "F32", width, 64)
    norm = torch.rand(64, generator=draw)
    block = FeedForwardWeights(norm, gate_up, down, 1e-5)
    rope = RopeTable(torch.ones(1, DIM // 2), torch.zeros(1, DIM // 2))
    stack = ops.load_stack([LayerWeights(attention, block)], rope)
    x = torch.randn((21, 64), generator=draw)
    inner = ops.silu_and_mul(ops.norm_linear(x, norm, 1e-5, gate_up))
    expected = ops.add(x, ops.linear(inner, down))
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for rows in (1, 2, 3, 8, 21):
            out = ops.feed_forward(x[:rows], stack, 0, x[:rows])
            assert torch.equal(out, expected[:rows])
    torch.set_num_threads(before)


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize("picked", [[], [0], [3, 8, 40], list(range(42))])
def test_a_whole_pass_is_its_parts(backend: str, picked: list[int]) -> None:
    world = World(load_ops(backend, "cpu"), SHAPES["llama"], [9, 33], 8)
    ops, maker = world.ops, Maker(world.ops, 5)
    table, head = ops.load_embedding(maker.weight(50, HIDDEN)), maker.weight(70, HIDDEN)
    weights = DecoderWeights(
        table, world.stack, maker.vector(HIDDEN), 1e-5, ops.load_linear([head])
    )
    batch, ids = world.batch([(0, 0, 9), (1, 0, 33)]), torch.arange(42) % 50
    x, taps = ops.run_stack(ops.embedding(ids, table), world.stack, batch, world.cache, (0, 2))
    hidden, tapped, logits = ops.run_decoder(ids, weights, batch, world.cache, (0, 2), picked)
    assert torch.equal(hidden, x)
    assert sorted(tapped) == [0, 2]
    assert all(torch.equal(tapped[tap], taps[tap]) for tap in taps)
    spared = ops.run_decoder(ids, weights, batch, world.cache, (0, 2), picked, picked)
    assert torch.equal(spared[0][picked], x[picked])
    assert all(torch.equal(spared[1][tap], taps[tap]) for tap in taps)
    if not picked:
        assert logits is spared[2] is None
        return
    assert logits is not None
    assert torch.equal(logits, ops.norm_linear(x[picked], weights.norm, 1e-5, weights.head))
    assert torch.equal(logits, spared[2])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30])
def test_a_row_that_is_no_number_spoils_no_other(value: float) -> None:
    world = World(NativeOps(), SHAPES["llama"], [20, 20], 8)
    whole = world.whole()
    world.x[0][7, 3] = value
    spoilt, clean = world.run([(0, 0, 20), (1, 0, 20)])[0].split([20, 20])
    assert torch.equal(clean, whole[1])
    assert torch.equal(spoilt[:7], whole[0][:7])
    assert not torch.equal(spoilt[7], whole[0][7])


def test_tokens_without_a_slot_write_nothing() -> None:
    world = World(NativeOps(), SHAPES["llama"], [12], 4)
    world.run([(0, 0, 12)])
    kept = [part.clone() for part in _memory(world.cache)]
    batch = world.batch([(0, 0, 12)])
    unwritten = PagedBatch(
        batch.positions, torch.full_like(batch.slots, -1), batch.query_start, batch.block_tables
    )
    world.ops.run_stack(2 * world.x[0], world.stack, unwritten, world.cache)
    assert all(torch.equal(*pair) for pair in zip(_memory(world.cache), kept, strict=True))


def _memory(cache: KVCache) -> list[Tensor]:
    return [part for part in vars(cache).values() if isinstance(part, Tensor)]


@pytest.mark.parametrize("name", ["llama", "experts"])
def test_nothing_is_allocated_once_the_largest_pass_was_seen(name: str) -> None:
    """Neither scratch memory nor, by the system's count of pages first touched, anything else."""
    ops = NativeOps()
    world = World(ops, SHAPES[name], [300, 40], 16)
    torch.set_num_threads(2)
    kinds = [[(0, 0, 300)], [(0, 299, 300)], [(0, 290, 294), (1, 3, 4)], [(1, 0, 40)]]
    for _ in range(3):
        for pieces in kinds:
            world.run(pieces, (1,))
    scratch, faults = ops.space.nbytes, resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        for pieces in kinds:
            world.run(pieces, (1,))
    assert ops.space.nbytes == scratch > 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults < 50


@pytest.mark.parametrize("ops", [load_ops("reference", "cpu"), *map(NativeOps, ["cpu"])])
def test_norm_and_head_together_are_one_after_the_other(ops: Ops) -> None:
    maker = Maker(ops, 3)
    head, norm = ops.load_linear([maker.weight(70, HIDDEN)]), maker.vector(HIDDEN)
    x = torch.randn(150, HIDDEN)
    expected = ops.linear(ops.rms_norm(x, norm, 1e-5), head)
    assert torch.equal(ops.norm_linear(x, norm, 1e-5, head), expected)
    assert torch.equal(ops.norm_linear(x[::2], norm, 1e-5, head), expected[::2])


# ---------------------------------------------------------------- what is picked from logits

BACKENDS = [load_ops("reference", "cpu"), *(NativeOps(path=path) for path in PATHS)]


@pytest.mark.parametrize("ops", BACKENDS)
def test_argmax(ops: Ops) -> None:
    rows = torch.randn(40, 1003).round(decimals=1)  # ties in most rows
    expected = [max(range(1003), key=lambda i: (row[i].item(), -i)) for row in rows]
    assert ops.argmax(rows).tolist() == expected
    assert ops.argmax(rows[:, :5]).tolist() == rows[:, :5].argmax(1).tolist()
    flat = torch.full((2, 21), -math.inf)
    flat[1, 20] = -3e38
    assert ops.argmax(flat).tolist() == [0, 20]
    for at in (20, 17, 3, 0):
        flat[0, :at] = math.inf
        flat[0, at:] = math.nan
        assert ops.argmax(flat)[0] == at


@pytest.mark.parametrize("ops", BACKENDS)
@pytest.mark.parametrize("k", [1, 2, 7, 40, 1003, 2000])
def test_top_k(ops: Ops, k: int) -> None:
    rows = torch.randn(5, 1003).round(decimals=1)
    rows[1] = torch.arange(1003)  # every one gets in
    rows[2] = 1.0
    rows[3, 500], rows[4, 7:9] = math.nan, math.inf
    values, ids = ops.top_k(rows, k)
    order = torch.sort(rows, dim=1, descending=True, stable=True)
    assert torch.equal(ids, order.indices[:, :k])
    assert torch.equal(values.nan_to_num(9), order.values[:, :k].nan_to_num(9))
