"""Answer a prompt without and with speculation: the same tokens, and how much sooner.

The last line is the result. Exit code 1 if a single token differs, which would be a bug.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from drumline.cli.engine import (
    add_script_engine_arguments,
    complain,
    decode_speed,
    engine_config,
    have_model,
    print_startup,
)
from drumline.cli.terminal import printable
from drumline.core.errors import ConfigError

if TYPE_CHECKING:
    from drumline.config import EngineConfig

PROMPT = "Why do ships float although steel sinks? Answer in two sentences."
MAX_TOKENS = 128
EXIT_DIFFERENT = 1
EXIT_INTERRUPTED = 130
# What is tried where no --speculative-config is given: the head that ships with the package for
# this model, and for a model without one the drafter that needs none.
HEAD = '{"method": "mtp", "num_speculative_tokens": 3}'
LOOKUP = """{
    "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 4
}"""


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

    without = answer(plain, args.prompt, args.max_tokens, show=True)
    if without is None:
        return EXIT_INTERRUPTED
    complain(f"without speculation: {without.tokens_per_second:.1f} tokens/s\n")
    told = answer(speculative, args.prompt, args.max_tokens, show=False)
    if told is None:
        return EXIT_INTERRUPTED
    method = told.method
    complain(
        f"with speculation ({method}): {told.tokens_per_second:.1f} tokens/s, "
        f"{told.acceptance_length:.2f} tokens per verified draft\n"
    )
    if told.token_ids != without.token_ids:
        print(f"demo: DIFFERENT tokens with {method}; this is a bug, please report it")
        return EXIT_DIFFERENT
    ratio = told.tokens_per_second / without.tokens_per_second
    length = f"acceptance length {told.acceptance_length:.2f}"
    print(f"demo: same tokens, {ratio:.2f}x ({method}, {length})")
    return 0


def with_drafter(config: EngineConfig) -> EngineConfig:
    """The configuration with a drafter: the one that was asked for, or the best that is here."""
    from drumline.config import EngineConfig
    from drumline.drafting.mtp import shipped_head
    from drumline.models.checkpoint import open_checkpoint
    from drumline.models.fetch import resolve_model

    if config.speculative.speculative_config is not None:
        return config
    path = resolve_model(config.model.model, config.model.revision)
    head = shipped_head(open_checkpoint(path).config, str(path))
    asked = {name: config.get(name) for name in config.sources}
    return EngineConfig.from_kwargs(**asked, speculative_config=HEAD if head else LOOKUP)


def answer(config: EngineConfig, prompt: str, max_tokens: int, show: bool) -> Answer | None:
    """Loads an engine, asks it once, greedily; None if interrupted."""
    from drumline.core.params import SamplingParams
    from drumline.engine.intake import Prompt
    from drumline.engine.llm import LLM, Interrupt
    from drumline.engine.outputs import RequestRecord

    llm = LLM.from_config(config)
    print_startup(llm.core.facts)
    asked = Prompt(messages=({"role": "user", "content": prompt},))
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    submission = llm.intake.admit(asked, params)
    record, interrupt = RequestRecord.of(submission), Interrupt()
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
    length = 1.0 if stats is None else stats.mean_acceptance_length
    speculative = llm.core.resolved.speculation
    method = "none" if speculative is None else speculative.method
    return Answer(completion.token_ids, decode_speed(llm.core.counters), length, method)
