"""Keys and values in int8 with a scale per token and head: stored alike everywhere, close to
float32, and bits that are each token's own."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from drumline.config.facts import kv_row_bytes
from drumline.core.cpu import native_available
from drumline.ops import load_ops
from drumline.ops.base import Ops, PagedBatch
from drumline.ops.reference import ReferenceKV

BACKENDS = ["reference", "native"] if native_available() else ["reference"]
KV_HEADS, DIM, SIZE, BLOCKS = 2, 24, 8, 40


@pytest.fixture(scope="module", params=BACKENDS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return load_ops(request.param, "cpu")


def cache(ops: Ops, dtype: str = "int8") -> ReferenceKV:
    made = ops.allocate_kv(2, BLOCKS, SIZE, KV_HEADS, DIM, dtype)
    assert isinstance(made, ReferenceKV)
    return made


def rows(count: int, seed: int, scale: float = 1.0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return scale * torch.randn((count, KV_HEADS, DIM), generator=draw)


def stored(ops: Ops, kv: ReferenceKV, layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values as they are read back: ``[blocks, kv_heads, block_size, head_dim]``."""
    keys = kv.keys[layer].transpose(2, 3) if ops.name == "native" else kv.keys[layer]
    assert kv.key_scales is not None
    assert kv.value_scales is not None
    return (
        keys.float() * kv.key_scales[layer].unsqueeze(-1),
        kv.values[layer].float() * kv.value_scales[layer].unsqueeze(-1),
    )


def test_numbers_and_scales_are_the_formulas(ops: Ops) -> None:
    """scale = largest / 127, q = round half to even, what is no finite number made one."""
    key, value = rows(6, 1, 3.0), rows(6, 2, 1e-3)
    key[0, 0] = 0.0
    key[1, 0, :4] = torch.tensor([127.0, 0.5, 1.5, -2.5])
    key[1, 0, 4:] = 0.0
    value[2, 1, 3] = math.inf
    value[3, 0, 5] = math.nan
    value[4, 1] = 1e-40  # scales lose bits down there
    kv = cache(ops)
    slots = torch.tensor([3, 8, 9, 100, -1, 0])
    ops.write_kv(key, value, kv, 1, slots)
    keys, values = stored(ops, kv, 1)
    untouched = torch.ones(BLOCKS, SIZE, dtype=torch.bool)
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        untouched[slot // SIZE, slot % SIZE] = False
        for read, x in ((keys, key[row]), (values, value[row])):
            x = torch.nan_to_num(x).clamp(-3.4e38, 3.4e38)
            step = x.abs().amax(-1, keepdim=True) / 127
            assert ((read[slot // SIZE, :, slot % SIZE] - x).abs() <= step * 0.5001).all()
    assert keys[1, 0, 0, :4].tolist() == [127.0, 0.0, 2.0, -2.0]
    assert not keys[0, 0, 3].any()
    assert torch.isfinite(values).all()
    for plane in (keys, values):
        assert not plane.transpose(1, 2)[untouched].any()


@pytest.mark.skipif(len(BACKENDS) < 2, reason="the native module is not built")
def test_backends_store_the_same_bits() -> None:
    key, value, slots = rows(50, 3), rows(50, 4), torch.randperm(BLOCKS * SIZE)[:50]
    kept = []
    for name in BACKENDS:
        ops = load_ops(name, "cpu")
        kv = cache(ops)
        ops.write_kv(key, value, kv, 0, slots)
        kept.append((*stored(ops, kv, 0), kv.key_scales, kv.value_scales))
    for one, other in zip(*kept, strict=True):
        assert one is not None
        assert torch.equal(one, other)


def attend(ops: Ops, kv: ReferenceKV, pieces: list[tuple[int, int]], heads: int = 6) -> Tensor:
    """One sequence of 300 tokens in blocks 0, 2, 4, ... and 1, 3, ..., piece after piece."""
    table = (*range(0, BLOCKS, 2), *range(1, BLOCKS, 2))
    query = torch.randn((300, heads, DIM), generator=torch.Generator().manual_seed(9))
    key, value = rows(300, 5), rows(300, 6)
    out = []
    for start, end in pieces:
        positions = torch.arange(start, end)
        slots = torch.tensor([table[p // SIZE] * SIZE + p % SIZE for p in range(start, end)])
        batch = PagedBatch(positions, slots, (0, end - start), (table,))
        part = slice(start, end)
        mixed = ops.attention(query[part], key[part], value[part], kv, 0, batch, DIM**-0.5)
        out.append(mixed)
    return torch.cat(out)


def test_bits_do_not_depend_on_the_pieces(ops: Ops) -> None:
    whole = attend(ops, cache(ops), [(0, 300)])
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for step in (1, 7, 150):
            pieces = [(at, min(at + step, 300)) for at in range(0, 300, step)]
            assert torch.equal(attend(ops, cache(ops), pieces), whole)


def test_close_to_float32(ops: Ops) -> None:
    """Random keys and values lose under 1% of their size."""
    exact = attend(ops, cache(ops, "float32"), [(0, 300)])
    error = (attend(ops, cache(ops), [(0, 300)]) - exact).norm() / exact.norm()
    assert 1e-4 < error < 1e-2


def test_it_takes_the_bytes_that_are_planned_for(ops: Ops) -> None:
    for dtype in ("float32", "float16", "bfloat16", "int8"):
        planned = 2 * 2 * BLOCKS * SIZE * KV_HEADS * kv_row_bytes(DIM, dtype)
        assert cache(ops, dtype).nbytes == planned
