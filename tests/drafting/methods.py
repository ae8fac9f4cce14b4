"""Every drafter under one name each: the list that the kit and the engine's tests go through.

A method is a speculative config for a target's folder; draft checkpoints are seeded miniatures,
written beside it once.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drumline.models.tiny import write_tiny
from drumline.models.tiny_drafts import (
    write_dflash,
    write_eagle,
    write_eagle3,
    write_medusa,
    write_mtp,
)

TESTING = "drumline.drafting.testing."


@dataclass(frozen=True)
class Method:
    """``config(target)``: the speculative config without a draft length. ``k_max``: the most that
    the miniature drafts. ``steady``: a draft depends on the request and what it committed alone.
    ``lookup``: single tokens are looked up before a network is asked.
    """

    name: str
    config: Callable[[Path], dict[str, Any]]
    k_max: int = 128
    steady: bool = True
    lookup: bool = False

    def speculative(self, target: Path, k: int, **more: Any) -> dict[str, Any]:
        k = min(k, self.k_max)
        return {**self.config(target), "num_speculative_tokens": k, **more}


def _testing(name: str) -> Callable[[Path], dict[str, Any]]:
    return lambda target: {"method": TESTING + name}


def _written(
    method: str, write: Callable[..., Any], lookup: int | None = None, **options: Any
) -> Callable[[Path], dict[str, Any]]:
    def config(target: Path) -> dict[str, Any]:
        folder = target.with_name(f"{target.name}-{method}")
        if not folder.exists():
            write(target, folder, 7, **options)
        found = {"method": method, "model": str(folder)}
        return found if lookup is None else {**found, "prompt_lookup_min": lookup}

    return config


def _smaller(target: Path, folder: Path, seed: int) -> None:
    import json

    vocab = json.loads((target / "config.json").read_text())["vocab_size"]
    write_tiny("llama", folder, seed, vocab=vocab, hidden=16, layers=1)


def _hidden_states(target: Path) -> dict[str, Any]:
    folder = tempfile.mkdtemp(
        dir=target.parent, prefix="hidden-"
    )  # files of others are not its own
    return {"method": "extract_hidden_states", "hidden_states_dir": folder}


KNOWN = [
    Method("oracle", _testing("Oracle")),
    Method("liar", _testing("Liar")),
    Method("random", _testing("Random")),
    Method("scripted", _testing("Scripted")),
    Method("brittle", _testing("Brittle")),
]
HOST = [
    Method("ngram", lambda target: {"method": "ngram", "prompt_lookup_min": 1}),
    Method("suffix", lambda target: {"method": "suffix"}, steady=False),
]
NEURAL = [
    Method("draft_model", _written("draft_model", _smaller)),
    Method("eagle", _written("eagle", write_eagle)),
    Method("eagle3", _written("eagle3", write_eagle3, draft_vocab=64)),
    Method("mtp", _written("mtp", write_mtp)),
    Method("dflash", _written("dflash", write_dflash, block_size=9), k_max=8),
    Method("medusa", _written("medusa", write_medusa, heads=8)),
    Method("mtp after lookup", _written("mtp", write_mtp, lookup=1), lookup=True),
]
# Whatever the target says, it said before: long runs are accepted.
ITSELF = Method("draft_model itself", lambda target: {"model": str(target)})
# Drafts nothing: in no list of drafters, but its requests give the same bits as any other's.
WRITING = Method("extract_hidden_states", _hidden_states, k_max=1)
METHODS = {method.name: method for method in [*KNOWN, *HOST, *NEURAL]}
