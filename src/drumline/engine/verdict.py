"""Who is to blame when a group of ranks ends: one error, from what its ranks said and left behind.

A rank that broke says so itself. One that died or stands still says nothing: the others name whom
they wait for, and its ledger shows how far it came. Pure; it asks nobody.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping

from drumline.config.mesh import Mesh
from drumline.core.errors import Diverged, DrumlineError, EngineDead, RankLost, UsageError
from drumline.core.ledger import Ring
from drumline.engine.messages import Trouble
from drumline.engine.rings import first_difference

_ORDER = ("usage", "own", "differs", "lost", "told")


def verdict(
    troubles: Mapping[int, Trouble],
    died: Mapping[int, int],
    ending: Callable[[int], str],
    silent: tuple[int, ...],
    ring: Callable[[int], Ring | None],
    last_steps: Mapping[int, int],
    mesh: Mesh,
) -> DrumlineError:
    """``troubles``: last words by rank. ``died``: exit codes, and ``ending`` says how in words.
    ``silent``: ranks that live and say nothing though they were told to end. ``last_steps``: the
    last step that a rank told of."""
    spoken = sorted(troubles.items(), key=lambda pair: (_ORDER.index(pair[1].kind), pair[0]))
    first = spoken[0][1] if spoken else None
    if first is not None and first.kind == "usage":
        return UsageError(first.message)
    if first is not None and first.kind == "own":
        return _lost(first.rank, first.message, ring, last_steps, first)
    # Ranks whose collectives differ may die of it, and not the one that was wrong.
    rings = {rank: found for rank in mesh.ranks if (found := ring(rank)) is not None}
    difference = first_difference(mesh, rings)
    dead = [rank for rank, code in sorted(died.items()) if code and rank not in troubles]
    if dead and difference is not None:
        return difference
    if dead:  # who left in order, followed somebody who did not
        return _lost(dead[0], ending(dead[0]), ring, last_steps)
    if first is not None and first.kind == "differs":
        return Diverged(first.what, first.values, first.step)
    if difference is not None:
        return difference
    lost = next((word for _, word in spoken if word.kind == "lost"), None)
    if silent:
        reason = "does not answer" if lost is None else lost.message
        return _lost(silent[0], reason, ring, last_steps)
    if lost is not None:
        return RankLost(lost.rank, lost.step, lost.phase, lost.operation, lost.message)
    left = [rank for rank in sorted(died) if rank not in troubles]
    if left:
        return _lost(
            left[0], f"has left, though nobody told it to: {ending(left[0])}", ring, last_steps
        )
    return EngineDead(first.message if first is not None else "the ranks are gone")


def _lost(
    rank: int,
    reason: str,
    ring: Callable[[int], Ring | None],
    last_steps: Mapping[int, int],
    words: Trouble | None = None,
) -> RankLost:
    """Where the rank was: by its own words, its ledger, or the last step it told of."""
    found = ring(rank)
    record = found.records[-1] if found is not None and found.records else None
    if words is not None:
        here = record is not None and record.step == words.step
        operation = str(record.entry) if here and record is not None else "no collective"
        return RankLost(rank, words.step, words.phase, operation, reason)
    if record is not None and record.step >= last_steps.get(rank, -1):
        state = "after" if record.completed else "in"
        return RankLost(rank, record.step, record.entry.phase, f"{state} {record.entry}", reason)
    return RankLost(rank, last_steps.get(rank, -1) + 1, "target", "no collective", reason)


def ending_of(process: int | None, code: int) -> str:
    """How a process ended, in words."""
    name = "its process" if process is None else f"its process {process}"
    if code >= 0:
        return f"{name} ended with code {code}"
    return f"{name} was ended by signal {-code} ({signal.Signals(-code).name})"
