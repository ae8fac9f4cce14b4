"""`resolve`: pure, with a reason for everything, and refusals that name field and value."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.config import (
    Adjustment,
    EngineConfig,
    MachineFacts,
    ModelFacts,
    Resolved,
    config_digest,
    resolve,
    startup_table,
)
from drumline.config.parts import FIELDS
from drumline.core.errors import ConfigError

GIB = 2**30


def model(**changes: Any) -> ModelFacts:
    facts: dict[str, Any] = {
        "model_type": "llama",
        "max_position_embeddings": 2048,
        "vocab_size": 49152,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "weight_bytes": GIB // 2,
    }
    return ModelFacts(**{**facts, **changes})


def machine(**changes: Any) -> MachineFacts:
    facts: dict[str, Any] = {
        "available_cores": 4,
        "physical_cores": 2,
        "free_memory_bytes": 16 * GIB,
        "total_memory_bytes": 32 * GIB,
    }
    return MachineFacts(**{**facts, **changes})


def run(
    facts: ModelFacts | None = None, host: MachineFacts | None = None, /, **asked: Any
) -> Resolved:
    return resolve(EngineConfig.from_kwargs(**asked), facts or model(), host or machine())


def refused(field: str, *args: Any, **asked: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        run(*args, **asked)
    assert caught.value.field == field
    assert "\n" not in str(caught.value)
    return caught.value


def chosen(resolved: Resolved, field: str) -> str:
    (reason,) = [choice.reason for choice in resolved.choices if choice.field == field]
    return reason


# ---------------------------------------------------------------- what is left open


def test_defaults() -> None:
    resolved = run()
    assert resolved.adjustments == ()
    assert resolved.device == "cpu"
    assert resolved.dtype == resolved.kv_cache_dtype == "float32"
    assert resolved.ops_backend == "reference"
    assert resolved.threads == 2
    assert resolved.max_model_len == 2048
    assert resolved.max_num_seqs == 16
    assert resolved.max_num_batched_tokens == 512
    assert resolved.num_kv_blocks == 16 * 2048 // 16
    assert resolved.kv_cache_bytes == resolved.num_kv_blocks * 16 * 2 * 30 * 3 * 64 * 4


def test_nothing_stays_open() -> None:
    """Beyond `resolve` there is no "auto", and None only where it is a value of its own."""
    flat = run().config.flat()
    means_none = {"revision", "quantization", "seed", "chat_template", "speculative_config"}
    means_none |= {"spec_method", "spec_model", "spec_tokens"}
    # Of one machine there is no address; `fleet.nodes` reads those of several.
    means_none |= {"master_addr", "data_parallel_address", "data_parallel_rpc_port"}
    means_none |= {"data_parallel_size_local"}
    assert {name for name, value in flat.items() if value is None} == means_none
    assert {name for name, value in flat.items() if value == "auto"} == {"generation_config"}


def test_every_choice_was_left_open_and_has_a_reason() -> None:
    for choice in run().choices:
        assert choice.reason
        assert FIELDS[choice.field].default in (None, "auto")


def test_what_is_asked_is_used() -> None:
    asked: dict[str, Any] = {
        "max_model_len": 100,
        "block_size": 8,
        "kv_cache_memory_bytes": 64 * 2**20,
        "kv_cache_dtype": "float16",
        "max_num_seqs": 3,
        "max_num_batched_tokens": 7,
        "threads": 1,
        "seed": 5,
        "dtype": "float32",
        "device": "cpu",
        "ops_backend": "reference",
    }
    resolved = run(**asked)
    assert resolved.choices == resolved.adjustments == ()
    assert resolved.config.flat() == EngineConfig.from_kwargs(**asked).flat()
    assert resolved.num_kv_blocks == 64 * 2**20 // (8 * 2 * 30 * 3 * 64 * 2)


# ---------------------------------------------------------------- purity

ASKED = st.fixed_dictionaries(
    {},
    optional={
        "max_model_len": st.integers(2, 5000),
        "block_size": st.sampled_from([1, 4, 16, 64]),
        "kv_cache_memory_bytes": st.integers(1, 2 * GIB),
        "max_num_seqs": st.integers(1, 2000),
        "max_num_batched_tokens": st.integers(1, 4096),
        "enable_chunked_prefill": st.booleans(),
        "threads": st.integers(1, 64),
        "ops_backend": st.sampled_from(["auto", "reference", "native"]),
        "strict_config": st.booleans(),
    },
)
MODELS = st.builds(
    model,
    max_position_embeddings=st.integers(2, 100_000),
    rope_type=st.sampled_from(["default", "linear", "dynamic", "llama3", "yarn"]),
    rope_factor=st.floats(1, 16),
    original_max_position_embeddings=st.none() | st.integers(2, 8192),
    weight_bytes=st.integers(0, 4 * GIB),
)
MACHINES = st.builds(
    machine,
    free_memory_bytes=st.integers(0, 32 * GIB),
    available_cores=st.integers(2, 64),
    native_ops=st.booleans(),
)


@given(ASKED, MODELS, MACHINES)
def test_resolve_is_pure_and_keeps_its_laws(
    asked: dict[str, Any], facts: ModelFacts, host: MachineFacts
) -> None:
    config = EngineConfig.from_kwargs(**asked)
    before = copy.deepcopy((config, facts, host))
    try:
        first = resolve(config, facts, host)
    except ConfigError as error:
        assert "\n" not in str(error)
        with pytest.raises(ConfigError) as again:
            resolve(config, facts, host)
        assert str(again.value) == str(error)
        return
    assert first == resolve(config, facts, host)
    assert (config, facts, host) == before
    # A request of full length always fits the cache, and a prompt the budget of a step.
    assert first.num_kv_blocks * first.block_size >= first.max_model_len >= 2
    assert first.max_model_len <= facts.longest
    if not first.config.scheduler.enable_chunked_prefill:
        assert first.max_num_batched_tokens >= first.max_model_len
    if "kv_cache_memory_bytes" not in asked:
        assert first.kv_cache_bytes <= host.free_memory_bytes * 40 // 100
    else:
        assert first.kv_cache_bytes <= asked["kv_cache_memory_bytes"]
    assert 1 <= first.threads <= host.available_cores
    if first.config.runtime.strict_config:
        assert first.adjustments == ()
    # What runs can be asked for, and then nothing is left to choose or to adjust.
    again_asked = {name: value for name, value in first.config.flat().items() if value is not None}
    second = resolve(EngineConfig.from_kwargs(**again_asked), facts, host)
    assert second.choices == ()
    assert [note.field for note in second.adjustments] in ([], ["rope_scaling"])
    assert config_digest(second) == config_digest(first)
    assert pickle.loads(pickle.dumps(first)) == first


# ---------------------------------------------------------------- length


def test_a_length_beyond_the_checkpoint() -> None:
    error = refused("max_model_len", max_model_len=2049)
    assert error.value == 2049
    assert "at most 2048 tokens" in error.problem


@pytest.mark.parametrize(
    ("changes", "longest", "taken"),
    [
        ({}, 2048, 2048),
        ({"rope_type": "linear", "rope_factor": 2.0}, 4096, 4096),
        ({"rope_type": "dynamic", "rope_factor": 2.0}, 4096, 2048),
        ({"rope_type": "llama3", "rope_factor": 8.0}, 2048, 2048),
        (
            {
                "rope_type": "yarn",
                "rope_factor": 4.0,
                "original_max_position_embeddings": 512,
            },
            2048,
            2048,
        ),
        ({"rope_type": "yarn", "rope_factor": 4.0}, 8192, 8192),
    ],
)
def test_rope_scaling_stretches_the_range(
    changes: dict[str, Any], longest: int, taken: int
) -> None:
    facts = model(**changes)
    assert facts.longest == longest
    assert run(facts).max_model_len == taken
    assert run(facts, max_model_len=longest).max_model_len == longest
    refused("max_model_len", facts, max_model_len=longest + 1)


def test_dynamic_rope_is_an_adjustment_only_beyond_the_original_length() -> None:
    facts = model(rope_type="dynamic", rope_factor=4.0)
    assert run(facts, max_model_len=2048).adjustments == ()
    (note,) = run(facts, max_model_len=4096).adjustments
    assert note.field == "rope_scaling"
    assert "4096" in note.used
    error = refused("strict_config", facts, max_model_len=4096, strict_config=True)
    assert "rope_scaling" in error.problem


# ---------------------------------------------------------------- memory


def test_an_open_length_is_cut_to_what_the_memory_holds() -> None:
    resolved = run(None, machine(free_memory_bytes=GIB // 2 + 100 * 2**20))
    assert resolved.max_model_len < 2048
    assert "the checkpoint covers 2048" in chosen(resolved, "max_model_len")
    assert resolved.num_kv_blocks * 16 == resolved.max_model_len


def test_an_asked_length_that_does_not_fit_is_refused() -> None:
    host = machine(free_memory_bytes=GIB // 2 + 100 * 2**20)
    error = refused("max_model_len", None, host, max_model_len=2048)
    assert "40%" in error.problem


def test_an_asked_cache_that_is_too_small_is_refused() -> None:
    error = refused("kv_cache_memory_bytes", kv_cache_memory_bytes=1000)
    assert error.value == 1000
    error = refused("kv_cache_memory_bytes", kv_cache_memory_bytes="10M", max_model_len=2048)
    assert "one request of 2048 needs" in error.problem


def test_the_share_of_memory() -> None:
    host = machine(free_memory_bytes=GIB // 2 + GIB)
    resolved = run(None, host)
    assert 0.39 * GIB < resolved.kv_cache_bytes <= 0.4 * GIB
    assert "40% of the free 1.0 GiB" in chosen(resolved, "kv_cache_memory_bytes")
    assert run(None, host, kv_cache_memory_bytes=GIB).kv_cache_bytes > 0.9 * GIB


# ---------------------------------------------------------------- steps


def test_whole_prompts_need_room_in_a_step() -> None:
    assert run(enable_chunked_prefill=False).max_num_batched_tokens == 2048
    error = refused(
        "max_num_batched_tokens", enable_chunked_prefill=False, max_num_batched_tokens=100
    )
    assert "max_model_len=2048" in error.problem


def test_many_sequences_widen_an_open_budget() -> None:
    assert run(max_num_seqs=1000).max_num_batched_tokens == 1000
    assert run(max_num_batched_tokens=1).max_num_batched_tokens == 1


# ---------------------------------------------------------------- adjustments and refusals


def test_native_operations_that_are_not_there() -> None:
    assert run(ops_backend="native").adjustments == (
        Adjustment("ops_backend", "native", "reference", "the native module was not built"),
    )
    refused("strict_config", ops_backend="native", strict_config=True)
    assert run(strict_config=True).adjustments == ()
    native = machine(native_ops=True)
    assert run(None, native).ops_backend == "native"
    assert run(None, native, ops_backend="native", strict_config=True).ops_backend == "native"
    assert run(None, native, ops_backend="reference").ops_backend == "reference"


@pytest.mark.parametrize(
    ("asked", "stored"),
    [
        ({}, "float16"),
        ({"ops_backend": "native"}, "float16"),
        ({"ops_backend": "reference"}, "float32"),
        ({"dtype": "float32"}, "float32"),
        ({"kv_cache_dtype": "float32"}, "float32"),
        ({"kv_cache_dtype": "int8"}, "int8"),
    ],
)
def test_keys_and_values_are_halves_beside_native_operations(
    asked: dict[str, Any], stored: str
) -> None:
    """Unless numbers are asked for; what one token takes goes with it."""
    native = machine(native_ops=True)
    resolved = run(None, native, **asked)
    assert resolved.kv_cache_dtype == resolved.config.cache.kv_cache_dtype == stored
    size = {"float16": 2, "float32": 4}
    if stored in size:
        assert (
            resolved.kv_cache_bytes == resolved.num_kv_blocks * 16 * 2 * 30 * 3 * 64 * size[stored]
        )
    assert run(None, machine(native_ops=False), **asked).kv_cache_dtype == (
        asked.get("kv_cache_dtype", "float32")
    )


def test_more_threads_than_processors() -> None:
    resolved = run(threads=5)
    assert resolved.threads == 4
    assert [note.field for note in resolved.adjustments] == ["threads"]
    assert run(threads=4).adjustments == ()


# ---------------------------------------------------------------- table and digest


def test_the_table_shows_every_engine_field_and_no_secret() -> None:
    resolved = run(ops_backend="native", api_key="sesame", seed=3)
    rows = startup_table(resolved)
    names = [name for name, _, _ in rows]
    assert len(names) == len(set(names))
    expected = {name for name, field in FIELDS.items() if field.part != "server"}
    expected -= {"spec_method", "spec_model", "spec_tokens"}
    assert expected | {"kv_blocks", "weights", "processor"} == set(names)
    reasons = {name: reason for name, _, reason in rows}
    assert reasons["ops_backend"].startswith("adjusted from native")
    assert reasons["seed"] == "asked (argument)"
    assert reasons["block_size"] == "default"
    assert "sesame" not in str(rows)


def test_an_adjustment_of_the_checkpoint_has_its_own_line() -> None:
    rows = startup_table(run(model(rope_type="dynamic", rope_factor=4.0), max_model_len=4096))
    assert any(name == "rope_scaling" for name, _, _ in rows)


def test_the_digest_is_stable_and_sees_what_matters() -> None:
    digest = config_digest(run())
    assert len(digest) == 64
    assert digest == config_digest(run())
    for same in ({"threads": 1}, {"port": 9}, {"api_key": "a"}, {"strict_config": True}):
        assert config_digest(run(**same)) == digest
    assert config_digest(run(kv_cache_memory_bytes=2 * GIB)) == digest
    for other in ({"block_size": 8}, {"max_model_len": 64}, {"kv_cache_dtype": "float16"}):
        assert config_digest(run(**other)) != digest
    assert config_digest(run(model(vocab_size=7))) != digest
