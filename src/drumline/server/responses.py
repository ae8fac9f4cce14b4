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
from drumline.engine.outputs import CompletionOutput, OutputDelta, RequestOutput, SampleRecord

LOGPROB_MIN = -9999.0  # JSON has no infinity; OpenAI and vLLM send this number instead


class TokenText(Protocol):
    """What responses need of a tokenizer."""

    special_ids: frozenset[int]

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
            "seed": completion.seed,
        }
        if token_ids:
            choice["token_ids"] = list(completion.token_ids)
        return choice

    def opening(self, index: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return self._chunk([{"index": index, "delta": delta, "finish_reason": None}])

    def chunk(
        self, sample: SampleRecord, delta: OutputDelta, logprobs: bool, token_ids: bool
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": sample.index,
            "delta": {"content": delta.text} if delta.text else {},
            "logprobs": self._logprobs(delta.logprobs) if logprobs else None,
            **_ending(sample, delta),
        }
        if token_ids:
            choice["token_ids"] = list(delta.token_ids)
        return self._chunk([choice])

    def closing(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        return {**self._chunk([]), "usage": usage(outputs)}

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
    """``text_completion``, streamed or not. Samples of prompt i are choices i * n … i * n + n-1.

    ``hidden`` are the special tokens that texts leave out; they take no room in offsets.
    """

    def __init__(self, model: str, tokenizer: TokenText, skip_special_tokens: bool) -> None:
        self.hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        self.id = new_id("cmpl")
        self.created = int(time.time())
        self.model = model
        self.tokenizer = tokenizer

    def body(
        self,
        outputs: Sequence[RequestOutput],
        *,
        echo: bool,
        token_ids: bool,
        show_prompt_logprobs: bool,
    ) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for output in outputs:
            for completion in output.outputs:
                choice = self._choice(len(choices), output, completion, echo)
                if token_ids:
                    choice["token_ids"] = list(completion.token_ids)
                    choice["prompt_token_ids"] = list(output.prompt_token_ids)
                if show_prompt_logprobs:
                    choice["prompt_logprobs"] = prompt_logprobs(output, self.tokenizer)
                choices.append(choice)
        return {**self._envelope(choices), "usage": usage(outputs)}

    def _choice(
        self, index: int, output: RequestOutput, completion: CompletionOutput, echo: bool
    ) -> dict[str, Any]:
        logprobs = None
        if completion.logprobs is not None:
            entries: list[tuple[int, PositionLogprobs | None]] = [
                (entry.token.token_id, entry) for entry in completion.logprobs
            ]
            if echo and output.prompt_logprobs is not None:
                prompt = zip(output.prompt_token_ids, output.prompt_logprobs, strict=False)
                entries = [*prompt, *entries]
            logprobs, _ = self._logprobs(entries, 0)
        echoed = self._echo_text(output) if echo else ""
        return {
            "index": index,
            "text": echoed + completion.text,
            "logprobs": logprobs,
            "finish_reason": finish_word(completion.finish_reason),
            "stop_reason": completion.stop_reason,
            "seed": completion.seed,
        }

    def echo(
        self, index: int, output: RequestOutput, sample: SampleRecord, logprobs: bool
    ) -> tuple[dict[str, Any], int]:
        """The chunk that opens a choice with its prompt, and the offset of what follows."""
        shown, offset = None, 0
        if logprobs:
            entries = zip(output.prompt_token_ids, (None, *sample.prompt_logprobs), strict=False)
            shown, offset = self._logprobs(list(entries), 0)
        text = self._echo_text(output)
        choice = {"index": index, "text": text, "logprobs": shown, "finish_reason": None}
        return self._envelope([choice]), offset

    def chunk(
        self,
        index: int,
        sample: SampleRecord,
        delta: OutputDelta,
        offset: int | None,
        token_ids: bool,
    ) -> tuple[dict[str, Any], int | None]:
        """``offset``: where the text of log-probabilities goes on; None if none are wanted."""
        shown = None
        if offset is not None:
            entries = [(entry.token.token_id, entry) for entry in delta.logprobs]
            shown, offset = self._logprobs(entries, offset)
        choice: dict[str, Any] = {
            "index": index,
            "text": delta.text,
            "logprobs": shown,
            **_ending(sample, delta),
        }
        if token_ids:
            choice["token_ids"] = list(delta.token_ids)
        return self._envelope([choice]), offset

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
        self, entries: Sequence[tuple[int, PositionLogprobs | None]], offset: int
    ) -> tuple[dict[str, Any], int]:
        """Four lists with an entry per token; the first of a prompt has none. And the offset of
        what follows."""
        tokens: list[str] = []
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token_id, entry in entries:
            tokens.append(self._text(token_id))
            offsets.append(offset)
            offset += 0 if token_id in self.hidden else len(tokens[-1])
            logprobs.append(None if entry is None else _finite(entry.token.logprob))
            tops.append(None if entry is None else self._top(entry))
        shown = {
            "tokens": tokens,
            "token_logprobs": logprobs,
            "top_logprobs": tops,
            "text_offset": offsets,
        }
        return shown, offset

    def _echo_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        shown = [token for token in output.prompt_token_ids if token not in self.hidden]
        data = b"".join(self.tokenizer.token_bytes(token) for token in shown)
        return data.decode("utf-8", errors="replace")

    def _top(self, entry: PositionLogprobs) -> dict[str, float]:
        tokens = (*entry.top, entry.token)
        return {self._text(token.token_id): _finite(token.logprob) for token in tokens}

    def _text(self, token_id: int) -> str:
        return self.tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")


def _ending(sample: SampleRecord, delta: OutputDelta) -> dict[str, Any]:
    """What a chunk says about the end of its choice."""
    ending: dict[str, Any] = {"finish_reason": finish_word(delta.finish_reason)}
    if delta.finish_reason is not None:
        ending |= {"stop_reason": delta.stop_reason, "seed": sample.seed}
    return ending


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
