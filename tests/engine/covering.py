"""Few runs that meet every pair: a covering array of strength two, the same on every machine."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

Case = dict[str, Any]
Pair = tuple[tuple[str, int], tuple[str, int]]


def covering_array(factors: Mapping[str, Sequence[Any]], seed: int = 0) -> list[Case]:
    """Cases in which any two values of two factors meet at least once, greedily few."""
    names = sorted(factors, key=lambda name: -len(factors[name]))
    draw = random.Random(seed)
    missing = _pairs(factors)
    cases = []
    while missing:
        candidates = [_grow(names, factors, missing, draw) for _ in range(20)]
        best = max(candidates, key=lambda case: len(_met(case) & missing))
        missing -= _met(best)
        cases.append({name: factors[name][best[name]] for name in factors})
    return cases


def _pairs(factors: Mapping[str, Sequence[Any]]) -> set[Pair]:
    return {
        tuple(sorted(((one, i), (other, j))))  # type: ignore[misc]
        for one, other in itertools.combinations(factors, 2)
        for i in range(len(factors[one]))
        for j in range(len(factors[other]))
    }


def _met(case: Mapping[str, int]) -> set[Pair]:
    return set(itertools.combinations(sorted(case.items()), 2))


def _grow(
    names: Sequence[str],
    factors: Mapping[str, Sequence[Any]],
    missing: set[Pair],
    draw: random.Random,
) -> dict[str, int]:
    """A case around a pair that is missing, each further value the one that meets most."""
    case: dict[str, int] = dict(draw.choice(sorted(missing)))
    for name in names:
        if name not in case:
            values = list(range(len(factors[name])))
            draw.shuffle(values)
            case[name] = max(values, key=lambda value: _gain(case, name, value, missing))
    return case


def _gain(case: Mapping[str, int], name: str, value: int, missing: set[Pair]) -> int:
    return sum(
        tuple(sorted(((name, value), other))) in missing  # type: ignore[comparison-overlap]
        for other in case.items()
    )
