"""Write a seeded miniature checkpoint in hub format, with drafts for it if asked.

The same arguments give the same bytes. Drafts go to folders inside the target's, named by method;
a next-token module goes into the target itself.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from drumline.core.errors import ConfigError


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--arch",
        required=True,
        help="llama, mistral, qwen2, qwen3; with experts: qwen3_moe, mixtral, deepseek_v3",
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to write to")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default: 0)")
    for name, default, text in (
        ("vocab", 128, "tokens"),
        ("hidden", 32, "width of the residual stream"),
        ("layers", 2, "transformer blocks"),
        ("heads", 4, "attention heads"),
        ("kv-heads", 2, "key and value heads"),
        ("intermediate", 64, "width of the feed-forward"),
        ("max-position-embeddings", 512, "longest sequence"),
        ("shards", 1, "weight files"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{text} (default: {default})"
        )
    parser.add_argument(
        "--head-dim", type=int, metavar="N", help="channels per head (default: hidden / heads)"
    )
    parser.add_argument(
        "--experts", type=int, metavar="N", help="experts (default: 4, deepseek_v3: 8)"
    )
    parser.add_argument(
        "--experts-per-token",
        type=int,
        metavar="N",
        help="experts that a token uses (default: 2)",
    )
    parser.add_argument(
        "--rope-scaling",
        metavar="JSON",
        help='as in a config.json: {"rope_type": "linear", "factor": 2.0}',
    )
    parser.add_argument(
        "--dtype", default="float32", help="float32, float16 or bfloat16 (default: float32)"
    )
    parser.add_argument("--tied", action="store_true", help="the head is the embedding")
    for name, text in (
        ("mtp", "with a next-token module of its own"),
        ("eagle", "with an EAGLE draft in DIR/eagle"),
        ("eagle3", "with an EAGLE-3 draft in DIR/eagle3"),
        ("draft-moe", "the EAGLE-3 draft has experts"),
        ("dflash", "with a DFlash draft in DIR/dflash"),
        ("medusa", "with Medusa heads in DIR/medusa"),
    ):
        parser.add_argument(f"--{name}", action="store_true", help=text)


def run(args: argparse.Namespace) -> int:
    from drumline.models.tiny import write_tiny

    folder = write_tiny(
        args.arch,
        args.output,
        args.seed,
        vocab=args.vocab,
        hidden=args.hidden,
        layers=args.layers,
        heads=args.heads,
        kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        intermediate=args.intermediate,
        max_position_embeddings=args.max_position_embeddings,
        rope_scaling=_scaling(args.rope_scaling),
        dtype=args.dtype,
        tied=args.tied,
        experts=args.experts,
        experts_per_token=args.experts_per_token,
        shards=args.shards,
    )
    for made in (folder, *_write_drafts(args, folder)):
        print(made)
    return 0


def _write_drafts(args: argparse.Namespace, folder: Path) -> list[Path]:
    from drumline.models import tiny_drafts

    if args.draft_moe and not args.eagle3:
        raise ConfigError("draft_moe", True, "belongs to --eagle3")
    if args.mtp:
        tiny_drafts.add_mtp(folder, args.seed)
    made = []
    if args.eagle:
        made.append(tiny_drafts.write_eagle(folder, folder / "eagle", args.seed))
    if args.eagle3:
        layer = "qwen3_moe" if args.draft_moe else "llama"
        made.append(tiny_drafts.write_eagle3(folder, folder / "eagle3", args.seed, layer=layer))
    if args.dflash:
        made.append(tiny_drafts.write_dflash(folder, folder / "dflash", args.seed))
    if args.medusa:
        made.append(tiny_drafts.write_medusa(folder, folder / "medusa", args.seed))
    return made


def _scaling(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError("rope_scaling", text, f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError("rope_scaling", text, "must be a JSON object")
    return value
