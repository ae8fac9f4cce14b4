"""drumline beside another engine, by turns in one run, as ratios.

Figures of a shared machine drift; a ratio of two measurements made one right after the other
drifts less, and the median over rounds least. Each round measures every workload once on both
sides; the side that goes first changes from round to round.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from drumline.bench.latency import measure
from drumline.bench.peers import Peer, Workload
from drumline.engine.llm import LLM


@dataclass(frozen=True, slots=True)
class Comparison:
    """One workload. Tokens per second, round by round; ``theirs`` is empty where the peer has no
    such figure."""

    what: str
    ours: tuple[float, ...]
    theirs: tuple[float, ...]

    @property
    def ratios(self) -> tuple[float, ...]:
        return tuple(a / b for a, b in zip(self.ours, self.theirs, strict=False))

    @property
    def ratio(self) -> float | None:
        """The median over rounds of ours by theirs."""
        return statistics.median(self.ratios) if self.theirs else None

    def as_json(self) -> dict[str, Any]:
        return {"what": self.what, "ours": self.ours, "theirs": self.theirs, "ratio": self.ratio}


def compare(
    llm: LLM,
    peer: Peer,
    streams: Sequence[int],
    prompt_len: int,
    output_len: int,
    prefill_len: int,
    rounds: int,
) -> list[Comparison]:
    """Decode of each number of streams, and prefill of one prompt of ``prefill_len`` tokens."""

    def our_decode(work: Workload) -> float:
        found = measure(llm, work.streams, work.prompt_len, work.output_len, runs=1, warmups=0)
        return found.decode_tokens_per_second.median

    def our_prefill() -> float:
        found = measure(llm, 1, prefill_len, 1, runs=1, warmups=0)
        return found.prefill_tokens_per_second.median

    sides: list[tuple[str, Callable[[], float], Callable[[], float | None]]] = []
    for count in streams:
        work = Workload(count, prompt_len, output_len)
        name = f"decode, {count} stream{'s' if count > 1 else ''}"
        sides.append((name, partial(our_decode, work), partial(peer.decode, work)))
    sides.append(
        (f"prefill, {prefill_len} tokens", our_prefill, partial(peer.prefill, prefill_len))
    )
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name, _, _ in sides}
    for _, ours, _ in sides:
        ours()  # a first call warms up; the peer's processes do so by themselves
    for number in range(rounds):
        for name, ours, theirs in sides:
            other = theirs() if number % 2 else None
            own = ours()
            if not number % 2:
                other = theirs()
            found[name][0].append(own)
            if other is not None:
                found[name][1].append(other)
    return [Comparison(name, tuple(own), tuple(other)) for name, (own, other) in found.items()]
