"""The heads inside the package, and the targets they were trained for.

A target is known by a part of the name of its file or folder (lower case) and by its shape: a head
for other weights would draft, and nearly always be wrong. Knows no format.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from drumline.core.errors import ConfigError
from drumline.models.checkpoint import Checkpoint
from drumline.models.config import ArchitectureConfig

HEADS = Path(__file__).resolve().parent.parent / "heads"


@dataclass(frozen=True)
class ShippedHead:
    """``folder``: in `HEADS`. The rest tells its target."""

    method: str
    folder: str
    name: str
    hidden_size: int
    num_hidden_layers: int
    vocab_size: int

    def fits(self, target: ArchitectureConfig, name: str) -> bool:
        own = (self.hidden_size, self.num_hidden_layers, self.vocab_size)
        shape = (target.hidden_size, target.num_hidden_layers, target.vocab_size)
        return own == shape and self.name in name.lower()


# The best of a target's comes first.
SHIPPED = (
    ShippedHead("eagle3", "smollm2-eagle3", "smollm2-135m-instruct", 576, 30, 49152),
    ShippedHead("mtp", "smollm2-mtp", "smollm2-135m-instruct", 576, 30, 49152),
)


def shipped_head(method: str, target: ArchitectureConfig, name: str) -> Path | None:
    """The folder of the head that the package ships for a target; ``name``: of the target's file
    or folder. None if there is none."""
    for head in SHIPPED:
        folder = HEADS / head.folder
        known = head.method == method and head.fits(target, name)
        if known and (folder / "config.json").exists():
            return folder
    return None


def best_method(target: ArchitectureConfig, name: str) -> str | None:
    """The method of the best head that is shipped for a target; None if there is none."""
    methods = [head.method for head in SHIPPED]
    return next((each for each in methods if shipped_head(each, target, name)), None)


def find_shipped(method: str, checkpoint: Checkpoint) -> Path:
    """The shipped head for a target whose own checkpoint has none and for which the user named
    none. ConfigError if there is none."""
    found = shipped_head(method, checkpoint.config, str(checkpoint.path))
    if found is None:
        raise ConfigError(
            "speculative_config.model",
            None,
            f"no {method} head is shipped for {checkpoint.path.name}, and its checkpoint has none "
            f"of its own; {method} needs the folder of a trained one",
        )
    return found
