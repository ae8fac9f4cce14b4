"""Going on from a head that is there: its weights, and what its card says of its making.

Refuses a head of another form; which tokens it drafted does not matter to a head whose rows are the
target's, and must be the same for an eagle3 head with rows of its own.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from drumline.core.errors import CheckpointError

WEIGHTS = "model.safetensors"
TABLES = ("d2t", "t2d")
KEPT = (  # of an earlier card
    "- data:",
    "- seen in training:",
    "- training, starts from:",
)


def weights_digest(folder: Path) -> str:
    """SHA-256 of a head's weights. `CheckpointError` if it has none."""
    try:
        return hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
    except OSError as error:
        raise CheckpointError(folder, f"no weights to start from: {error.strerror}") from None


def load_weights(folder: Path, module: nn.Module, prefix: str) -> None:
    """Sets every parameter. `CheckpointError` for a head of another form or another size."""
    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(folder, f"no weights to start from: {error}") from None
    found = {
        name.removeprefix(prefix): value for name, value in tensors.items() if name not in TABLES
    }
    parameters = dict(module.named_parameters())
    if found.keys() != parameters.keys():
        odd = ", ".join(sorted(found.keys() ^ parameters.keys())[:4])
        raise CheckpointError(folder, f"another form of head ({odd})")
    with torch.no_grad():
        for name, parameter in parameters.items():
            if found[name].shape != parameter.shape:
                was, needed = tuple(found[name].shape), tuple(parameter.shape)
                raise CheckpointError(folder, f"{name} is {was}, this head needs {needed}")
            parameter.copy_(found[name].float())


def describe_start(folder: Path | None) -> str:
    """For the card: chance, or the head's weights and how its own card says it was made."""
    if folder is None:
        return "chance"
    card = folder / "README.md"
    lines = card.read_text(encoding="utf-8").splitlines() if card.exists() else []
    made = [line.removeprefix("- ") for line in lines if line.startswith(KEPT)]
    history = "; ".join(made) or "a head without a card"
    return f"weights {weights_digest(folder)[:12]} ({history})"
