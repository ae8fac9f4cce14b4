"""How often drafts would be accepted, on conversations that were never trained on.

The greedy chain is simulated exactly: every chain of every position at once, true tokens fed in
(after the first wrong draft a chain is over, so what it would have been fed cannot matter), then
a walk over each answer as an engine takes it: verify, keep the accepted drafts and the target's
next token, start the next chain there.

Sharpening: under coupled drafts at temperature T the draft is argmax(beta * z / T + g) with the
target's own noise g (Daliri et al. 2024). Which beta agrees most is measured here, over draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drumline.training.chain import Batch, Head, Verifier, batches, run_chain
from drumline.training.features import Example
from drumline.training.target import Target
from drumline.training.vocabulary import DraftVocabulary

SHARPENINGS = (1.0, 1.15, 1.3, 1.5, 1.75, 2.0, 2.5, 3.0, math.inf)
DRAWS = 4  # of noise for each position


@dataclass(frozen=True, slots=True)
class Acceptance:
    """``per_position``: share of chains whose drafts up to and with position j are all accepted.
    ``mean_length``: tokens a verify step yields, drafts and the target's own."""

    per_position: tuple[float, ...]
    mean_length: float
    chains: int
    conversations: int


@dataclass(frozen=True, slots=True)
class Sharpening:
    """``agreement[beta]``: the mean length that drafts at that beta would have."""

    temperature: float
    best: float
    agreement: dict[float, float]


@torch.no_grad()
def hits(
    head: Head,
    verifier: Verifier,
    vocabulary: DraftVocabulary,
    examples: Sequence[Example],
    steps: int,
    batch_tokens: int,
) -> list[Tensor]:
    """Per example ``[length, steps]`` bool: whether the greedy draft of the chain that starts at
    an index is the true token; False where there is none."""
    found = [torch.zeros(one.length, steps, dtype=torch.bool) for one in examples]
    for group in batches(examples, batch_tokens, 0, 0):
        batch = Batch.of([examples[i] for i in group])
        table = torch.zeros(*batch.ids.shape, steps, dtype=torch.bool)
        for step, (chosen, logits) in enumerate(run_chain(head, verifier, batch, steps)):
            drafts = vocabulary.ids[logits.argmax(-1)]
            truth = batch.ahead(batch.ids, 2 + step).flatten()[chosen]
            table.view(-1, steps)[chosen, step] = drafts == truth
        for row, index in enumerate(group):
            found[index] = table[row, : examples[index].length]
    return found


def acceptance(examples: Sequence[Example], table: Sequence[Tensor], steps: int) -> Acceptance:
    """From `hits` to rates and to the walk over each answer."""
    chains, accepted, tokens, passes = 0, [0] * steps, 0, 0
    for one, hit in zip(examples, table, strict=True):
        kept = hit[:, :steps].long().cumprod(1).sum(1).tolist()  # accepted drafts per chain
        for index in range(one.answer - 1, one.length - 2):
            chains += 1
            for step in range(kept[index]):
                accepted[step] += 1
        index = one.answer - 1
        while index < one.length - 2:  # the token at index + 1 is known; more are to come
            tokens += kept[index] + 1
            passes += 1
            index += kept[index] + 1
        tokens -= max(0, index - (one.length - 2))  # the target's token after the end
    return Acceptance(
        tuple(count / max(chains, 1) for count in accepted),
        tokens / max(passes, 1),
        chains,
        len(examples),
    )


@torch.no_grad()
def measure_sharpening(
    head: Head,
    verifier: Verifier,
    target: Target,
    vocabulary: DraftVocabulary,
    examples: Sequence[Example],
    steps: int,
    temperature: float,
    batch_tokens: int,
    seed: int,
) -> Sharpening:
    """Draws the target's token at each position several times and counts, per step and beta, how
    often the coupled draft is the same. The rates of the steps are multiplied along the chain."""
    generator = torch.Generator().manual_seed(seed % 2**63)
    agreed = {beta: [0] * steps for beta in SHARPENINGS}
    counted = [0] * steps
    for group in batches(examples, batch_tokens, 0, 0):
        batch = Batch.of([examples[i] for i in group])
        last = batch.taps[verifier.last_tap].flatten(0, 1)
        for step, (chosen, logits) in enumerate(run_chain(head, verifier, batch, steps)):
            for rows, own in zip(torch.split(chosen, 128), torch.split(logits, 128), strict=True):
                z = target.model.compute_logits(last[rows + 1 + step]) / temperature
                for _ in range(DRAWS):
                    noise = -torch.empty_like(z).exponential_(generator=generator).log()
                    truth = (z + noise).argmax(-1)
                    counted[step] += len(rows)
                    for beta in SHARPENINGS:
                        draft = _coupled(own, noise[:, vocabulary.ids], beta / temperature)
                        agreed[beta][step] += int((vocabulary.ids[draft] == truth).sum())
    lengths = {beta: _length(agreed[beta], counted) for beta in SHARPENINGS}
    best = max(SHARPENINGS, key=lambda beta: lengths[beta])
    return Sharpening(temperature, best, lengths)


def _coupled(logits: Tensor, noise: Tensor, factor: float) -> Tensor:
    return (logits if math.isinf(factor) else logits * factor + noise).argmax(-1)


def _length(agreed: Sequence[int], counted: Sequence[int]) -> float:
    length, reach = 1.0, 1.0
    for count, total in zip(agreed, counted, strict=True):
        reach *= count / max(total, 1)
        length += reach
    return length
