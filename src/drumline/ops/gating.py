"""DeepSeek-V3's choice of experts, in operations that every backend shares.

    score  = sigmoid(logits)                         float32, one per expert
    merit  = score + bias                            the bias balances load and weighs nothing
    groups = the best ``used`` groups, a group's merit being that of its two best experts
    chosen = the ``per_token`` experts of most merit in those groups
    weight = score[chosen], divided by their sum if asked, times ``scaling``

(DeepSeek-AI 2024, section 2.1.2.) Ties go to the lowest group and the lowest expert id. A row's
bits are its own: exponentials see contiguous tensors, sums are trees.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drumline.ops.base import Routing
from drumline.ops.sums import tree_sum_last

TINY = 1e-20  # keeps a sum of scores that all vanish from dividing by zero


def route_by_groups(
    logits: Tensor,  # [tokens, experts]
    bias: Tensor,  # [experts]
    *,
    groups: int,
    used: int,
    per_token: int,
    normalize: bool,
    scaling: float,
) -> Routing:
    """``[tokens, experts]`` router logits → `Routing` with ascending ids."""
    tokens, count = logits.shape
    scores = 1.0 / (1.0 + torch.exp(-logits.contiguous()))
    merit = scores + bias
    grouped = merit.view(tokens, groups, count // groups)
    best = _descending(grouped)[0][..., :2]  # [tokens, groups, 2]
    kept = _descending(best[..., 0] + best[..., 1])[1][:, :used]  # [tokens, used]
    open_groups = torch.zeros((tokens, groups), dtype=torch.bool, device=logits.device)
    open_groups.scatter_(1, kept, True)
    merit = grouped.masked_fill(~open_groups.unsqueeze(-1), -torch.inf).view(tokens, count)
    chosen = _descending(merit)[1][:, :per_token].sort(dim=1).values  # [tokens, k], ascending
    weights = scores.gather(1, chosen)
    if normalize:
        weights = weights / (tree_sum_last(weights) + TINY)
    return Routing(chosen, weights * scaling)


def _descending(x: Tensor) -> tuple[Tensor, Tensor]:
    """Values and indices; of equals the lowest index comes first, which `topk` leaves open."""
    found = torch.sort(x, dim=-1, descending=True, stable=True)
    return found.values, found.indices
