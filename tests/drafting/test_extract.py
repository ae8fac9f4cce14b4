"""Hidden states on disk: one row per token, each with the bits of the target alone (CASE 46)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from drafting.steps import BLOCK, Bench
from drafting.world import cache_bytes, engine
from drumline.core.errors import ConfigError, EngineError
from drumline.core.params import SamplingParams
from drumline.drafting.extract import HiddenStatesWriter
from drumline.engine.llm import LLM
from drumline.ops.base import PagedBatch
from drumline.ops.reference_attention import ReferenceKV
from drumline.worker.worker import Worker

TinyPath = Callable[..., Path]
TAPS = [0, 2, 3]
SHORT = [7, 90, 15, 33, 64]
LONG = [21, 8, 101, 56, 12, 77, 40, 31, 9, 70, 66, 18, 23, 5, 6, 99, 44]


@pytest.fixture(scope="module")
def target(tiny_path: TinyPath) -> Path:
    return tiny_path(arch="llama", seed=3, layers=3)


def extract(folder: Path, **keys: Any) -> dict[str, Any]:
    method = {"method": "extract_hidden_states", "hidden_states_dir": str(folder)}
    return {**method, "hidden_states_taps": TAPS, **keys}


def states(worker: Worker, tokens: list[int]) -> dict[int, Tensor]:
    """The target's taps over a whole sequence at once, in a cache of its own like the worker's."""
    model, ops, spec = worker.model, worker.ops, worker.model.kv_spec
    blocks = -(-len(tokens) // BLOCK)
    assert isinstance(worker.cache, ReferenceKV)
    numbers = str(worker.cache.values.dtype).removeprefix("torch.")
    cache = ops.allocate_kv(spec.layers, blocks, BLOCK, spec.kv_heads, spec.head_dim, numbers)
    at = torch.arange(len(tokens))
    batch = PagedBatch(at, at, (0, len(tokens)), (tuple(range(blocks)),))
    with torch.inference_mode():
        return dict(model.forward(torch.tensor(tokens), batch, cache, tuple(TAPS)).taps)


def read(path: Path) -> tuple[list[int], dict[int, Tensor], dict[str, str]]:
    with safe_open(path, framework="pt") as file:
        ids = file.get_tensor("token_ids").tolist()
        taps = {tap: file.get_tensor(f"tap_{tap}") for tap in TAPS}
        assert set(file.keys()) == {"token_ids", *(f"tap_{tap}" for tap in TAPS)}
        return ids, taps, file.metadata()


def assert_whole(path: Path, sequence: list[int], worker: Worker) -> None:
    """Every token but the one sampled last has its row, with the baseline's bits."""
    ids, taps, _ = read(path)
    assert ids == sequence[:-1]
    for tap, expected in states(worker, sequence[:-1]).items():
        assert taps[tap].dtype == torch.float32
        assert torch.equal(taps[tap], expected), tap


def generate(llm: LLM, prompts: list[list[int]], count: int = 12, **params: Any) -> list[list[int]]:
    settings = SamplingParams(
        **{"temperature": 0.0, "max_tokens": count, "ignore_eos": True} | params
    )
    outputs = llm.generate(prompts, settings)
    pairs = zip(prompts, outputs, strict=True)
    return [[*prompt, *output.outputs[0].token_ids] for prompt, output in pairs]


