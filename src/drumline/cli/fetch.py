"""Bring a model into the cache and print where it is: smollm2, or a hub name."""

from __future__ import annotations

import argparse

from drumline.cli.engine import complain


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="smollm2, or a hub name like org/model")
    parser.add_argument("--revision", help="branch, tag or commit of a hub model")


def run(args: argparse.Namespace) -> int:
    from drumline.models.fetch import resolve_model

    print(resolve_model(args.name, args.revision, complain))
    return 0
