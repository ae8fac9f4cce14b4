"""Measure the engine on this machine. Medians of several runs, least and largest beside them.

latency      one table line per --batch-size: prefill and decode speed of equal requests together
throughput   --num-prompts requests through the scheduler at once, tokens per second over all
acceptance   drafts accepted on the prompts of --data, by category; needs --speculative-config
roofline     target passes beside what they read and multiply, and what the machine can do of it
overhead     decode steps outside of model passes, greedy and sampled: the engine's share and, with
             --speculative-config, that of speculation
speedup      decode speed on the prompts of --data, by category, with --speculative-config and
             without, by turns; beside llama.cpp's server where --llama-server says where that is
compare      decode and prefill beside another engine (--peer), by turns, as ratios
quality      the backend's arithmetic against the reference's, on texts the model writes (minutes);
             --output-len tokens of each greedy one; exit status 1 beyond the limits
hang         the two ways in which replicas that speculate used to wait for each other for ever,
             with the old decision (--policy local) or without; exit status 1 if the run hangs
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drumline.cli.bench_hang import add_hang_arguments, run_hang
from drumline.cli.bench_overhead import run_overhead
from drumline.cli.bench_speedup import add_speedup_arguments, run_speedup
from drumline.cli.engine import add_script_engine_arguments, engine_config
from drumline.core.errors import ConfigError, UsageError

ROOFLINE_COLUMNS = (
    *("rows", "MB", "GMAC", "memory ms", "arithmetic ms", "pass ms"),
    *("share", "to 1 row", "step ms", "outside"),
)
DEFAULT_SIZES = {"roofline": [1, 2, 4, 8, 16], "overhead": [1, 16]}
PEERS = ("llama.cpp", "transformers", "openvino", "vllm")

if TYPE_CHECKING:
    from drumline.bench.latency import Agreement, Measurement
    from drumline.config import EngineConfig
    from drumline.engine.llm import LLM

KINDS = (
    *("latency", "throughput", "acceptance", "speedup", "roofline", "overhead", "compare"),
    *("quality", "hang"),
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=KINDS, help="what to measure")
    parser.add_argument("--input-len", type=int, default=64, metavar="N", help="prompt tokens")
    parser.add_argument("--output-len", type=int, default=64, metavar="N", help="output tokens")
    parser.add_argument(
        "--batch-size",
        type=int,
        nargs="+",
        metavar="N",
        help="requests together (default: 1 4 16; roofline: 1 2 4 8 16; overhead: 1 16)",
    )
    parser.add_argument(
        "--num-prompts", type=int, default=64, metavar="N", help="throughput: requests in all"
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help="acceptance, speedup: JSON lines with turns or prompt, and category",
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="acceptance: 0 is greedy"
    )
    parser.add_argument(
        "--context", type=int, default=64, metavar="N", help="roofline: tokens of each sequence"
    )
    parser.add_argument("--peer", choices=PEERS, help="compare: with which engine")
    for name in ("--llama-bench", "--llama-batched-bench"):
        parser.add_argument(name, type=Path, metavar="PATH", help="compare: llama.cpp's program")
    parser.add_argument(
        "--peer-python",
        type=Path,
        metavar="PATH",
        help="compare: interpreter that has the peer's library (default: this one)",
    )
    parser.add_argument(
        "--prefill-len", type=int, default=512, metavar="N", help="compare: tokens to prefill"
    )
    parser.add_argument("--num-iters", type=int, default=3, metavar="N", help="runs counted")
    add_speedup_arguments(parser)
    add_hang_arguments(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    add_script_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    for name in ("input_len", "output_len", "num_prompts", "num_iters", "context", "prefill_len"):
        if getattr(args, name) < 1:
            raise ConfigError(name, getattr(args, name), "must be at least 1")
    if args.batch_size is None:
        args.batch_size = DEFAULT_SIZES.get(args.kind, [1, 4, 16])
    if min(args.batch_size) < 1:
        raise ConfigError("batch_size", min(args.batch_size), "must be at least 1")
    if args.json is not None and not args.json.parent.is_dir():
        raise UsageError(f"--json {args.json}: no such folder")
    config = engine_config(args)
    if args.kind == "hang":
        return run_hang(args, config)
    if args.kind == "acceptance":
        return _acceptance(args, config)
    if args.kind == "speedup":
        llm, figures = run_speedup(args, config)
        _write(args.json, "speedup", llm, figures)
        return 0
    if args.kind == "overhead":
        llm, figures = run_overhead(args, config)
        _write(args.json, "overhead", llm, figures)
        return 0
    if args.kind == "compare" and args.peer is None:
        raise UsageError("--peer: compare needs another engine")

    from drumline.bench.latency import Agreement, bench_config
    from drumline.engine.llm import LLM

    llm = LLM.from_config(bench_config(config, args.batch_size))
    if args.kind == "roofline":
        return _roofline(llm, args)
    if args.kind == "compare":
        return _compare(llm, args)
    if args.kind == "quality":
        return _quality(llm, args)
    measurements = _latency(llm, args) if args.kind == "latency" else [_throughput(llm, args)]
    agreement = Agreement.of(llm)
    _print(llm, measurements)
    _print_agreement(agreement)
    figures = [measurement.as_json() for measurement in measurements]
    _write(args.json, args.kind, llm, figures, agreement)
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


def _roofline(llm: LLM, args: argparse.Namespace) -> int:
    from drumline.bench.roofline import measure_roofline
    from drumline.models.checkpoint import open_checkpoint

    quantization = llm.core.resolved.config.model.quantization
    weights = open_checkpoint(llm.core.facts.model_path, quantization).tensors
    limits, lines = measure_roofline(llm, weights, args.batch_size, args.context, args.num_iters)
    signal = limits.signal_seconds
    seen = "" if signal is None else f", signals another thread in {signal * 1e9:.0f} ns"
    print(_headline(llm))
    print(
        f"\nreads {limits.bytes_per_second / 1e9:.1f} GB/s, multiplies "
        f"{limits.int8_macs_per_second / 1e9:.0f} G int8/s, "
        f"{limits.float_macs_per_second / 1e9:.0f} G float32/s{seen}; context {args.context}\n"
    )
    print(f"| {' | '.join(ROOFLINE_COLUMNS)} |")
    print("| ---: |" + " ---: |" * (len(ROOFLINE_COLUMNS) - 1))
    for one in lines:
        work = one.work
        step = "" if one.step_seconds is None else f"{one.step_seconds * 1e3:.2f}"
        outside = "" if one.outside is None else f"{one.outside:.1%}"
        print(
            f"| {work.rows} | {(work.weight_bytes + work.kv_bytes) / 1e6:.1f} "
            f"| {work.macs / 1e9:.3f} | {one.memory_seconds * 1e3:.2f} "
            f"| {one.arithmetic_seconds * 1e3:.2f} | {one.pass_seconds * 1e3:.2f} "
            f"| {one.share:.0%} | {one.pass_seconds / lines[0].pass_seconds:.2f} "
            f"| {step} | {outside} |"
        )
    _write(args.json, "roofline", llm, [one.as_json() for one in lines])
    return 0


def _compare(llm: LLM, args: argparse.Namespace) -> int:
    from drumline.bench.compare import compare
    from drumline.bench.peers import open_peer

    peer = open_peer(
        args.peer,
        Path(llm.core.facts.model_path),
        llm.core.resolved.threads,
        llm.core.facts.limits.vocab_size,
        args.llama_bench,
        args.llama_batched_bench,
        args.peer_python,
    )
    try:
        found = compare(
            llm,
            peer,
            args.batch_size,
            args.input_len,
            args.output_len,
            args.prefill_len,
            args.num_iters,
        )
    finally:
        peer.close()
    print(f"{_headline(llm)}\n")
    print(f"| tokens/s | drumline | {peer.name} | ratio (median, least, largest) |")
    print("| --- | ---: | ---: | ---: |")
    for one in found:
        theirs, ratio = "–", "–"
        if one.theirs:
            theirs = f"{statistics.median(one.theirs):.4g}"
            ratio = f"{one.ratio:.2f} ({min(one.ratios):.2f}–{max(one.ratios):.2f})"
        print(f"| {one.what} | {statistics.median(one.ours):.4g} | {theirs} | {ratio} |")
    _write(args.json, "compare", llm, [one.as_json() for one in found])
    return 0


def _quality(llm: LLM, args: argparse.Namespace) -> int:
    from drumline.bench.quality import measure_quality

    quality = measure_quality(llm, args.output_len)
    print(f"positions compared         {quality.positions}")
    print(f"same preferred token       {quality.agreement:.2%}")
    print(f"mean divergence            {quality.divergence:.2e} nats")
    print(
        f"perplexity                 {quality.perplexity:.4f}, reference "
        f"{quality.reference_perplexity:.4f} ({quality.perplexity_change:+.3%}), "
        f"{quality.text_tokens} tokens"
    )
    failures = quality.failures()
    print("beyond the limits          " + ("; ".join(failures) or "nothing"))
    _write(args.json, "quality", llm, [quality.as_json()])
    return 1 if failures else 0


def _latency(llm: LLM, args: argparse.Namespace) -> list[Measurement]:
    from drumline.bench.latency import measure

    sizes: list[int] = args.batch_size
    return [measure(llm, size, args.input_len, args.output_len, args.num_iters) for size in sizes]


def _throughput(llm: LLM, args: argparse.Namespace) -> Measurement:
    from drumline.bench.latency import measure_many

    return measure_many(llm, args.num_prompts, args.input_len, args.output_len, args.num_iters)


def _write(
    path: Path | None,
    kind: str,
    llm: LLM,
    results: list[dict[str, Any]],
    agreement: Agreement | None = None,
) -> None:
    if path is not None:
        startup = [list(row) for row in llm.core.facts.startup_rows]
        content: dict[str, Any] = {"kind": kind, "startup": startup, "measurements": results}
        if agreement is not None:
            content["agreement"] = asdict(agreement)
        path.write_text(json.dumps(content, indent=1) + "\n")


def _print(llm: LLM, measurements: list[Measurement]) -> None:
    """A Markdown table, ready for a README."""
    print(f"{_headline(llm)}\n")
    print("| requests | prompt + output | prefill tokens/s | decode tokens/s | seconds |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    for m in measurements:
        print(
            f"| {m.batch_size} | {m.input_len} + {m.output_len} | {m.prefill_tokens_per_second} "
            f"| {m.decode_tokens_per_second} | {m.seconds} |"
        )


def _print_agreement(agreement: Agreement | None) -> None:
    """What agreeing costs, where replicas take every step together."""
    if agreement is not None:
        print(
            f"\nexchange before a step, waiting included: {agreement.exchange_micros:.0f} µs, "
            f"{agreement.share:.1%} of a step"
        )


def _headline(llm: LLM) -> str:
    facts: dict[str, Any] = {name: value for name, value, _ in llm.core.facts.startup_rows}
    return (
        f"{facts['model']} · {facts['ops_backend']} ops · {facts['dtype']} · "
        f"{facts['threads']} threads · {facts['processor']}"
    )
