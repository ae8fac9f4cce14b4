"""Who drafts where that is left to the engine (method auto).

The target's own next-token module, else the best head that is shipped for it, behind a lookup; a
lookup alone where there is neither. What a lookup finds is mostly right for long; where it finds
nothing a network's first draft is right about half of the time. On a CPU, where every row that is
verified and every pass that is drafted takes time, that first one is all that a network is asked
for (`SpeculativeConfig.settled`); docs/acceptance.md has the counts, docs/PERFORMANCE.md the times.

The answer follows from the target's files and the package alone, so all ranks of an engine give
the same. Knows no draft length and loads nothing.
"""

from __future__ import annotations

from drumline.drafting.mtp import has_own_module
from drumline.drafting.shipped import best_method
from drumline.models.checkpoint import Checkpoint


def choose_method(checkpoint: Checkpoint) -> tuple[str, str]:
    """The method for a target, and why."""
    if has_own_module(checkpoint):
        return "mtp", "the checkpoint has a next-token module of its own"
    method = best_method(checkpoint.config, str(checkpoint.path))
    if method is not None:
        return method, "a head is shipped for this model"
    return "ngram", "the checkpoint has no next-token module, and no head is shipped for it"
