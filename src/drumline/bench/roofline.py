"""A target pass beside what it must read and multiply, and what the machine can do of either.

    bytes         the weights a pass touches, as they are stored, and the keys and values it reads
    memory        those bytes at the best reading speed measured between the passes
    arithmetic    its multiply-adds at the best int8 rate (float32 where weights are not quantised)
    pass          forward and logits for so many sequences of one new token each
    share         of the higher of the two limits that the pass reaches
    step, outside what the whole engine takes for a decode step of as many requests, and the share
                  of it that is spent outside model passes

(Williams, Waterman, Patterson 2009: roofline.) Times are medians of rounds in which every size and
every limit is measured once, so that all see the same machine.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from drumline.bench.probe import Limits, Probe
from drumline.core.errors import ConfigError, UsageError
from drumline.core.params import SamplingParams
from drumline.engine.core import EngineCore
from drumline.engine.llm import LLM, Interrupt
from drumline.models.layers import EMBEDDING, HEAD
from drumline.ops.base import PagedBatch
from drumline.ops.weights import WeightTensor
from drumline.worker.worker import Worker

PLAIN_KINDS = ("F32", "F16", "BF16")
DECODED = 16  # steps of a run whose time counts


@dataclass(frozen=True, slots=True)
class PassWork:
    """What one pass over ``rows`` sequences of ``context`` tokens must do."""

    rows: int
    context: int
    weight_bytes: int
    kv_bytes: int
    macs: int
    quantised: bool


@dataclass(frozen=True, slots=True)
class Line:
    """One size, measured. Seconds; ``outside`` and ``share`` are shares of one."""

    work: PassWork
    memory_seconds: float
    arithmetic_seconds: float
    pass_seconds: float
    step_seconds: float | None
    outside: float | None

    @property
    def limit_seconds(self) -> float:
        return max(self.memory_seconds, self.arithmetic_seconds)

    @property
    def share(self) -> float:
        return self.limit_seconds / self.pass_seconds

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"share": self.share}


def pass_work(
    core: EngineCore, weights: Mapping[str, WeightTensor], rows: int, context: int
) -> PassWork:
    """Counted from the checkpoint's tensors. A table of embeddings is read where it is also the
    head; of a layer's experts as many as the rows can choose."""
    config = core.worker.model.config  # type: ignore[attr-defined]
    tied = HEAD not in weights
    experts = config.experts
    reached = 1.0
    if experts is not None:
        reached = min(1.0, rows * experts.per_token / experts.count)
    read = macs = 0.0
    kinds: set[str] = set()
    for name, weight in weights.items():
        if name == EMBEDDING and not tied:
            continue
        share = reached if ".experts." in name else 1.0
        read += share * weight.nbytes
        if len(weight.shape) == 2:
            chosen = experts.per_token / experts.count if experts and ".experts." in name else 1.0
            macs += chosen * rows * math.prod(weight.shape)
            kinds.add(weight.kind)
    heads = config.num_attention_heads * config.head_dim * config.num_hidden_layers
    kv = rows * context * core.resolved.model.kv_bytes_per_token(core.resolved.kv_cache_dtype)
    return PassWork(
        rows=rows,
        context=context,
        weight_bytes=round(read),
        kv_bytes=kv,
        macs=round(macs) + 2 * rows * context * heads,
        quantised=not kinds <= set(PLAIN_KINDS),
    )


def _one_rank(llm: LLM) -> EngineCore:
    if isinstance(llm.core, EngineCore):
        return llm.core
    parallel = llm.core.resolved.config.parallel
    for name in ("data_parallel_size", "tensor_parallel_size"):
        if getattr(parallel, name) > 1:
            raise ConfigError(name, getattr(parallel, name), "roofline measures one rank")
    raise AssertionError("several ranks, and no size above 1")


