"""Latency and throughput of the engine in this process, on prompts of random token ids.

Each figure is the median of several runs, with the least and the largest beside it: machines are
shared and noisy. Prompts differ between runs and prefix caching is off, so nothing is measured
that was remembered. Tokens are drawn from a seed, so two runs measure the same work.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from drumline.config import EngineConfig
from drumline.core.errors import ConfigError
from drumline.core.params import SamplingParams
from drumline.engine.fleet_core import FleetCore
from drumline.engine.llm import LLM, Interrupt


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and largest of the runs."""

    median: float
    least: float
    largest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:.4g} ({self.least:.4g}–{self.largest:.4g})"


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a batch of equal requests took. Seconds, and tokens per second over the whole batch.

    ``time_to_first_token``: until every request has its first token, prefill of the whole batch.
    ``decode_tokens_per_second``: tokens after each request's first, over the time from there on.
    """

    batch_size: int
    input_len: int
    output_len: int
    runs: int
    seconds: Spread
    time_to_first_token: Spread
    prefill_tokens_per_second: Spread
    decode_tokens_per_second: Spread

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Agreement:
    """What agreeing costs where replicas take every step together. Microseconds: the median
    exchange, waiting for the others included, and the mean step; both are the median replica's."""

    exchange_micros: float
    step_micros: float
    share: float

    @classmethod
    def of(cls, llm: LLM) -> Agreement | None:
        """Of the steps since the start; None where nobody has to agree."""
        if not isinstance(llm.core, FleetCore) or not llm.core.mesh.agrees:
            return None
        told = llm.core.told().values()
        exchange = statistics.median(one.exchange_micros for one in told)
        step = statistics.median(1e6 * one.step_seconds / max(1, one.steps) for one in told)
        return cls(exchange, step, exchange / step if step else 0.0)


def measure(
    llm: LLM, batch_size: int, input_len: int, output_len: int, runs: int, warmups: int = 1
) -> Measurement:
    """Runs ``batch_size`` equal requests together, ``runs`` times after ``warmups``.

    Raises `ConfigError` where the requests would not fit the model or not run together.
    """
    if batch_size > llm.core.resolved.max_num_seqs:
        problem = f"more than max_num_seqs={llm.core.resolved.max_num_seqs}"
        raise ConfigError("batch_size", batch_size, problem)
    return measure_many(llm, batch_size, input_len, output_len, runs, warmups)


def measure_many(
    llm: LLM, count: int, input_len: int, output_len: int, runs: int, warmups: int = 1
) -> Measurement:
    """As `measure`, for any number of requests: the scheduler runs as many together as it can."""
    limits = llm.core.facts.limits
    if input_len + output_len > limits.max_model_len:
        problem = f"{input_len} + output_len exceeds max_model_len={limits.max_model_len}"
        raise ConfigError("input_len", input_len, problem)
    timings = [_run(llm, count, input_len, output_len, run) for run in range(warmups + runs)][
        warmups:
    ]
    prefill = count * input_len
    decoded = count * (output_len - 1)
    return Measurement(
        batch_size=count,
        input_len=input_len,
        output_len=output_len,
        runs=runs,
        seconds=Spread.of([whole for _, whole in timings]),
        time_to_first_token=Spread.of([first for first, _ in timings]),
        prefill_tokens_per_second=Spread.of([prefill / first for first, _ in timings]),
        decode_tokens_per_second=Spread.of(
            [decoded / (whole - first) if decoded else 0.0 for first, whole in timings]
        ),
    )


def _run(
    llm: LLM, batch_size: int, input_len: int, output_len: int, run: int
) -> tuple[float, float]:
    """Seconds until every request has a first token, and until all have ended."""
    vocab = llm.core.facts.limits.vocab_size
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    draw = random.Random(run)
    prompts = [tuple(draw.randrange(vocab) for _ in range(input_len)) for _ in range(batch_size)]
    submissions = llm.submissions(prompts, params)
    started: set[int] = set()
    began = time.perf_counter()
    first = 0.0
    interrupt = Interrupt()
    for index, delta in llm.run(submissions, interrupt):
        if delta.token_ids and index not in started:
            started.add(index)
            if len(started) == batch_size:
                first = time.perf_counter() - began
    if interrupt.raised:
        raise KeyboardInterrupt
    return first, time.perf_counter() - began


def bench_config(config: EngineConfig, batch_sizes: Sequence[int]) -> EngineConfig:
    """The user's configuration, without prefix caching and with seats for the largest batch."""
    seats = max(config.scheduler.max_num_seqs, *batch_sizes)
    return config.with_fields(enable_prefix_caching=False, max_num_seqs=seats)
