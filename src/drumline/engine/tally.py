"""Sums over replicas: what is in flight where, tokens and time, steps and draft lengths.

Tokens and the time in which any request decodes are counted where all deltas arrive; what only a
replica knows comes in its own words. Knows no process.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from drumline.core.plan import SpeculationStats
from drumline.core.request import Request
from drumline.engine.core import Counters
from drumline.engine.messages import Told
from drumline.engine.outputs import OutputDelta


class Tally:
    """``live``: the replica of every request in flight, by number."""

    def __init__(self) -> None:
        self.live: dict[int, int] = {}
        self.counters = Counters()
        self.ended_by_failure = False
        self._decoding: set[int] = set()
        self._since = 0.0  # when the first of those that decode began to, or was last counted

    def begin(self, request: Request, replica: int) -> None:
        self.live[request.number] = replica
        self.counters.prompt_tokens += len(request.prompt_token_ids)

    def busy(self, replica: int) -> bool:
        return replica in self.live.values()

    def count(self, delta: OutputDelta) -> None:
        """A delta of a live request; its last one ends it."""
        number, tokens, now = delta.number, len(delta.token_ids), time.monotonic()
        if self._decoding:
            self.counters.decode_seconds += now - self._since
        self._since = now
        first = number not in self._decoding
        self.counters.completion_tokens += tokens
        self.counters.decode_tokens += max(0, tokens - 1) if first else tokens
        if tokens:
            self._decoding.add(number)
        if delta.finish_reason is not None:
            self._decoding.discard(number)
            del self.live[number]

    def note(self, told: Mapping[int, Told], together: bool) -> None:
        """Takes over what only replicas know."""
        steps = [one.steps for one in told.values()]
        self.counters.steps = max(steps, default=0) if together else sum(steps)
        self.counters.step_seconds = sum(one.step_seconds for one in told.values())
        self.counters.preemptions = sum(one.preemptions for one in told.values())


def draft_lengths(told: Mapping[int, Told], together: bool) -> dict[int, int]:
    """Draft length → steps: those of one replica where all take every step together."""
    if together:
        first = min(told, default=None)
        return {} if first is None else dict(sorted(told[first].draft_lengths.items()))
    found: dict[int, int] = {}
    for one in told.values():
        for k, count in one.draft_lengths.items():
            found[k] = found.get(k, 0) + count
    return dict(sorted(found.items()))


def summed(parts: Sequence[SpeculationStats]) -> SpeculationStats:
    """What drafts brought to several replicas together."""
    width = max((len(part.accepted_per_position) for part in parts), default=0)
    places = [0] * width
    for part in parts:
        for index, count in enumerate(part.accepted_per_position):
            places[index] += count
    return SpeculationStats(
        drafts=sum(part.drafts for part in parts),
        drafted=sum(part.drafted for part in parts),
        accepted=sum(part.accepted for part in parts),
        accepted_per_position=tuple(places),
    )
