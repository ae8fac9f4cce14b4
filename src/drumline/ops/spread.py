"""Experts spread over ranks: tokens go out, outputs come back.

    gather       every rank's tokens and the ids they chose           one all_gather over ep
    compute      own experts' outputs for all of them, unsummed
    exchange     each output to the rank whose token it is             one all_to_all over ep
    pick         per chosen id, from the rank that holds it

Nothing is added here: the owner of a token adds in ascending expert id, so that a token's bits are
those of one rank that holds all experts. Sizes follow from the number of tokens, which all ranks
have alike, and never from what was chosen.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drumline.ops.base import Ops, Routing
from drumline.ops.shares import SpreadExperts
from drumline.parallel.comm import Comm
from drumline.parallel.shards import experts_max


def exchange(
    inner: Ops, ep: Comm, shards: int, x: Tensor, ids: Tensor, experts: SpreadExperts
) -> Tensor:
    """``[tokens, hidden]`` and ``[tokens, k]`` → ``[tokens, k, hidden]``. Each ``shards`` ranks of
    ep are one replica and have the same tokens: its first one's are taken. An id of -1 costs
    nothing and gives zeros."""
    tokens, hidden = x.shape
    k = ids.shape[1]
    bits = ids.to(torch.int32).view(torch.float32)  # as they are: nothing computes with them
    gathered = ep.all_gather(torch.cat((x, bits), dim=1))[::shards]
    replicas = gathered.shape[0]
    sources = gathered.reshape(replicas * tokens, hidden + k)
    wanted = sources[:, hidden:].contiguous().view(torch.int32)
    held = min(k, experts_max(experts.count, ep.size))
    outputs = own_outputs(inner, sources[:, :hidden], wanted, experts, held)
    outputs = outputs.view(replicas, tokens, held, hidden)
    parts = outputs if shards == 1 else outputs.repeat_interleave(shards, dim=0)
    received = ep.all_to_all(parts)
    return pick(received, ids, experts.count)


def own_outputs(inner: Ops, x: Tensor, ids: Tensor, experts: SpreadExperts, held: int) -> Tensor:
    """``[rows, hidden]`` and ``[rows, k]`` → ``[rows, held, hidden]``: outputs of the experts that
    are here, in their order, then zeros."""
    out = x.new_zeros((x.shape[0], held, x.shape[1]))
    if experts.share is None:
        return out
    local = ids.to(torch.int64) - experts.first
    own = (local >= 0) & (local < experts.share.count)  # [rows, k]
    row, at = torch.nonzero(own, as_tuple=True)
    if row.shape[0]:
        place = (torch.cumsum(own, dim=1) - 1)[row, at]
        chosen = local[row, at].unsqueeze(1)  # [pairs, 1]
        routing = Routing(chosen, x.new_ones(chosen.shape))
        computed = inner.expert_outputs(x.index_select(0, row), routing, experts.share)
        out[row, place] = computed[:, 0]
    return out


def pick(received: Tensor, ids: Tensor, count: int) -> Tensor:
    """``[ranks, tokens, held, hidden]`` → ``[tokens, k, hidden]``: of each id, what its owner
    computed; zeros for -1."""
    ranks, tokens, k = received.shape[0], ids.shape[0], ids.shape[1]
    owner = torch.div((ids.clamp(min=0) + 1) * ranks - 1, count, rounding_mode="floor")
    # Ids ascend, so those of one owner stand side by side: how many of them come before.
    before = torch.ones(k, k, dtype=torch.bool, device=ids.device).tril(-1)
    place = ((owner.unsqueeze(2) == owner.unsqueeze(1)) & before).sum(dim=2)  # [tokens, k]
    place = place.clamp(max=received.shape[2] - 1)  # only rows of -1 go so far
    token = torch.arange(tokens, device=ids.device).unsqueeze(1).expand(tokens, k)
    return received[owner, token, place].masked_fill((ids < 0).unsqueeze(2), 0.0)
