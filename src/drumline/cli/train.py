"""Train a drafter for a target, from text that the target writes itself.

    drumline train mtp --target smollm2 --output head --max-minutes 60

Every stage keeps what it has done: the same command goes on where it stopped. docs/training.md
tells the whole of it.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from drumline.core.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from drumline.engine.llm import LLM
    from drumline.training.pipeline import Plan

METHODS = ("mtp", "eagle3")
DRAFT_VOCAB_SIZE = 8192
COUNTS = (
    "conversations",
    "draft_vocab_size",
    "epochs",
    "batch_tokens",
    "threads",
    "draft_steps",
    "later_every",
    "intermediate_size",
)
STEP_DECAY = 0.7  # weight of a draft step relative to the one before it, which it depends on


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("method", choices=METHODS, help="what kind of head")
    parser.add_argument("--target", required=True, metavar="M", help="the model to draft for")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="folder to write")
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="folder of conversation pieces; missing ones are made (default: DIR/parts/data)",
    )
    parser.add_argument(
        "--conversations",
        type=int,
        metavar="N",
        help="questions asked of the target (default: what --data has, else 2048)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of data, weights and order")
    _configure_head(parser)
    _configure_training(parser)
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="default: 1")
    parser.add_argument(
        "--max-minutes", type=float, metavar="M", help="stop after M minutes; run again to go on"
    )


def _configure_head(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--draft-vocab-size",
        type=int,
        metavar="V",
        help=f"most frequent tokens to draft (default: {DRAFT_VOCAB_SIZE}, or all of fewer)",
    )
    parser.add_argument(
        "--full-vocab", action="store_true", help="draft every token; the plain format"
    )
    parser.add_argument(
        "--intermediate-size",
        type=int,
        metavar="N",
        help="of the head's feed-forward (default: the target's)",
    )
    parser.add_argument(
        "--share-head",
        action="store_true",
        help="eagle3: no rows of its own, the target's are gathered at load; a smaller file",
    )
    parser.add_argument(
        "--start-from", type=Path, metavar="DIR", help="a head of the same form to go on from"
    )


def _configure_training(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--draft-steps", type=int, default=3, metavar="K", help="steps unrolled")
    parser.add_argument("--epochs", type=int, default=8, metavar="N", help="passes over the data")
    parser.add_argument(
        "--learning-rate",
        type=float,
        default=0.04,
        metavar="R",
        help="of matrices (Muon); norms and an eagle3 head get a twentieth (AdamW); default: 0.04",
    )
    parser.add_argument(
        "--later-every",
        type=int,
        default=2,
        metavar="N",
        help="of the chains, every N-th goes on after its first draft (default: 2)",
    )
    parser.add_argument(
        "--copy-weight",
        type=float,
        default=0.5,
        metavar="W",
        help="of the part of the loss that teaches a group of heads to copy; default: 0.5",
    )
    parser.add_argument("--batch-tokens", type=int, default=1024, metavar="N")
    parser.add_argument(
        "--train-on-prompts", action="store_true", help="learn from the questions too"
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="of products; weights and sums stay float32 (default: auto, bfloat16 where fast)",
    )


def run(args: argparse.Namespace) -> int:
    began = time.monotonic()
    for name in COUNTS:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(name, value, "must be at least 1")
    for name in ("learning_rate", "max_minutes"):
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(name, value, "must be a number above 0")
    if not 0 <= args.copy_weight < float("inf"):
        raise ConfigError("copy_weight", args.copy_weight, "must be a number, at least 0")
    if args.full_vocab and args.draft_vocab_size is not None:
        raise ConfigError("draft_vocab_size", args.draft_vocab_size, "contradicts --full-vocab")
    if args.data is not None and args.data.exists() and not args.data.is_dir():
        raise UsageError(f"--data {args.data}: not a folder")
    if args.output.exists() and not args.output.is_dir():
        raise UsageError(f"--output {args.output}: not a folder")

    import torch

    from drumline.models.fetch import resolve_model
    from drumline.training.pipeline import train
    from drumline.training.progress import Progress
    from drumline.training.target import load_target

    torch.set_num_threads(args.threads)
    deadline = None if args.max_minutes is None else began + 60 * args.max_minutes
    progress = Progress(deadline)
    target = load_target(resolve_model(args.target, None, progress.say), args.target)
    plan = make_plan(args, target.config.vocab_size)
    found = train(plan, target, partial(_open_llm, args), progress)
    if found is None:
        return 0
    print(plan.output)
    for name, one in found.items():
        rates = " ".join(f"{rate:.3f}" for rate in one.per_position)
        print(f"{name}: accepted per position {rates}, {one.mean_length:.3f} tokens per pass")
    return 0


def make_plan(args: argparse.Namespace, vocab_size: int) -> Plan:
    from drumline.training.conversations import Recipe, piece_indices
    from drumline.training.optimize import Settings
    from drumline.training.pipeline import Plan
    from drumline.training.target import fast_bfloat16

    recipe = Recipe(seed=args.seed)
    data = args.output / "parts" / "data" if args.data is None else args.data
    present = piece_indices(data)
    if args.conversations is not None or not present or args.data is None:
        count = -(-(args.conversations or 2048) // recipe.piece_size)
        pieces = tuple(range(count))
    else:
        pieces = present
    size: int | None = args.draft_vocab_size or min(DRAFT_VOCAB_SIZE, vocab_size)
    weights = tuple(STEP_DECAY**step for step in range(args.draft_steps))
    return Plan(
        method=args.method,
        output=args.output,
        data=data,
        pieces=pieces,
        recipe=recipe,
        draft_vocab_size=None if args.full_vocab or size == vocab_size else size,
        start=args.start_from,
        intermediate_size=args.intermediate_size,
        share_head=args.share_head,
        settings=Settings(
            seed=args.seed,
            epochs=args.epochs,
            learning_rate=args.learning_rate,
            batch_tokens=args.batch_tokens,
            step_weights=weights,
            prompts=args.train_on_prompts,
            later_every=args.later_every,
            copy_weight=args.copy_weight,
            bfloat16=args.dtype == "bfloat16" or (args.dtype == "auto" and fast_bfloat16()),
        ),
    )


def _open_llm(args: argparse.Namespace, record: Path, taps: tuple[int, ...]) -> LLM:
    """An engine that keeps the hidden states of what it says in ``record``."""
    from drumline.engine.llm import LLM
    from drumline.training.conversations import LENGTH_MAX

    extract = {
        "method": "extract_hidden_states",
        "hidden_states_dir": str(record),
        "hidden_states_taps": list(taps),
    }
    return LLM(
        model=args.target,
        max_model_len=LENGTH_MAX,
        max_num_seqs=64,
        threads=args.threads,
        speculative_config=extract,
    )
