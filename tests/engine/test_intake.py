"""Intake: every refusal names its parameter and changes nothing; seeds, stops and limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drumline.config import EngineConfig
from drumline.core.errors import PromptTooLong, RequestError
from drumline.core.params import SamplingParams
from drumline.engine.facts import open_tokenizer
from drumline.engine.intake import (
    CHARACTERS_PER_TOKEN_MAX,
    PROBE_CHARACTERS,
    Intake,
    IntakeLimits,
    Prompt,
)
from drumline.models.checkpoint import open_checkpoint
from drumline.models.tokenizer import Tokenizer

LIMITS = IntakeLimits(
    max_model_len=64,
    vocab_size=128,
    max_logprobs=20,
    kv_token_capacity=48,
    eos_token_ids=(2,),
    samples_max=10,
)
IDS = Prompt(token_ids=(5, 6, 7))


@pytest.fixture(scope="module")
def tokenizer(tiny_path: Callable[..., Path]) -> Tokenizer:
    return open_tokenizer(tiny_path(), EngineConfig())


@pytest.fixture
def intake(tokenizer: Tokenizer) -> Intake:
    return Intake(tokenizer, LIMITS, seed=3)


REFUSED: list[tuple[Prompt, dict[str, Any], str, str]] = [
    (Prompt(text=""), {}, "", ""),  # BOS alone is a prompt
    (Prompt(token_ids=()), {}, "prompt_token_ids", "no tokens"),
    (Prompt(token_ids=(128,)), {}, "prompt_token_ids", "128"),
    (Prompt(token_ids=(-1,)), {}, "prompt_token_ids", "-1"),
    (Prompt(token_ids=("5",)), {}, "prompt_token_ids", "'5'"),  # type: ignore[arg-type]
    (Prompt(token_ids=(5,) * 64), {}, "prompt_token_ids", "leave no room"),
    (Prompt(text="a " * 64), {}, "prompt", "leave no room"),
    (Prompt(text="a" * (64 * CHARACTERS_PER_TOKEN_MAX + 1)), {}, "prompt", "characters"),
    (
        Prompt(messages=({"role": "user", "content": "a" * 20_000},)),
        {},
        "messages",
        "characters",
    ),
    (Prompt(messages=({"content": "a"},)), {}, "messages", "chat template"),
    (IDS, {"max_tokens": 60}, "max_tokens", "never fit"),
    (IDS, {"max_tokens": 8, "n": 11}, "n", "more than the engine holds"),
    (IDS, {"logprobs": 21}, "logprobs", "max_logprobs=20"),
    (IDS, {"prompt_logprobs": -1}, "prompt_logprobs", "max_logprobs=20"),
    (IDS, {"stop_token_ids": (128,)}, "stop_token_ids", "128"),
    (IDS, {"allowed_token_ids": (128,)}, "allowed_token_ids", "128"),
    (IDS, {"logit_bias": {128: 1.0}}, "logit_bias", "128"),
    (IDS, {"stop": ("\ud800",)}, "stop", "surrogate"),
    (IDS, {"bad_words": ("\ud800",)}, "bad_words", "surrogate"),
]


@pytest.mark.parametrize(("prompt", "given", "param", "words"), REFUSED)
def test_refusals_name_the_parameter_and_use_up_no_number(
    intake: Intake, prompt: Prompt, given: dict[str, Any], param: str, words: str
) -> None:
    params = SamplingParams(**{"max_tokens": 8, **given})
    if not param:
        assert intake.admit(prompt, params).prompt_token_ids == (1,)
        return
    with pytest.raises(RequestError, match=words) as refused:
        intake.admit(prompt, params)
    assert refused.value.param == param
    assert intake.admit(IDS, SamplingParams()).requests[0].number == 0


@pytest.mark.parametrize("priority", [True, "1", 1.5, 2**63, None])
def test_priorities_are_integers(intake: Intake, priority: Any) -> None:
    with pytest.raises(RequestError, match="priority"):
        intake.admit(IDS, SamplingParams(), priority=priority)


def test_exact_max_tokens_must_fit_and_others_are_cut(tokenizer: Tokenizer) -> None:
    wide = Intake(tokenizer, IntakeLimits(64, 128, 20, 1000, (2,), 10))
    params = SamplingParams(max_tokens=62)
    assert wide.admit(IDS, params).requests[0].max_tokens == 61
    with pytest.raises(PromptTooLong, match="max_model_len=64") as refused:
        wide.admit(IDS, params, exact_max_tokens=True)
    assert refused.value.param == "max_tokens"
    assert wide.admit(IDS, SamplingParams(max_tokens=None)).requests[0].max_tokens == 61


def test_stops_hold_eos_unless_it_is_ignored(intake: Intake) -> None:
    listed = SamplingParams(stop_token_ids=(9,))
    assert intake.admit(IDS, listed).requests[0].stop_token_ids == {2, 9}
    ignored = SamplingParams(stop_token_ids=(9,), ignore_eos=True)
    assert intake.admit(IDS, ignored).requests[0].stop_token_ids == {9}


def test_bad_words_are_spelled_at_the_start_and_within(intake: Intake) -> None:
    words = intake.admit(IDS, SamplingParams(bad_words=("rain",))).requests[0].bad_words
    texts = {intake.tokenizer.decode(word) for word in words}
    assert texts == {"rain", " rain"}


def test_seeds_follow_from_arrival_or_from_entropy(tokenizer: Tokenizer) -> None:
    def seeds(seed: int | None) -> list[int]:
        intake = Intake(tokenizer, LIMITS, seed)
        return [intake.admit(IDS, SamplingParams()).requests[0].seed for _ in range(3)]

    assert seeds(3) == seeds(3)
    assert len(set(seeds(3) + seeds(4) + seeds(None) + seeds(None))) == 12
    intake = Intake(tokenizer, LIMITS)
    own = [intake.admit(IDS, SamplingParams(seed=s)).requests[0].seed for s in (7, -2, 2**64 - 1)]
    assert own == [7, 2**64 - 2, 2**64 - 1]


def test_samples_are_consecutive_and_share_a_seed(intake: Intake) -> None:
    intake.admit(IDS, SamplingParams(n=2))
    requests = intake.admit(IDS, SamplingParams(n=3)).requests
    assert [request.number for request in requests] == [2, 3, 4]
    assert [request.sample_index for request in requests] == [0, 1, 2]
    assert len({request.seed for request in requests}) == 1


def test_a_prompt_is_exactly_one_thing() -> None:
    with pytest.raises(RequestError, match="got none"):
        Prompt()
    with pytest.raises(RequestError, match="got prompt and messages"):
        Prompt(text="a", messages=())


def test_encoding_first_is_the_same(intake: Intake) -> None:
    prompt = Prompt(text="the rain")
    ids = intake.encode(prompt)
    assert intake.admit(prompt, SamplingParams(), token_ids=ids).prompt_token_ids == ids


@pytest.mark.parametrize("as_message", [True, False])
def test_a_text_far_too_long_is_refused_by_its_beginning(tiny_path: Any, as_message: bool) -> None:
    """Encoding megabytes takes seconds and holds everybody up; a beginning is enough to know."""
    tokenizer = open_checkpoint(tiny_path()).tokenizer()
    encoded: list[int] = []
    whole = tokenizer.encode

    def counting(text: str, add_special_tokens: bool = True) -> list[int]:
        encoded.append(len(text))
        return whole(text, add_special_tokens)

    tokenizer.encode = counting  # type: ignore[method-assign]
    limits = replace(LIMITS, max_model_len=8192, kv_token_capacity=8192)
    text = "x " * 1_000_000
    prompt = (
        Prompt(messages=({"role": "user", "content": text},)) if as_message else Prompt(text=text)
    )
    with pytest.raises(PromptTooLong, match="are .* tokens already"):
        Intake(tokenizer, limits).encode(prompt)
    assert encoded == [PROBE_CHARACTERS]
    short = Prompt(text="x " * 4000)
    assert len(Intake(tokenizer, limits).encode(short)) > 4000


def test_what_the_tokenizer_knows_and_the_model_does_not_is_refused(tokenizer: Tokenizer) -> None:
    """A tokenizer with more tokens than the model has rows: a text of them must not reach it."""
    small = Intake(tokenizer, replace(LIMITS, vocab_size=6))
    with pytest.raises(RequestError, match="prompt: token id .* outside the vocabulary of 6"):
        small.encode(Prompt(text="abc"))
    params = SamplingParams(bad_words=("abc",))
    with pytest.raises(RequestError, match="bad_words: token id .* outside the vocabulary of 6"):
        small.admit(Prompt(token_ids=(5,)), params)
