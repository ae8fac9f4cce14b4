"""The target as training sees it: whole sequences at once, as fast as plain torch goes.

The engine's operations keep every row's bits apart from its neighbours; training needs no such
promise and gets ordinary matrix products and fused attention from `PlainOps`, under the same
models. Its results differ from the engine's by rounding. Knows no scheduler and no request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from drumline.models.checkpoint import Checkpoint, open_checkpoint
from drumline.models.config import ArchitectureConfig
from drumline.models.layers import ModelOutput
from drumline.models.registry import model_module
from drumline.models.tokenizer import Tokenizer
from drumline.ops.base import KVCache, Linear, PagedBatch
from drumline.ops.reference import ReferenceLinear, ReferenceOps
from drumline.ops.weights import WeightTensor

if TYPE_CHECKING:
    from drumline.drafting.base import TargetModel


class PlainOps(ReferenceOps):
    """Reference operations without batch invariance: library products, fused attention.

    Sequences come whole, from position 0, so keys are those of the call and no cache is kept.
    """

    name = "plain"

    def linear(self, x: Tensor, weight: Linear) -> Tensor:
        assert isinstance(weight, ReferenceLinear)
        return F.linear(x, weight.weight, weight.bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), weight, eps)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def prepare(self, batch: PagedBatch, block_size: int) -> Any:
        return batch

    def attention(
        self,
        query: Tensor,  # [tokens, heads, head_dim]
        key: Tensor,  # [tokens, kv_heads, head_dim]
        value: Tensor,
        cache: KVCache,
        layer: int,
        batch: PagedBatch,
        scale: float,
    ) -> Tensor:
        out = torch.empty_like(query)
        for start, end in zip(batch.query_start, batch.query_start[1:], strict=False):
            own = slice(start, end)
            out[own] = F.scaled_dot_product_attention(
                query[own].transpose(0, 1)[None],
                key[own].transpose(0, 1)[None],
                value[own].transpose(0, 1)[None],
                is_causal=True,
                scale=scale,
                enable_gqa=True,
            )[0].transpose(0, 1)
        return out.flatten(1)  # [tokens, heads * head_dim]


@dataclass(frozen=True, eq=False)
class Target:
    """A loaded target. ``config`` and ``tokenizer`` are the checkpoint's."""

    name: str
    checkpoint: Checkpoint
    model: TargetModel
    cache: KVCache  # nothing in it; models hand one to every attention
    tokenizer: Tokenizer

    @property
    def config(self) -> ArchitectureConfig:
        return self.checkpoint.config

    @property
    def digest(self) -> str:
        return self.checkpoint.digest

    @property
    def licence(self) -> str:
        """As the checkpoint states it; ``other`` where it is silent."""
        if self.checkpoint.gguf is not None:
            stated = self.checkpoint.gguf.metadata.get("general.license")
            return stated if isinstance(stated, str) else "other"
        return "other"

    def weight(self, name: str) -> Tensor:
        """A tensor of the checkpoint as float32, under its hub name."""
        tensor: WeightTensor = self.checkpoint.tensors[name]
        return tensor.to_float()

    @property
    def embedding(self) -> Tensor:
        """``[vocab, hidden]``"""
        return _dense(self.model.embedding)

    @property
    def head(self) -> Tensor:
        """``[vocab, hidden]``"""
        return _dense(self.model.head)

    def prefill(self, sequences: Sequence[Sequence[int]], taps: tuple[int, ...]) -> ModelOutput:
        """Whole sequences from position 0, flat, one after the other: ``[tokens, hidden]``."""
        starts = [0]
        for sequence in sequences:
            starts.append(starts[-1] + len(sequence))
        positions = torch.cat([torch.arange(len(sequence)) for sequence in sequences])
        batch = PagedBatch(
            positions=positions,
            slots=torch.full_like(positions, -1),
            query_start=tuple(starts),
            block_tables=((),) * len(sequences),
        )
        ids = torch.tensor([token for sequence in sequences for token in sequence])
        return self.model.forward(ids, batch, self.cache, taps)


def fast_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 faster than float32."""
    supported: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return supported


def _dense(weight: Linear) -> Tensor:
    assert isinstance(weight, ReferenceLinear)
    return weight.weight


def load_target(path: Path, name: str) -> Target:
    """Opens and loads a checkpoint; ``name`` is what the user called it. `CheckpointError`."""
    checkpoint = open_checkpoint(path)
    ops = PlainOps()
    with torch.inference_mode():
        module = model_module(checkpoint.config.model_type)
        length = checkpoint.config.max_context_length
        model: TargetModel = module.Model(checkpoint.config, checkpoint.tensors, ops, length)
        empty = ops.allocate_kv(0, 0, 1, 1, 1, "float32")
    return Target(name, checkpoint, model, empty, checkpoint.tokenizer())
