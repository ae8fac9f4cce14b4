"""What is cut, and where: arithmetic, views of weights, whole blocks of quantized ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drumline.config.mesh import Mesh
from drumline.core.errors import ConfigError
from drumline.models.checkpoint import open_checkpoint
from drumline.models.sharding import ShardedTensors, Share, shard_config
from drumline.ops.quant import BLOCK_LAYOUTS
from drumline.ops.shard_weights import ColumnShard, VocabularyShard, columns, rows
from drumline.ops.weights import WeightTensor
from drumline.parallel.shards import (
    expert_split,
    experts_max,
    head_split,
    split,
    vocabulary_split,
    vocabulary_width,
    width_split,
)


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 6))
def test_parts_are_all_and_even(units: int, size: int, unit: int) -> None:
    parts = [split(units * unit, size, rank, unit) for rank in range(size)]
    assert [at for part in parts for at in part] == list(range(units * unit))
    widths = [len(part) // unit for part in parts]
    assert max(widths) - min(widths) <= 1
    assert all(len(part) % unit == 0 for part in parts)


@given(st.integers(1, 64), st.integers(1, 4), st.integers(1, 4))
def test_experts_lie_where_the_mesh_says(count: int, dp: int, tp: int) -> None:
    mesh = Mesh(dp=dp, tp=tp, expert_parallel=True)
    for rank in range(mesh.size):
        assert expert_split(count, mesh.size, rank) == mesh.experts(rank, count)
        assert len(mesh.experts(rank, count)) <= experts_max(count, mesh.size)


def test_smollm2_is_cut_by_groups() -> None:
    assert [len(head_split(9, 3, 2, rank)) for rank in range(2)] == [3, 6]
    assert [len(head_split(9, 3, 3, rank)) for rank in range(3)] == [3, 3, 3]
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=4: .*9 heads lie in 3 groups; "
                                          r"allowed: 1, 2, 3"):  # fmt: skip
        head_split(9, 3, 4, 0)


@given(st.integers(1, 2000), st.integers(1, 8))
def test_a_vocabulary_is_cut_in_equal_parts(vocab: int, size: int) -> None:
    try:
        width = vocabulary_width(vocab, size)
    except ConfigError:
        assert vocab < size * size
        return
    parts = [vocabulary_split(vocab, size, rank) for rank in range(size)]
    assert [at for part in parts for at in part] == list(range(vocab))
    assert {len(part) for part in parts[:-1]} <= {width}
    assert 0 < len(parts[-1]) <= width


def test_widths_are_cut_between_blocks_where_there_are_enough() -> None:
    assert [len(width_split(1536, 2, rank, 256)) for rank in range(2)] == [768, 768]
    assert [len(width_split(160, 2, rank, 32)) for rank in range(2)] == [64, 96]
    assert [len(width_split(64, 3, rank, 32)) for rank in range(3)] == [21, 21, 22]
    with pytest.raises(ConfigError, match="a width of 3 has not so many parts"):
        width_split(3, 4, 0, 1)


# ---------------------------------------------------------------- weights


def quantized(kind: str, outputs: int, width: int) -> WeightTensor:
    """Random blocks whose scales are finite."""
    layout = BLOCK_LAYOUTS[kind]
    draw = np.random.default_rng(3)
    shape = (outputs * width // layout.elements, layout.nbytes)
    data = torch.from_numpy(draw.integers(0, 60, shape, dtype=np.uint8))
    return WeightTensor("w", (outputs, width), kind, data.reshape(outputs, -1))


@pytest.mark.parametrize("kind", list(BLOCK_LAYOUTS))
def test_blocks_are_cut_between_or_not_at_all(kind: str) -> None:
    block = BLOCK_LAYOUTS[kind].elements
    weight = quantized(kind, 6, 4 * block)
    part = columns(weight, range(block, 3 * block))
    assert (type(part), part.kind, part.shape) == (ColumnShard, kind, (6, 2 * block))
    assert part.data.untyped_storage().data_ptr() == weight.data.untyped_storage().data_ptr()
    assert torch.equal(part.to_float(), weight.to_float()[:, block : 3 * block])
    cut = columns(weight, range(block // 2, 2 * block))  # through a block: the same numbers
    assert cut.kind == "F32"
    assert torch.equal(cut.to_float(), weight.to_float()[:, block // 2 : 2 * block])
    assert torch.equal(rows(weight, range(2, 5)).to_float(), weight.to_float()[2:5])


def test_shares_of_a_checkpoint_are_views_and_make_the_whole(
    tiny_path: Callable[..., Path],
) -> None:
    path = tiny_path(arch="llama", seed=3, heads=9, kv_heads=3, hidden=72, attention_bias=True)
    checkpoint = open_checkpoint(path)
    shares = [
        ShardedTensors(checkpoint.config, checkpoint.tensors, Share(rank, 2)) for rank in range(2)
    ]
    layer = "model.layers.0"
    for name, axis in (
        (f"{layer}.self_attn.q_proj.weight", 0),
        (f"{layer}.self_attn.v_proj.bias", 0),
        (f"{layer}.self_attn.o_proj.weight", 1),
        (f"{layer}.mlp.up_proj.weight", 0),
        (f"{layer}.mlp.down_proj.weight", 1),
        ("model.embed_tokens.weight", 0),
        ("lm_head.weight", 0),
    ):
        whole = checkpoint.tensors[name]
        parts = [share[name] for share in shares]
        assert torch.equal(torch.cat([part.data for part in parts], axis), whole.data), name
        home = whole.data.untyped_storage().data_ptr()
        assert all(part.data.untyped_storage().data_ptr() == home for part in parts), name
    assert isinstance(shares[1]["lm_head.weight"], VocabularyShard)
    bias = f"{layer}.self_attn.o_proj.bias"
    assert torch.equal(shares[0][bias].data, checkpoint.tensors[bias].data)
    assert not shares[1][bias].data.any()  # added once
    norm = f"{layer}.input_layernorm.weight"
    assert shares[1][norm] is checkpoint.tensors[norm]
    config = shard_config(checkpoint.config, checkpoint.tensors, Share(1, 2))
    assert (config.num_attention_heads, config.num_key_value_heads) == (6, 2)


def test_spread_experts_are_whole(tiny_path: Callable[..., Path]) -> None:
    checkpoint = open_checkpoint(tiny_path(arch="deepseek_v3", seed=3))
    share = Share(1, 2, spread_experts=True)
    tensors = ShardedTensors(checkpoint.config, checkpoint.tensors, share)
    for part in ("experts.0.down_proj", "shared_experts.up_proj"):
        name = f"model.layers.1.mlp.{part}.weight"
        assert tensors[name] is checkpoint.tensors[name]
    assert tensors["model.layers.0.mlp.up_proj.weight"].shape == (32, 32)
    local = shard_config(checkpoint.config, checkpoint.tensors, share)
    assert local.experts == checkpoint.config.experts


def test_one_rank_has_it_all(tiny_path: Callable[..., Path]) -> None:
    checkpoint = open_checkpoint(tiny_path(arch="llama", seed=3))
    assert shard_config(checkpoint.config, checkpoint.tensors, Share()) is checkpoint.config
    tensors = ShardedTensors(checkpoint.config, checkpoint.tensors, Share())
    assert dict(tensors) == dict(checkpoint.tensors)
