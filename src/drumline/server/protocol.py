"""Request bodies of the OpenAI API, with vLLM's extra sampling fields, and what they mean.

A field that is not here is refused by name, with the nearest one that is. A field that is here is
honoured. Responses are built in `responses`; this module knows no engine and no transport.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from drumline.core.errors import RequestError
from drumline.core.params import SamplingParams

COMPLETION_MAX_TOKENS = 16  # the OpenAI default for /v1/completions


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Body):
    include_usage: bool = False


class TextFormat(Body):
    type: Literal["text"]


class SamplingFields(Body):
    """What completions and chat completions have in common."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, max_length=512)
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: list[str] | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    priority: int = 0
    return_token_ids: bool = False

    def given(self) -> dict[str, Any]:
        """The sampling fields that were set; null means the default, as OpenAI has it."""
        names = set(SamplingParams.names()) - {"logprobs"}
        values = {name: getattr(self, name) for name in names if name in type(self).model_fields}
        return {name: value for name, value in values.items() if value is not None}


class CompletionBody(SamplingFields):
    """``POST /v1/completions``. ``prompt``: a text, texts, token ids, or lists of token ids."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool = False
    logprobs: int | None = None

    def params(self, defaults: SamplingParams) -> SamplingParams:
        given: dict[str, Any] = {"max_tokens": COMPLETION_MAX_TOKENS, **self.given()}
        if self.logprobs is not None:
            given["logprobs"] = self.logprobs
        return SamplingParams.from_mapping(given, defaults)

    def prompts(self) -> list[str | tuple[int, ...]]:
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise RequestError("an empty list has nothing to complete", param="prompt")
        if isinstance(prompt[0], int):
            return [tuple(prompt)]  # type: ignore[arg-type]
        return [item if isinstance(item, str) else tuple(item) for item in prompt]  # type: ignore[arg-type]


class TextPart(Body):
    type: Literal["text"]
    text: str


class Message(Body):
    role: str = Field(min_length=1, max_length=64)
    content: str | list[TextPart] | None = None
    name: str | None = None

    def rendered(self) -> Mapping[str, Any]:
        content = self.content or ""
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        message: dict[str, Any] = {"role": self.role, "content": content}
        if self.name is not None:
            message["name"] = self.name
        return message


class ChatBody(SamplingFields):
    """``POST /v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: TextFormat | None = None

    def params(self, defaults: SamplingParams) -> SamplingParams:
        given: dict[str, Any] = {"max_tokens": None, **self.given()}
        if self.max_completion_tokens is not None:
            given["max_tokens"] = self.max_completion_tokens
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("needs logprobs to be true", param="top_logprobs")
        if self.logprobs:
            given["logprobs"] = self.top_logprobs or 0
        return SamplingParams.from_mapping(given, defaults)
