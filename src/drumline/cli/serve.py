"""OpenAI-compatible server: completions and chat completions, streamed or not. With --headless:
replicas for a server or a script on another machine (--node-rank, --master-addr)."""

from __future__ import annotations

import argparse
import logging

from drumline.cli.engine import engine_config, have_model
from drumline.config.arguments import add_engine_arguments
from drumline.core.errors import UsageError
from drumline.fleet.nodes import nodes_of


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
    if nodes_of(config).own:
        from drumline.engine.node import serve_node  # torch loads here

        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
        return serve_node(config)

    from drumline.server.run import serve

    return serve(config)
