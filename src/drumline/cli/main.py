"""``drumline``: the verbs. Each lives in a module of its own that is imported when it is typed,
so that ``--help`` is instant and nothing loads torch before it must.

Exit codes: 0 good, 1 the thing checked does not hold, 2 wrong use, 130 interrupted. Wrong use is
one line on standard error, without a traceback.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence

from drumline._version import __version__
from drumline.cli.terminal import printable
from drumline.config.arguments import Parser
from drumline.core.errors import DrumlineError, UsageError, nearest_name

EXIT_WRONG_USE = 2
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

VERBS = {
    "generate": "complete prompts and print what comes",
    "chat": "talk with a model in the terminal",
    "serve": "OpenAI-compatible server",
    "demo": "the same answer without and with speculation, and how much sooner",
    "bench": "measure: latency, throughput, acceptance of drafts",
    "train": "make a drafter for a model, from the model's own text",
    "fetch": "bring a model into the cache",
    "tiny": "write a seeded miniature checkpoint, for tests and bug reports",
    "upcycle": "make a mixture of experts of a dense model, with the same answers",
    "doctor": "what this machine is, and which backend runs why",
}


def usage() -> str:
    lines = ["usage: drumline VERB [flags]     drumline VERB --help for a verb's flags", ""]
    lines += [f"  {verb:<10} {text}" for verb, text in VERBS.items()]
    lines += ["", "  -h, --help     this page", "  --version      the version"]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if sys.stdout is None:  # closed before we began: what is printed goes nowhere, quietly
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character is no error
    try:
        code = dispatch(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has left; there is nobody to tell. Python would complain once
        # more while it closes standard output.
        _drop_output()
        return EXIT_FAILED
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EIO, errno.EDQUOT):
            raise
        _drop_output()
        print(
            _line(f"drumline: failed: cannot write the output: {error.strerror}"), file=sys.stderr
        )
        return EXIT_FAILED
    return code


def dispatch(arguments: Sequence[str]) -> int:
    """The page of verbs, the version, or a verb."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else EXIT_WRONG_USE
    if arguments[0] in ("-V", "--version"):
        print(f"drumline {__version__}")
        return 0
    if arguments[0] not in VERBS:
        known = (*VERBS, "--help", "--version")
        return _wrong(f"unknown verb {arguments[0]!r}{nearest_name(arguments[0], known)}")
    return run_verb(arguments[0], arguments[1:])


def _drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run_verb(verb: str, arguments: Sequence[str]) -> int:
    """Parses and runs; every failure that has a name is one line on standard error."""
    module = importlib.import_module(f"drumline.cli.{verb}")
    parser = Parser(prog=f"drumline {verb}", description=module.__doc__, add_help=True)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    module.configure(parser)
    try:
        code: int = module.run(parser.parse_args(arguments))
        return code
    except SystemExit as leaving:  # argparse has said what is wrong, or shown its help
        return leaving.code if isinstance(leaving.code, int) else 0
    except UsageError as error:
        return _wrong(f"{parser.prog}: error: {error}")
    except DrumlineError as error:
        print(_line(f"{parser.prog}: failed: {error}"), file=sys.stderr)
        return EXIT_FAILED


def _wrong(message: object) -> int:
    print(_line(message), file=sys.stderr)
    return EXIT_WRONG_USE


def _line(message: object) -> str:
    """One line that a terminal can show, whatever was typed."""
    return printable(" ".join(str(message).split()))


if __name__ == "__main__":
    sys.exit(main())
