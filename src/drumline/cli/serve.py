"""OpenAI-compatible server: completions and chat completions, streamed or not."""

from __future__ import annotations

import argparse

from drumline.cli.engine import engine_config, have_model
from drumline.config.arguments import add_engine_arguments
from drumline.core.errors import UsageError


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="the same as --model")
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.model_tag is not None:
        if getattr(args, "model", args.model_tag) != args.model_tag:
            raise UsageError(f"MODEL={args.model_tag!r} and --model {args.model!r} differ")
        args.model = args.model_tag
    config = engine_config(args)
    have_model(config)

    from drumline.server.run import serve

    return serve(config)
