"""One llama layer under autograd, run as a chain of drafts from every position at once.

Step 1 of the chain that starts at position i makes its entry from what the target computed; the
steps after it from what the head itself computed one step before. As EAGLE-3 trains it (Li et al.
2025, "training-time test"), a step attends to step 1's entries up to i, which are what the cache
holds when drafting starts there, and to its own chain's entries after that:

    keys of chain i at step 3     [1st of 0] ... [1st of i]  [2nd of i]  [3rd of i]

Sequences are padded on the right, ``[batch, length, ...]``; no query sees a pad. Knows no format.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drumline.models.config import ArchitectureConfig


@dataclass
class Memory:
    """Keys and values of the steps so far, each ``[batch, kv_heads, length, head_dim]``."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


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
        """``[batch, length, width]`` of draft step ``step`` (from 0) → ``[batch, length, hidden]``.
        The entry of index i stands at position i + 1 + step."""
        batch, length = x.shape[:2]
        q = self._split(self.q_proj(x), self.heads)  # [batch, heads, length, head_dim]
        k = self._split(self.k_proj(x), self.kv_heads)
        v = self._split(self.v_proj(x), self.kv_heads)
        q, k = self._rotate(q, step + 1), self._rotate(k, step + 1)
        memory.keys.append(k)
        memory.values.append(v)
        group = self.heads // self.kv_heads
        q = q.view(batch, self.kv_heads, group, length, self.head_dim) * self.head_dim**-0.5
        first = memory.keys[0].unsqueeze(2)
        scores = q @ first.transpose(-1, -2)  # [batch, kv_heads, group, length, length]
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
        own = [(q * key.unsqueeze(2)).sum(-1, keepdim=True) for key in memory.keys[1:]]
        weights = torch.cat([scores, *own], -1).softmax(-1)
        mixed = weights[..., :length] @ memory.values[0].unsqueeze(2)
        for at, value in enumerate(memory.values[1:]):
            mixed = mixed + weights[..., length + at : length + at + 1] * value.unsqueeze(2)
        mixed = mixed.reshape(batch, self.heads, length, self.head_dim)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:2], heads, self.head_dim).transpose(1, 2)

    def _rotate(self, x: Tensor, offset: int) -> Tensor:
        """Rope by halves for positions ``offset..offset + length - 1``."""
        positions = torch.arange(offset, offset + x.shape[2], dtype=torch.float64)
        angles = positions[:, None] * self.frequencies  # [length, head_dim / 2]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
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
