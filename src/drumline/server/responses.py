"""Response bodies of the OpenAI API, built from what the engine emits. Plain dictionaries.

It knows the wire format and how token ids are shown as text, and refuses to know how tokens come
about.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from drumline.core.request import FinishReason, PositionLogprobs, TokenLogprob
from drumline.engine.outputs import CompletionOutput, OutputDelta, RequestOutput

LOGPROB_MIN = -9999.0  # JSON has no infinity; OpenAI and vLLM send this number instead


class TokenText(Protocol):
    """What responses need of a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes: ...


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def finish_word(reason: FinishReason | None) -> str | None:
    return None if reason is None else str(reason)


def usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(c.token_ids) for output in outputs for c in output.outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _finite(logprob: float) -> float:
    return max(logprob, LOGPROB_MIN)


class ChatFormat:
    """``chat.completion`` and ``chat.completion.chunk``."""

    def __init__(self, model: str, tokenizer: TokenText) -> None:
        self.id = new_id("chatcmpl")
        self.created = int(time.time())
        self.model = model
        self.tokenizer = tokenizer

    def body(self, output: RequestOutput, token_ids: bool) -> dict[str, Any]:
        choices = [self._choice(c, token_ids) for c in output.outputs]
        body = self._envelope("chat.completion", choices)
        body["usage"] = usage([output])
        if token_ids:
            body["prompt_token_ids"] = list(output.prompt_token_ids)
        if output.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(output, self.tokenizer)
        return body

    def _choice(self, completion: CompletionOutput, token_ids: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": completion.index,
            "message": {"role": "assistant", "content": completion.text},
            "logprobs": self._logprobs(completion.logprobs),
            "finish_reason": finish_word(completion.finish_reason),
            "stop_reason": completion.stop_reason,
        }
        if token_ids:
            choice["token_ids"] = list(completion.token_ids)
        return choice

    def opening(self, index: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return self._chunk([{"index": index, "delta": delta, "finish_reason": None}])

    def chunk(
        self, index: int, delta: OutputDelta, logprobs: bool, token_ids: bool
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "delta": {"content": delta.text} if delta.text else {},
            "logprobs": self._logprobs(delta.logprobs) if logprobs else None,
            "finish_reason": finish_word(delta.finish_reason),
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if token_ids:
            choice["token_ids"] = list(delta.token_ids)
        return self._chunk([choice])

    def closing(self, output: RequestOutput) -> dict[str, Any]:
        return {**self._chunk([]), "usage": usage([output])}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._envelope("chat.completion.chunk", choices)

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _logprobs(self, entries: Sequence[PositionLogprobs] | None) -> dict[str, Any] | None:
        if entries is None:
            return None
        content = [
            {**self._token(entry.token), "top_logprobs": [self._token(t) for t in entry.top]}
            for entry in entries
        ]
        return {"content": content}

    def _token(self, token: TokenLogprob) -> dict[str, Any]:
        data = self.tokenizer.token_bytes(token.token_id)
        return {
            "token": data.decode("utf-8", errors="replace"),
            "logprob": _finite(token.logprob),
            "bytes": list(data),
        }


class CompletionFormat:
    """``text_completion``, streamed or not. Samples of prompt i are choices i * n … i * n + n-1."""

    def __init__(self, model: str, tokenizer: TokenText) -> None:
        self.id = new_id("cmpl")
        self.created = int(time.time())
        self.model = model
        self.tokenizer = tokenizer

    def body(self, outputs: Sequence[RequestOutput], echo: bool, token_ids: bool) -> dict[str, Any]:
        choices = []
        for output in outputs:
            for completion in output.outputs:
                echoed = echo_text(output, self.tokenizer) if echo else ""
                choice = self._choice(len(choices), echoed + completion.text, completion)
                if token_ids:
                    choice["token_ids"] = list(completion.token_ids)
                    choice["prompt_token_ids"] = list(output.prompt_token_ids)
                if output.prompt_logprobs is not None:
                    choice["prompt_logprobs"] = prompt_logprobs(output, self.tokenizer)
                choices.append(choice)
        return {**self._envelope(choices), "usage": usage(outputs)}

    def _choice(self, index: int, text: str, completion: CompletionOutput) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(completion.logprobs, 0),
            "finish_reason": finish_word(completion.finish_reason),
            "stop_reason": completion.stop_reason,
        }

    def chunk(
        self, index: int, delta: OutputDelta, logprobs: bool, offset: int, token_ids: bool
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "text": delta.text,
            "logprobs": self._logprobs(delta.logprobs, offset) if logprobs else None,
            "finish_reason": finish_word(delta.finish_reason),
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if token_ids:
            choice["token_ids"] = list(delta.token_ids)
        return self._envelope([choice])

    def echo(self, index: int, text: str) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
        return self._envelope([choice])

    def closing(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        return {**self._envelope([]), "usage": usage(outputs)}

    def _envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _logprobs(
        self, entries: Sequence[PositionLogprobs] | None, offset: int
    ) -> dict[str, Any] | None:
        if entries is None:
            return None
        tokens, offsets = [], []
        for entry in entries:
            tokens.append(self._text(entry.token))
            offsets.append(offset)
            offset += len(tokens[-1])
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(entry.token.logprob) for entry in entries],
            "top_logprobs": [
                {self._text(top): _finite(top.logprob) for top in (entry.token, *entry.top)}
                for entry in entries
            ],
            "text_offset": offsets,
        }

    def _text(self, token: TokenLogprob) -> str:
        return self.tokenizer.token_bytes(token.token_id).decode("utf-8", errors="replace")


def echo_text(output: RequestOutput, tokenizer: TokenText) -> str:
    if output.prompt is not None:
        return output.prompt
    data = b"".join(tokenizer.token_bytes(token) for token in output.prompt_token_ids)
    return data.decode("utf-8", errors="replace")


def prompt_logprobs(
    output: RequestOutput, tokenizer: TokenText
) -> list[dict[str, Mapping[str, Any]] | None]:
    """vLLM's form: per prompt position a map from token id to logprob, rank and text."""
    assert output.prompt_logprobs is not None
    shown: list[dict[str, Mapping[str, Any]] | None] = []
    for entry in output.prompt_logprobs:
        if entry is None:
            shown.append(None)
            continue
        shown.append(
            {
                str(token.token_id): {
                    "logprob": _finite(token.logprob),
                    "rank": token.rank,
                    "decoded_token": tokenizer.token_bytes(token.token_id).decode(
                        "utf-8", errors="replace"
                    ),
                }
                for token in (entry.token, *entry.top)
            }
        )
    return shown
