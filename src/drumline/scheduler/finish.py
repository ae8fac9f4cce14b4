"""When a request ends, as far as token ids can tell. Stop strings need text and live at intake."""

from __future__ import annotations

from collections.abc import Sequence

from drumline.core.request import FinishReason, Request, Verdict


class TokenFinish:
    """Judges by stop token ids, ``min_tokens`` and ``max_tokens``: what every `Finish` shares."""

    def judge(self, request: Request, output_count: int, tokens: Sequence[int]) -> Verdict:
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
