"""Complete prompts with a model and print what comes.

A single prompt streams to the terminal; several show a progress bar and print in input order.
With --json: one object per (request, sample) in input order, then one summary object.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drumline.cli.engine import (
    add_script_engine_arguments,
    complain,
    decode_speed,
    engine_config,
    have_model,
    print_startup,
)
from drumline.cli.prompts import Job, from_file, from_texts
from drumline.cli.sampling import add_sampling_arguments, sampling_arguments
from drumline.cli.terminal import printable
from drumline.core.errors import EngineError, RequestError, UsageError

if TYPE_CHECKING:
    from drumline.core.plan import SpeculationStats
    from drumline.core.request import PositionLogprobs, TokenLogprob
    from drumline.engine.llm import LLM, Interrupt
    from drumline.engine.outputs import CompletionOutput, OutputDelta, RequestOutput, RequestRecord

MAX_TOKENS = 256
EXIT_INTERRUPTED = 130
EXIT_FAILED = 1


def configure(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--prompt", metavar="TEXT", nargs="+", action="extend", help="one or more prompts"
    )
    source.add_argument(
        "--prompts",
        metavar="FILE",
        type=Path,
        help="JSON lines with prompt, prompt_token_ids or messages, and sampling parameters",
    )
    parser.add_argument(
        "--chat", action="store_true", help="put bare prompts into the chat template"
    )
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.add_argument(
        "--quiet", action="store_true", help="no start-up table, progress bar or speeds"
    )
    add_sampling_arguments(parser, max_tokens=str(MAX_TOKENS))
    add_script_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    flags = {"max_tokens": MAX_TOKENS, **sampling_arguments(args)}
    try:
        if args.prompts is not None:
            jobs = from_file(args.prompts, flags, args.chat)
        else:
            jobs = from_texts(args.prompt, flags, args.chat)
    except RequestError as error:
        raise UsageError(f"--{str(error.param).replace('_', '-')}: {error.problem}") from None
    config = engine_config(args)
    have_model(config)

    from drumline.engine.llm import LLM, Interrupt  # torch loads here

    llm = LLM.from_config(config)
    if not args.quiet and not args.json:
        print_startup(llm.core.facts)
    session = Session(llm, jobs, Interrupt())
    if args.json:
        printer: Printer = JsonPrinter()
    elif len(jobs) == 1 and session.submissions[0].params.n == 1:
        printer = StreamPrinter()
    else:
        printer = TextPrinter(len(session.records), show_bar=not args.quiet)
    try:
        session.drive(printer)
    finally:
        printer.close()
    printer.finish(session)
    if not args.quiet and not args.json:
        complain(session.speed_line())
    failure = session.failure
    if failure is not None:
        complain(printable(f"drumline generate: failed: {failure}"))
        return EXIT_FAILED
    return EXIT_INTERRUPTED if session.interrupt.raised else 0


class Session:
    """Everything one call of the verb runs, and what came of it."""

    def __init__(self, llm: LLM, jobs: Sequence[Job], interrupt: Interrupt) -> None:
        from drumline.engine.outputs import RequestRecord

        self.llm = llm
        self.interrupt = interrupt
        self.broken: str | None = None
        defaults = llm.default_params()
        self.submissions = []
        for job in jobs:
            try:
                params = job.params(defaults)
                self.submissions.append(llm.intake.admit(job.prompt, params, priority=job.priority))
            except RequestError as error:
                raise UsageError(f"{job.where}: {error}") from None
        self.records = [RequestRecord.of(submission) for submission in self.submissions]
        self.seconds = 0.0

    def drive(self, printer: Printer) -> None:
        began = time.monotonic()
        try:
            with closing(self.llm.run(self.submissions, self.interrupt)) as deltas:
                for index, delta in deltas:
                    self.records[index].add(delta)
                    printer.take(index, delta, self.records[index])
        except EngineError as error:
            self.broken = str(error)
        self.seconds = time.monotonic() - began

    @property
    def outputs(self) -> list[RequestOutput]:
        return [record.output() for record in self.records]

    @property
    def failure(self) -> str | None:
        """Why not everything that was asked for was done, other than by an interrupt."""
        if self.broken is not None:
            return self.broken
        samples = [sample for record in self.records for sample in record.samples]
        errors = [sample.error for sample in samples if sample.error is not None]
        return f"{len(errors)} of {len(samples)} samples: {errors[0]}" if errors else None

    def speed_line(self) -> str:
        counters = self.llm.core.counters
        ended = "interrupted after " if self.interrupt.raised else ""
        return (
            f"{ended}{counters.completion_tokens} tokens in {self.seconds:.1f} s · "
            f"decode {decode_speed(counters):.1f} tokens/s"
        )

    def summary(self) -> dict[str, Any]:
        core = self.llm.core
        counters = core.counters
        return {
            "prompt_tokens": sum(len(record.prompt_token_ids) for record in self.records),
            "completion_tokens": counters.completion_tokens,
            "seconds": self.seconds,
            "decode_tokens_per_second": decode_speed(counters),
            "steps": counters.steps,
            "draft_length_histogram": {str(k): v for k, v in core.draft_lengths.items()},
            "adjustments": [
                {"field": a.field, "asked": a.asked, "used": a.used, "reason": a.reason}
                for a in core.resolved.adjustments
            ],
            "speculation": {
                **speculation_object(core.speculation),
                "mean_acceptance_length": core.speculation.mean_acceptance_length,
            },
            "preemptions": counters.preemptions,
            "interrupted": self.interrupt.raised,
        }


class Printer:
    """What the three ways of printing have in common."""

    def take(self, index: int, delta: OutputDelta, record: RequestRecord) -> None:
        """Called for every delta as it comes."""

    def close(self) -> None:
        """Called once, however it ended; gives the terminal back."""

    def finish(self, session: Session) -> None:
        """Called once after that, unless nobody reads any more."""


class StreamPrinter(Printer):
    """One prompt, one sample: the text as it comes."""

    def take(self, index: int, delta: OutputDelta, record: RequestRecord) -> None:
        sys.stdout.write(printable(delta.text))
        sys.stdout.flush()

    def finish(self, session: Session) -> None:
        print(flush=True)


class TextPrinter(Printer):
    """Several: a progress bar on standard error, then every text under its number."""

    def __init__(self, total: int, show_bar: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

        self.bar = Progress(
            "requests",
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            "{task.fields[tokens]} tokens",
            console=Console(stderr=True),
            transient=True,
            disable=not show_bar or not sys.stderr.isatty(),
        )
        self.tokens = 0
        self.done: set[int] = set()
        self.task = self.bar.add_task("", total=total, tokens=0)
        self.bar.start()

    def take(self, index: int, delta: OutputDelta, record: RequestRecord) -> None:
        self.tokens += len(delta.token_ids)
        if delta.finish_reason is not None and record.finished:
            self.done.add(index)
        self.bar.update(self.task, completed=len(self.done), tokens=self.tokens)

    def close(self) -> None:
        self.bar.stop()

    def finish(self, session: Session) -> None:
        for index, output in enumerate(session.outputs):
            for completion in output.outputs:
                sample = f" sample {completion.index}" if len(output.outputs) > 1 else ""
                reason = completion.finish_reason or "not started"
                print(f"--- {index}{sample} ({reason})")
                print(printable(completion.text))


class JsonPrinter(Printer):
    """The contract of ``--json``: every (request, sample) in input order, then the summary."""

    def __init__(self) -> None:
        self.printed = 0
        self.ready: dict[int, RequestOutput] = {}

    def take(self, index: int, delta: OutputDelta, record: RequestRecord) -> None:
        if delta.finish_reason is None or not record.finished:
            return
        self.ready[index] = record.output()
        while self.printed in self.ready:
            self._print(self.printed, self.ready.pop(self.printed))
            self.printed += 1

    def finish(self, session: Session) -> None:
        for index, output in enumerate(session.outputs[self.printed :], self.printed):
            self._print(index, output)
        print(json.dumps({"summary": session.summary()}), flush=True)

    def _print(self, index: int, output: RequestOutput) -> None:
        for completion in output.outputs:
            print(json.dumps(sample_object(index, output, completion)), flush=True)


def sample_object(
    index: int, output: RequestOutput, completion: CompletionOutput
) -> dict[str, Any]:
    """One sample as ``--json`` prints it. A request that never started counts as aborted."""
    shown: dict[str, Any] = {
        "index": index,
        "sample": completion.index,
        "prompt_token_ids": list(output.prompt_token_ids),
        "token_ids": list(completion.token_ids),
        "text": completion.text,
        "finish_reason": str(completion.finish_reason or "abort"),
        "error": completion.error,
        "seed": completion.seed,
        "replica": completion.replica,
    }
    if completion.logprobs is not None:
        shown["logprobs"] = [position_object(entry) for entry in completion.logprobs]
    shown["speculation"] = speculation_object(completion.speculation)
    if output.prompt_logprobs is not None:
        shown["prompt_logprobs"] = [
            None if entry is None else position_object(entry) for entry in output.prompt_logprobs
        ]
    shown["stop_reason"] = completion.stop_reason
    return shown


def speculation_object(stats: SpeculationStats | None) -> dict[str, Any]:
    """``steps``: verify passes with at least one draft. A sample that never ran has none."""
    return {
        "steps": 0 if stats is None else stats.drafts,
        "drafted": 0 if stats is None else stats.drafted,
        "accepted": 0 if stats is None else stats.accepted,
        "accepted_per_position": [] if stats is None else list(stats.accepted_per_position),
    }


def position_object(entry: PositionLogprobs) -> dict[str, Any]:
    return {**token_object(entry.token), "top": [token_object(token) for token in entry.top]}


def token_object(token: TokenLogprob) -> dict[str, Any]:
    """JSON has no infinity: a token that cannot be drawn reads null."""
    logprob = token.logprob if math.isfinite(token.logprob) else None
    return {"token_id": token.token_id, "logprob": logprob, "rank": token.rank}
