"""Make a mixture of experts of a dense model: the same answers, from N always-active experts.

A real model for trying expert and data parallelism: every expert is a slice of the dense
feed-forward, and their sum is what the dense one computes. With --mtp its next-token module gets
experts, too, so that replicas which share experts meet in draft passes as well.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from drumline.cli.engine import complain
from drumline.core.errors import ConfigError

SHIPPED = "shipped"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default="smollm2", help="folder, GGUF file, hub name or alias (default: smollm2)"
    )
    parser.add_argument("--revision", help="branch, tag or commit of a hub model")
    parser.add_argument(
        "--experts", type=int, required=True, metavar="N", help="parts of the feed-forward"
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="new folder to write to")
    parser.add_argument(
        "--mtp",
        nargs="?",
        const=SHIPPED,
        metavar="FOLDER",
        help="also the next-token module in FOLDER, or the one that is shipped for the model, "
        "with experts, to DIR/mtp",
    )


def run(args: argparse.Namespace) -> int:
    from drumline.models.fetch import resolve_model
    from drumline.models.upcycle import upcycle, upcycle_mtp

    model = resolve_model(args.model, args.revision, complain)
    head = None if args.mtp is None else _head(model, args.mtp)
    folder = upcycle(model, args.experts, args.output)
    if head is not None:
        upcycle_mtp(head, args.experts, folder / "mtp")
    print(folder)
    return 0


def _head(model: Path, asked: str) -> Path:
    """The folder of the module. ConfigError if it is to be the shipped one and there is none."""
    if asked != SHIPPED:
        return Path(asked)

    from drumline.drafting.shipped import shipped_head
    from drumline.models.checkpoint import open_checkpoint

    found = shipped_head("mtp", open_checkpoint(model).config, str(model))
    if found is None:
        raise ConfigError("mtp", None, f"none is shipped for {model.name}; give its folder")
    return found
