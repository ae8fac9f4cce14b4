"""What a decode step costs beyond model passes: the engine's share, and what speculation adds.

    passes        forward and logits of the target, and of the drafter's network if it has one
    verify        from logits to accepted tokens
    propose       what the drafter does beside its passes, and what is done with its drafts
    outside       the whole step without the passes, and as a share of the step

Two engines take turns on the same requests, one of them with the drafter; a step counts where
every request decodes. Shares are medians over steps, then over runs; machines are shared and noisy.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from drumline.core.errors import UsageError
from drumline.core.params import SamplingParams
from drumline.core.plan import StepPlan, StepResult
from drumline.engine.core import EngineCore
from drumline.engine.llm import LLM, Interrupt, PromptLike

SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=1, ignore_eos=True)
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
DRAWS = {"greedy": GREEDY, "sampled": SAMPLED}
PASSES = ("forward", "compute_logits", "read", "write_context")


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of one step; ``verify`` and ``propose`` are parts of what is outside of passes."""

    step: float
    passes: float
    verify: float
    propose: float

    @property
    def outside(self) -> float:
        return self.step - self.passes


@dataclass(frozen=True, slots=True)
class Overhead:
    """One batch, one way of drawing: medians. ``engine``: the share of a step without speculation
    that is outside of passes; ``together``: of one with it; ``speculation``: verify and propose
    alone."""

    requests: int
    draw: str
    plain: StepCost
    engine: float
    speculating: StepCost | None = None
    speculation: float | None = None
    together: float | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Stopwatch:
    """Times what an engine calls, by name; `attached` while it does."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.steps: list[StepCost] = []
        self._spent = {"passes": 0.0, "verify": 0.0, "draft": 0.0, "draft passes": 0.0}
        self._counts = False

    @contextmanager
    def attached(self, requests: int) -> Iterator[None]:
        """``requests``: rows of a step that counts."""
        worker = self.core.worker
        undo: list[tuple[object, str]] = []

        def watch(owner: object, name: str, *keys: str) -> None:
            if hasattr(owner, name):
                setattr(owner, name, self._timed(getattr(owner, name), keys))
                undo.append((owner, name))

        for name in PASSES:
            watch(worker.model, name, "passes")
        watch(worker.verifier, "verify", "verify")
        if worker.speculator is not None:
            watch(worker.speculator, "draft", "draft")
            for name in PASSES:
                watch(_network(worker.speculator.drafter), name, "passes", "draft passes")
        execute = worker.execute

        def noticed(plan: StepPlan) -> StepResult:
            self._counts = len(plan.rows) == requests and plan.steady
            return execute(plan)

        worker.execute = noticed  # type: ignore[method-assign]
        undo.append((worker, "execute"))
        try:
            yield
        finally:
            for owner, name in undo:
                delattr(owner, name)

    def step_ended(self, seconds: float) -> None:
        spent = self._spent
        if self._counts:
            propose = spent["draft"] - spent["draft passes"]
            self.steps.append(StepCost(seconds, spent["passes"], spent["verify"], propose))
        self._counts = False
        for key in spent:
            spent[key] = 0.0

    def _timed(self, call: Callable[..., Any], keys: tuple[str, ...]) -> Callable[..., Any]:
        def run(*args: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **named)
            finally:
                seconds = time.perf_counter() - began
                for key in keys:
                    self._spent[key] += seconds

        return run


def _network(drafter: Any) -> object:
    """What a drafter runs passes of. Raises `UsageError` where it cannot be told."""
    drafter = getattr(drafter, "inner", drafter)
    for name in ("network", "model"):
        if hasattr(drafter, name):
            return getattr(drafter, name)
    if drafter.traits.runs_forward:
        raise UsageError(f"overhead cannot tell the passes of a {drafter.traits.method} drafter")
    return object()


def measure_overhead(
    plain: LLM, speculating: LLM | None, sizes: Sequence[int], steps: int, rounds: int
) -> list[Overhead]:
    """``steps``: tokens of each request. Raises `UsageError` for engines of several ranks."""
    engines = [llm for llm in (plain, speculating) if llm is not None]
    for llm in engines:
        if not isinstance(llm.core, EngineCore):
            raise UsageError("overhead measures one rank")
    found = []
    for size in sizes:
        for draw, params in DRAWS.items():
            runs: list[list[list[StepCost]]] = [[] for _ in engines]
            for number in range(1 + rounds):
                for llm, ran in zip(engines, runs, strict=True):
                    costs = decode_steps(llm, size, replace(params, max_tokens=steps), number)
                    if number:  # the first round warms up
                        ran.append(costs)
            if not all(any(ran) for ran in runs):
                raise UsageError(
                    f"{steps} tokens of {size} requests: no step in which all of them decode"
                )
            found.append(_summed(size, draw, *runs))
    return found


def decode_steps(
    llm: LLM, requests: int, params: SamplingParams, number: int = 0
) -> list[StepCost]:
    """The steps of ``requests`` equal requests in which all of them decode."""
    core = llm.core
    assert isinstance(core, EngineCore)
    texts = [f"Tell me fact {number}.{row} about the sea and the sky." for row in range(requests)]
    prompts: list[PromptLike] = list(texts)
    if core.tokenizer.has_chat_template:  # what is drawn from random tokens is like no text
        prompts = [{"messages": [{"role": "user", "content": text}]} for text in texts]
    watch = Stopwatch(core)
    with watch.attached(requests):
        last, step = time.perf_counter(), core.counters.steps
        for _ in llm.run(llm.submissions(prompts, params), Interrupt()):
            if core.counters.steps != step:
                now = time.perf_counter()
                watch.step_ended(now - last)
                step, last = core.counters.steps, now
    return watch.steps


def _summed(
    requests: int,
    draw: str,
    plain: list[list[StepCost]],
    speculating: list[list[StepCost]] | None = None,
) -> Overhead:
    engine = _share(plain, lambda one: one.outside)
    if speculating is None:
        return Overhead(requests, draw, _typical(plain), engine)
    return Overhead(
        requests,
        draw,
        _typical(plain),
        engine,
        _typical(speculating),
        _share(speculating, lambda one: one.verify + one.propose),
        _share(speculating, lambda one: one.outside),
    )


def _share(runs: list[list[StepCost]], part: Callable[[StepCost], float]) -> float:
    return statistics.median(
        statistics.median(part(one) / one.step for one in steps) for steps in runs if steps
    )


def _typical(runs: list[list[StepCost]]) -> StepCost:
    every = [one for steps in runs for one in steps]
    names = ("step", "passes", "verify", "propose")
    return StepCost(*(statistics.median(getattr(one, name) for one in every) for name in names))