@pytest.mark.parametrize("params", [{}, {"temperature": 0.9, "seed": 4}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("chunk", [256, 5])
def test_rows_are_those_of_the_target_alone(
    target: Path, tmp_path: Path, chunk: int, params: dict[str, Any]
) -> None:
    """Two requests of different length beside each other, whole prompts and chunks."""
    llm = engine(target, extract(tmp_path), max_num_batched_tokens=chunk, max_num_seqs=2)
    found = generate(llm, [SHORT, LONG], **params)
    assert found == generate(engine(target), [SHORT, LONG], **params)
    for number, sequence in enumerate(found):
        assert_whole(tmp_path / f"{number:08}.safetensors", sequence, llm.core.worker)
    assert len(list(tmp_path.iterdir())) == 2
    assert llm.core.speculation.drafted == 0


def test_a_preempted_request_has_one_row_per_token(target: Path, tmp_path: Path) -> None:
    keys = extract(tmp_path)
    llm = engine(
        target,
        keys,
        max_num_batched_tokens=8,
        max_num_seqs=3,
        kv_cache_memory_bytes=cache_bytes(target, keys, 64),
    )
    found = generate(llm, [LONG, LONG[::-1], LONG[3:]], count=30)
    assert llm.core.counters.preemptions > 0
    for number, sequence in enumerate(found):
        assert_whole(tmp_path / f"{number:08}.safetensors", sequence, llm.core.worker)


def test_a_shared_prefix_is_computed_and_the_start_up_table_says_so(
    target: Path, tmp_path: Path
) -> None:
    llm = engine(target, extract(tmp_path), enable_prefix_caching=True)
    (adjusted,) = [a for a in llm.core.resolved.adjustments if a.field == "enable_prefix_caching"]
    assert (adjusted.asked, adjusted.used) == (True, False)
    assert "a row for every position" in adjusted.reason
    found = generate(llm, [LONG]) + generate(llm, [LONG])
    for number, sequence in enumerate(found):
        assert_whole(tmp_path / f"{number:08}.safetensors", sequence, llm.core.worker)


def test_strict_config_wants_prefix_caching_off(target: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="enable_prefix_caching"):
        engine(target, extract(tmp_path), strict_config=True)
    engine(target, extract(tmp_path), strict_config=True, enable_prefix_caching=False)


def test_a_hole_is_an_error_and_no_file(target: Path, tmp_path: Path) -> None:
    bench = Bench(target, extract(tmp_path))
    first = bench.add(LONG)
    bench.step([first])
    second = bench.add([*LONG[:8], 3])
    bench.adopt(second, first, 8 // BLOCK)
    with pytest.raises(EngineError, match="starts at position 8, .* known up to 0 only"):
        bench.step([second])


def test_a_stop_inside_the_text_leaves_the_rows_before_it(target: Path, tmp_path: Path) -> None:
    (free,) = generate(engine(target), [SHORT])
    llm = engine(target, extract(tmp_path))
    (found,) = generate(llm, [SHORT], stop_token_ids=(free[9],))
    assert found == free[: free.index(free[9], len(SHORT)) + 1]
    assert_whole(tmp_path / "00000000.safetensors", found, llm.core.worker)


def test_metadata_says_whose_rows_they_are(target: Path, tmp_path: Path) -> None:
    llm = engine(target, extract(tmp_path))
    params = SamplingParams(n=2, temperature=0.9, seed=5, max_tokens=4, ignore_eos=True)
    llm.generate([SHORT], params)
    metadata = [read(path)[2] for path in sorted(tmp_path.iterdir())]
    assert [entry["sample_index"] for entry in metadata] == ["0", "1"]
    assert {entry["seed"] for entry in metadata} == {"5"}
    assert {entry["prompt_tokens"] for entry in metadata} == {"5"}


def test_the_last_tap_is_the_default(target: Path, tmp_path: Path) -> None:
    keys = extract(tmp_path)
    del keys["hidden_states_taps"]
    drafter = Bench(target, keys).drafter
    assert isinstance(drafter, HiddenStatesWriter)
    assert drafter.taps == (3,)
    assert drafter.traits.passes(1) == drafter.traits.passes(0) == 0


def test_close_writes_what_still_runs(target: Path, tmp_path: Path) -> None:
    bench = Bench(target, extract(tmp_path))
    sequence = bench.add(SHORT)
    bench.run([sequence], 3, 0)
    bench.worker.close()
    assert_whole(tmp_path / "00000000.safetensors", sequence.tokens, bench.worker)


@pytest.mark.parametrize(
    ("taps", "message"), [([4], r"tap 4 is outside 0\.\.3"), ([1, 1], "names a tap twice")]
)
def test_bad_taps_are_named(target: Path, tmp_path: Path, taps: list[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Bench(target, extract(tmp_path, hidden_states_taps=taps))


def test_a_folder_that_cannot_be_is_named(target: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"hidden_states_dir=.*file.*: no folder"):
        Bench(target, extract(tmp_path / "file" / "below"))


def test_a_file_that_cannot_be_written_ends_the_next_step(target: Path, tmp_path: Path) -> None:
    folder = tmp_path / "states"
    bench = Bench(target, extract(folder))
    sequence, other = bench.add(SHORT), bench.add(LONG)
    bench.step([sequence, other])
    folder.rmdir()
    bench.worker.end(sequence.request.number)
    with pytest.raises(EngineError, match="hidden states of request 0 cannot be written"):
        bench.step([other])


def test_an_earlier_runs_files_are_not_overwritten(target: Path, tmp_path: Path) -> None:
    (tmp_path / "00000000.safetensors").write_bytes(b"precious")
    with pytest.raises(ConfigError, match=r"hidden_states_dir=.*earlier run"):
        Bench(target, extract(tmp_path))
    assert (tmp_path / "00000000.safetensors").read_bytes() == b"precious"
