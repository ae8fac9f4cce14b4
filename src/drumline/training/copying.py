"""Attention that finds what followed the last time this was said, put into an mtp head.

Text repeats itself: names, quotations, passages that are asked about, and the loops of a small
model's greedy answers. One layer can follow a repetition (an "induction head", Olsson et al. 2022),
since an entry holds the pair (hidden state after token i, token i + 1): look for the entry whose
hidden state comes after the newest token, and say its token. Gradients find that late, so the first
group of heads is set to it by least squares on text of the target, and training goes on from there.

    q, k    canonical correlations (Hotelling 1936) between the input of neighbouring entries, in
            those dimensions of a head that rope turns slowly
    v, o    from an entry's input to its token's row of the verifier's head, at the head's rank

It costs a head that is already trained nearly nothing: the other query heads of the group fall
silent. Knows mtp heads only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from drumline.training.block import Attention
from drumline.training.chain import Verifier
from drumline.training.features import Example
from drumline.training.mtp_module import MTPHead
from drumline.training.vocabulary import DraftVocabulary

ENTRIES = 40000  # that are looked at, at most
DISTANCE = 512  # over which rope may turn a dimension that is matched by at most...
TURN = 1.5  # ...this angle
RIDGE = 0.05
MATCH = 16.0  # mean score of a true match, in the softmax


@dataclass(frozen=True, eq=False)
class Entries:
    """Of neighbouring entries: what attention reads of each, ``[n, hidden]``; the first one's
    token; and the mean size of the residual stream."""

    first: Tensor
    second: Tensor
    tokens: Tensor
    size: float


@torch.no_grad()
def graft_copies(
    head: MTPHead, verifier: Verifier, vocabulary: DraftVocabulary, examples: Sequence[Example]
) -> None:
    """Sets the first group of heads. Nothing where rope leaves no dimension to match in."""
    attention = head.self_attn
    slow = slow_dimensions(attention)
    if not len(slow):
        return
    width, group = attention.head_dim, attention.heads // attention.kv_heads
    entries = read_entries(head, verifier.embedding, examples)
    ask, answer, found = correlate(entries.first, entries.second, len(slow))
    gain = math.sqrt(MATCH * math.sqrt(width) / max(1e-6, len(slow) * found))
    attention.q_proj.weight[:width] = 0.0
    attention.q_proj.weight[slow[: len(ask)]] = gain * ask
    attention.k_proj.weight[:width] = 0.0
    attention.k_proj.weight[slow[: len(ask)]] = gain * answer
    encode, decode = token_code(entries, verifier.rows, vocabulary, width)
    attention.v_proj.weight[:width] = 0.0
    attention.v_proj.weight[: len(encode)] = encode
    attention.o_proj.weight[:, : group * width] = 0.0
    back = decode / head.final_layernorm.weight  # which multiplies at the end
    said = entries.first @ encode.t() @ back
    scale = entries.size / said.pow(2).mean().sqrt()
    attention.o_proj.weight[:, : len(encode)] = (scale * back).t()


def slow_dimensions(attention: Attention) -> Tensor:
    """Dimensions of a head that rope turns by at most `TURN` over `DISTANCE`, slowest first."""
    pairs = torch.nonzero(attention.frequencies * DISTANCE <= TURN).squeeze(1).flip(0)
    return torch.stack((pairs, pairs + attention.head_dim // 2), 1).flatten()


def read_entries(head: MTPHead, embedding: Tensor, examples: Sequence[Example]) -> Entries:
    first: list[Tensor] = []
    second: list[Tensor] = []
    tokens: list[Tensor] = []
    squares: list[Tensor] = []
    for one in examples:
        if sum(map(len, first)) >= ENTRIES:
            break
        token = head.token_layernorm(embedding[one.ids[1:]])
        hidden = head.hidden_layernorm(one.taps[head.taps[0]].float()[:-1])
        x = head.input_proj(torch.cat((token, hidden), -1))
        read = head.input_layernorm(x)
        first.append(read[:-1])
        second.append(read[1:])
        tokens.append(one.ids[1:-1])
        squares.append(x.detach().pow(2).mean(1))
    size = float(torch.cat(squares).mean().sqrt())
    return Entries(torch.cat(first), torch.cat(second), torch.cat(tokens), size)


def correlate(before: Tensor, after: Tensor, count: int) -> tuple[Tensor, Tensor, float]:
    """The ``count`` strongest canonical pairs: rows that read ``before``, rows that read ``after``,
    each of unit variance, and their mean correlation."""
    aside, apart = without(before.mean(0)), without(after.mean(0))
    left, right = aside @ whitener(before @ aside), apart @ whitener(after @ apart)
    shared = (before @ left).t() @ (after @ right) / len(after)
    a, strength, b = torch.linalg.svd(shared, full_matrices=False)
    mean = float(strength[:count].mean())
    return (left @ a[:, :count]).t(), (right @ b[:count].t()).t(), mean


def without(mean: Tensor) -> Tensor:
    """Projects a direction out: layers have no bias to subtract a mean with."""
    direction = F.normalize(mean, dim=0)
    return torch.eye(len(mean)) - torch.outer(direction, direction)


def whitener(x: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(x.t() @ x / len(x))
    kept = values > 1e-6 * values.max()
    scales: Tensor = (values[kept] + RIDGE * values.mean()).rsqrt()
    white: Tensor = vectors[:, kept] * scales
    return white


def token_code(
    entries: Entries, rows: Tensor, vocabulary: DraftVocabulary, count: int
) -> tuple[Tensor, Tensor]:
    """``count`` numbers that tell an entry's token, as rows that read the entry, and the way from
    them to its row, ``[count, hidden]``, turned so that it is told from the others."""
    place = torch.full((vocabulary.target_size,), -1)
    place[vocabulary.ids] = torch.arange(vocabulary.size)
    known = place[entries.tokens] >= 0
    aside = without(entries.first.mean(0))
    read = entries.first[known] @ aside
    apart = rows - rows.mean(0)
    wanted = (apart @ torch.linalg.inv(ridged(apart)))[place[entries.tokens[known]]]
    straight = torch.linalg.solve(ridged(read), read.t() @ wanted / len(read))
    _, _, axes = torch.linalg.svd(read @ straight, full_matrices=False)
    return (aside @ straight @ axes[:count].t()).t(), axes[:count]


def ridged(x: Tensor) -> Tensor:
    """Second moments of the columns, with a ridge."""
    moments = x.t() @ x / len(x)
    return moments + RIDGE * moments.diagonal().mean() * torch.eye(len(moments))
