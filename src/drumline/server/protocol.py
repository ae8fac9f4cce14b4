"""Request bodies of the OpenAI API, with vLLM's extra sampling fields, and what they mean.

A field that is not here is refused by name, with the nearest one that is. A field that is here is
honoured. Checking stops at the first mistake, so that a body of a million mistakes costs no more
than one. Responses are built in `responses`; this module knows no engine and no transport.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    SkipValidation,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from drumline.core.errors import RequestError, nearest_name
from drumline.core.params import SamplingParams

COMPLETION_MAX_TOKENS = 16  # the OpenAI default for /v1/completions
PROMPTS_MAX = 256
MESSAGES_MAX = 4096
NAME_CHARACTERS_MAX = 64  # of an unknown field, in an answer

# What clients know from OpenAI or vLLM; null asks for nothing and passes.
NOT_HERE = {
    "tools": "tool calls are not in this release",
    "tool_choice": "tool calls are not in this release",
    "parallel_tool_calls": "tool calls are not in this release",
    "functions": "tool calls are not in this release",
    "function_call": "tool calls are not in this release",
    "best_of": "beams are not in this release; n gives several samples",
    "suffix": "infilling is not in this release",
    "reasoning_effort": "reasoning parsers are not in this release",
    "audio": "this release reads and writes text only",
    "modalities": "this release reads and writes text only",
    "guided_json": "grammars are not in this release",
    "guided_regex": "grammars are not in this release",
    "structured_outputs": "grammars are not in this release",
    "store": "nothing is stored",
    "metadata": "nothing is stored",
}

_PROMPT_SCHEMA = {
    "oneOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    ]
}
_TEXTS_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        {"type": "null"},
    ]
}
_PART_SCHEMA = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_CONTENT_SCHEMA = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": _PART_SCHEMA}, {"type": "null"}]
}
_BIAS_SCHEMA = {
    "anyOf": [{"type": "object", "additionalProperties": {"type": "number"}}, {"type": "null"}]
}

# Read by `SamplingParams` and `prompts`, which stop at the first mistake; pydantic's unions try
# every branch on every item.
Prompts = Annotated[SkipValidation[Any], WithJsonSchema(_PROMPT_SCHEMA)]
Texts = Annotated[SkipValidation[Any], WithJsonSchema(_TEXTS_SCHEMA)]
Bias = Annotated[SkipValidation[Any], WithJsonSchema(_BIAS_SCHEMA)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        """The first field that is not one of ours ends the reading."""
        if not isinstance(data, dict):
            return data
        strangers = [name for name in data if name not in cls.model_fields]
        for name in strangers:
            if data[name] is None and name in NOT_HERE:
                continue
            shown = name[:NAME_CHARACTERS_MAX].encode(errors="backslashreplace").decode()
            problem = NOT_HERE.get(name) or "unknown parameter" + nearest_name(
                shown, cls.model_fields
            )
            raise PydanticCustomError("unknown_parameter", problem, {"name": shown})
        return {name: data[name] for name in data if name in cls.model_fields}


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
    stop: Texts = None
    stop_token_ids: Annotated[list[int] | None, FailFast()] = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: Texts = None
    logit_bias: Bias = None
    allowed_token_ids: Annotated[list[int] | None, FailFast()] = None
    prompt_logprobs: int | None = None
    num_speculative_tokens: int | None = None
    priority: int = 0
    return_token_ids: bool = False

    def given(self) -> dict[str, Any]:
        """The sampling fields that were set; null means the default, as OpenAI has it."""
        if self.stream_options is not None and not self.stream:
            raise RequestError("needs stream to be true", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError("cannot be streamed", param="prompt_logprobs")
        names = set(SamplingParams.names()) - {"logprobs"}
        values = {name: getattr(self, name) for name in names if name in type(self).model_fields}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def asked_max_tokens(self) -> int | None:
        """max_tokens if the client chose it: then it must fit, as OpenAI and vLLM have it."""
        return self.max_tokens


class CompletionBody(SamplingFields):
    """``POST /v1/completions``. ``prompt``: a text, texts, token ids, or lists of token ids."""

    prompt: Prompts
    echo: bool = False
    logprobs: int | None = None

    def params(self, defaults: SamplingParams) -> SamplingParams:
        """With ``echo``, log-probabilities cover the prompt too, as OpenAI has it."""
        given: dict[str, Any] = {"max_tokens": COMPLETION_MAX_TOKENS, **self.given()}
        if self.logprobs is not None:
            given["logprobs"] = self.logprobs
            if self.echo:
                given.setdefault("prompt_logprobs", self.logprobs)
        return SamplingParams.from_mapping(given, defaults)

    def prompts(self) -> list[str | tuple[int, ...]]:
        """One entry per prompt. What stands in a list of ids is checked by intake."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not isinstance(prompt, list):
            raise RequestError("must be a text, texts, token ids or lists of them", param="prompt")
        if not prompt:
            raise RequestError("an empty list has nothing to complete", param="prompt")
        if isinstance(prompt[0], int):
            return [tuple(prompt)]
        if len(prompt) > PROMPTS_MAX:
            raise RequestError(f"{len(prompt)} prompts, at most {PROMPTS_MAX}", param="prompt")
        prompts: list[str | tuple[int, ...]] = []
        for item in prompt:
            if not isinstance(item, str | list) or type(item) is not type(prompt[0]):
                problem = f"{item!r:.60}: all prompts must be texts, or all lists of token ids"
                raise RequestError(problem, param="prompt")
            prompts.append(item if isinstance(item, str) else tuple(item))
        return prompts


class Message(Body):
    role: Literal["system", "user", "assistant"]
    content: Annotated[str | None, WithJsonSchema(_CONTENT_SCHEMA)] = None
    name: str | None = Field(None, max_length=512)

    @field_validator("content", mode="before")
    @classmethod
    def _one_text(cls, content: Any) -> Any:
        """Parts of type text are joined by line breaks."""
        if not isinstance(content, list):
            return content
        texts = []
        for part in content:
            text = part.get("text") if isinstance(part, dict) else None
            if not isinstance(text, str) or part.get("type") != "text" or len(part) != 2:
                problem = 'parts must be {"type": "text", "text": …}'
                raise PydanticCustomError("content", problem)
            texts.append(text)
        return "\n".join(texts)

    def rendered(self) -> Mapping[str, Any]:
        """As chat templates want it."""
        if self.content is None:
            raise RequestError(f"a message of {self.role} needs content", param="messages")
        name = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": self.content, **name}


class ChatBody(SamplingFields):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], FailFast(), Field(min_length=1, max_length=MESSAGES_MAX)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: TextFormat | None = None

    @property
    def asked_max_tokens(self) -> int | None:
        completion = self.max_completion_tokens
        return self.max_tokens if completion is None else completion

    def params(self, defaults: SamplingParams) -> SamplingParams:
        """Without max_tokens an answer may go on to max_model_len."""
        if self.max_completion_tokens is not None and self.max_tokens is not None:
            raise RequestError("is another name for max_tokens", param="max_completion_tokens")
        given: dict[str, Any] = {**self.given(), "max_tokens": self.asked_max_tokens}
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("needs logprobs to be true", param="top_logprobs")
        if self.logprobs:
            given["logprobs"] = self.top_logprobs or 0
        return SamplingParams.from_mapping(given, defaults)
