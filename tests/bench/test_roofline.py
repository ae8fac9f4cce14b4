"""What a pass must read and multiply, counted by hand; the measurement itself runs once."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from drumline.bench.probe import Probe
from drumline.bench.roofline import measure_roofline, pass_work
from drumline.core.errors import ConfigError, UsageError
from drumline.engine.llm import LLM
from drumline.models.checkpoint import open_checkpoint

NATIVE = pytest.mark.skipif(
    find_spec("drumline._native") is None, reason="the native module was not built"
)


def open_llm(path: Path, **settings: object) -> LLM:
    return LLM(
        model=str(path), max_model_len=64, threads=1, enable_prefix_caching=False, **settings
    )


def test_a_dense_pass_reads_every_weight_once_and_the_head_is_the_table(
    tiny_path: Callable[..., Path],
) -> None:
    path = tiny_path("llama", 3, vocab=96, hidden=32, layers=2)
    llm = open_llm(path, kv_cache_dtype="float16")
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    work = pass_work(llm.core, checkpoint.tensors, rows=3, context=20)
    hidden, width = config.hidden_size, config.intermediate_size
    heads = config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    layer = hidden * (heads + 2 * kv) + heads * hidden + 3 * hidden * width
    matrices = config.num_hidden_layers * layer + config.vocab_size * hidden
    assert work.macs == 3 * matrices + 2 * 3 * 20 * heads * config.num_hidden_layers
    norms = (2 * config.num_hidden_layers + 1) * hidden
    stored = {weight.kind: weight.nbytes for weight in checkpoint.tensors.values()}
    assert set(stored) == {"F32"}
    assert work.weight_bytes == 4 * (matrices + norms)
    assert work.kv_bytes == 3 * 20 * 2 * config.num_hidden_layers * kv * 2
    assert not work.quantised


def test_of_experts_as_many_are_read_as_rows_can_choose(tiny_path: Callable[..., Path]) -> None:
    path = tiny_path("qwen3_moe", 3, vocab=96)
    llm = open_llm(path)
    checkpoint = open_checkpoint(path)
    experts = checkpoint.config.experts
    assert experts is not None
    own = {n: w for n, w in checkpoint.tensors.items() if ".experts." in n}
    all_bytes = sum(weight.nbytes for weight in own.values())
    one = pass_work(llm.core, checkpoint.tensors, 1, 8)
    many = pass_work(llm.core, checkpoint.tensors, 64, 8)
    share = experts.per_token / experts.count
    assert 0 < share < 1
    assert many.weight_bytes - one.weight_bytes == pytest.approx((1 - share) * all_bytes, abs=2)


@NATIVE
def test_every_size_is_measured_beside_the_limits(tiny_path: Callable[..., Path]) -> None:
    path = tiny_path("llama", 3, vocab=96, hidden=32, layers=2)
    llm = open_llm(path, ops_backend="native", max_num_seqs=2)
    checkpoint = open_checkpoint(path)
    limits, lines = measure_roofline(llm, checkpoint.tensors, [1, 2, 4], 8, 1)
    assert limits.bytes_per_second > 1e8
    assert limits.signal_seconds is None  # one thread has nobody to tell
    assert [line.work.rows for line in lines] == [1, 2, 4]
    for line in lines:
        assert 0 < line.limit_seconds < line.pass_seconds
        assert line.limit_seconds == max(line.memory_seconds, line.arithmetic_seconds)
    assert [line.step_seconds is None for line in lines] == [False, False, True]
    for line in lines[:2]:
        assert line.step_seconds is not None
        assert line.outside is not None
        assert 0 < line.outside < 1
    prompt = [1, 2, 3]
    assert llm.generate([prompt])[0].outputs[0].token_ids  # the timed passes are gone again
    with pytest.raises(ConfigError, match="the cache holds"):
        measure_roofline(llm, checkpoint.tensors, [4000], 60, 1)


def test_reference_operations_have_no_roofline(tiny_path: Callable[..., Path]) -> None:
    path = tiny_path("llama", 3, vocab=96, hidden=32, layers=2)
    llm = open_llm(path, ops_backend="reference")
    with pytest.raises(UsageError, match="native"):
        measure_roofline(llm, open_checkpoint(path).tensors, [1], 8, 1)


@NATIVE
def test_two_threads_are_asked_how_soon_they_see_what_the_other_wrote() -> None:
    limits = Probe(2, "portable").measure(repeats=1)
    assert limits.signal_seconds is not None
    assert limits.signal_seconds > 0
