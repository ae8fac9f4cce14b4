"""What a request may ask of sampling: one frozen value, checked when it is made.

Names, defaults and meanings are vLLM's and the OpenAI API's. A value that is out of range, or a
name that does not exist, is refused here by name; nothing downstream has to doubt a field. This
module knows no tokenizer, no vocabulary and no engine limit: those checks belong to intake.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from drumline.core.errors import RequestError, nearest_name

SEED_LIMIT = 2**64
COUNT_LIMIT = 2**31 - 1
SAMPLES_MAX = 128
STOPS_MAX = 64
STOP_CHARACTERS_MAX = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens of one request are drawn and when it ends.

    ``temperature`` 0 is greedy. ``top_k`` 0 or -1 keeps every token. ``logprobs`` is the number of
    best alternatives to report beside the token itself (0: the token alone, -1: the vocabulary).
    ``max_tokens`` None means up to the model's limit. ``seed`` None, or -1 as in vLLM, lets the
    engine derive one, which the output reports; other negative seeds count modulo 2**64.
    ``num_speculative_tokens`` is the most drafts per step, 0 for none and None for as many as the
    engine is configured for; it changes the clock and no token. Raises `RequestError` naming the
    parameter.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    bad_words: tuple[str, ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    num_speculative_tokens: int | None = None

    def __post_init__(self) -> None:
        for check in _CHECKS:
            check(self)
        if self.seed == -1:
            object.__setattr__(self, "seed", None)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(spec.name for spec in fields(cls))

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any], base: SamplingParams | None = None) -> Self:
        """Reads JSON-like values over ``base`` (or the defaults); unknown names are refused."""
        known = set(cls.names())
        for name in given:
            if name not in known:
                raise RequestError(f"unknown parameter{nearest_name(name, known)}", param=name)
        given = {name: _from_json(name, value) for name, value in given.items()}
        if base is None:
            return cls(**given)
        merged: Self = replace(base, **given)  # type: ignore[assignment]
        return merged

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _from_json(name: str, value: Any) -> Any:
    """JSON has lists for tuples and string keys for integer ones."""
    if name in ("stop", "bad_words"):
        if value is None:
            return ()
        if isinstance(value, str):
            return (value,)
    if name in ("stop_token_ids",) and value is None:
        return ()
    if name == "logit_bias":
        if value is None:
            return {}
        if isinstance(value, Mapping):
            return {_token_key(key): bias for key, bias in value.items()}
    if isinstance(value, list):
        return tuple(value)
    return value


def _token_key(key: Any) -> Any:
    if isinstance(key, str) and key.isascii() and key.isdigit():
        return int(key)
    return key


def _number(params: SamplingParams, name: str, low: float, high: float, words: str) -> None:
    value = getattr(params, name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RequestError(f"{value!r} is not a number; allowed: {words}", param=name)
    if not low <= value <= high:
        raise RequestError(f"{value!r} is out of range; allowed: {words}", param=name)


def _integer(
    params: SamplingParams, name: str, low: int, high: int, words: str, optional: bool = False
) -> None:
    value = getattr(params, name)
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{value!r} is not an integer; allowed: {words}", param=name)
    if not low <= value <= high:
        raise RequestError(f"{value!r} is out of range; allowed: {words}", param=name)


def _ranges(params: SamplingParams) -> None:
    _number(params, "temperature", 0.0, 100.0, "0 (greedy) to 100")
    _number(params, "top_p", 1e-9, 1.0, "above 0, up to 1")
    _number(params, "min_p", 0.0, 1.0, "0 to 1")
    _number(params, "presence_penalty", -2.0, 2.0, "-2 to 2")
    _number(params, "frequency_penalty", -2.0, 2.0, "-2 to 2")
    _number(params, "repetition_penalty", 1e-6, 1e6, "above 0")
    _integer(params, "n", 1, SAMPLES_MAX, f"1 to {SAMPLES_MAX}")
    _integer(params, "top_k", -1, COUNT_LIMIT, "-1 or 0 (all), or at least 1")
    _integer(params, "seed", -(2**63), SEED_LIMIT - 1, "a 64-bit integer or null", optional=True)
    _integer(params, "max_tokens", 1, COUNT_LIMIT, f"1 to {COUNT_LIMIT}, or null", optional=True)
    _integer(params, "min_tokens", 0, COUNT_LIMIT, f"0 to {COUNT_LIMIT}")
    _integer(params, "num_speculative_tokens", 0, COUNT_LIMIT, "0 or more, or null", optional=True)
    _integer(params, "logprobs", -1, COUNT_LIMIT, "-1 (all), 0 or more, or null", optional=True)
    _integer(
        params, "prompt_logprobs", -1, COUNT_LIMIT, "-1 (all), 0 or more, or null", optional=True
    )
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise RequestError(
            f"{params.min_tokens} is more than max_tokens={params.max_tokens}", param="min_tokens"
        )


def _flags(params: SamplingParams) -> None:
    for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
        if not isinstance(getattr(params, name), bool):
            raise RequestError(
                f"{getattr(params, name)!r} is not a boolean; allowed: true, false", param=name
            )


def _texts(params: SamplingParams) -> None:
    for name in ("stop", "bad_words"):
        value = getattr(params, name)
        if isinstance(value, str):
            object.__setattr__(params, name, (value,))
        elif isinstance(value, list):
            object.__setattr__(params, name, tuple(value))
        value = getattr(params, name)
        if not isinstance(value, tuple) or not all(isinstance(text, str) for text in value):
            raise RequestError(f"{value!r} is not a list of strings", param=name)
        if any(text == "" for text in value):
            raise RequestError("an empty string cannot be matched", param=name)
        if len(value) > STOPS_MAX or any(len(text) > STOP_CHARACTERS_MAX for text in value):
            raise RequestError(
                f"at most {STOPS_MAX} strings of at most {STOP_CHARACTERS_MAX} characters",
                param=name,
            )


def _tokens(params: SamplingParams) -> None:
    for name in ("stop_token_ids", "allowed_token_ids"):
        value = getattr(params, name)
        if value is None and name == "allowed_token_ids":
            continue
        if isinstance(value, list):
            value = tuple(value)
            object.__setattr__(params, name, value)
        if not isinstance(value, tuple) or not all(_is_token(token) for token in value):
            raise RequestError(f"{value!r} is not a list of token ids", param=name)
    if params.allowed_token_ids == ():
        raise RequestError("an empty list allows no token at all", param="allowed_token_ids")
    bias = params.logit_bias
    if not isinstance(bias, Mapping) or not all(_is_token(token) for token in bias):
        raise RequestError(f"{bias!r} is not a map from token id to bias", param="logit_bias")
    for token, amount in bias.items():
        number = isinstance(amount, int | float) and not isinstance(amount, bool)
        if not number or not -100.0 <= amount <= 100.0:
            raise RequestError(
                f"{amount!r} for token {token} is out of range; allowed: -100 to 100",
                param="logit_bias",
            )


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= COUNT_LIMIT


_CHECKS = (_ranges, _flags, _texts, _tokens)
