"""Acceptance rules that keep the target's distribution by chance rather than by equality.

    p   the target's processed distribution at a position, with the drafts before it as history
    q   the distribution a draft was drawn from; a point for deterministic drafts

A rule says how many leading drafts stand and what the token after them is drawn from. Its draws
have purposes of their own and carry their distance from the window's start (`core.random`).
Knows no greedy requests: their p is a point, and to match it is the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from drumline.core.random import Purpose, uniform_bits
from drumline.sampling.distribution import Distribution, distribution
from drumline.sampling.draw import Draw, LogitDraw, Waiting
from drumline.sampling.reduce import tree_sum
from drumline.sampling.sampler import Target
from drumline.sampling.window import WindowLogits

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Standing:
    """The targets of the drafts that stand and, if the window goes so far, of the token after
    them, which ``last`` draws."""

    targets: tuple[Target, ...]
    draft_count: int
    last: Waiting | None


def standard(view: WindowLogits) -> Standing:
    """Token by token: x stands with probability min(1, p(x) / q(x)), else the token comes from
    max(p - q, 0) (Leviathan, Kalman, Matias 2023; Chen et al. 2023)."""
    window = view.window
    targets: list[Target] = []
    for ahead, draft in enumerate(window.drafts):
        target = view.target(ahead)
        if target is None:
            return Standing(tuple(targets), ahead, None)
        targets.append(target)
        p, q = distribution(_draw(target)), window.drawn_from(ahead)
        if not _uniform(view, ahead) * q.at(draft) < p.at(draft):
            return Standing(tuple(targets), ahead, _excess_draw(target, p, q, 1.0))
    return _then_the_target(view, targets)


def block(view: WindowLogits) -> Standing:
    """The longest prefix whose draw says so (Sun et al. 2024, Algorithm 2; weight is its p_i).

    weight_i = min(1, weight_{i-1} * p(x_i) / q(x_i)). Prefix i stands with probability
    S / (S + (1 - weight_i)), where S is the mass of max(weight_i * p - q, 0) after it, the whole
    window with its weight. The token after prefix i comes from that same difference. A window
    cut short by numbers that are not finite is a shorter window.
    """
    window = view.window
    targets: list[Target] = []
    levels: list[tuple[Distribution, float]] = []  # p after prefix i, and weight_i
    standing, weight = 0, 1.0
    for ahead, draft in enumerate(window.drafts):
        target = view.target(ahead)
        if target is None:
            standing = ahead if _stands(view, ahead, weight) else standing
            break
        p, q = distribution(_draw(target)), window.drawn_from(ahead)
        mass = float(tree_sum(_excess(p, q, weight)))
        if mass > 0 and _stands(view, ahead, mass / (mass + (1 - weight))):
            standing = ahead
        targets.append(target)
        levels.append((p, weight))
        reached, offered = weight * p.at(draft), q.at(draft)
        weight = reached / offered if reached < offered else float(reached > 0)
        if weight == 0.0:
            break
    else:
        if _stands(view, len(window.drafts), weight):
            standing = len(window.drafts)
    if standing == len(targets):
        return _then_the_target(view, targets)
    p, weight = levels[standing]
    last = _excess_draw(targets[standing], p, window.drawn_from(standing), weight)
    return Standing(tuple(targets[: standing + 1]), standing, last)


def _stands(view: WindowLogits, length: int, probability: float) -> bool:
    """Whether a prefix of that length stands by its own draw; the empty one always does."""
    if length == 0:
        return True
    return _uniform(view, length - 1) < probability


def _uniform(view: WindowLogits, ahead: int) -> float:
    """The acceptance draw of one draft, strictly between 0 and 1."""
    request, position = view.window.request, len(view.window.committed) + ahead
    bits = uniform_bits(request.seed, request.sample_index, position, Purpose.ACCEPT, ahead=ahead)
    return (bits + 0.5) / 2**32


def _then_the_target(view: WindowLogits, targets: list[Target]) -> Standing:
    """All drafts so far stand; the next token is the target's own, drawn as ever."""
    last = view.target(len(targets))
    if last is None:
        return Standing(tuple(targets), len(targets), None)
    return Standing((*targets, last), len(targets), _draw(last))


def _excess(p: Distribution, q: Distribution, weight: float) -> Floats:
    """max(weight * p - q, 0) over the ids of ``p``."""
    difference = weight * p.values
    if p.ids is None and q.ids is not None:
        difference[q.ids] -= q.values
    else:
        difference -= q.values if p.ids is None else q.at_ids(p.ids)
    excess: Floats = np.maximum(difference, 0.0, out=difference)
    return excess


def _excess_draw(target: Target, p: Distribution, q: Distribution, weight: float) -> Waiting:
    """A draw in proportion to that difference; from ``p`` where rounding leaves nothing of it."""
    excess = _excess(p, q, weight)
    places = np.flatnonzero(excess)
    if len(places) == 0:
        return _draw(target)
    logs = np.log(excess[places])
    ids = places if p.ids is None else p.ids[places]
    scaled = np.full(len(target.raw), -np.inf)
    scaled[ids] = logs - logs.max()
    return Draw(target.row, scaled, ids, Purpose.RESIDUAL)


def _draw(target: Target) -> LogitDraw:
    assert target.draw is not None, "a greedy request is matched"
    return target.draw
