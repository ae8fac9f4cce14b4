"""The next-token module (MTP) under autograd, with the arithmetic of the speculators format.

    x       = input_proj(concat(token_layernorm(embedding of t_{p+1}), hidden_layernorm(h_p)))
    x      += self_attn(input_layernorm(x))
    x      += mlp(post_attention_layernorm(x))
    h       = final_layernorm(x)           fed back as the next step's hidden state
    logits  = verifier's head rows · h

h_p of the first step is the target's residual stream after all layers, before its final norm.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from drumline.models.config import ArchitectureConfig
from drumline.models.layers import FINAL_NORM
from drumline.training.block import Attention, FeedForward, Memory, RMSNorm
from drumline.training.target import Target

PREFIX = "mtp_layers.0."
FINAL_SHARE = 0.2


class MTPHead(nn.Module):
    """See the module. Parameters are named as in the file, without `PREFIX`."""

    method = "mtp"
    prefix = PREFIX

    def __init__(self, config: ArchitectureConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.taps: tuple[int, ...] = (config.num_hidden_layers,)
        self.hidden_layernorm = RMSNorm(hidden, eps)
        self.token_layernorm = RMSNorm(hidden, eps)
        self.input_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.input_layernorm = RMSNorm(hidden, eps)
        self.self_attn = Attention(config, hidden)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = FeedForward(config)
        self.final_layernorm = RMSNorm(hidden, eps)

    def start_from(self, target: Target, rows: Tensor) -> None:
        """The target's final norm, at a fifth, so that the first guesses are not confident ones.
        (Measured on SmolLM2: its last layer as a start learns more slowly than chance weights,
        because it has the current token's answer to unlearn.) ``rows``: not read."""
        with torch.no_grad():
            self.final_layernorm.weight.copy_(target.weight(FINAL_NORM) * FINAL_SHARE)

    def enter(self, taps: Mapping[int, Tensor]) -> Tensor:
        """Taps ``[batch, length, hidden]`` → what the first step takes as hidden state."""
        return taps[self.taps[0]]

    def step(
        self, embeddings: Tensor, hidden: Tensor, step: int, memory: Memory
    ) -> tuple[Tensor, Tensor]:
        """One draft step of every chain: (hidden state to feed back, what the head reads).
        Step 0 comes with every index, later ones with the chains, as in `block.Attention`."""
        joined = torch.cat((self.token_layernorm(embeddings), self.hidden_layernorm(hidden)), -1)
        x = self.input_proj(joined).float()  # sums stay float32 under autocast
        x = memory.select(x, step) + self.self_attn(self.input_layernorm(x), step, memory)
        x = x + self.mlp(self.post_attention_layernorm(x))
        out = self.final_layernorm(x)
        return out, out

    def logits(self, states: Tensor, rows: Tensor) -> Tensor:
        """``[n, hidden]`` → ``[n, draft vocabulary]``; ``rows`` of the verifier's head."""
        return states @ rows.t()
