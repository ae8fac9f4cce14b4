"""The speculative config: every key, every contradiction, and what `resolve` makes of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.config import (
    DrafterFacts,
    EngineConfig,
    MachineFacts,
    ModelFacts,
    Resolved,
    SpeculativeConfig,
    config_digest,
    resolve,
    startup_table,
)
from drumline.config.draft_table import clamp_table, read_table
from drumline.config.speculative import KEYS
from drumline.config.speculative_methods import METHODS
from drumline.config.speculative_refused import REFUSED_KEYS, REFUSED_METHODS
from drumline.core.errors import ConfigError
from tidy.source import ROOT

GIB = 2**30
MODEL = ModelFacts(
    model_type="llama",
    max_position_embeddings=2048,
    vocab_size=49152,
    num_hidden_layers=30,
    num_key_value_heads=3,
    head_dim=64,
    weight_bytes=GIB // 2,
)
MACHINE = MachineFacts(
    available_cores=4,
    physical_cores=2,
    free_memory_bytes=16 * GIB,
    total_memory_bytes=32 * GIB,
)
NEEDED = {
    "draft_model": {"model": "small"},
    "eagle": {"model": "head"},
    "eagle3": {"model": "head"},
    "dflash": {"model": "head"},
    "medusa": {"model": "head"},
    "custom_class": {"model": "package.module.Class"},
    "extract_hidden_states": {"hidden_states_dir": "out"},
}


def read(**keys: Any) -> SpeculativeConfig:
    config = EngineConfig.from_kwargs(speculative_config=keys).speculation
    assert config is not None
    return config


def refused(key: str, **keys: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_kwargs(speculative_config=keys)
    assert caught.value.field == f"speculative_config.{key}"
    assert "\n" not in str(caught.value)
    return caught.value


def run(drafter: DrafterFacts | None = None, /, keys: Any = None, **asked: Any) -> Resolved:
    spec = {"method": "ngram", "num_speculative_tokens": 3} if keys is None else keys
    config = EngineConfig.from_kwargs(speculative_config=spec, **asked)
    assert config.speculation is not None
    facts = drafter or DrafterFacts(method=config.speculation.method)
    return resolve(config, MODEL, MACHINE, facts)


# ---------------------------------------------------------------- places


def test_every_place_reads_the_same(tmp_path: Path) -> None:
    keys = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    file = tmp_path / "one.yaml"
    file.write_text(
        "speculative-config: {method: ngram, num_speculative_tokens: 3, prompt_lookup_max: 4}"
    )
    text = json.dumps(keys)
    configs = [
        EngineConfig.from_sources({"speculative_config": text}, {}),
        EngineConfig.from_sources({}, {"DRUMLINE_SPECULATIVE_CONFIG": text}),
        EngineConfig.from_sources({}, {}, file),
        EngineConfig.from_kwargs(speculative_config=keys),
        EngineConfig.from_kwargs(speculative_config=text),
        EngineConfig.from_sources(
            {"speculative_config": '{"prompt_lookup_max":4}', "spec_tokens": "3"},
            {"DRUMLINE_SPEC_METHOD": "ngram"},
        ),
    ]
    expected = SpeculativeConfig(
        method="ngram", num_speculative_tokens=3, prompt_lookup_min=4, prompt_lookup_max=4
    )
    assert [config.speculation for config in configs] == [expected] * len(configs)
    assert EngineConfig().speculation is None


def test_a_shortcut_excludes_its_key() -> None:
    pairs = (("spec_method", "ngram"), ("spec_model", "m"), ("spec_tokens", 2))
    keys = {"method": "draft_model", "model": "small", "num_speculative_tokens": 3}
    for shortcut, value in pairs:
        with pytest.raises(ConfigError, match="say it once") as caught:
            EngineConfig.from_kwargs(speculative_config=keys, **{shortcut: value})
        assert caught.value.field == shortcut
    for shortcut, bad in (("spec_method", "ngramm"), ("spec_tokens", 500)):
        with pytest.raises(ConfigError) as caught:
            EngineConfig.from_kwargs(speculative_config={"model": "x"}, **{shortcut: bad})
        assert caught.value.field == shortcut


def test_a_key_that_stands_twice_is_named() -> None:
    with pytest.raises(ConfigError, match="method stands there twice"):
        EngineConfig.from_sources({"speculative_config": '{"method":"ngram","method":"mtp"}'}, {})


@pytest.mark.parametrize("method", METHODS)
def test_what_is_read_is_written_and_read_again(method: str) -> None:
    config = read(method=method, **NEEDED.get(method, {}))
    assert SpeculativeConfig.from_mapping(config.to_mapping()) == config


# ---------------------------------------------------------------- who drafts


@pytest.mark.parametrize(
    ("keys", "method"),
    [
        ({"model": "small-llama"}, "draft_model"),
        ({"model": "./folder/file.gguf"}, "draft_model"),
        ({"model": "file.gguf"}, "draft_model"),
        ({"model": "yuhuili/EAGLE-LLaMA3-Instruct-8B"}, "eagle"),
        ({"model": "AngelSlim/Qwen3-8B_eagle3"}, "eagle3"),
        ({"model": "ngram"}, "ngram"),
        ({"model": "my_package.drafters.Mine"}, "custom_class"),
        ({"method": "my_package.drafters.Mine"}, "custom_class"),
    ],
)
def test_the_method_is_inferred(keys: dict[str, str], method: str) -> None:
    assert read(**keys).method == method


def test_a_custom_class_by_either_name() -> None:
    by_method = read(method="a.b.C")
    assert by_method.model == "a.b.C"
    assert by_method == read(model="a.b.C") == read(method="custom_class", model="a.b.C")
    assert "a.b.C already" in refused("model", method="a.b.C", model="a.b.D").problem
    assert "dotted path" in refused("model", method="custom_class", model="Mine").problem


def test_nobody_named_is_an_error() -> None:
    for keys in ({}, {"num_speculative_tokens": 3}):
        with pytest.raises(ConfigError, match="needs a method") as caught:
            EngineConfig.from_kwargs(speculative_config=keys)
        assert caught.value.field == "speculative_config"


@pytest.mark.parametrize("method", [*REFUSED_METHODS, "ngramm", "", 7, ["ngram"]])
def test_other_methods_are_refused(method: Any) -> None:
    refused("method", method=method, model="m")


def test_a_misspelt_key_gets_the_nearest_name() -> None:
    problem = refused("num_speculative_token", method="ngram", num_speculative_token=3).problem
    assert "did you mean 'num_speculative_tokens'" in problem


@pytest.mark.parametrize("key", REFUSED_KEYS)
def test_keys_of_others_are_refused_with_a_sentence(key: str) -> None:
    error = refused(key, method="ngram", **{key: 1})
    assert error.problem == f"refused: {REFUSED_KEYS[key]}"
    assert key not in KEYS


@pytest.mark.parametrize("rule", ["synthetic", "typical_acceptance_sampler", "strict", "x", 1])
def test_other_rules_of_acceptance_are_refused(rule: Any) -> None:
    refused("rejection_sample_method", method="ngram", rejection_sample_method=rule)


# ---------------------------------------------------------------- contradictions

TABLE = [[1, 2, 2]]


@pytest.mark.parametrize(
    ("key", "keys"),
    [
        ("num_speculative_tokens", {"num_speculative_tokens": 0}),
        ("num_speculative_tokens", {"num_speculative_tokens": 500}),
        ("num_speculative_tokens", {"num_speculative_tokens": 129}),
        ("num_speculative_tokens", {"num_speculative_tokens": True}),
        ("num_speculative_tokens", {"num_speculative_tokens": 2.0}),
        ("num_speculative_tokens", {"num_speculative_tokens": "3"}),
        ("model", {"model": "small"}),
        ("revision", {"revision": "main"}),
        ("draft_tensor_parallel_size", {"draft_tensor_parallel_size": 1}),
        ("draft_tensor_parallel_size", {"method": "mtp", "draft_tensor_parallel_size": 0}),
        ("model", {"method": "eagle"}),
        ("model", {"method": "draft_model"}),
        ("model", {"method": "custom_class"}),
        ("max_model_len", {"max_model_len": 0}),
        ("prompt_lookup_min", {"prompt_lookup_min": 0}),
        ("prompt_lookup_min", {"prompt_lookup_min": 4, "prompt_lookup_max": 3}),
        ("prompt_lookup_max", {"method": "suffix", "prompt_lookup_max": 3}),
        ("suffix_decoding_max_tree_depth", {"suffix_decoding_max_tree_depth": 9}),
        (
            "suffix_decoding_min_token_prob",
            {"method": "suffix", "suffix_decoding_min_token_prob": 2},
        ),
        (
            "suffix_decoding_max_spec_factor",
            {"method": "suffix", "suffix_decoding_max_spec_factor": -1},
        ),
        ("use_heterogeneous_vocab", {"use_heterogeneous_vocab": True}),
        ("draft_sample_method", {"method": "mtp", "draft_sample_method": "probabilistic"}),
        ("draft_sample_method", {"draft_sample_method": "coupled"}),
        (
            "draft_sample_method",
            {"method": "mtp", "draft_sample_method": "coupled", "rejection_sample_method": "block"},
        ),
        (
            "draft_sample_method",
            {"draft_sample_method": "probabilistic", "rejection_sample_method": "standard"},
        ),
        (
            "draft_sample_method",
            {
                "method": "draft_model",
                "model": "m",
                "use_heterogeneous_vocab": True,
                "rejection_sample_method": "standard",
                "draft_sample_method": "probabilistic",
            },
        ),
        ("draft_length", {"draft_length": "table"}),
        (
            "draft_length",
            {"draft_length": "static", "num_speculative_tokens_per_batch_size": TABLE},
        ),
        (
            "draft_length",
            {"draft_length": "adaptive", "num_speculative_tokens_per_batch_size": TABLE},
        ),
        ("draft_length", {"draft_length": "sometimes"}),
        ("dp_draft_length", {"dp_draft_length": "table"}),
        ("disable_padded_drafter_batch", {"disable_padded_drafter_batch": 1}),
        ("lookup_miss_tokens", {"lookup_miss_tokens": 1}),  # there is no network
        ("lookup_miss_tokens", {"method": "mtp", "lookup_miss_tokens": 1}),  # nor a lookup
        (
            "lookup_miss_tokens",
            {"method": "mtp", "prompt_lookup_min": 2, "lookup_miss_tokens": 0},
        ),
        ("hidden_states_dir", {"hidden_states_dir": "out"}),
        ("hidden_states_dir", {"method": "extract_hidden_states"}),
        ("hidden_states_taps", {"method": "extract_hidden_states", "hidden_states_taps": 3}),
        (
            "num_speculative_tokens",
            {
                "method": "extract_hidden_states",
                "hidden_states_dir": "o",
                "num_speculative_tokens": 2,
            },
        ),
    ],
)
def test_contradictions_name_key_and_value(key: str, keys: dict[str, Any]) -> None:
    error = refused(key, **{"method": "ngram", **keys})
    assert error.value == keys.get(key)
    assert error.problem


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ({"1": 2}, "must be a list"),
        ("[[1,2,3]]", "must be a list"),
        (3, "must be a list"),
        ([], "must not be empty"),
        ([[1, 2]], "three whole numbers"),
        ([[1, 2, 3, 4]], "three whole numbers"),
        ([[1, 2, 3.0]], "three whole numbers"),
        ([[1, True, 3]], "three whole numbers"),
        ([1, 2, 3], "three whole numbers"),
        ([[1, 4, 3], [6, 5, 1]], "starts after it ends"),
        ([[1, 4, 3], [4, 8, 1]], "overlap at 4"),
        ([[2, 4, 3]], "must start at 1"),
        ([[0, 4, 3]], "must start at 1"),
        ([[1, 4, -1]], "negative K"),
    ],
)
def test_tables_that_are_none(table: Any, problem: str) -> None:
    key = "num_speculative_tokens_per_batch_size"
    assert problem in refused(key, method="ngram", **{key: table}).problem


def test_a_table_may_stand_in_any_order() -> None:
    key = "num_speculative_tokens_per_batch_size"
    config = read(method="ngram", **{key: [[8, 9, 0], [1, 4, 3]]})
    assert config.num_speculative_tokens_per_batch_size == ((1, 4, 3), (8, 9, 0))
    assert config.draft_length == "table"


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(-1, 4)), min_size=1, max_size=4
    )
)
def test_a_table_is_read_exactly_when_its_ranges_are_disjoint_from_1(
    entries: list[tuple[int, int, int]],
) -> None:
    covered = [size for start, end, _ in entries for size in range(start, end + 1)]
    fine = (
        all(1 <= start <= end and k >= 0 for start, end, k in entries)
        and len(covered) == len(set(covered))
        and min(covered, default=0) == 1
    )
    try:
        assert read_table([list(entry) for entry in entries]) == tuple(sorted(entries))
    except ValueError:
        assert not fine
    else:
        assert fine


# ---------------------------------------------------------------- defaults


def test_defaults_follow_the_rule_of_acceptance() -> None:
    assert read(method="mtp").draft_sample_method == "coupled"
    assert read(method="mtp", rejection_sample_method="standard").draft_sample_method == "greedy"
    assert read(method="ngram").draft_sample_method == "greedy"
    assert read(method="suffix").draft_sample_method == "greedy"
    probabilistic = read(
        method="mtp", rejection_sample_method="block", draft_sample_method="probabilistic"
    )
    assert probabilistic.draft_sample_method == "probabilistic"


@pytest.mark.parametrize(
    ("low", "high", "read_as"),
    [(None, None, (5, 5)), (2, None, (2, 2)), (None, 7, (7, 7)), (2, 4, (2, 4))],
)
def test_prompt_lookup_mirrors(low: int | None, high: int | None, read_as: tuple[int, int]) -> None:
    config = read(method="ngram", prompt_lookup_min=low, prompt_lookup_max=high)
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == read_as


@pytest.mark.parametrize(
    ("given", "read_as"),
    [
        ({}, (None, None)),
        ({"prompt_lookup_min": 2}, (2, 2)),
        ({"prompt_lookup_max": 4}, (4, 4)),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 4}, (2, 4)),
    ],
)
def test_a_network_looks_up_first_only_if_asked(
    given: dict[str, int], read_as: tuple[int | None, int | None]
) -> None:
    config = read(method="mtp", **given)
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == read_as
    assert SpeculativeConfig.from_mapping(config.to_mapping()) == config


def test_a_network_drafts_no_more_than_is_looked_up() -> None:
    keys = {"method": "mtp", "num_speculative_tokens": 3, "prompt_lookup_min": 2}
    resolved = run(keys={**keys, "lookup_miss_tokens": 3}).speculation
    assert resolved is not None
    assert resolved.lookup_miss_tokens == 3
    with pytest.raises(ConfigError, match="must be at most num_speculative_tokens=3") as caught:
        run(keys={**keys, "lookup_miss_tokens": 4})
    assert caught.value.field == "speculative_config.lookup_miss_tokens"


def test_suffix_has_vllms_settings() -> None:
    config = read(method="suffix")
    assert config.suffix_decoding_max_tree_depth == 24
    assert config.suffix_decoding_max_cached_requests == 10000
    assert config.suffix_decoding_max_spec_factor == 1.0
    assert config.suffix_decoding_min_token_prob == 0.1


# ---------------------------------------------------------------- resolve


def test_resolved_speculation_is_complete_and_resolves_to_itself() -> None:
    resolved = run()
    spec = resolved.speculation
    assert spec is not None
    assert (spec.num_speculative_tokens, spec.max_model_len) == (3, resolved.max_model_len)
    assert resolved.num_speculative_tokens == 3
    assert resolved.config.speculation == spec
    again = resolve(resolved.config, MODEL, MACHINE, resolved.drafter)
    assert again.speculation == spec
    assert resolve(EngineConfig(), MODEL, MACHINE).num_speculative_tokens == 0


def test_shortcuts_are_resolved_away() -> None:
    config = EngineConfig.from_kwargs(spec_method="ngram", spec_tokens=2)
    resolved = resolve(config, MODEL, MACHINE, DrafterFacts(method="ngram"))
    assert resolved.config.speculative.spec_tokens is None
    assert resolved.config.speculation == resolved.speculation


def test_the_draft_length_comes_from_the_checkpoint_or_is_required() -> None:
    keys = {"method": "eagle3", "model": "head"}
    resolved = run(DrafterFacts(method="eagle3", default_tokens=4), keys=keys)
    assert resolved.num_speculative_tokens == 4
    assert any(choice.used == 4 for choice in resolved.choices)
    with pytest.raises(ConfigError, match=r"num_speculative_tokens=None: must be given"):
        run(DrafterFacts(method="eagle3"), keys=keys)
    facts = DrafterFacts(method="dflash", tokens_max=7)
    with pytest.raises(ConfigError, match="at most 7 at once"):
        run(facts, keys={"method": "dflash", "model": "h", "num_speculative_tokens": 8})
    assert run(keys={"method": "suffix"}).num_speculative_tokens == 24


def test_the_checkpoint_may_correct_a_guess_but_not_a_name() -> None:
    facts = DrafterFacts(method="eagle3", default_tokens=2)
    resolved = run(facts, keys={"model": "somebody/head"})
    assert resolved.speculation is not None
    assert resolved.speculation.method == "eagle3"
    assert ("eagle3", "the draft checkpoint says so") in [
        (choice.used, choice.reason) for choice in resolved.choices
    ]
    with pytest.raises(ConfigError, match="checkpoint is one for eagle3"):
        run(facts, keys={"method": "draft_model", "model": "somebody/head"})


def test_case_01_the_start_names_both_limits() -> None:
    facts = DrafterFacts(method="mtp", positions_max=32)
    resolved = run(facts, keys={"method": "mtp", "num_speculative_tokens": 3}, max_model_len=64)
    (row,) = [
        row for row in startup_table(resolved) if row[0] == "speculative_config.max_model_len"
    ]
    assert row[1] == "32"
    assert "max_model_len=64" in row[2]


def test_the_drafters_own_limit() -> None:
    def limited(asked: int | None, own: int | None) -> int | None:
        keys = {"method": "mtp", "num_speculative_tokens": 3, "max_model_len": asked}
        resolved = run(DrafterFacts(method="mtp", positions_max=own), keys=keys, max_model_len=64)
        assert resolved.speculation is not None
        return resolved.speculation.max_model_len

    assert limited(None, None) == 64
    assert limited(None, 100) == 64
    assert limited(None, 40) == 40
    assert limited(16, None) == limited(16, 40) == 16
    with pytest.raises(ConfigError, match="at most 40 positions"):
        limited(41, 40)
    with pytest.raises(ConfigError, match="target's max_model_len=64"):
        limited(65, None)


def test_clamped_entries_are_an_adjustment() -> None:
    table = [[1, 2, 5], [3, 4, 1]]
    keys = {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": table,
    }
    resolved = run(keys=keys)
    assert resolved.speculation is not None
    assert resolved.speculation.num_speculative_tokens_per_batch_size == ((1, 2, 3), (3, 4, 1))
    (note,) = resolved.adjustments
    assert (note.asked, note.used) == (table, [[1, 2, 3], [3, 4, 1]])
    assert any(row[2].startswith("adjusted from [[1, 2, 5]") for row in startup_table(resolved))
    with pytest.raises(ConfigError, match="strict_config"):
        run(keys=keys, strict_config=True)
    assert run(keys={**keys, "num_speculative_tokens": 5}).adjustments == ()
    assert clamp_table(((1, 2, 5),), 0) == ((1, 2, 0),)


def test_the_cache_counts_the_drafters_keys_and_values() -> None:
    keys = {"method": "mtp", "num_speculative_tokens": 3}
    facts = DrafterFacts(method="mtp", layers=1, kv_heads=3, head_dim=64)
    plain, with_cache = run(), run(facts, keys=keys)
    assert plain.num_kv_blocks == with_cache.num_kv_blocks
    assert with_cache.kv_cache_bytes * 30 == plain.kv_cache_bytes * 31
    budget = 64 * 2**20
    fewer = run(facts, keys=keys, kv_cache_memory_bytes=budget, max_model_len=64)
    assert fewer.num_kv_blocks == budget // (16 * 2 * 31 * 3 * 64 * 4)
    heavy = DrafterFacts(method="mtp", weight_bytes=15 * GIB)
    tight = run(heavy, keys=keys, max_model_len=64)
    free = 16 * GIB - MODEL.weight_bytes - heavy.weight_bytes
    assert tight.kv_cache_bytes <= free * 40 // 100


def test_a_step_has_room_for_every_draft() -> None:
    assert run().max_num_batched_tokens == 512
    keys = {"method": "ngram", "num_speculative_tokens": 63}
    resolved = run(keys=keys)
    assert resolved.max_num_batched_tokens == 16 * 64
    (reason,) = [c.reason for c in resolved.choices if c.field == "max_num_batched_tokens"]
    assert "63 drafts" in reason
    assert run(keys=keys, max_num_batched_tokens=7).max_num_batched_tokens == 7


def test_what_replicas_do_is_said_where_there_is_one() -> None:
    keys = {"method": "ngram", "num_speculative_tokens": 3}
    assert not [c for c in run().choices if c.field == "speculative_config.dp_draft_length"]
    (choice,) = [
        c
        for c in run(keys={**keys, "dp_draft_length": "static"}).choices
        if c.field == "speculative_config.dp_draft_length"
    ]
    assert "data_parallel_size above 1" in choice.reason
    two = run(keys={**keys, "dp_draft_length": "static"}, data_parallel_size=2)
    assert not [c for c in two.choices if c.field == "speculative_config.dp_draft_length"]


def test_the_start_shows_each_key_with_its_reason() -> None:
    rows = {name: (value, reason) for name, value, reason in startup_table(run())}
    assert rows["speculative_config.method"] == ("ngram", "asked")
    assert rows["speculative_config.num_speculative_tokens"] == ("3", "asked")
    assert rows["speculative_config.draft_length"] == ("static", "default")
    assert rows["speculative_config.rejection_sample_method"] == ("match", "default")
    assert rows["speculative_config.draft_sample_method"] == ("greedy", "default")
    assert "speculative_config" not in rows
    assert "speculative_config.use_heterogeneous_vocab" not in rows
    off = {name: value for name, value, _ in startup_table(resolve(EngineConfig(), MODEL, MACHINE))}
    assert off["speculative_config"] == "none"


def test_the_digest_sees_speculation() -> None:
    digests = {
        config_digest(run()),
        config_digest(resolve(EngineConfig(), MODEL, MACHINE)),
        config_digest(run(keys={"method": "ngram", "num_speculative_tokens": 4})),
        config_digest(run(DrafterFacts(method="ngram", layers=1, kv_heads=1, head_dim=2))),
    }
    assert len(digests) == 4


# What ranks that share the target's layers do with the drafter; an engine has one rank.
SAYS_NOTHING = {"draft_tensor_parallel_size"}


@pytest.mark.parametrize("name", sorted(KEYS.keys() - SAYS_NOTHING))
def test_every_key_is_read_outside_config(name: str) -> None:
    """A key that nothing reads would be accepted and ignored."""
    source = ROOT / "src" / "drumline"
    for path in source.rglob("*.py"):
        inside = path.relative_to(source).parts[0] == "config"
        if not inside and re.search(rf"\.{name}\b", path.read_text(encoding="utf-8")):
            return
    pytest.fail(f"no module outside config reads .{name}")
