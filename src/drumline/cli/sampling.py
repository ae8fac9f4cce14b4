"""The sampling flags, one per field of `SamplingParams`, under vLLM's names."""

from __future__ import annotations

import argparse
import json
from typing import Any

_SUPPRESS = argparse.SUPPRESS


def add_sampling_arguments(parser: argparse.ArgumentParser, max_tokens: str) -> None:
    """``max_tokens`` says what holds if the flag is not given. ``--seed`` is the engine's; a
    request's own seed goes into its line of the prompts file."""
    group = parser.add_argument_group("sampling (default: what the checkpoint suggests)")

    def add(flag: str, metavar: str, help: str, **more: Any) -> None:
        group.add_argument(flag, metavar=metavar, default=_SUPPRESS, help=help, **more)

    several: dict[str, Any] = {"nargs": "+", "action": "extend"}
    add("--max-tokens", "N", f"most tokens to generate (default: {max_tokens})", type=_integer)
    add("--min-tokens", "N", "no end before this many tokens", type=_integer)
    add("--temperature", "T", "0 is greedy", type=_number)
    add("--top-p", "P", "keep the smallest set of tokens with this probability", type=_number)
    add("--top-k", "N", "keep this many tokens; 0 keeps all", type=_integer)
    add("--min-p", "P", "drop tokens below this share of the best one's probability", type=_number)
    add("--presence-penalty", "X", "-2 to 2, for tokens already generated", type=_number)
    add("--frequency-penalty", "X", "-2 to 2, per time already generated", type=_number)
    add("--repetition-penalty", "X", "above 1 discourages what stands already", type=_number)
    add("--n", "N", "samples per prompt", type=_integer)
    add("--stop", "TEXT", "end before this text; may be repeated", action="append")
    add("--stop-token-ids", "ID", "end after one of these tokens", type=_integer, **several)
    add("--bad-words", "TEXT", "never generate these words", **several)
    add("--allowed-token-ids", "ID", "generate only these tokens", type=_integer, **several)
    add("--logit-bias", "JSON", 'map from token id to bias, as {"50": -3.5}', type=_object)
    add("--logprobs", "N", "report log-probabilities, and of the N best", type=_integer)
    add("--prompt-logprobs", "N", "the same for the prompt's tokens", type=_integer)
    for flag, text in (
        ("--ignore-eos", "go on past the end token"),
        ("--include-stop-str-in-output", "keep the text that ended the output"),
    ):
        group.add_argument(flag, action="store_true", default=_SUPPRESS, help=text)
    group.add_argument(
        "--skip-special-tokens",
        action=argparse.BooleanOptionalAction,
        default=_SUPPRESS,
        help="leave special tokens out of the text (default: on)",
    )


def sampling_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling flags that were typed, by field name."""
    from drumline.core.params import SamplingParams

    typed = {name: value for name, value in vars(args).items() if name in SamplingParams.names()}
    typed.pop("seed", None)
    return {k: tuple(v) if isinstance(v, list) else v for k, v in typed.items()}


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _object(text: str) -> dict[int, float]:
    try:
        value = json.loads(text)
        return {int(token): bias for token, bias in value.items()}
    except (ValueError, AttributeError, TypeError):
        raise argparse.ArgumentTypeError(
            f'{text!r} is not a JSON object like {{"50": -3.5}}'
        ) from None
