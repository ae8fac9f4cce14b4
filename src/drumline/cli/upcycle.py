"""Make a mixture of experts of a dense model: the same answers, from N always-active experts.

A real model for trying expert and data parallelism: every expert is a slice of the dense
feed-forward, and their sum is what the dense one computes.
"""

from __future__ import annotations

import argparse

from drumline.cli.engine import complain


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default="smollm2", help="folder, GGUF file, hub name or alias (default: smollm2)"
    )
    parser.add_argument("--revision", help="branch, tag or commit of a hub model")
    parser.add_argument(
        "--experts", type=int, required=True, metavar="N", help="parts of the feed-forward"
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="new folder to write to")


def run(args: argparse.Namespace) -> int:
    from drumline.models.fetch import resolve_model
    from drumline.models.upcycle import upcycle

    print(upcycle(resolve_model(args.model, args.revision, complain), args.experts, args.output))
    return 0
