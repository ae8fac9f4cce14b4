"""Write a seeded miniature checkpoint in hub format; the same arguments give the same bytes."""

from __future__ import annotations

import argparse
import json
from typing import Any

from drumline.core.errors import ConfigError


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", required=True, help="llama, mistral, qwen2, qwen3 or qwen3_moe")
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
    parser.add_argument("--experts", type=int, metavar="N", help="qwen3_moe: experts (default: 4)")
    parser.add_argument(
        "--experts-per-token",
        type=int,
        metavar="N",
        help="qwen3_moe: experts that a token uses (default: 2)",
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
    print(folder)
    return 0


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
