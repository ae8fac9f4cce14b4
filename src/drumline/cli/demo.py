"""Answer a prompt without and with speculation: the same tokens, and how much sooner.

The last line is the result. Exit code 1 if a single token differs, which would be a bug.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from drumline.cli.engine import (
    add_script_engine_arguments,
    complain,
    engine_config,
    have_model,
    print_startup,
)
from drumline.cli.terminal import printable
from drumline.core.errors import ConfigError

if TYPE_CHECKING:
    from drumline.config import EngineConfig
    from drumline.engine.llm import LLM

PROMPT = "Explain step by step why ships float although steel sinks."
MAX_TOKENS = 128
ROUNDS = 3
EXIT_DIFFERENT = 1
EXIT_INTERRUPTED = 130
AUTO = '{"method": "auto"}'  # where no --speculative-config is given: what suits model and device


@dataclass(frozen=True, slots=True)
class Answer:
    """One run: what came, how fast, and what drafts brought of it."""

    token_ids: tuple[int, ...]
    tokens_per_second: float
    acceptance_length: float
    method: str


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", default=PROMPT, metavar="TEXT", help="what to ask")
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS, metavar="N")
    add_script_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.max_tokens < 2:
        raise ConfigError("max_tokens", args.max_tokens, "must be at least 2: speed needs two")
    if not args.prompt.strip():
        raise ConfigError("prompt", args.prompt, "is empty")
    config = engine_config(args)
    have_model(config)
    plain = config.with_fields(speculative_config=None)
    speculative = with_drafter(config)

    engines = [load(plain), load(speculative)]
    print_startup(engines[1].core.facts)
    runs: tuple[list[Answer], list[Answer]] = ([], [])
    for turn in range(ROUNDS + 1):  # the first, which is shown, also warms up
        for engine, answers in zip(engines, runs, strict=True):
            told = answer(engine, args.prompt, args.max_tokens, show=turn == 0 and not runs[0])
            if told is None:
                return EXIT_INTERRUPTED
            answers.append(told)
    return report(*runs)


def report(plain: list[Answer], told: list[Answer]) -> int:
    """Compares every run with the first; speeds are medians of the runs after it."""
    method = told[0].method
    if any(one.token_ids != plain[0].token_ids for one in (*plain, *told)):
        print(f"demo: DIFFERENT tokens with {method}; this is a bug, please report it")
        return EXIT_DIFFERENT
    speeds = [
        statistics.median(one.tokens_per_second for one in runs[1:]) for runs in (plain, told)
    ]
    length = statistics.median(one.acceptance_length for one in told[1:])
    complain(f"without speculation  {speeds[0]:.1f} tokens/s")
    complain(f"with speculation     {speeds[1]:.1f} tokens/s ({method}), medians of {ROUNDS}")
    print(
        f"demo: same tokens, {speeds[1] / speeds[0]:.2f}x "
        f"({method}, acceptance length {length:.2f})"
    )
    return 0


def with_drafter(config: EngineConfig) -> EngineConfig:
    """The configuration with a drafter: the one that was asked for, or the one that suits."""
    if config.speculation is not None:
        return config
    return config.with_fields(speculative_config=AUTO)


def load(config: EngineConfig) -> LLM:
    """Without prefix caching: a repeated prompt is to be read again."""
    from drumline.engine.llm import LLM

    return LLM.from_config(config.with_fields(enable_prefix_caching=False))


def answer(llm: LLM, prompt: str, max_tokens: int, show: bool) -> Answer | None:
    """Asks once, greedily; None if interrupted."""
    from drumline.core.params import SamplingParams
    from drumline.engine.intake import Prompt
    from drumline.engine.llm import Interrupt
    from drumline.engine.outputs import RequestRecord

    asked = Prompt(messages=({"role": "user", "content": prompt},))
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    submission = llm.intake.admit(asked, params)
    record, interrupt = RequestRecord.of(submission), Interrupt()
    counters = llm.core.counters
    tokens, seconds = counters.decode_tokens, counters.decode_seconds
    for _, delta in llm.run([submission], interrupt):
        record.add(delta)
        if show:
            sys.stdout.write(printable(delta.text))
            sys.stdout.flush()
    if show:
        print("\n", flush=True)
    if interrupt.raised:
        return None
    (completion,) = record.output().outputs
    stats = completion.speculation
    speculative = llm.core.resolved.speculation
    spent = counters.decode_seconds - seconds
    return Answer(
        token_ids=completion.token_ids,
        tokens_per_second=(counters.decode_tokens - tokens) / spent if spent else 0.0,
        acceptance_length=1.0 if stats is None else stats.mean_acceptance_length,
        method="none" if speculative is None else speculative.method,
    )
