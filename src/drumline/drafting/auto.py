"""Who drafts where that is left to the engine (method auto).

    CPU           a lookup: a row that is verified and a pass that is drafted take real time there,
                  so that few drafts that are mostly right bring more than many that are not
                  (docs/acceptance.md has the counts)
    accelerator   the target's own next-token module, else the best head that is shipped for it,
                  behind a lookup; both cost little beside weights that are read anyway
                  a lookup alone where there is neither

The answer follows from the target's files, the package and the device alone, so all ranks of an
engine give the same. Knows no draft length and loads nothing.
"""

from __future__ import annotations

from drumline.drafting.mtp import has_own_module
from drumline.drafting.shipped import best_method
from drumline.models.checkpoint import Checkpoint


def choose_method(checkpoint: Checkpoint, device: str) -> tuple[str, str]:
    """The method for a target, and why."""
    if device == "cpu":
        return "ngram", "on a CPU every pass of a network takes time, and a lookup takes none"
    if has_own_module(checkpoint):
        return (
            "mtp",
            "the checkpoint has a next-token module of its own",
        )
    method = best_method(checkpoint.config, str(checkpoint.path))
    if method is not None:
        return method, "a head is shipped for this model"
    return "ngram", "the checkpoint has no next-token module, and no head is shipped for it"
