"""One signature per operation, for every backend.

`reference` (plain torch, any device) is the oracle; `native` (C++ on the CPU) must give the
same tokens within its own path. An `Ops` object is the only thing models and drafters compute
with; it knows tensors and cache slots, and refuses to know requests, schedules and ranks.

The law every implementation keeps (promise P1): the result of a row is computed by the same
operations in the same order whatever other rows share the call, however many threads run it,
and however the rows are cut into calls. Activations are token-major and flat: ``[tokens, ...]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from msgspec import Struct
from torch import Tensor

from drumline.ops.weights import WeightTensor


class PagedBatch(Struct, frozen=True):
    """Where the tokens of one flat batch sit in their sequences and in the KV cache.

    Tokens of one sequence are adjacent and ascending in position. A token attends to the keys
    of its own sequence at positions ``first_key..position``, all read back from the cache. (A block
    whose tokens see each other both ways gives all of them its last position; rope is told apart.)

        token      0   1   2   3   4
        sequence   a   a   a   b   c          query_start = (0, 3, 4, 5)
        position   7   8   9   0   30         slots: block_id * block_size + offset
    """

    positions: Tensor  # [tokens] int64
    slots: Tensor  # [tokens] int64; -1 writes nothing
    query_start: tuple[int, ...]  # [sequences + 1], the first is 0, the last is the token count
    block_tables: tuple[tuple[int, ...], ...]  # per sequence, enough blocks for its last position
    first_key: int = 0  # keys before this position do not exist (1 for EAGLE-like drafters)

    @property
    def token_count(self) -> int:
        return self.query_start[-1]


@dataclass(frozen=True)
class RopeTable:
    """Cosines and sines by position; scaling is already inside. ``[positions, rope_dim / 2]``."""

    cos: Tensor  # float32
    sin: Tensor  # float32


class Linear(Protocol):
    """A weight prepared by a backend's `load_linear`; only that backend can read it."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


class Experts(Protocol):
    """Feed-forward experts prepared by a backend's `load_experts`; only that backend reads them."""

    @property
    def count(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True)
class Routing:
    """Which experts each token goes to: ``[tokens, k]``, expert ids ascending in every row."""

    experts: Tensor  # int64
    weights: Tensor  # float32


@dataclass(frozen=True)
class AttentionWeights:
    """One attention block: ``o(attention(rope(q), rope(k), v))`` with q, k, v of ``qkv(norm(x))``,
    stacked in this order. Scores are divided by the root of ``head_dim``."""

    norm: Tensor | None  # [hidden]; None: x comes as qkv takes it
    qkv: Linear
    o: Linear
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    q_norm: Tensor | None = None  # [head_dim], over each head of q before rope
    k_norm: Tensor | None = None


@dataclass(frozen=True)
class FeedForwardWeights:
    """``down(silu(gate) * up)`` with gate, up of ``gate_up(norm(x))``."""

    norm: Tensor
    gate_up: Linear
    down: Linear
    eps: float


@dataclass(frozen=True)
class MoeWeights:
    """The sum of weight * expert(norm(x)) over the ``per_token`` experts that `Ops.route` picks."""

    norm: Tensor
    router: Linear
    experts: Experts
    per_token: int
    normalize: bool
    eps: float


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer: each of its two blocks is added to the residual stream."""

    attention: AttentionWeights
    feed_forward: FeedForwardWeights | MoeWeights


class Stack(Protocol):
    """Decoder layers prepared by a backend's `load_stack`; only that backend reads them."""

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class DecoderWeights:
    """A whole model: ``head(norm(layers(embedding(ids))))``."""

    embedding: Linear
    stack: Stack
    norm: Tensor
    eps: float
    head: Linear


