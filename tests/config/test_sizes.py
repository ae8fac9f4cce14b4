"""Sizes read as vLLM reads them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.config.sizes import format_bytes, parse_integer, parse_size

DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1k", 1000),
        ("1K", 1024),
        ("1G", 2**30),
        ("1.5k", 1500),
        ("25.6k", 25600),
        ("0.5m", 500_000),
        ("2T", 2 * 2**40),
        ("3t", 3 * 10**12),
        (" 4096 ", 4096),
        ("-1", -1),
        ("1.0005k", 1000),
        ("1.001k", 1000),  # through a float and cut, as there
    ],
)
def test_examples(text: str, number: int) -> None:
    assert parse_size(text) == number


@given(st.integers(0, 10**6), st.sampled_from(sorted(DECIMAL | BINARY)))
def test_whole_numbers_with_any_suffix(number: int, suffix: str) -> None:
    assert parse_size(f"{number}{suffix}") == number * (DECIMAL | BINARY)[suffix]


@given(st.integers(0, 10**4), st.integers(0, 999), st.sampled_from(sorted(DECIMAL)))
def test_decimals_agree_with_a_float_cut(whole: int, part: int, suffix: str) -> None:
    text = f"{whole}.{part:03d}"
    assert parse_size(text + suffix) == int(float(text) * DECIMAL[suffix])


@given(st.integers(0, 10**4), st.integers(0, 999), st.sampled_from(sorted(BINARY)))
def test_no_decimals_with_binary_suffixes(whole: int, part: int, suffix: str) -> None:
    text = f"{whole}.{part}{suffix}"
    with pytest.raises(ValueError, match="decimals go with k, m, g, t"):
        parse_size(text)


@given(st.integers(-(10**20), 10**20))
def test_plain_integers(number: int) -> None:
    assert parse_size(str(number)) == parse_integer(str(number)) == number


@given(st.text(max_size=40))
def test_any_text_is_a_number_or_one_clear_error(text: str) -> None:
    try:
        assert isinstance(parse_size(text), int)
    except ValueError as error:
        assert "\n" not in str(error)
        assert str(error)


@pytest.mark.parametrize(
    "text", ["", "k", "1kk", "1 k", "1e3", "0x10", "１２", "1_000", "nan", "9" * 33]
)
def test_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_size(text)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (5 * 2**30, "5.0 GiB"),
        (2**42, "4096.0 GiB"),
    ],
)
def test_bytes_for_people(count: int, text: str) -> None:
    assert format_bytes(count) == text
