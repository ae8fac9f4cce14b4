"""A target and a drafter small enough to write down: the next logits follow from the last token.

`speculate` runs many requests that differ only in their seed through drafts and verification, so
that what comes out can be counted; `expected` multiplies out what should come.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import torch

from drumline.core.request import Request
from drumline.sampling.accept import Verifier, Window
from drumline.sampling.draft import DraftSampler
from drumline.sampling.draw import Draw
from drumline.sampling.history import SamplingRow
from drumline.sampling.sampler import Sampler, Target
from sampling import scalar


class QuickSampler(Sampler):
    """Works a position out once for all requests that have the same parameters and history."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.known: dict[tuple[int, ...], Target] = {}

    def target(self, raw: np.ndarray, row: SamplingRow) -> Target:
        history = (*row.committed, *row.drafts)
        if history not in self.known:
            self.known[history] = super().target(raw, row)
        target = self.known[history]
        draw = target.draw and Draw(row, target.draw.scaled, target.draw.kept)
        return Target(row, raw, target.edited, target.top, draw)


class QuickDrafts(DraftSampler):
    """The same for drafts."""

    def __init__(self, vocab_size: int, method: str) -> None:
        super().__init__(vocab_size, method)
        self.known: dict[tuple[tuple[int, ...], ...], Draw] = {}

    def _draw(self, edited: np.ndarray, maximum: float, row: SamplingRow) -> Draw:
        history = (tuple(row.committed), row.drafts)
        if history not in self.known:
            self.known[history] = super()._draw(edited, maximum, row)
        draw = self.known[history]
        return Draw(row, draw.scaled, draw.kept, draw.purpose)


def speculate(
    request: Request,
    seeds: range,
    target: torch.Tensor,
    drafter: torch.Tensor,
    k: int,
    length: int,
    method: str,
    drafts: str,
) -> tuple[Counter[tuple[int, ...]], float]:
    """Runs until each request has ``length`` tokens: how often each sequence came, and the mean
    number of drafts that stood in a request's first window.

    ``target`` and ``drafter`` are ``[vocab, vocab]``: logits after each token.
    """
    verifier = Verifier(QuickSampler(len(target)), method)
    sampler = QuickDrafts(len(target), drafts)
    prompt = request.prompt_token_ids
    requests = [replace(request, number=0, seed=seed) for seed in seeds]
    sequences = [list(prompt) for _ in seeds]
    alive = list(range(len(seeds)))
    stood = -1.0
    while alive:
        windows = [Window(requests[at], sequences[at]) for at in alive]
        for ahead in range(k):
            last = [(window.drafts or window.committed)[-1] for window in windows]
            drawn = sampler.draw(drafter[last], [window.row(ahead) for window in windows])
            windows = [
                Window(
                    window.request,
                    window.committed,
                    (*window.drafts, token.token_id),
                    (*window.probs, token.probs),
                )
                for window, token in zip(windows, drawn, strict=True)
                if token is not None
            ]
        last = [t for window in windows for t in (window.committed[-1], *window.drafts)]
        accepted = verifier.verify(target[last], windows)
        if stood < 0:
            stood = sum(one.draft_count for one in accepted) / len(accepted)
        for at, one in zip(alive, accepted, strict=True):
            sequences[at].extend(token.token_id for token in one.tokens)
        alive = [at for at in alive if len(sequences[at]) < len(prompt) + length]
    first, end = len(prompt), len(prompt) + length
    return Counter(tuple(sequence[first:end]) for sequence in sequences), stood


def expected(request: Request, target: torch.Tensor, length: int) -> dict[tuple[int, ...], float]:
    """The probability of each sequence of ``length`` tokens under the target's own sampling."""
    chances: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer: dict[tuple[int, ...], float] = {}
        for tokens, chance in chances.items():
            history = [*request.prompt_token_ids, *tokens]
            row = scalar.processed(target[history[-1]].tolist(), request, history)
            for token, value in enumerate(scalar.log_softmax(row)):
                if value > -math.inf:
                    longer[(*tokens, token)] = chance * math.exp(value)
        chances = longer
    return chances


def chi_square(counts: Counter[tuple[int, ...]], chances: dict[tuple[int, ...], float]) -> float:
    """The statistic over its 1 - 1e-4 quantile: above 1 the counts do not fit. Sequences with
    fewer than 8 expected share a cell."""
    draws = sum(counts.values())
    if set(counts) - set(chances):
        return math.inf  # a sequence that cannot be
    cells: list[tuple[float, int]] = []
    rest_mean, rest_count = 0.0, 0
    for tokens, chance in chances.items():
        if chance * draws < 8:
            rest_mean, rest_count = rest_mean + chance * draws, rest_count + counts[tokens]
        else:
            cells.append((chance * draws, counts[tokens]))
    if rest_mean >= 8:
        cells.append((rest_mean, rest_count))
    statistic = sum((count - mean) ** 2 / mean for mean, count in cells)
    return statistic / quantile(len(cells) - 1)


def quantile(freedom: int) -> float:
    """The 1 - 1e-4 quantile, by Wilson and Hilferty's cube-root approximation (1931)."""
    part = 2 / (9 * freedom)
    return freedom * (1 - part + 3.719 * math.sqrt(part)) ** 3
