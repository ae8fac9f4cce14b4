"""Every value a request may not have is refused under its own name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from drumline.core.errors import RequestError
from drumline.core.params import COUNT_LIMIT, SAMPLES_MAX, STOPS_MAX, SamplingParams

NAN, INFINITY = math.nan, math.inf

REFUSED: list[tuple[str, Any]] = [
    *[("temperature", value) for value in (-0.1, 100.1, NAN, INFINITY, "1", None, True)],
    *[("top_p", value) for value in (0.0, -1.0, 1.01, NAN, "0.9", None)],
    *[("min_p", value) for value in (-0.01, 1.5, NAN, None)],
    *[("presence_penalty", value) for value in (-2.1, 2.1, NAN, "x")],
    *[("frequency_penalty", value) for value in (-2.1, 2.1, NAN, None)],
    *[("repetition_penalty", value) for value in (0.0, -1.0, INFINITY, None)],
    *[("n", value) for value in (0, -1, SAMPLES_MAX + 1, 1.0, True, None)],
    *[("top_k", value) for value in (-2, 1.5, "5", COUNT_LIMIT + 1, None)],
    *[("seed", value) for value in (-(2**63) - 1, 2**64, 0.5, "7", True)],
    *[("max_tokens", value) for value in (0, -1, 1.0, COUNT_LIMIT + 1, False)],
    *[("min_tokens", value) for value in (-1, 17, 1.0, None)],
    *[("logprobs", value) for value in (-2, 1.0, True)],
    *[("prompt_logprobs", value) for value in (-2, "1")],
    *[("ignore_eos", value) for value in (1, "yes", None)],
    *[("include_stop_str_in_output", value) for value in (0, None)],
    *[("skip_special_tokens", value) for value in ("true",)],
    *[("stop", value) for value in ((1,), ("",), ("x",) * (STOPS_MAX + 1), ("x" * 1025,), 3)],
    *[("bad_words", value) for value in ((None,), ("ok", ""), {"a": 1})],
    *[("stop_token_ids", value) for value in ((-1,), ("3",), (1.0,), (True,), 3, (2**31,))],
    *[("num_speculative_tokens", value) for value in (-1, 1.0, True, "2")],
    *[("allowed_token_ids", value) for value in ((), (-1,), ("a",), 7)],
    *[
        ("logit_bias", value)
        for value in ({1: 101.0}, {1: -101}, {1: NAN}, {-1: 0.0}, {"x": 1.0}, {1: "1"}, [1])
    ],
]


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=lambda part: repr(part)[:30])
def test_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert str(caught.value).startswith(f"{name}: ")
    assert "\n" not in str(caught.value)


def test_every_parameter_has_a_refusal_here() -> None:
    assert {name for name, _ in REFUSED} == set(SamplingParams.names())


def test_edges_that_are_allowed() -> None:
    SamplingParams(
        n=SAMPLES_MAX,
        temperature=0,
        top_p=1,
        top_k=-1,
        min_p=1,
        presence_penalty=-2,
        frequency_penalty=2,
        repetition_penalty=0.01,
        seed=-(2**63),
        max_tokens=3,
        min_tokens=3,
        logprobs=-1,
        prompt_logprobs=0,
        logit_bias={0: -100, 5: 100.0},
    )
    SamplingParams(seed=2**64 - 1, max_tokens=None, min_tokens=500)


def test_values_are_frozen_and_lists_become_tuples() -> None:
    params = SamplingParams(stop=["a", "b"], stop_token_ids=[1], bad_words="word")  # type: ignore[arg-type]
    assert params.stop == ("a", "b")
    assert params.stop_token_ids == (1,)
    assert params.bad_words == ("word",)
    with pytest.raises(AttributeError):
        params.n = 2  # type: ignore[misc]


def test_greedy_is_temperature_zero() -> None:
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams(temperature=1e-9).greedy


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("temprature", "temperature"),
        ("top_P", "top_p"),
        ("stop_tokens_ids", "stop_token_ids"),
        ("max_token", "max_tokens"),
        ("zzz", None),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(name: str, near: str | None) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams.from_mapping({name: 1})
    assert caught.value.param == name
    hint = f"; did you mean {near!r}?" if near else ""
    assert str(caught.value) == f"{name}: unknown parameter{hint}"


def test_from_mapping_reads_json() -> None:
    params = SamplingParams.from_mapping(
        {
            "stop": "END",
            "logit_bias": {"7": -100},
            "stop_token_ids": None,
            "allowed_token_ids": [1, 2],
            "bad_words": None,
        }
    )
    assert params.stop == ("END",)
    assert params.logit_bias == {7: -100}
    assert params.stop_token_ids == ()
    assert params.allowed_token_ids == (1, 2)
    assert params.bad_words == ()
    assert SamplingParams.from_mapping({"logit_bias": None}).logit_bias == {}


def test_from_mapping_reads_over_a_base_and_checks_again() -> None:
    base = SamplingParams(temperature=0.2, max_tokens=8, min_tokens=4)
    merged = SamplingParams.from_mapping({"top_k": 5}, base)
    assert (merged.temperature, merged.max_tokens, merged.top_k) == (0.2, 8, 5)
    with pytest.raises(RequestError, match="min_tokens: 4 is more than max_tokens=3"):
        SamplingParams.from_mapping({"max_tokens": 3}, base)
    with pytest.raises(RequestError, match="logit_bias"):
        SamplingParams.from_mapping({"logit_bias": {"+7": 1}})


def test_a_seed_of_minus_one_is_none_as_in_vllm() -> None:
    assert SamplingParams(seed=-1) == SamplingParams(seed=None)
    assert SamplingParams.from_mapping({"seed": -1}).seed is None
    assert SamplingParams(seed=-2).seed == -2