def measure_roofline(
    llm: LLM,
    weights: Mapping[str, WeightTensor],
    sizes: Sequence[int],
    context: int,
    rounds: int,
) -> tuple[Limits, list[Line]]:
    """The medians of ``rounds``. Raises `ConfigError` for sizes that the cache does not hold."""
    core = _one_rank(llm)
    ops = core.worker.ops
    if ops.name != "native":
        raise UsageError("roofline compares native operations with the machine: --ops-backend")
    probe = Probe(core.resolved.threads, ops.path)  # type: ignore[attr-defined]
    passes = {size: _target_pass(core.worker, size, context) for size in sizes}
    stepped = [size for size in sizes if size <= core.resolved.max_num_seqs]
    limits: list[Limits] = []
    pass_seconds: dict[int, list[float]] = {size: [] for size in sizes}
    steps: dict[int, list[tuple[float, float]]] = {size: [] for size in stepped}
    for number in range(1 + rounds):
        found = probe.measure()
        taken = {size: _best(call) for size, call in passes.items()}
        ran = {size: _decode_steps(llm, size, context, number) for size in stepped}
        if number:  # the first round warms up
            limits.append(found)
            for size in sizes:
                pass_seconds[size].append(taken[size])
            for size in stepped:
                steps[size].append(ran[size])
    limit = Limits(
        statistics.median(one.bytes_per_second for one in limits),
        statistics.median(one.int8_macs_per_second for one in limits),
        statistics.median(one.float_macs_per_second for one in limits),
        _median_signal(limits),
    )
    lines = []
    for size in sizes:
        work = pass_work(core, weights, size, context)
        rate = limit.int8_macs_per_second if work.quantised else limit.float_macs_per_second
        step = outside = None
        if size in steps:
            step = statistics.median(whole for whole, _ in steps[size])
            outside = statistics.median(1 - inside / whole for whole, inside in steps[size])
        lines.append(
            Line(
                work=work,
                memory_seconds=(work.weight_bytes + work.kv_bytes) / limit.bytes_per_second,
                arithmetic_seconds=work.macs / rate if rate else 0.0,
                pass_seconds=statistics.median(pass_seconds[size]),
                step_seconds=step,
                outside=outside,
            )
        )
    return limit, lines


def _median_signal(limits: Sequence[Limits]) -> float | None:
    """The middle one, not a mean: cores that a host moves about are near each other or they are
    not."""
    seconds = [one.signal_seconds for one in limits if one.signal_seconds is not None]
    return statistics.median_low(seconds) if seconds else None


def _best(call: Callable[[], object], repeats: int = 5) -> float:
    call()
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def _target_pass(worker: Worker, rows: int, context: int) -> Callable[[], object]:
    """A pass for one new token of each of ``rows`` sequences that have ``context`` tokens then."""
    size = worker.cache.block_size
    blocks = -(-context // size)
    if rows * blocks > worker.cache.block_count:
        holds = worker.cache.block_count // blocks
        raise ConfigError("batch_size", rows, f"the cache holds {holds} sequences of {context}")
    tables = tuple(tuple(range(row * blocks, (row + 1) * blocks)) for row in range(rows))
    last = context - 1
    batch = PagedBatch(
        positions=torch.full((rows,), last, dtype=torch.int64),
        slots=torch.tensor([table[last // size] * size + last % size for table in tables]),
        query_start=tuple(range(rows + 1)),
        block_tables=tables,
    )
    ids = torch.arange(rows, dtype=torch.int64)

    def run() -> object:
        with torch.inference_mode():
            output = worker.model.forward(ids, batch, worker.cache)
            return worker.model.compute_logits(output.hidden)

    return run


def _decode_steps(llm: LLM, rows: int, context: int, number: int) -> tuple[float, float]:
    """(seconds of a decode step, seconds of it inside model passes): medians over the steps of
    ``rows`` equal requests."""
    vocab = llm.core.facts.limits.vocab_size
    prompt_len = max(1, context - DECODED // 2)
    prompts = [
        tuple((7919 * (row + 1) + 104729 * number + 31 * at) % vocab for at in range(prompt_len))
        for row in range(rows)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=DECODED, ignore_eos=True)
    core = _one_rank(llm)
    inside = [0.0]
    model = core.worker.model
    forward, logits = model.forward, model.compute_logits

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args)
            finally:
                inside[0] += time.perf_counter() - began

        return run

    model.forward = timed(forward)  # type: ignore[method-assign]
    model.compute_logits = timed(logits)  # type: ignore[method-assign]
    found: list[tuple[float, float]] = []
    try:
        last, before = time.perf_counter(), 0.0
        step = core.counters.steps
        for _ in llm.run(llm.submissions(prompts, params), Interrupt()):
            if core.counters.steps != step:
                now = time.perf_counter()
                found.append((now - last, inside[0] - before))
                step, last, before = core.counters.steps, now, inside[0]
    finally:
        model.forward, model.compute_logits = forward, logits  # type: ignore[method-assign]
    decode = found[-(DECODED - 2) :]
    return statistics.median(a for a, _ in decode), statistics.median(b for _, b in decode)