class KVCache(Protocol):
    """Keys and values of all layers in fixed-size blocks, as a backend lays them out."""

    @property
    def block_size(self) -> int: ...

    @property
    def block_count(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


class Ops(Protocol):
    """The operations a model is made of. Every tensor is float32 unless said otherwise."""

    @property
    def name(self) -> str: ...

    @property
    def device(self) -> torch.device: ...

    def load_linear(self, weights: Sequence[WeightTensor], bias: Tensor | None = None) -> Linear:
        """Prepares one or more ``[out_i, in]`` weights, stacked along the output."""
        ...

    def load_embedding(self, weight: WeightTensor) -> Linear:
        """Prepares a ``[vocab, hidden]`` table for `embedding`, and for `linear` if tied."""
        ...

    def load_vector(self, weight: WeightTensor) -> Tensor:
        """A norm weight or bias as a float32 tensor on the device."""
        ...

    def load_experts(
        self, gate_up: Sequence[Sequence[WeightTensor]], down: Sequence[WeightTensor]
    ) -> Experts:
        """Prepares experts by ascending id: per expert the weights stacked to ``[2 * width,
        hidden]`` (gate first), and ``[hidden, width]``."""
        ...

    def load_stack(self, layers: Sequence[LayerWeights], rope: RopeTable) -> Stack:
        """Prepares layers, whose weights this backend has loaded, for `run_stack`."""
        ...

    def allocate_kv(
        self, layers: int, blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: str
    ) -> KVCache: ...

    def embedding(self, ids: Tensor, table: Linear) -> Tensor:
        """``[tokens]`` int64 → ``[tokens, hidden]``."""
        ...

    def linear(self, x: Tensor, weight: Linear) -> Tensor:
        """``[tokens, in]`` → ``[tokens, out]``, bias added if the weight has one."""
        ...

    def norm_linear(self, x: Tensor, norm: Tensor, eps: float, weight: Linear) -> Tensor:
        """`linear` of `rms_norm`: the end of a model, its final norm and its head."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root mean square norm over the last axis (Zhang & Sennrich 2019). Any leading axes."""
        ...

    def add(self, x: Tensor, y: Tensor) -> Tensor: ...

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """``[tokens, 2 * width]`` (gate first) → silu(gate) * up, ``[tokens, width]``."""
        ...

    def route(self, logits: Tensor, per_token: int, normalize: bool) -> Routing:
        """The ``per_token`` highest of ``[tokens, experts]`` router logits, ties to the lowest id,
        weighted by the softmax over all experts, or over the chosen ones if ``normalize``."""
        ...

    def expert_outputs(self, x: Tensor, routing: Routing, experts: Experts) -> Tensor:
        """``[tokens, hidden]`` → ``[tokens, k, hidden]``: each chosen expert's own output, neither
        weighted nor added, so that whoever computes it, its bits are the same."""
        ...

    def combine(self, outputs: Tensor, weights: Tensor) -> Tensor:
        """``[tokens, k, hidden]`` and ``[tokens, k]`` → the weighted sum ``[tokens, hidden]``,
        added from left to right: by ascending expert id."""
        ...

    def rope(self, x: Tensor, positions: Tensor, table: RopeTable) -> Tensor:
        """Rotates ``[tokens, heads, head_dim]`` by halves (GPT-NeoX order), as hub checkpoints
        store them. Only the first ``rope_dim`` channels turn."""
        ...

    def prepare(self, batch: PagedBatch, block_size: int) -> PagedBatch:
        """Works out once per pass what every layer's `attention` needs of the batch."""
        ...

    def write_kv(
        self,
        key: Tensor,  # [tokens, kv_heads, head_dim]
        value: Tensor,
        cache: KVCache,
        layer: int,
        slots: Tensor,  # [tokens] int64; -1 writes nothing
    ) -> None:
        """What `attention` does first, for tokens that are only looked at."""
        ...

    def attention(
        self,
        query: Tensor,  # [tokens, heads, head_dim]
        key: Tensor,  # [tokens, kv_heads, head_dim]
        value: Tensor,  # [tokens, kv_heads, head_dim]
        cache: KVCache,
        layer: int,
        batch: PagedBatch,
        scale: float,
    ) -> Tensor:
        """Writes keys and values to their slots, then causal attention over the cache.
        Returns ``[tokens, heads * head_dim]``."""
        ...

    def attend(
        self,
        x: Tensor,
        stack: Stack,
        index: int,
        batch: PagedBatch,
        cache: KVCache,
        residual: Tensor | None = None,
    ) -> Tensor:
        """The attention block of layer ``index``, which is also its layer of the cache:
        ``[tokens, in]`` → ``[tokens, hidden]``, added to ``residual`` if there is one."""
        ...

    def feed_forward(
        self, x: Tensor, stack: Stack, index: int, residual: Tensor | None = None
    ) -> Tensor:
        """The other block of layer ``index``, in the same way."""
        ...

    def run_stack(
        self,
        x: Tensor,
        stack: Stack,
        batch: PagedBatch,
        cache: KVCache,
        taps: Sequence[int] = (),
        entry: Tensor | None = None,
        read_at: Sequence[int] | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """All layers, one after the other: the residual stream ``[tokens, hidden]`` before them →
        after them, and copies of it after so many layers as each of ``taps`` says (0: before).

        ``entry`` ``[tokens, in]``: what layer 0 attends to in place of x, to which it is added.

        ``read_at``: the tokens, ascending, whose rows the caller will read; None: all. A backend
        may spare the others all of the last layer but keys and values; their rows mean nothing."""
        ...

    def run_decoder(
        self,
        ids: Tensor,
        weights: DecoderWeights,
        batch: PagedBatch,
        cache: KVCache,
        taps: Sequence[int] = (),
        logits_at: Sequence[int] = (),
        read_at: Sequence[int] | None = None,
    ) -> tuple[Tensor, dict[int, Tensor], Tensor | None]:
        """One pass of a model: ``[tokens]`` int64 → what `run_stack` gives for their embeddings,
        and the logits ``[rows, vocab]`` of the tokens at ascending ``logits_at``, if any.
        ``read_at`` as there; those of ``logits_at`` are among them."""
        ...

    def argmax(self, logits: Tensor) -> Tensor:
        """``[rows, n]`` → ``[rows]`` int64: where the largest stands, ties to the lowest id. Not a
        number counts as larger than everything."""
        ...

    def top_k(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """``[rows, n]`` → the ``k`` largest ``[rows, k]``, in descending order, and their ids; ties
        by ascending id."""
        ...
