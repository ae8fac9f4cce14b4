"""The EAGLE-3 head (Li et al. 2025) under autograd, with the arithmetic of the speculators format.

    h_p     = fc(concat of three taps, a norm each)       first step only; fc_norm: true
    x       = concat(input_layernorm(embedding of t_{p+1}), hidden_norm(h_p))      2 * hidden wide
    r       = h_p + self_attn(x)                           norm_before_residual: false
    h       = r + mlp(post_attention_layernorm(r))         fed back as the next step's h_p
    logits  = lm_head · norm(h)

The head's rows are its own, and start as the verifier's; or they are the verifier's, and stay so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from drumline.models.config import ArchitectureConfig
from drumline.models.layers import FINAL_NORM
from drumline.training.block import Attention, FeedForward, Memory, RMSNorm
from drumline.training.mtp_module import FINAL_SHARE
from drumline.training.target import Target


def default_taps(layers: int) -> tuple[int, ...]:
    """After layers 2, N/2 and N - 3, as the format has it; clamped, for targets of few layers."""
    return tuple(min(max(tap, 0), layers) for tap in (2, layers // 2, layers - 3))


class Eagle3Layer(nn.Module):
    def __init__(self, config: ArchitectureConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.self_attn = Attention(config, 2 * hidden)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = FeedForward(config)


class Eagle3Head(nn.Module):
    """See the module. Parameters are named as in the file."""

    method = "eagle3"
    prefix = ""

    def __init__(self, config: ArchitectureConfig, draft_vocab_size: int | None) -> None:
        """``draft_vocab_size``: rows of an own head; None reads the verifier's."""
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.taps: tuple[int, ...] = default_taps(config.num_hidden_layers)
        self.fc_norm = nn.ModuleList([RMSNorm(hidden, eps) for _ in self.taps])
        self.fc = nn.Linear(len(self.taps) * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([Eagle3Layer(config)])
        self.norm = RMSNorm(hidden, eps)
        self.lm_head = (
            None if draft_vocab_size is None else nn.Linear(hidden, draft_vocab_size, bias=False)
        )

    def start_from(self, target: Target, rows: Tensor) -> None:
        """The target's head ``rows`` and final norm, at a fifth: no confident first guesses."""
        with torch.no_grad():
            self.norm.weight.copy_(target.weight(FINAL_NORM) * FINAL_SHARE)
            if self.lm_head is not None:
                self.lm_head.weight.copy_(rows)

    def enter(self, taps: Mapping[int, Tensor]) -> Tensor:
        """Taps ``[batch, length, hidden]`` each → what the first step takes as hidden state."""
        normed = [norm(taps[tap]) for norm, tap in zip(self.fc_norm, self.taps, strict=True)]
        joined: Tensor = self.fc(torch.cat(normed, -1))
        return joined.float()  # sums stay float32 under autocast

    def step(
        self, embeddings: Tensor, hidden: Tensor, step: int, memory: Memory
    ) -> tuple[Tensor, Tensor]:
        """One draft step of every chain: (hidden state to feed back, what the head reads).
        Step 0 comes with every index, later ones with the chains, as in `block.Attention`."""
        layer = cast(Eagle3Layer, self.layers[0])
        joined = torch.cat((layer.input_layernorm(embeddings), layer.hidden_norm(hidden)), -1)
        x = memory.select(hidden, step) + layer.self_attn(joined, step, memory)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        return x, self.norm(x)

    def logits(self, states: Tensor, rows: Tensor) -> Tensor:
        """``[n, hidden]`` → ``[n, draft vocabulary]``; ``rows``: the verifier's."""
        logits: Tensor = states @ rows.t() if self.lm_head is None else self.lm_head(states)
        return logits
