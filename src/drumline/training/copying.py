"""Heads that find what followed the last time this was said, taught where to look.

Text repeats itself: names, quotations, passages that are asked about, and the loops of a small
model's greedy answers. One layer can follow a repetition (an "induction head", Olsson et al. 2022):
look for the entry whose hidden state comes after the newest token, and say the token of that entry.
The next-token loss finds that late, because looking pays only once what is seen is also said. Where
a repetition goes on is known while training, so the first group of heads is told: a part of the
loss is how much of its attention lies on entries that

    follow the same token as the draft does, and carry the token that the draft should be.

Chains without such an entry are told nothing. Knows no format and no method.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drumline.training.block import Memory

LEAST = 1e-6  # of a share of attention, in its logarithm


class Copying:
    """Watches the first group of heads in one batch: call it as `block.Memory.watch`."""

    def __init__(self, ids: Tensor) -> None:
        """``ids``: ``[batch, length]``, as the chains read them."""
        self.ids = ids
        self.shares: list[Tensor] = []  # a step each: [queries], 0..1

    def __call__(self, step: int, memory: Memory, weights: Tensor) -> None:
        """``weights``: ``[batch, heads, chains, length]``, attention over step 1's entries."""
        right = self.followers(step, memory)
        taught = right.any(-1) & memory.used  # [batch, chains]
        share = (weights.float() * right[:, None]).sum(-1)  # [batch, heads, chains]
        self.shares.append(share[taught[:, None].expand_as(share)])

    def followers(self, step: int, memory: Memory) -> Tensor:
        """``[batch, chains, length]`` bool: entries that say what each chain drafts at ``step``
        and follow the token that it goes on from."""
        length = self.ids.shape[1]
        row = torch.arange(len(self.ids))[:, None]
        newest = self.ids[row, (memory.starts + 1 + step).clamp(max=length - 1)]
        wanted = self.ids[row, (memory.starts + 2 + step).clamp(max=length - 1)]
        carried = torch.cat((self.ids[:, 1:], self.ids[:, -1:]), 1)  # an entry's token
        before = torch.arange(length) <= memory.starts[..., None]
        same = self.ids[:, None] == newest[..., None]
        return same & (carried[:, None] == wanted[..., None]) & before

    def loss(self, step_weights: Sequence[float]) -> Tensor:
        """Mean of -log(share), weighted by step like the drafts themselves."""
        total = torch.zeros(())
        for weight, share in zip(step_weights, self.shares, strict=True):
            if share.shape[0]:
                total = total - weight * share.clamp(min=LEAST).log().mean()
        return total / sum(step_weights)
