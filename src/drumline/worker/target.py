"""What a worker needs of a target model; every architecture's `Model` has this form."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from drumline.models.layers import KVSpec, ModelOutput
from drumline.ops.base import KVCache, PagedBatch


class TargetModel(Protocol):
    """Weights and a forward pass; no state of any sequence."""

    @property
    def kv_spec(self) -> KVSpec: ...

    def forward(
        self, ids: Tensor, batch: PagedBatch, cache: KVCache, taps: tuple[int, ...] = ()
    ) -> ModelOutput:
        """``[tokens]`` int64 → hidden states before the final norm ``[tokens, hidden]``."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """``[rows, hidden]`` → ``[rows, vocab]``."""
        ...
