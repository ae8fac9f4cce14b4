"""`drumline bench speedup`: decode speed on prompts with speculation and without it, as a table."""

from __future__ import annotations

import argparse
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drumline.config.speculative import SHORTCUTS
from drumline.core.errors import UsageError

if TYPE_CHECKING:
    from drumline.bench.speedup import Candidate, Speeds
    from drumline.config import EngineConfig
    from drumline.engine.llm import LLM


def add_speedup_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--llama-server", type=Path, metavar="PATH", help="speedup: llama.cpp's server, beside it"
    )
    parser.add_argument(
        "--llama-spec-type",
        nargs="+",
        default=[],
        metavar="TYPE",
        help="speedup: ways of llama.cpp's server to speculate, each a candidate of its own",
    )


def run_speedup(args: argparse.Namespace, config: EngineConfig) -> tuple[LLM, list[dict[str, Any]]]:
    if args.data is None:
        raise UsageError("bench speedup needs --data")
    if config.speculation is None:
        raise UsageError("bench speedup needs --speculative-config: nothing would be drafted")
    if args.llama_spec_type and args.llama_server is None:
        raise UsageError("--llama-spec-type needs --llama-server")
    from drumline.bench.acceptance import read_questions
    from drumline.bench.speedup import PLAIN, LlamaServer, OwnEngine, measure_speedup
    from drumline.engine.llm import LLM

    questions = read_questions(args.data)
    config = config.with_fields(enable_prefix_caching=False)
    with ExitStack() as opened:

        def keep(candidate: Candidate) -> Candidate:
            opened.callback(candidate.close)
            return candidate

        without = config.with_fields(speculative_config=None, **dict.fromkeys(SHORTCUTS))
        plain = LLM.from_config(without)
        candidates = [keep(OwnEngine(PLAIN, plain))]
        speculative = LLM.from_config(config)
        candidates.append(keep(OwnEngine(_name_of(speculative), speculative)))
        if args.llama_server is not None:
            for spec_type in (None, *args.llama_spec_type):
                path = Path(plain.core.facts.model_path)
                threads = plain.core.resolved.threads
                candidates.append(keep(LlamaServer(args.llama_server, path, threads, spec_type)))
        speeds = measure_speedup(
            candidates,
            questions,
            args.output_len,
            args.num_iters,
            lambda text: print(text, file=sys.stderr, flush=True),
        )
        print_speedup(speeds, [candidate.name for candidate in candidates])
        return plain, [one.as_json() for one in speeds]


def _name_of(llm: LLM) -> str:
    drafting = llm.core.resolved.speculation
    assert drafting is not None
    return str(drafting.method)


def print_speedup(speeds: list[Speeds], names: list[str]) -> None:
    """A Markdown table: the plain engine's tokens per second, and everyone's ratio to it."""
    from drumline.bench.speedup import PLAIN, best

    own, peers = names[1], names[2:]
    print(f"| decode | {PLAIN} tokens/s | " + " | ".join(names[1:]) + " |")
    print("| --- | ---: |" + " ---: |" * len(names[1:]))
    for one in speeds:
        ratios = " | ".join(f"{one.ratio(name, PLAIN).median:.2f}" for name in names[1:])
        print(f"| {one.category} | {statistics.median(one.by_candidate[PLAIN]):.1f} | {ratios} |")
    whole = speeds[-1]
    if peers:
        print(f"\n{own} to {peers[0]}: {whole.ratio(own, peers[0])}")
    if len(peers) > 1:
        quickest = best(whole, peers[1:])
        print(f"{own} to its best way to speculate ({quickest}): {whole.ratio(own, quickest)}")
    least = min(speeds, key=lambda one: one.ratio(own, PLAIN).median)
    print(f"least to {PLAIN}: {least.ratio(own, PLAIN)} ({least.category})")
