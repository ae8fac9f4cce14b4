"""Shared by the tests of this room: a paged forward pass over one sequence."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from drumline.models.checkpoint import Checkpoint
from drumline.models.registry import model_module
from drumline.ops.base import PagedBatch
from drumline.ops.reference import ReferenceOps

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
BLOCK = 16


class Runner:
    """A model on the reference ops and a cache for one sequence."""

    def __init__(self, checkpoint: Checkpoint, max_model_len: int) -> None:
        ops = ReferenceOps()
        module = model_module(checkpoint.config.model_type)
        self.model = module.Model(checkpoint.config, checkpoint.tensors, ops, max_model_len)
        spec = self.model.kv_spec
        self.blocks = -(-max_model_len // BLOCK)
        self.cache = ops.allocate_kv(
            spec.layers, self.blocks, BLOCK, spec.kv_heads, spec.head_dim, "float32"
        )

    def batch(self, start: int, count: int) -> PagedBatch:
        """Tokens ``start..start + count - 1`` of the sequence, in blocks of descending number."""
        positions = torch.arange(start, start + count)
        table = tuple(reversed(range(self.blocks)))
        slots = torch.tensor([table[p // BLOCK] * BLOCK + p % BLOCK for p in positions.tolist()])
        return PagedBatch(positions, slots, (0, count), (table,))

    def logits(self, ids: Tensor, chunk: int = 10**9) -> Tensor:
        """``[tokens, vocab]`` of a whole sequence, computed in chunks."""
        rows = []
        for start in range(0, len(ids), chunk):
            piece = ids[start : start + chunk]
            out = self.model.forward(piece, self.batch(start, len(piece)), self.cache)
            rows.append(self.model.compute_logits(out.hidden))
        return torch.cat(rows)


@pytest.fixture(scope="session")
def runner() -> Callable[[Checkpoint, int], Runner]:
    return Runner
