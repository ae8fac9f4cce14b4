"""Every declared field: its bounds, its readings, and that a refusal names field and value."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.config import EngineConfig
from drumline.config.fields import Field, Kind
from drumline.config.parts import FIELDS, PARTS
from drumline.config.reference import page
from drumline.config.refused import REFUSED, REFUSED_SHORT
from drumline.core.errors import ConfigError
from tidy.source import ROOT

NUMERIC = [f for f in FIELDS.values() if f.option.kind in (Kind.INTEGER, Kind.SIZE)]


# A draft length alone says nothing about who drafts.
COMPANY = {"spec_tokens": {"spec_method": "ngram"}}


def _refused(field: Field, value: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_kwargs(**{field.name: value}, **COMPANY.get(field.name, {}))
    error = caught.value
    assert error.field == field.name
    assert str(error).startswith(field.name + "=")
    assert "\n" not in str(error)
    return error


def test_names_are_unique_and_none_is_refused() -> None:
    import dataclasses

    names = [spec.name for cls in PARTS.values() for spec in dataclasses.fields(cls)]
    assert len(names) == len(set(names)) == len(FIELDS)
    assert not FIELDS.keys() & REFUSED.keys()
    assert set(REFUSED_SHORT.values()) <= REFUSED.keys()
    shorts = [f.option.short for f in FIELDS.values() if f.option.short]
    assert len(shorts) == len(set(shorts))
    assert not set(shorts) & REFUSED_SHORT.keys()


@pytest.mark.parametrize("name", FIELDS)
def test_the_default_is_a_value(name: str) -> None:
    field = FIELDS[name]
    config = EngineConfig.from_kwargs(**{name: field.default})
    assert config == EngineConfig()


@pytest.mark.parametrize("name", [field.name for field in NUMERIC])
def test_both_ends_of_the_range(name: str) -> None:
    field = FIELDS[name]
    low, high = field.option.low, field.option.high
    assert low is not None
    assert high is not None
    for inside in (int(low), int(high)):
        if name == "block_size" and inside & (inside - 1):
            continue
        company = COMPANY.get(name, {})
        assert EngineConfig.from_kwargs(**{name: inside}, **company).get(name) == inside
    below = int(low) - 1
    if not (field.option.minus_one_is_none and below == -1):
        assert "at least" in _refused(field, below).problem
    assert "at most" in _refused(field, int(high) + 1).problem


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize(
    "wrong", [b"x", 1.5, object(), [1], {"a"}, math.nan, math.inf, -math.inf, True, "", "\0", 7]
)
def test_values_of_another_type_are_refused(name: str, wrong: Any) -> None:
    """No value is bent into shape: not a bool into a number, not a text into an integer."""
    field = FIELDS[name]
    kind = field.option.kind
    fits = {
        Kind.SWITCH: wrong is True,
        Kind.INTEGER: wrong == 7 and type(wrong) is int,
        Kind.SIZE: wrong == 7 and type(wrong) is int,
        Kind.SECONDS: type(wrong) in (int, float) and math.isfinite(wrong),
    }.get(kind, False)
    if name in ("block_size", "max_body_bytes"):
        fits = False
    if fits:
        EngineConfig.from_kwargs(**{name: wrong}, **COMPANY.get(name, {}))
    else:
        _refused(field, wrong)


@pytest.mark.parametrize("name", [f.name for f in FIELDS.values() if f.option.kind is Kind.INTEGER])
def test_a_text_is_no_integer_in_python(name: str) -> None:
    _refused(FIELDS[name], "8")


@pytest.mark.parametrize("name", [f.name for f in FIELDS.values() if not f.optional])
def test_none_is_refused_where_it_means_nothing(name: str) -> None:
    part = PARTS[FIELDS[name].part]
    with pytest.raises(ConfigError, match=name):
        part(**{name: None})


@pytest.mark.parametrize("name", [f.name for f in FIELDS.values() if f.option.kind is Kind.CHOICE])
def test_choices(name: str) -> None:
    field = FIELDS[name]
    for choice in field.option.choices:
        assert EngineConfig.from_kwargs(**{name: choice}).get(name) == choice
    assert field.option.choices[0] in _refused(field, "nonsense").problem
    for later in field.option.later:
        assert "not in this release" in _refused(field, later).problem


@pytest.mark.parametrize("text", ["true", "1", "YES", "on"])
def test_switches_read_yes(text: str) -> None:
    assert EngineConfig.from_sources({}, {"DRUMLINE_STRICT_CONFIG": text}).runtime.strict_config


@pytest.mark.parametrize("text", ["false", "0", "No", "off"])
def test_switches_read_no(text: str) -> None:
    config = EngineConfig.from_sources({}, {"DRUMLINE_ENABLE_PREFIX_CACHING": text})
    assert not config.cache.enable_prefix_caching


@pytest.mark.parametrize("value", ["auto", "AUTO", -1, "-1", None])
def test_an_open_length(value: Any) -> None:
    assert EngineConfig.from_kwargs(max_model_len=value).model.max_model_len is None


def test_minus_one_is_a_size_only_where_it_means_something() -> None:
    assert EngineConfig.from_kwargs(max_logprobs=-1).model.max_logprobs == -1
    _refused(FIELDS["kv_cache_memory_bytes"], -1)


@pytest.mark.parametrize("bad", [3, 6, 24, 255])
def test_block_sizes_are_powers_of_two(bad: int) -> None:
    assert "power of two" in _refused(FIELDS["block_size"], bad).problem


@pytest.mark.parametrize("bad", ["[1]", "nonsense", "", '{"a":', '{"a": NaN}', "[" * 5000])
def test_objects_are_json_objects(bad: str) -> None:
    with pytest.raises(ConfigError, match="speculative_config"):
        EngineConfig.from_sources({"speculative_config": bad}, {})


def test_secrets_are_not_repeated() -> None:
    config = EngineConfig.from_kwargs(api_key=["sesame"])
    assert config.server.api_key == ("sesame",)
    assert "sesame" not in repr(config)
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_kwargs(api_key=["sesame", ""])
    assert "sesame" not in str(caught.value)


@given(st.dictionaries(st.sampled_from(sorted(FIELDS)), st.text(max_size=12), max_size=3))
def test_any_texts_make_a_config_or_one_clear_error(texts: dict[str, str]) -> None:
    try:
        EngineConfig.from_sources(texts, {})
    except ConfigError as error:
        assert error.field in texts or (
            error.field.startswith("speculative_config") and any("spec" in name for name in texts)
        )
        assert "\n" not in str(error)


def test_the_page_of_settings_is_current() -> None:
    """``python -m drumline.config.reference > docs/configuration.md`` renews it."""
    assert (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8") == page()


# Fields that become the mesh, and whose larger values the engine refuses at its door.
REFUSED_BY_RESOLVE = {
    "data_parallel_size",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "enable_expert_parallel",
    "strict_config",  # acts inside `resolve` and nowhere else
}


# Fields that `resolve` turns into another number, which is what the others read.
READ_AS = {
    "kv_cache_memory_bytes": "num_kv_blocks",
    "speculative_config": "speculation",
    "spec_method": "speculation",
    "spec_model": "speculation",
    "spec_tokens": "speculation",
}


@pytest.mark.parametrize("name", sorted(FIELDS.keys() - REFUSED_BY_RESOLVE))
def test_every_field_is_read_outside_config(name: str) -> None:
    """A setting that nothing reads would be accepted and ignored."""
    source = ROOT / "src" / "drumline"
    for path in source.rglob("*.py"):
        if path.relative_to(source).parts[0] == "config":
            continue
        if re.search(rf"\.{READ_AS.get(name, name)}\b", path.read_text(encoding="utf-8")):
            return
    pytest.fail(f"no module outside config reads .{name}")
