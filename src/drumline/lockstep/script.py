"""The sizes of a step's draft passes, from the plan and the traits alone.

    pass_sizes(traits, rows, draft_k)      rows: (target tokens, samples) of each row

A size is the sum of the rows' bounds, never a count known only after acceptance: so that ranks
which agree on the bounds pad alike, whatever was accepted. Pure; knows no tensors and no ranks.
"""

from __future__ import annotations

from collections.abc import Iterable

from drumline.core.traits import DrafterTraits


def pass_sizes(
    traits: DrafterTraits, rows: Iterable[tuple[int, bool]], draft_k: int
) -> tuple[int, ...]:
    """Tokens per draft pass, one entry for each of ``traits.passes(draft_k)``."""
    shapes = tuple(rows)
    return tuple(
        sum(traits.pass_bound(index, width, samples, draft_k) for width, samples in shapes)
        for index in range(traits.passes(draft_k))
    )
