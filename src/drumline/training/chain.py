"""From examples to the head's predictions and the target's own, step by step.

    index i      the entry made of (h_i, token i + 1); the chain that starts there drafts
    step j       token i + 2 + j, which the target predicts from h_{i + 1 + j}         j from 0

What drafts are trained on and measured at: chains whose first draft is the second answer token
or later, because an answer's first token always comes from the target.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from drumline.core.random import derive_seed
from drumline.training.block import Memory
from drumline.training.copying import Copying
from drumline.training.features import Example
from drumline.training.target import Target
from drumline.training.vocabulary import DraftVocabulary


class Head(Protocol):
    """A head under autograd; `mtp_module.MTPHead` and `eagle3_module.Eagle3Head`."""

    taps: tuple[int, ...]

    def enter(self, taps: Mapping[int, Tensor]) -> Tensor: ...

    def step(
        self, embeddings: Tensor, hidden: Tensor, step: int, memory: Memory
    ) -> tuple[Tensor, Tensor]: ...

    def logits(self, states: Tensor, rows: Tensor) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Verifier:
    """What of the target a head is trained against. ``rows``: its head at the draft vocabulary."""

    embedding: Tensor  # [vocab, hidden]
    rows: Tensor  # [draft vocab, hidden]
    norm: Tensor  # [hidden]
    eps: float
    last_tap: int

    @classmethod
    def of(cls, target: Target, vocabulary: DraftVocabulary) -> Verifier:
        # Clones: weights loaded for inference cannot be saved for a backward pass.
        rows = target.head if vocabulary.full else target.head[vocabulary.ids]
        return cls(
            target.embedding.clone(),
            rows.clone(),
            target.model.final_norm.clone(),
            target.config.rms_norm_eps,
            target.config.num_hidden_layers,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """``[n, hidden]`` after the last layer → ``[n, draft vocab]``, as the target has them."""
        return F.rms_norm(hidden, (hidden.shape[-1],), self.norm, self.eps) @ self.rows.t()


@dataclass(frozen=True, eq=False)
class Batch:
    """Examples side by side, padded on the right."""

    ids: Tensor  # [batch, length] int64
    starts: Tensor  # [batch] the first index whose chain counts: the last prompt token's
    lengths: Tensor  # [batch]
    taps: dict[int, Tensor]  # [batch, length, hidden] float32

    @classmethod
    def of(cls, examples: Sequence[Example], prompts: bool = False) -> Batch:
        pad = torch.nn.utils.rnn.pad_sequence
        return cls(
            ids=pad([one.ids for one in examples], batch_first=True),
            starts=torch.tensor([0 if prompts else one.answer - 1 for one in examples]),
            lengths=torch.tensor([one.length for one in examples]),
            taps={
                tap: pad([one.taps[tap].float() for one in examples], batch_first=True)
                for tap in examples[0].taps
            },
        )

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    def counts(self, step: int) -> Tensor:
        """``[batch, length]`` bool: chains that have a true token to predict at ``step``."""
        index = torch.arange(self.ids.shape[1])
        inside = index[None] + 2 + step < self.lengths[:, None]
        return inside & (index[None] >= self.starts[:, None])

    def ahead(self, values: Tensor, by: int) -> Tensor:
        """``[batch, length, ...]`` with what stands ``by`` indices later; the end repeats."""
        index = (torch.arange(values.shape[1]) + by).clamp(max=values.shape[1] - 1)
        return values[:, index]


def run_chain(
    head: Head,
    verifier: Verifier,
    batch: Batch,
    steps: int,
    later_every: int = 1,
    watch: Copying | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """Per step, over the chains that count, in order: (``[n]`` flat indices into the batch, logits
    ``[n, draft vocab]``). True tokens are fed in: after a wrong draft nothing counts anyway.
    ``later_every``: after the first step only every so many-th chain goes on. ``watch``: sees where
    the first group of heads looks."""
    hidden, length = head.enter(batch.taps), batch.ids.shape[1]
    starts = _starts(batch.counts(0))
    memory = Memory(starts, torch.ones_like(starts, dtype=torch.bool), watch)
    offsets = torch.arange(len(batch.ids))[:, None] * length
    results = []
    for step in range(steps):
        if step == 1 and later_every > 1:
            memory.starts = memory.starts[:, ::later_every]
            hidden = hidden[:, ::later_every]
        entries = memory.starts if step else torch.arange(length).expand_as(batch.ids)
        follow = (entries + step + 1).clamp(max=length - 1)
        embeddings = verifier.embedding[batch.ids.gather(1, follow)]
        counted = batch.counts(step).gather(1, memory.starts)
        memory.used = counted & _first_of_equals(memory.starts)
        hidden, states = head.step(embeddings, hidden, step, memory)
        chosen = (offsets + memory.starts)[memory.used]
        results.append((chosen, head.logits(states[memory.used], verifier.rows)))
    return results


def _starts(counts: Tensor) -> Tensor:
    """``[batch, length]`` bool → ``[batch, chains]`` indices where it holds, ascending; rows with
    fewer repeat their last (or have 0)."""
    places = [torch.nonzero(row).squeeze(1) for row in counts]
    longest = max(1, *(len(place) for place in places))
    rows = []
    for place in places:
        end = place[-1:] if len(place) else torch.zeros(1, dtype=torch.int64)
        rows.append(torch.cat((place, end.expand(longest - len(place)))))
    return torch.stack(rows)


def _first_of_equals(starts: Tensor) -> Tensor:
    """False at the repetitions that fill a row."""
    same = starts[:, 1:] == starts[:, :-1]
    return torch.cat((torch.ones(len(starts), 1, dtype=torch.bool), ~same), 1)


def chain_loss(
    head: Head,
    verifier: Verifier,
    batch: Batch,
    step_weights: Sequence[float],
    later_every: int = 1,
    copy_weight: float = 0.0,
) -> Tensor:
    """Cross entropy with the target's own distribution, renormalised to the draft vocabulary:
    the mean over chains, weighted by step. Up to a constant the Kullback-Leibler divergence. To it
    comes ``copy_weight`` times `Copying.loss`."""
    steps = len(step_weights)
    length = batch.ids.shape[1]
    with torch.no_grad():
        wanted = torch.zeros(batch.ids.shape, dtype=torch.bool)
        for step in range(steps):
            wanted[:, step + 1 :] |= batch.counts(step)[:, : length - step - 1]
        place = wanted.flatten().cumsum(0) - 1  # flat index → row of `odds`
        odds = verifier.logits(batch.taps[verifier.last_tap][wanted]).float().softmax(-1)
    total = torch.zeros(())
    copying = Copying(batch.ids) if copy_weight else None
    results = run_chain(head, verifier, batch, steps, later_every, copying)
    for step, (chosen, logits) in enumerate(results):
        if chosen.shape[0]:
            aim = odds[place[chosen + 1 + step]]
            total = total + step_weights[step] * F.cross_entropy(logits.float(), aim)
    loss = total / sum(step_weights)
    return loss if copying is None else loss + copy_weight * copying.loss(step_weights)


def batches(
    examples: Sequence[Example], batch_tokens: int, seed: int, epoch: int
) -> list[list[int]]:
    """Indices by batch: neighbours in length share one (little padding), the order of batches and
    of equal lengths is drawn from (seed, epoch)."""
    keyed = [derive_seed("order", seed, epoch, index) for index in range(len(examples))]
    # Lengths within a tenth count as equal, so that batches differ from epoch to epoch.
    order = sorted(range(len(examples)), key=lambda i: (_size(examples[i].length), keyed[i]))
    groups: list[list[int]] = []
    longest = 0
    for index in order:
        longest = max(longest, examples[index].length)
        if not groups or longest * (len(groups[-1]) + 1) > batch_tokens:
            groups.append([])
            longest = examples[index].length
        groups[-1].append(index)
    groups.sort(key=lambda group: keyed[group[0]])
    return groups


def _size(length: int) -> int:
    return int(8 * math.log2(length))
