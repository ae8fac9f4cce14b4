"""The sampler again, slowly: one row, plain numbers and loops, written from the definitions.

Shares no code with `drumline.sampling`. Arithmetic that the real one does in float32 is rounded
to float32 here after each operation; sums need no rounding, they are compared with a tolerance.
"""

from __future__ import annotations

import math
import struct

from drumline.core.random import Purpose, uniform_bits
from drumline.core.request import Request

INFINITY = math.inf


def f32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


def edit(logits: list[float], request: Request, history: list[int]) -> list[float]:
    """Bans, bias and penalties, in vLLM's order."""
    params = request.params
    outputs = history[len(request.prompt_token_ids) :]
    edited = list(logits)
    if params.allowed_token_ids is not None:
        for token in range(len(edited)):
            if token not in params.allowed_token_ids:
                edited[token] = -INFINITY
    banned = set()
    for word in request.bad_words:
        begun = list(word[:-1])
        if not begun or (len(outputs) >= len(begun) and outputs[-len(begun) :] == begun):
            banned.add(word[-1])
    if len(outputs) < params.min_tokens:
        banned |= request.stop_token_ids
    if any(edited[t] > -INFINITY and t not in banned for t in range(len(edited))):
        for token in banned:
            edited[token] = -INFINITY
    for token, bias in params.logit_bias.items():
        edited[token] = f32(edited[token] + f32(bias))
    for token in range(len(edited)):
        edited[token] = penalised(edited[token], token, request, outputs)
    return edited


def penalised(value: float, token: int, request: Request, outputs: list[int]) -> float:
    params = request.params
    if token in request.prompt_token_ids or token in outputs:
        repetition = f32(params.repetition_penalty)
        value = f32(value / repetition) if value > 0 else f32(value * repetition)
    if token in outputs:
        value = f32(value - f32(f32(params.frequency_penalty) * outputs.count(token)))
        value = f32(value - f32(params.presence_penalty))
    return value


def scaled(edited: list[float], temperature: float) -> list[float]:
    maximum = max(edited)
    return [(value - maximum) / temperature for value in edited]


def kept(edited: list[float], scaled_row: list[float], request: Request) -> list[int]:
    """The ids that min_p, top_k and top_p leave, ascending."""
    params = request.params
    order = sorted(range(len(edited)), key=lambda token: (-edited[token], token))
    if params.min_p > 0:
        order = [token for token in order if scaled_row[token] >= math.log(params.min_p)]
    if params.top_k > 0:
        order = order[: params.top_k]
    if params.top_p < 1:
        target = params.top_p * math.fsum(math.exp(scaled_row[token]) for token in order)
        mass, leading = 0.0, []
        for token in order:
            leading.append(token)
            mass += math.exp(scaled_row[token])
            if mass >= target:
                break
        order = leading
    return sorted(order)


def noise(request: Request, position: int, token: int) -> float:
    bits = uniform_bits(request.seed, request.sample_index, position, Purpose.TARGET, token)
    return f32(-math.log(-math.log((bits + 0.5) / 2**32)))


def sample(logits: list[float], request: Request, history: list[int]) -> int:
    edited = edit(logits, request, history)
    if request.params.temperature == 0:
        return min(range(len(edited)), key=lambda token: (-edited[token], token))
    row = scaled(edited, request.params.temperature)
    return max(
        kept(edited, row, request),
        key=lambda token: (row[token] + noise(request, len(history), token), -token),
    )


def processed(logits: list[float], request: Request, history: list[int]) -> list[float]:
    """The logits that the token is drawn from."""
    edited = edit(logits, request, history)
    if request.params.temperature == 0:
        return edited
    row = scaled(edited, request.params.temperature)
    stay = kept(edited, row, request)
    return [value if token in stay else -INFINITY for token, value in enumerate(row)]


def log_softmax(values: list[float]) -> list[float]:
    maximum = max(values)
    total = math.log(math.fsum(math.exp(value - maximum) for value in values))
    return [value - maximum - total for value in values]


def rank(values: list[float], token: int) -> int:
    return 1 + sum(
        other > values[token] or (other == values[token] and place < token)
        for place, other in enumerate(values)
    )
