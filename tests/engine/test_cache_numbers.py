"""Promise P1 with keys and values stored in fewer bits: every cache is a world of its own, in
which the same request gives the same bits in any company; and what int8 costs on a real model."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.core.cpu import native_available
from drumline.core.params import SamplingParams
from drumline.engine.llm import LLM
from drumline.models.checkpoint import open_checkpoint
from drumline.models.registry import model_module
from drumline.ops import load_ops
from drumline.ops.base import PagedBatch

TinyPath = Callable[..., Path]
DRAW = random.Random(5)
SHARED = tuple(DRAW.randrange(5, 300) for _ in range(24))
PROMPTS = [
    SHARED[: 8 * (i % 3)] + tuple(DRAW.randrange(5, 300) for _ in range(9)) for i in range(8)
]
PARAMS = [
    SamplingParams(max_tokens=24, ignore_eos=True, logprobs=1, temperature=0.8 * (i % 2), seed=i)
    for i in range(8)
]
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}


def outputs(path: Path, together: bool, **settings: Any) -> list[Any]:
    settings = {"max_model_len": 96, "block_size": 4, "threads": 1, **settings}
    llm = LLM(model=str(path), **settings)
    if together:
        found = llm.generate(list(PROMPTS), PARAMS)
    else:
        found = [llm.generate([p], q)[0] for p, q in zip(PROMPTS, PARAMS, strict=True)]
    return [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in found]


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize("dtype", ["int8", "float16"])
def test_same_bits_in_any_company(tiny_path: TinyPath, backend: str, dtype: str) -> None:
    if backend == "native" and not native_available():
        pytest.skip("the native module is not built")
    path = tiny_path(arch="llama", seed=3, vocab=300, hidden=48, layers=2, heads=6, kv_heads=2)
    settings: dict[str, Any] = {"ops_backend": backend, "kv_cache_dtype": dtype}
    alone = outputs(path, False, enable_prefix_caching=False, **settings)
    assert outputs(path, True, max_num_batched_tokens=11, max_num_seqs=8, **settings) == alone
    assert outputs(path, True, threads=2, speculative_config=NGRAM, **settings) == alone
    exact = outputs(path, True, ops_backend=backend, kv_cache_dtype="float32")
    assert exact != alone, "the cache's numbers were not used"


def test_int8_on_a_real_model(smollm2_path: Path) -> None:
    """400 tokens of English: 0.96 of the greedy tokens and a mean divergence under 2e-3, at little
    more than a quarter of the bytes (measured on 1,024 tokens: 0.975, 7.7e-4)."""
    if not native_available():
        pytest.skip("the native module is not built")
    checkpoint = open_checkpoint(smollm2_path)
    text = Path(__file__).resolve().parents[2].joinpath("README.md").read_text(encoding="utf-8")
    ids = checkpoint.tokenizer().encode(text)[:400]
    ops = load_ops("native", "cpu")
    found = {}
    with torch.inference_mode():
        module = model_module(checkpoint.config.model_type)
        model = module.Model(checkpoint.config, checkpoint.tensors, ops, 512)
        spec = model.kv_spec
        for dtype in ("float32", "int8"):
            cache = ops.allocate_kv(spec.layers, 25, 16, spec.kv_heads, spec.head_dim, dtype)
            places = torch.arange(400)
            batch = PagedBatch(places, places, (0, 400), (tuple(range(25)),))
            hidden = model.forward(torch.tensor(ids), batch, cache).hidden
            found[dtype] = torch.log_softmax(model.compute_logits(hidden), dim=1), cache.nbytes
    (exact, wide), (coarse, narrow) = found["float32"], found["int8"]
    assert narrow == wide * (64 + 4) / (4 * 64)
    agreed = (exact.argmax(1) == coarse.argmax(1)).float().mean().item()
    divergence = (exact.exp() * (exact - coarse)).sum(1).mean().item()
    assert agreed >= 0.96, agreed
    assert 0 < divergence < 2e-3, divergence
