"""What a request's parameters do to one row of logits, in vLLM's order.

    edit       allowed_token_ids, bad_words, min_tokens, logit_bias,
               repetition, presence and frequency penalty         float32, on the logits
    scale      (logit - maximum) / temperature                    float64, maximum 0
    truncate   min_p, top_k, top_p                                the ids that stay

Bans set a logit to -inf. Each stage is a function of the row alone and returns a new array if it
changes anything: the caller's logits are never written to. Knows no draws.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from drumline.core.errors import EngineError
from drumline.core.params import SamplingParams
from drumline.core.request import Request
from drumline.sampling.history import SamplingRow, SamplingState
from drumline.sampling.order import best_ids, sorted_ids
from drumline.sampling.reduce import tree_sum

Logits = NDArray[np.float32]  # [vocab]
Scaled = NDArray[np.float64]  # [vocab], maximum 0
Ids = NDArray[np.int64]

_DEPTHS = (3.0, 6.0, 9.0, 12.0, 16.0, 24.0)  # nats below the maximum, for top_p


def edits(request: Request) -> bool:
    """Whether `edit` could ever change a logit of this request."""
    params = request.params
    return bool(
        params.allowed_token_ids is not None
        or request.bad_words
        or params.min_tokens
        or params.logit_bias
        or penalises(params)
    )


def penalises(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


def edit(logits: Logits, row: SamplingRow, state: SamplingState) -> Logits:
    """Bans, bias and penalties for ``row``'s history; the same array if there are none.

    Where the bans together leave no token, allowed_token_ids holds and the others yield: a
    request always has a next token.
    """
    if not edits(row.request):
        return logits
    params = row.request.params
    edited = _only_allowed(logits, params.allowed_token_ids)
    banned = _banned(row)
    if banned:
        open_count = np.count_nonzero(edited != -np.inf)
        inside = np.array([token for token in banned if token < len(edited)], dtype=np.int64)
        spent = inside[edited[inside] != -np.inf]
        if len(spent) < open_count:
            edited[spent] = -np.inf
    for token, bias in params.logit_bias.items():
        edited[token] += np.float32(bias)
    if penalises(params):
        _penalise(edited, row, state)
    return edited


def _only_allowed(logits: Logits, allowed: tuple[int, ...] | None) -> Logits:
    """A copy in which every token outside ``allowed`` is banned."""
    if allowed is None:
        return logits.copy()
    edited = np.full_like(logits, -np.inf)
    ids = np.array(allowed, dtype=np.int64)
    edited[ids] = logits[ids]
    return edited


def _banned(row: SamplingRow) -> list[int]:
    """Tokens that bad_words and min_tokens forbid at this position, ascending."""
    request = row.request
    banned: set[int] = set()
    for word in request.bad_words:  # over the outputs only, as in vLLM
        begun = word[:-1]
        if row.last_outputs(len(begun)) == begun:
            banned.add(word[-1])
    if row.output_count < request.params.min_tokens:
        banned.update(request.stop_token_ids)
    return sorted(banned)


def _penalise(edited: Logits, row: SamplingRow, state: SamplingState) -> None:
    """Repetition (Keskar et al. 2019, CTRL) over prompt and outputs; the others over outputs."""
    params = row.request.params
    counts = state.counts(row)
    if params.repetition_penalty != 1.0:
        seen = counts.seen_ids()
        penalty = np.float32(params.repetition_penalty)
        values = edited[seen]
        edited[seen] = np.where(values > 0, values / penalty, values * penalty)
    if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
        ids, times = counts.output_ids()
        edited[ids] -= np.float32(params.frequency_penalty) * times.astype(np.float32)
        edited[ids] -= np.float32(params.presence_penalty)


def top_value(logits: Logits, row: SamplingRow) -> tuple[int, float]:
    """The best token and its logit; raises `EngineError` if the logits are no numbers."""
    token = int(np.argmax(logits))  # the first of equals; a NaN wins over everything
    value = float(logits[token])
    if not math.isfinite(value):
        raise EngineError(
            f"request {row.request.number}, position {row.position}: "
            f"the largest logit is {value}, not a finite number"
        )
    return token, value


def scale(logits: Logits, maximum: float, temperature: float) -> Scaled:
    """Logits relative to their maximum, divided by the temperature: ``[vocab]`` float64.

    Taking the maximum first keeps the smallest temperatures from overflowing.
    """
    assert temperature > 0, "greedy rows are not scaled"
    scaled = np.subtract(logits, maximum, dtype=np.float64)
    if temperature != 1.0:
        with np.errstate(over="ignore"):
            scaled /= temperature
    return scaled


def truncate(logits: Logits, scaled: Scaled, params: SamplingParams) -> Ids | None:
    """The ids that min_p, top_k and top_p leave, ascending; None if they were not asked.

    Each works on what the one before left. The order of tokens is that of the edited logits,
    ties to the lowest id: top_k keeps exactly k, top_p the smallest leading part whose
    probability reaches p, and never less than one token.
    """
    kept: Ids | None = None
    if params.min_p > 0.0:
        kept = np.flatnonzero(scaled >= math.log(params.min_p))
    if 0 < params.top_k < len(logits):
        if kept is None:
            kept = best_ids(logits, params.top_k)
        else:
            kept = kept[best_ids(logits[kept], params.top_k)]
        kept = np.sort(kept)
    if params.top_p < 1.0:
        kept = _nucleus(logits, scaled, kept, params.top_p)
    return kept


def _nucleus(logits: Logits, scaled: Scaled, kept: Ids | None, top_p: float) -> Ids:
    """top_p (Holtzman et al. 2020). Running sums go down the order one by one, in float64.

    Only tokens near the maximum are sorted, deeper in steps until they reach p: the sums, and
    with them the result, do not depend on how deep that was.
    """
    values = scaled if kept is None else scaled[kept]
    weights = np.exp(values)
    target = top_p * float(tree_sum(weights))
    for depth in (*_DEPTHS, math.inf):
        near = np.flatnonzero(values > -depth)
        ids = near if kept is None else kept[near]
        if depth < math.inf and len(ids) < len(values) and weights[near].sum() < target:
            continue  # a guess that may be off by rounding; the running sum decides
        ordered = sorted_ids(logits, ids)
        sums = np.cumsum(np.exp(scaled[ordered]))
        count = int(np.searchsorted(sums, target)) + 1
        if count <= len(ordered):
            return np.sort(ordered[:count])
    return np.sort(ordered)
