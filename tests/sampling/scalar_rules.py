"""Drafts and acceptance again, slowly, from the papers' formulas; beside `scalar`, plain numbers.

Every function takes the logits of one position or of a window's positions, the request and its
history, and says what must come out. Shares no code with `drumline.sampling`.
"""

from __future__ import annotations

import math

from drumline.core.random import Purpose, uniform_bits
from drumline.core.request import Request
from sampling import scalar

Row = list[float]


def noise(request: Request, position: int, token: int, purpose: Purpose, ahead: int) -> float:
    bits = uniform_bits(request.seed, request.sample_index, position, purpose, token, ahead)
    return scalar.f32(-math.log(-math.log((bits + 0.5) / 2**32)))


def softmax(values: Row) -> Row:
    maximum = max(values)
    weights = [math.exp(value - maximum) for value in values]
    return [weight / math.fsum(weights) for weight in weights]


def draft_scores(logits: Row, request: Request, history: list[int], beta: float) -> Row:
    """beta * z / T of what is kept, -inf elsewhere."""
    z = scalar.edit(logits, request, history)
    row = scalar.scaled(z, request.params.temperature)
    kept = scalar.kept(z, row, request)
    return [beta * value if token in kept else -math.inf for token, value in enumerate(row)]


def coupled(logits: Row, request: Request, history: list[int], beta: float) -> int:
    if request.params.temperature == 0:
        z = scalar.edit(logits, request, history)
        return min(range(len(z)), key=lambda token: (-z[token], token))
    scores = draft_scores(logits, request, history, beta)
    return max(
        range(len(scores)),
        key=lambda token: (scores[token] + scalar.noise(request, len(history), token), -token),
    )


def point(token: int, vocab: int) -> Row:
    return [1.0 if one == token else 0.0 for one in range(vocab)]


def target_probs(logits: Row, request: Request, history: list[int]) -> Row:
    if request.params.temperature == 0:
        return point(scalar.sample(logits, request, history), len(logits))
    return softmax(scalar.processed(logits, request, history))


def uniform(request: Request, position: int, ahead: int) -> float:
    bits = uniform_bits(request.seed, request.sample_index, position, Purpose.ACCEPT, 0, ahead)
    return (bits + 0.5) / 2**32


def from_excess(request: Request, position: int, p: Row, q: Row, weight: float) -> int:
    """Gumbel-max over max(weight * p - q, 0)."""
    logs = {
        token: math.log(weight * p[token] - q[token])
        for token in range(len(p))
        if weight * p[token] - q[token] > 0
    }
    return max(
        logs,
        key=lambda token: (
            logs[token] + noise(request, position, token, Purpose.RESIDUAL, 0),
            -token,
        ),
    )


def standard(
    logits: list[Row], request: Request, history: list[int], drafts: list[int], q: list[Row]
) -> list[int]:
    """Leviathan, Kalman, Matias 2023, Algorithm 1."""
    tokens: list[int] = []
    for ahead, draft in enumerate(drafts):
        before = history + tokens
        p = target_probs(logits[ahead], request, before)
        ratio = p[draft] / q[ahead][draft]
        if uniform(request, len(before), ahead) >= ratio:
            return [*tokens, from_excess(request, len(before), p, q[ahead], 1.0)]
        tokens.append(draft)
    return [*tokens, scalar.sample(logits[-1], request, history + tokens)]


def block(
    logits: list[Row], request: Request, history: list[int], drafts: list[int], q: list[Row]
) -> list[int]:
    """Sun et al. 2024, Algorithm 2, every level worked out."""
    count = len(drafts)
    p = [
        target_probs(logits[level], request, history + drafts[:level]) for level in range(count + 1)
    ]
    weights = [1.0]
    for level, draft in enumerate(drafts):
        weights.append(min(weights[level] * p[level][draft] / q[level][draft], 1.0))
    standing = 0
    for level in range(1, count + 1):
        if level == count:
            chance = weights[count]
        else:
            pairs = zip(p[level], q[level], strict=True)
            mass = math.fsum(max(weights[level] * one - other, 0.0) for one, other in pairs)
            chance = mass / (mass + 1 - weights[level]) if mass > 0 else 0.0
        if uniform(request, len(history) + level - 1, level - 1) < chance:
            standing = level
    tokens = drafts[:standing]
    if standing == count:
        return [*tokens, scalar.sample(logits[-1], request, history + tokens)]
    position = len(history) + standing
    return [
        *tokens,
        from_excess(request, position, p[standing], q[standing], weights[standing]),
    ]
