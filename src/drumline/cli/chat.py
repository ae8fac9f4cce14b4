"""Talk with a model in the terminal. An empty line or Ctrl-D ends; Ctrl-C cuts an answer short.

With -q TEXT: one question, one answer, no conversation.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from drumline.cli.engine import (
    add_script_engine_arguments,
    complain,
    engine_config,
    print_startup,
)
from drumline.cli.generate import printable
from drumline.cli.sampling import add_sampling_arguments, sampling_arguments
from drumline.core.errors import PromptTooLong, RequestError, UsageError

if TYPE_CHECKING:
    from drumline.core.params import SamplingParams
    from drumline.engine.llm import LLM


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-q", metavar="TEXT", dest="question", help="ask this and leave")
    parser.add_argument("--system-prompt", metavar="TEXT", help="the conversation's system turn")
    parser.add_argument("--quiet", action="store_true", help="no start-up table")
    add_sampling_arguments(parser, max_tokens="to the model's limit")
    # The short form -q is the question here, as in `vllm chat`.
    add_script_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    config = engine_config(args)
    given = {"max_tokens": None, **sampling_arguments(args)}

    from drumline.core.params import SamplingParams
    from drumline.engine.llm import LLM

    llm = LLM.from_config(config)
    try:
        params = SamplingParams.from_mapping(given, llm.default_params())
    except RequestError as error:
        raise UsageError(f"--{str(error.param).replace('_', '-')}: {error.problem}") from None
    if params.n != 1:
        raise UsageError("--n: a conversation has one answer at a time")
    if not args.quiet:
        print_startup(llm.core.facts)
    messages: list[dict[str, Any]] = []
    if args.system_prompt is not None:
        messages.append({"role": "system", "content": args.system_prompt})
    if args.question is not None:
        messages.append({"role": "user", "content": args.question})
        answer(llm, messages, params)
        return 0
    converse(llm, messages, params)
    return 0


def converse(llm: LLM, messages: list[dict[str, Any]], params: SamplingParams) -> None:
    """Turns until the user leaves. A turn that does not fit is taken back, and said so."""
    while True:
        text = read_turn()
        if not text.strip():
            return
        messages.append({"role": "user", "content": text})
        try:
            reply = answer(llm, messages, params)
        except PromptTooLong as error:
            complain(f"this turn does not fit: {error.problem}")
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": reply})


def read_turn() -> str:
    try:
        return input("> " if sys.stdin.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        print()
        return ""


def answer(llm: LLM, messages: list[dict[str, Any]], params: SamplingParams) -> str:
    """Streams the answer to standard output and returns it."""
    from drumline.engine.intake import Prompt
    from drumline.engine.llm import Interrupt

    submission = llm.intake.admit(Prompt(messages=tuple(messages)), params)
    pieces = []
    for _, delta in llm.run([submission], Interrupt()):
        pieces.append(delta.text)
        sys.stdout.write(printable(delta.text))
        sys.stdout.flush()
    print()
    return "".join(pieces)
