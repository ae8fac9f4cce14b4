"""When a request ends, as far as token ids can tell. Stop strings need text and live at intake."""

from __future__ import annotations

from collections.abc import Sequence as Tokens

from drumline.core.request import FinishReason, Request, Verdict
from drumline.scheduler.sequence import Sequence


class TokenFinish:
    """Judges by stop token ids, ``min_tokens`` and ``max_tokens``: what every `Finish` shares."""

    def judge(self, request: Request, output_count: int, tokens: Tokens[int]) -> Verdict:
        room = request.max_tokens - output_count
        assert room > 0, f"request {request.number} went on past its limit"
        stops = request.stop_token_ids
        for index, token in enumerate(tokens[:room]):
            if token in stops and output_count + index + 1 > request.params.min_tokens:
                asked = token in request.params.stop_token_ids
                return Verdict(index + 1, FinishReason.STOP, token if asked else None)
        if len(tokens) >= room:
            return Verdict(room, FinishReason.LENGTH)
        return Verdict(len(tokens))


def check_verdict(sequence: Sequence, verdict: Verdict, count: int) -> None:
    """The other half of the agreement with `Finish`: limits hold exactly."""
    assert 1 <= verdict.kept <= count
    assert verdict.reason is not None or verdict.kept == count, "tokens dropped without an end"
    length = sequence.committed_count + verdict.kept
    assert length <= sequence.request.length_max, "a request ran past its limit"
    assert verdict.reason is not None or length < sequence.request.length_max
