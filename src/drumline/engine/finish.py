"""Which accepted tokens are kept, why a request ends, and what text it has become.

One judge for all requests of an engine. Tokens come as steps accept them, several at once under
speculation, and are judged one by one in order, so the outcome does not depend on how they were
grouped: ids, log-probabilities, usage and text end at the same token. Knows no tensors, no model
and no vocabulary; text comes from a detokenizer it is handed.

    text so far   | taken | released | held |        held could still begin a stop string
                                                     (nothing is held if stop strings stay in)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from drumline.core.request import FinishReason, Request, Verdict


class Detokenizer(Protocol):
    """Turns the tokens of one sequence into text, piece by piece."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; an unfinished character waits for the next."""
        ...

    def flush(self) -> str:
        """What still waits, at the end of the sequence."""
        ...


ALL_KEPT = tuple(Verdict(count) for count in range(9))  # what most steps hear, made once


@dataclass(slots=True)
class _Output:
    """One request's text. ``window`` is the longest end of the text that begins a stop string."""

    detokenizer: Detokenizer | None
    stop: tuple[str, ...]
    include_stop: bool
    min_tokens: int
    count: int = 0
    window: str = ""
    released: list[str] = field(default_factory=list)
    finished: bool = False

    @property
    def may_stop(self) -> bool:
        return self.count > self.min_tokens

    def add(self, delta: str) -> str | None:
        """Appends text. Returns the stop string that it completes; text is then cut at it."""
        if not self.stop:
            self.released.append(delta)
            return None
        text = self.window + delta
        match = self._first_stop(text) if self.may_stop and delta else None
        begin = len(self.window) if self.include_stop else 0
        if match is not None:
            start, stop = match
            self.released.append(text[begin : start + len(stop) if self.include_stop else start])
            self.window = ""
            return stop
        held = _held_length(text, self.stop)
        end = len(text) if self.include_stop else len(text) - held
        self.released.append(text[begin:end])
        self.window = text[len(text) - held :]
        return None

    def end(self) -> None:
        """No stop string came: what was held is text like any other."""
        if not self.include_stop:
            self.released.append(self.window)
        self.window = ""

    def _first_stop(self, text: str) -> tuple[int, str] | None:
        """The stop string that begins first, and of those the one listed first. It must end in
        the new text: one that was complete before came too early to count (min_tokens)."""
        found: list[tuple[int, int]] = []
        for order, stop in enumerate(self.stop):
            start = text.find(stop, max(len(self.window) - len(stop) + 1, 0))
            if start >= 0:
                found.append((start, order))
        if not found:
            return None
        start, order = min(found)
        return start, self.stop[order]


class OutputJudge:
    """Implements `core.request.Finish`, and keeps the text of every request it judges.

    ``start`` before the first `judge`, ``forget`` after the last `take_text`. To rebuild a
    request after a restart: start it again, judge the tokens it had, and drop the text taken.
    """

    def __init__(self) -> None:
        self._outputs: dict[int, _Output] = {}

    def start(
        self, request: Request, detokenizer: Detokenizer | None, stop: tuple[str, ...] = ()
    ) -> None:
        """Opens a request. Without a detokenizer it has no text, and no stop strings."""
        assert detokenizer is not None or not stop, "stop strings need text"
        params = request.params
        self._outputs[request.number] = _Output(
            detokenizer, stop, params.include_stop_str_in_output, params.min_tokens
        )

    def judge(self, request: Request, output_count: int, tokens: Sequence[int]) -> Verdict:
        """Keeps tokens up to and with the one that ends the request.

        At one token, a stop wins over the limit; a stop beyond the limit is never seen. Neither
        stop ids nor stop strings count among the first min_tokens outputs.
        """
        output = self._outputs[request.number]
        assert output.count == output_count, "a token was lost or judged twice"
        assert not output.finished, "the request has ended"
        for kept, token in enumerate(tokens, start=1):
            output.count += 1
            verdict = self._judge_token(request, output, kept, token)
            if verdict is not None:
                output.finished = True
                return verdict
        return ALL_KEPT[len(tokens)] if len(tokens) < len(ALL_KEPT) else Verdict(len(tokens))

    def take_text(self, number: int) -> str:
        """The text that became certain since the last call."""
        released = self._outputs[number].released
        text = released[0] if len(released) == 1 else "".join(released)
        released.clear()
        return text

    def take_rest(self, number: int) -> str:
        """All remaining text of a request that ends without a verdict (abort, error)."""
        output = self._outputs[number]
        if not output.finished:
            output.finished = True
            if output.add(_flush(output.detokenizer)) is None:
                output.end()
        return self.take_text(number)

    def forget(self, number: int) -> None:
        """Drops a request; one that is not known is none to drop."""
        self._outputs.pop(number, None)

    def _judge_token(
        self, request: Request, output: _Output, kept: int, token: int
    ) -> Verdict | None:
        """The verdict if ``token``, the ``kept``-th of this call, ends the request."""
        stopped = output.may_stop and token in request.stop_token_ids
        ends = stopped or output.count >= request.max_tokens
        shown = () if stopped and not output.include_stop else (token,)
        text = _push(output.detokenizer, shown)
        if ends:
            text += _flush(output.detokenizer)
        stop = output.add(text)
        if stop is not None:  # also where the end set free text that had waited
            return Verdict(kept, FinishReason.STOP, stop)
        if not ends:
            return None
        output.end()
        if not stopped:
            return Verdict(kept, FinishReason.LENGTH)
        listed = token in request.params.stop_token_ids
        return Verdict(kept, FinishReason.STOP, token if listed else None)


def _push(detokenizer: Detokenizer | None, tokens: Sequence[int]) -> str:
    return detokenizer.push(tokens) if detokenizer is not None and tokens else ""


def _flush(detokenizer: Detokenizer | None) -> str:
    return detokenizer.flush() if detokenizer is not None else ""


def _held_length(text: str, stops: tuple[str, ...]) -> int:
    """The length of the longest end of ``text`` that is a beginning of a stop string."""
    longest = 0
    for stop in stops:
        start = text.find(stop[0], max(len(text) - len(stop) + 1, 0))
        while 0 <= start < len(text) - longest:
            if stop.startswith(text[start:]):
                longest = len(text) - start
                break
            start = text.find(stop[0], start + 1)
    return longest
