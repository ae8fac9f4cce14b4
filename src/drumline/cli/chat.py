"""Talk with a model in the terminal. Ctrl-D ends the conversation; Ctrl-C cuts an answer short.

With -q TEXT: one question, one answer, no conversation.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
from typing import TYPE_CHECKING, Any

from drumline.cli.engine import (
    add_script_engine_arguments,
    complain,
    engine_config,
    have_model,
    print_startup,
)
from drumline.cli.sampling import add_sampling_arguments, sampling_arguments
from drumline.cli.terminal import printable
from drumline.core.errors import EngineError, RequestError, UsageError
from drumline.core.params import SamplingParams

if TYPE_CHECKING:
    from drumline.engine.llm import LLM

EXIT_INTERRUPTED = 130


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-q", metavar="TEXT", dest="question", help="ask this and leave")
    parser.add_argument("--system-prompt", metavar="TEXT", help="the conversation's system turn")
    parser.add_argument("--quiet", action="store_true", help="no start-up table")
    add_sampling_arguments(parser, max_tokens="to the model's limit")
    # The short form -q is the question here, as in `vllm chat`.
    add_script_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    given = {"max_tokens": None, **sampling_arguments(args)}
    try:
        SamplingParams.from_mapping(given)
    except RequestError as error:
        raise UsageError(f"--{str(error.param).replace('_', '-')}: {error.problem}") from None
    if given.get("n", 1) != 1:
        raise UsageError("--n: a conversation has one answer at a time")
    config = engine_config(args)
    have_model(config)

    from drumline.engine.llm import LLM

    llm = LLM.from_config(config)
    params = SamplingParams.from_mapping(given, llm.default_params())
    if not args.quiet:
        print_startup(llm.core.facts)
    messages: list[dict[str, Any]] = []
    if args.system_prompt is not None:
        messages.append({"role": "system", "content": args.system_prompt})
    if args.question is not None:
        messages.append({"role": "user", "content": args.question})
        _, cut = answer(llm, messages, params)
        return EXIT_INTERRUPTED if cut else 0
    converse(llm, messages, params)
    return 0


def converse(llm: LLM, messages: list[dict[str, Any]], params: SamplingParams) -> None:
    """Turns until the user leaves. A turn that does not fit, or that the template refuses, is
    taken back, and said so."""
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # input() then has line editing and a history
    while (text := read_turn()) is not None:
        if not text.strip():
            continue
        messages.append({"role": "user", "content": text})
        try:
            reply, _ = answer(llm, messages, params)
        except RequestError as error:
            complain(printable(f"this turn is taken back: {error.problem}"))
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": reply})


def read_turn() -> str | None:
    """What the user says next; None at the end of input. Ctrl-C drops the line that was begun."""
    if sys.stdin is None:  # closed before we began
        return None
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            return input(prompt)
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print("\n(Ctrl-D leaves)")


def answer(llm: LLM, messages: list[dict[str, Any]], params: SamplingParams) -> tuple[str, bool]:
    """Streams the answer to standard output. Returns it, and whether Ctrl-C cut it short."""
    from drumline.engine.intake import Prompt
    from drumline.engine.llm import Interrupt

    submission = llm.intake.admit(Prompt(messages=tuple(messages)), params)
    pieces: list[str] = []
    interrupt = Interrupt()
    with contextlib.closing(llm.run([submission], interrupt)) as deltas:
        for _, delta in deltas:
            pieces.append(delta.text)
            sys.stdout.write(printable(delta.text))
            sys.stdout.flush()
            if delta.error is not None:
                raise EngineError(delta.error)
    print(flush=True)
    return "".join(pieces), interrupt.raised
