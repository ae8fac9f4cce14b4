"""``--quantization``: the same weights as a file that was quantized before, on every backend."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch

from drumline import LLM, ConfigError, EngineConfig, SamplingParams
from drumline.core.cpu import native_available
from drumline.engine.core import EngineCore
from drumline.models.checkpoint import open_checkpoint
from drumline.models.layers import EMBEDDING, FINAL_NORM
from drumline.models.tiny import write_tiny

KINDS = ("q8_0", "q4_1", "q4_0")
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
BACKENDS = ("reference", "native") if native_available() else ("reference",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bf16")
    return write_tiny("llama", path, seed=3, hidden=64, intermediate=96, dtype="bfloat16")


@pytest.mark.parametrize("kind", KINDS)
def test_matrices_are_what_gguf_makes_of_them(folder: Path, kind: str) -> None:
    plain, quantized = open_checkpoint(folder), open_checkpoint(folder, kind)
    assert list(quantized.tensors) == list(plain.tensors)
    assert quantized.digest == plain.digest
    kinds = set()
    for name, weight in plain.tensors.items():
        ours = quantized.tensors[name]
        kinds.add(ours.kind)
        wanted = "Q8_0" if name in (EMBEDDING, "lm_head.weight") else kind.upper()
        if len(weight.shape) == 1:
            assert ours.kind == "BF16"
            assert torch.equal(ours.data, weight.data)
            continue
        theirs = gguf.quants.quantize(weight.to_float().numpy(), gguf.GGMLQuantizationType[wanted])
        assert (ours.kind, ours.shape) == (wanted, weight.shape)
        assert ours.data.numpy().tobytes() == theirs.tobytes()
    assert kinds == {kind.upper(), "Q8_0", "BF16"}
    assert quantized.weight_bytes == sum(one.nbytes for one in quantized.tensors.values())
    assert quantized.weight_bytes < 0.8 * plain.weight_bytes


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_runs_them(folder: Path, kind: str, backend: str) -> None:
    """Asked for, told at start-up, and what the worker holds."""
    llm = LLM(str(folder), quantization=kind, ops_backend=backend, threads=1)
    rows = {name: (value, reason) for name, value, reason in llm.core.facts.startup_rows}
    assert rows["quantization"] == (kind, "asked (argument)")
    assert isinstance(llm.core, EngineCore)
    tensors = open_checkpoint(folder, kind).tensors
    model, ops = llm.core.worker.model, llm.core.worker.ops
    ids = torch.arange(model.embedding.out_features)
    assert torch.equal(ops.embedding(ids, model.embedding), tensors[EMBEDDING].to_float())
    assert torch.equal(model.final_norm, tensors[FINAL_NORM].to_float())
    output = llm.generate("the rain in", GREEDY)[0].outputs[0]
    assert len(output.token_ids) == 12


@pytest.mark.skipif(not native_available(), reason="the native module is not built")
@pytest.mark.parametrize("kind", KINDS)
def test_both_backends_say_the_same(folder: Path, kind: str) -> None:
    said = [
        LLM(str(folder), quantization=kind, ops_backend=backend, threads=1)
        .generate("the rain in", GREEDY)[0]
        .outputs[0]
        .token_ids
        for backend in BACKENDS
    ]
    assert said[0] == said[1]


def test_routers_stay_what_they_are(tiny_path: Callable[..., Path]) -> None:
    tensors = open_checkpoint(tiny_path("qwen3_moe"), "q4_0").tensors
    kinds = {name: weight.kind for name, weight in tensors.items()}
    assert kinds["model.layers.0.mlp.gate.weight"] == "F32"
    assert kinds["model.layers.1.mlp.experts.0.up_proj.weight"] == "Q4_0"


def test_a_matrix_of_odd_rows_stays_what_it_is(tmp_path: Path) -> None:
    write_tiny("llama", tmp_path, seed=1, hidden=64, intermediate=72)
    tensors = open_checkpoint(tmp_path, "q8_0").tensors
    assert tensors["model.layers.0.mlp.down_proj.weight"].kind == "F32"
    assert tensors["model.layers.0.mlp.up_proj.weight"].kind == "Q8_0"


def test_refusals(tmp_path: Path, smollm2_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"quantization.*q8_0.*are Q4_1 already"):
        open_checkpoint(smollm2_path, "q8_0")
    same = open_checkpoint(smollm2_path, "q4_1").tensors
    assert {weight.kind for weight in same.values()} == {"Q4_1", "Q8_0", "F32"}
    write_tiny("llama", tmp_path, seed=1, hidden=40, heads=5, kv_heads=5, intermediate=72)
    with pytest.raises(ConfigError, match="no weight of the checkpoint has rows of whole blocks"):
        open_checkpoint(tmp_path, "q4_0")
    with pytest.raises(ConfigError, match="quantization"):
        EngineConfig.from_kwargs(quantization="q2_k")
