"""Measure the engine on this machine. Medians of several runs, least and largest beside them.

latency      one table line per --batch-size: prefill and decode speed of equal requests together
throughput   --num-prompts requests through the scheduler at once, tokens per second over all
acceptance   drafts accepted on the prompts of --data, by category; needs --speculative-config
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drumline.cli.engine import add_script_engine_arguments, engine_config
from drumline.core.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from drumline.bench.latency import Measurement
    from drumline.config import EngineConfig
    from drumline.engine.llm import LLM

KINDS = ("latency", "throughput", "acceptance")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=KINDS, help="what to measure")
    parser.add_argument("--input-len", type=int, default=64, metavar="N", help="prompt tokens")
    parser.add_argument("--output-len", type=int, default=64, metavar="N", help="output tokens")
    parser.add_argument(
        "--batch-size",
        type=int,
        nargs="+",
        default=[1, 4, 16],
        metavar="N",
        help="latency: requests together (default: 1 4 16)",
    )
    parser.add_argument(
        "--num-prompts", type=int, default=64, metavar="N", help="throughput: requests in all"
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help="acceptance: JSON lines with turns or prompt, and category",
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="acceptance: 0 is greedy"
    )
    parser.add_argument("--num-iters", type=int, default=3, metavar="N", help="runs counted")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    add_script_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    for name in ("input_len", "output_len", "num_prompts", "num_iters"):
        if getattr(args, name) < 1:
            raise ConfigError(name, getattr(args, name), "must be at least 1")
    if min(args.batch_size) < 1:
        raise ConfigError("batch_size", min(args.batch_size), "must be at least 1")
    if args.json is not None and not args.json.parent.is_dir():
        raise UsageError(f"--json {args.json}: no such folder")
    config = engine_config(args)
    if args.kind == "acceptance":
        return _acceptance(args, config)

    from drumline.bench.latency import bench_config
    from drumline.engine.llm import LLM

    llm = LLM.from_config(bench_config(config, args.batch_size))
    measurements = _latency(llm, args) if args.kind == "latency" else [_throughput(llm, args)]
    _print(llm, measurements)
    _write(args.json, args.kind, llm, [measurement.as_json() for measurement in measurements])
    return 0


def _acceptance(args: argparse.Namespace, config: EngineConfig) -> int:
    if args.data is None:
        raise UsageError("--data: acceptance needs a file of prompts")
    if config.speculation is None:
        raise UsageError("--speculative-config: acceptance needs a drafter")

    from drumline.bench.acceptance import measure_acceptance, read_questions
    from drumline.core.params import SamplingParams
    from drumline.engine.llm import LLM

    questions = read_questions(args.data)
    params = SamplingParams(
        temperature=args.temperature,
        max_tokens=args.output_len,
        seed=0 if args.temperature else None,
    )
    llm = LLM.from_config(config)
    results = measure_acceptance(llm, questions, params)
    print("| category | prompts | tokens | acceptance length | accepted per position |")
    print("| --- | ---: | ---: | ---: | --- |")
    for one in results:
        places = " ".join(f"{share:.2f}" for share in one.per_position)
        print(
            f"| {one.category} | {one.prompts} | {one.tokens} | {one.mean_acceptance_length:.2f} "
            f"| {places} |"
        )
    _write(args.json, "acceptance", llm, [one.as_json() for one in results])
    return 0


def _latency(llm: LLM, args: argparse.Namespace) -> list[Measurement]:
    from drumline.bench.latency import measure

    sizes: list[int] = args.batch_size
    return [measure(llm, size, args.input_len, args.output_len, args.num_iters) for size in sizes]


def _throughput(llm: LLM, args: argparse.Namespace) -> Measurement:
    from drumline.bench.latency import measure_many

    return measure_many(llm, args.num_prompts, args.input_len, args.output_len, args.num_iters)


def _write(path: Path | None, kind: str, llm: LLM, results: list[dict[str, Any]]) -> None:
    if path is not None:
        startup = [list(row) for row in llm.core.facts.startup_rows]
        content = {"kind": kind, "startup": startup, "measurements": results}
        path.write_text(json.dumps(content, indent=1) + "\n")


def _print(llm: LLM, measurements: list[Measurement]) -> None:
    """A Markdown table, ready for a README."""
    facts: dict[str, Any] = {name: value for name, value, _ in llm.core.facts.startup_rows}
    print(
        f"{facts['model']} · {facts['ops_backend']} ops · {facts['dtype']} · "
        f"{facts['threads']} threads · {facts['processor']}"
    )
    print()
    print("| requests | prompt + output | prefill tokens/s | decode tokens/s | seconds |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    for m in measurements:
        print(
            f"| {m.batch_size} | {m.input_len} + {m.output_len} | {m.prefill_tokens_per_second} "
            f"| {m.decode_tokens_per_second} | {m.seconds} |"
        )
