"""One llama layer under autograd, run as a chain of drafts from every position at once.

Step 1 of the chain that starts at position i makes its entry from what the target computed; the
steps after it from what the head itself computed one step before. As EAGLE-3 trains it (Li et al.
2025, "training-time test"), a step attends to step 1's entries up to i, which are what the cache
holds when drafting starts there, and to its own chain's entries after that:

    keys of chain i at step 3     [1st of 0] ... [1st of i]  [2nd of i]  [3rd of i]

Sequences are padded on the right, ``[batch, length, ...]``; no query sees a pad. Every index gives
step 1 a key, but only the chains of ``Memory.starts`` are computed: where a prompt is long and its
answer short, that is a fraction of the work. Knows no format.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drumline.models.config import ArchitectureConfig


@dataclass
class Memory:
    """Keys and values: step 1's ``[batch, kv_heads, length, head_dim]``, those of later steps
    ``[batch, kv_heads, chains, head_dim]``. ``starts``: ``[batch, chains]``, the indices whose
    chains are run; they may be narrowed after step 1. ``used``: ``[batch, chains]`` bool, chains
    that have a token to draft in this step. ``watch``: is shown each step's attention of the first
    group of heads, ``[batch, heads, chains, length]``, over step 1's entries."""

    starts: Tensor
    used: Tensor
    watch: Callable[[int, Memory, Tensor], None] | None = None
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def select(self, x: Tensor, step: int) -> Tensor:
        """``x`` at the chains: step 1 (``step`` 0) comes with every index, later ones with them."""
        return x if step else pick(x, self.starts)


def pick(x: Tensor, index: Tensor) -> Tensor:
    """``[batch, length, ...]`` at ``index [batch, chains]`` → ``[batch, chains, ...]``."""
    return x[torch.arange(x.shape[0])[:, None], index]


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions, no biases. ``width``: of its input."""

    def __init__(self, config: ArchitectureConfig, width: int) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        rows, kv_rows = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.q_proj = nn.Linear(width, rows, bias=False)
        self.k_proj = nn.Linear(width, kv_rows, bias=False)
        self.v_proj = nn.Linear(width, kv_rows, bias=False)
        self.o_proj = nn.Linear(rows, config.hidden_size, bias=False)
        powers = torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim
        self.frequencies = config.rope_theta**-powers  # [head_dim / 2]

    def forward(self, x: Tensor, step: int, memory: Memory) -> Tensor:
        """Draft step ``step`` (from 0): ``[batch, length, width]``, after that ``[batch, chains,
        width]`` → ``[batch, chains, hidden]``. The entry of index i stands at i + 1 + step."""
        batch, length = x.shape[:2]
        starts = memory.starts
        at = starts if step else torch.arange(length).expand(batch, length)
        own = memory.select(x, step)
        q = self._rotate(self._split(self.q_proj(own), self.heads), starts + 1 + step)
        k = self._rotate(self._split(self.k_proj(x), self.kv_heads), at + 1 + step)
        memory.keys.append(k)
        memory.values.append(self._split(self.v_proj(x), self.kv_heads))
        chains = own.shape[1]
        group = self.heads // self.kv_heads
        q = q.view(batch, self.kv_heads, group, chains, self.head_dim) * self.head_dim**-0.5
        first = memory.keys[0].unsqueeze(2)
        scores = q @ first.transpose(-1, -2)  # [batch, kv_heads, group, chains, length]
        length = scores.shape[-1]
        later = torch.arange(length) > starts[..., None]  # [batch, chains, length]
        scores = scores.masked_fill(later[:, None, None], -torch.inf)
        drafts = [(q * key.unsqueeze(2)).sum(-1, keepdim=True) for key in memory.keys[1:]]
        weights = torch.cat([scores, *drafts], -1).softmax(-1)
        if memory.watch is not None:
            memory.watch(step, memory, weights[:, 0, ..., :length])
        mixed = weights[..., :length] @ memory.values[0].unsqueeze(2)
        for step_before, value in enumerate(memory.values[1:]):
            place = length + step_before
            mixed = mixed + weights[..., place : place + 1] * value.unsqueeze(2)
        mixed = mixed.reshape(batch, self.heads, chains, self.head_dim)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:2], heads, self.head_dim).transpose(1, 2)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rope by halves: ``[batch, heads, n, head_dim]`` at ``positions [batch, n]``."""
        angles = positions[..., None].double() * self.frequencies  # [batch, n, head_dim / 2]
        cos, sin = angles.cos().to(x.dtype)[:, None], angles.sin().to(x.dtype)[:, None]
        low, high = x.chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


class FeedForward(nn.Module):
    def __init__(self, config: ArchitectureConfig) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out
