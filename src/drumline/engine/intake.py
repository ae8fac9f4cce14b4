"""Intake: from what a user wrote to `Request` values, or a refusal that names what is wrong.

Everything that can be refused is refused here, before anything is queued: prompts that do not fit,
ids outside the vocabulary, parameters the engine does not have. It needs the tokenizer and the
limits, and refuses to know the scheduler, the model and who is asking.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drumline.core.errors import PromptTooLong, RequestError
from drumline.core.params import SamplingParams
from drumline.core.random import derive_seed
from drumline.core.request import Request
from drumline.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class IntakeLimits:
    """What a request may ask of this engine. Lengths and counts are in tokens."""

    max_model_len: int
    vocab_size: int
    max_logprobs: int
    kv_token_capacity: int
    eos_token_ids: tuple[int, ...]
    samples_max: int  # that may run and wait at once
    num_speculative_tokens: int = 0  # most drafts per step


# No token of any vocabulary spells more than this, so a longer text is refused unread.
CHARACTERS_PER_TOKEN_MAX = 256
PROBE_CHARACTERS = 65_536  # a beginning that is encoded in a few milliseconds
PROBE_SLACK = 64  # tokens that the cut at the end of a probe may add


@dataclass(frozen=True, slots=True)
class Prompt:
    """Exactly one of ``text``, ``token_ids`` and ``messages``; what a user typed."""

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None

    def __post_init__(self) -> None:
        names = {"text": "prompt", "token_ids": "prompt_token_ids", "messages": "messages"}
        given = [name for field, name in names.items() if getattr(self, field) is not None]
        if len(given) != 1:
            raise RequestError(
                f"exactly one of prompt, prompt_token_ids and messages is needed, got "
                f"{' and '.join(given) or 'none'}",
                param="prompt",
            )

    @property
    def param(self) -> str:
        """The name a user knows it by."""
        if self.messages is not None:
            return "messages"
        return "prompt" if self.text is not None else "prompt_token_ids"

    @property
    def character_count(self) -> int:
        """Of everything that becomes text; 0 for token ids."""
        return len(self.text or "") + _characters(self.messages or ())


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return _characters(tuple(value.values()))
    return sum(_characters(item) for item in value) if isinstance(value, list | tuple) else 0


@dataclass(frozen=True, slots=True)
class Submission:
    """One user request, ready for the engine: a `Request` per sample."""

    request_id: str
    prompt: str | None
    requests: tuple[Request, ...]

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        return self.requests[0].prompt_token_ids

    @property
    def params(self) -> SamplingParams:
        return self.requests[0].params


class Intake:
    """Makes submissions; numbers ascend in order of arrival. Owned by one thread.

    ``seed`` is the engine's (``--seed``): requests without a seed of their own then get one from
    it and their arrival number. Without it, entropy drawn at start and the request id serve.
    """

    def __init__(self, tokenizer: Tokenizer, limits: IntakeLimits, seed: int | None = None) -> None:
        self.tokenizer = tokenizer
        self.limits = limits
        self._seed = seed
        self._entropy = secrets.token_hex(16)
        self._arrivals = 0
        self._numbers = 0

    def admit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        exact_max_tokens: bool = False,
        token_ids: tuple[int, ...] | None = None,
    ) -> Submission:
        """``exact_max_tokens``: a max_tokens that max_model_len would cut short is refused, as
        servers do it; else the output ends with ``length`` at max_model_len. ``token_ids`` is
        what `encode` gave for the prompt, where that was done before.

        Raises `RequestError` or `PromptTooLong`; then nothing has changed.
        """
        self._check_params(params)
        if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) >= 2**63:
            raise RequestError(f"{priority!r:.60} is not a 64-bit integer", param="priority")
        ids = self.encode(prompt) if token_ids is None else token_ids
        max_tokens = self._max_tokens(ids, params, exact_max_tokens)
        stops = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stops |= frozenset(self.limits.eos_token_ids)
        bad_words = self._bad_words(params)
        arrival, self._arrivals = self._arrivals, self._arrivals + 1
        request_id = request_id or f"req-{arrival}"
        seed = self._resolve_seed(params, arrival, request_id)
        requests = tuple(
            Request(
                number=self._numbers + sample,
                prompt_token_ids=ids,
                params=params,
                max_tokens=max_tokens,
                seed=seed,
                sample_index=sample,
                stop_token_ids=stops,
                bad_words=bad_words,
                priority=priority,
                num_speculative_tokens=params.num_speculative_tokens,
            )
            for sample in range(params.n)
        )
        self._numbers += params.n
        return Submission(request_id=request_id, prompt=prompt.text, requests=requests)

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """The prompt's token ids, checked. Changes nothing; any thread may call it."""
        limit = self.limits.max_model_len
        if prompt.character_count > limit * CHARACTERS_PER_TOKEN_MAX:
            raise PromptTooLong(
                f"{prompt.character_count} characters cannot fit max_model_len={limit} tokens",
                param=prompt.param,
            )
        ids = self._token_ids(prompt)
        if not ids:
            raise RequestError("the prompt has no tokens", param=prompt.param)
        if max(ids) >= self.limits.vocab_size:  # a tokenizer may know more than its model
            self._check_ids(ids, prompt.param)
        if len(ids) >= limit:
            raise PromptTooLong(
                f"{len(ids)} tokens leave no room for output under max_model_len={limit}",
                param=prompt.param,
            )
        return ids

    def _token_ids(self, prompt: Prompt) -> tuple[int, ...]:
        if prompt.token_ids is not None:
            self._check_ids(prompt.token_ids, prompt.param)
            return prompt.token_ids
        try:
            if prompt.text is not None:
                self._probe(prompt.text, prompt.param)
                return tuple(self.tokenizer.encode(prompt.text))
            assert prompt.messages is not None
            for message in prompt.messages:
                if not isinstance(message, Mapping):
                    raise RequestError(f"{message!r:.60} is no mapping with role and content")
                if isinstance(message.get("content"), str):
                    self._probe(message["content"], prompt.param)
            return tuple(self.tokenizer.encode_chat(prompt.messages))
        except PromptTooLong:
            raise
        except RequestError as error:
            raise RequestError(error.problem, param=prompt.param) from None

    def _probe(self, text: str, param: str) -> None:
        """Refuses a text whose beginning alone is too long, at the cost of that beginning: the
        encoder takes seconds for megabytes, and holds the interpreter meanwhile."""
        end = PROBE_CHARACTERS
        while end < len(text):
            count = len(self.tokenizer.encode(text[:end], add_special_tokens=False))
            if count > self.limits.max_model_len + PROBE_SLACK:
                raise PromptTooLong(
                    f"its first {end} of {len(text)} characters are {count} tokens already, more "
                    f"than max_model_len={self.limits.max_model_len}",
                    param=param,
                )
            end *= 2

    def _check_ids(self, ids: Sequence[int], param: str) -> None:
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int):
                raise RequestError(f"{token!r:.60} is not a token id", param=param)
            if not 0 <= token < self.limits.vocab_size:
                raise RequestError(
                    f"token id {token} is outside the vocabulary of {self.limits.vocab_size}",
                    param=param,
                )

    def _check_params(self, params: SamplingParams) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(params, name)
            count = self.limits.vocab_size if asked == -1 else asked
            if count is not None and count > self.limits.max_logprobs:
                raise RequestError(
                    f"{asked} is more than max_logprobs={self.limits.max_logprobs}", param=name
                )
        if params.n > self.limits.samples_max:
            problem = f"{params.n} samples are more than the engine holds: "
            raise RequestError(problem + str(self.limits.samples_max), param="n")
        drafts, most = params.num_speculative_tokens, self.limits.num_speculative_tokens
        if drafts is not None and drafts > most:
            problem = f"{drafts} is more than the configured {most}" if most else "nothing drafts"
            raise RequestError(problem, param="num_speculative_tokens")
        for name in ("stop", "bad_words"):
            for text in getattr(params, name):
                if not _is_unicode(text):
                    raise RequestError(f"{text!r:.60} has lone surrogates", param=name)
        self._check_ids(params.stop_token_ids, "stop_token_ids")
        self._check_ids(params.allowed_token_ids or (), "allowed_token_ids")
        self._check_ids(tuple(params.logit_bias), "logit_bias")

    def _max_tokens(self, ids: tuple[int, ...], params: SamplingParams, exact: bool) -> int:
        limit = self.limits.max_model_len
        room = limit - len(ids)
        if exact and params.max_tokens is not None and params.max_tokens > room:
            raise PromptTooLong(
                f"{len(ids)} prompt tokens and max_tokens={params.max_tokens} are more than "
                f"max_model_len={limit}",
                param="max_tokens",
            )
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        longest = len(ids) + max_tokens
        if longest > self.limits.kv_token_capacity:
            raise RequestError(
                f"prompt of {len(ids)} tokens and up to {max_tokens} more can never fit the KV "
                f"cache of {self.limits.kv_token_capacity} tokens",
                param="max_tokens",
            )
        return max_tokens

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Each word as it is spelled at the start of a text and after a space (as vLLM does)."""
        words: list[tuple[int, ...]] = []
        for word in params.bad_words:
            for spelling in (word.lstrip(), " " + word.lstrip()):
                ids = tuple(self.tokenizer.encode(spelling, add_special_tokens=False))
                self._check_ids(ids, "bad_words")
                if ids and ids not in words:
                    words.append(ids)
        return tuple(words)

    def _resolve_seed(self, params: SamplingParams, arrival: int, request_id: str) -> int:
        if params.seed is not None:
            return params.seed & (2**64 - 1)
        if self._seed is not None:
            return derive_seed("engine seed", self._seed, arrival)
        return derive_seed("engine entropy", self._entropy, request_id)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
