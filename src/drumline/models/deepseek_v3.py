"""DeepSeek-V3 (DeepSeek-AI 2024): latent attention, and experts picked by groups.

    x = embedding(ids)
    per layer   x += o(values)      c = kv_norm(kv_a(norm(x))), r = rope(rest of kv_a)   cached
                                    q = q_b(q_norm(q_a(norm(x)))), split in plain and turning
                                    score = (up_k^T q_plain) . c + rope(q_turning) . r
                                    values = up_v (softmax(score) c)
                x += shared(norm(x)) + sum of weight * expert(norm(x))
                                    or down(silu(gate) * up) in the first layers
    logits = head(norm(x))

kv_b holds up_k and up_v of every head. up_k is multiplied into the query instead of the keys, and
up_v into what attention mixed, so that the cache has one head: the latent c and the key r that all
heads share, kept as key and as value. Rope turns neighbours in these checkpoints: their rows are
put into halves when they are loaded, for queries and keys alike, which leaves every score as it is.
A next-token module lies beside the layers, as layer ``num_hidden_layers``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from msgspec.structs import replace
from torch import Tensor

from drumline.models.config import ArchitectureConfig, ExpertsConfig, LatentConfig
from drumline.models.layers import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    KVSpec,
    ModelOutput,
    check_length,
    stack,
)
from drumline.models.moe import expert_shapes
from drumline.models.rope import build_rope
from drumline.ops.base import KVCache, Linear, Ops, PagedBatch, RopeTable
from drumline.ops.gating import route_by_groups
from drumline.ops.indices import pick_rows
from drumline.ops.shard_weights import rows
from drumline.ops.sharded import mix_experts
from drumline.ops.weights import FLOAT_KINDS, WeightTensor

Weights = Mapping[str, WeightTensor]


def tensor_shapes(config: ArchitectureConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor a checkpoint of this architecture must have, with its shape."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (config.vocab_size, hidden),
        FINAL_NORM: (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        shapes |= _attention_shapes(config, f"{prefix}.self_attn")
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
        }
        if layer in config.expert_layers:
            shapes |= _mixture_shapes(config, f"{prefix}.mlp")
        else:
            shapes |= _dense_shapes(f"{prefix}.mlp", hidden, config.intermediate_size)
    return shapes


def _attention_shapes(config: ArchitectureConfig, attn: str) -> dict[str, tuple[int, ...]]:
    latent, heads, hidden = config.latent, config.num_attention_heads, config.hidden_size
    assert latent is not None
    queries = heads * (latent.plain_dim + config.rotary_dim)
    shapes: dict[str, tuple[int, ...]] = {
        f"{attn}.kv_a_proj_with_mqa.weight": (latent.kv_rank + config.rotary_dim, hidden),
        f"{attn}.kv_a_layernorm.weight": (latent.kv_rank,),
        f"{attn}.kv_b_proj.weight": (heads * (latent.plain_dim + latent.value_dim), latent.kv_rank),
        f"{attn}.o_proj.weight": (hidden, heads * latent.value_dim),
    }
    if latent.query_rank is None:
        shapes[f"{attn}.q_proj.weight"] = (queries, hidden)
    else:
        shapes |= {
            f"{attn}.q_a_proj.weight": (latent.query_rank, hidden),
            f"{attn}.q_a_layernorm.weight": (latent.query_rank,),
            f"{attn}.q_b_proj.weight": (queries, latent.query_rank),
        }
    if config.attention_bias:
        for name in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj"):
            weight = shapes.get(f"{attn}.{name}.weight")
            if weight is not None:
                shapes[f"{attn}.{name}.bias"] = weight[:1]
    return shapes


def _mixture_shapes(config: ArchitectureConfig, mlp: str) -> dict[str, tuple[int, ...]]:
    experts = config.experts
    assert experts is not None
    shapes = expert_shapes(mlp, config.hidden_size, experts)
    shapes[f"{mlp}.gate.e_score_correction_bias"] = (experts.count,)
    return shapes | _dense_shapes(f"{mlp}.shared_experts", config.hidden_size, experts.shared_width)


def _dense_shapes(prefix: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (width, hidden),
        f"{prefix}.up_proj.weight": (width, hidden),
        f"{prefix}.down_proj.weight": (hidden, width),
    }


class LatentAttention:
    """The attention of one layer, over a cache of one head."""

    def __init__(self, config: ArchitectureConfig, weights: Weights, ops: Ops, attn: str) -> None:
        latent = config.latent
        assert latent is not None
        self.ops = ops
        self.latent: LatentConfig = latent
        self.heads = config.num_attention_heads
        self.turning = config.rotary_dim
        self.eps = config.rms_norm_eps
        self.q_a: Linear | None = None
        bias = config.attention_bias
        if latent.query_rank is None:
            last = f"{attn}.q_proj.weight"
        else:
            self.q_a = stack(ops, weights, [f"{attn}.q_a_proj"], bias)
            self.q_norm = ops.load_vector(weights[f"{attn}.q_a_layernorm.weight"])
            last = f"{attn}.q_b_proj.weight"
        self.q_b = ops.load_linear([self._in_halves(weights[last], self.heads)])
        self.kv_a = self._kv_a(weights, f"{attn}.kv_a_proj_with_mqa", bias)
        self.kv_norm = ops.load_vector(weights[f"{attn}.kv_a_layernorm.weight"])
        self.up_k, self.up_v = self._up(weights[f"{attn}.kv_b_proj.weight"])
        self.o = stack(ops, weights, [f"{attn}.o_proj"], bias)

    def forward(
        self, x: Tensor, index: int, batch: PagedBatch, cache: KVCache, rope: RopeTable
    ) -> Tensor:
        """``[tokens, hidden]``, normed → ``[tokens, hidden]``, to be added to the residual."""
        ops, latent, tokens = self.ops, self.latent, x.shape[0]
        queries = (
            x if self.q_a is None else ops.rms_norm(ops.linear(x, self.q_a), self.q_norm, self.eps)
        )
        q = ops.linear(queries, self.q_b).view(tokens, self.heads, latent.plain_dim + self.turning)
        turned = ops.rope(q[..., latent.plain_dim :].contiguous(), batch.positions, rope)
        plain = torch.stack(
            [ops.linear(q[:, h, : latent.plain_dim], up) for h, up in enumerate(self.up_k)], dim=1
        )  # [tokens, heads, kv_rank]
        kv = ops.linear(x, self.kv_a)  # [tokens, kv_rank + turning]
        c = ops.rms_norm(kv[:, : latent.kv_rank], self.kv_norm, self.eps)
        r = ops.rope(kv[:, None, latent.kv_rank :].contiguous(), batch.positions, rope)
        key = torch.cat((c.unsqueeze(1), r), dim=-1)  # [tokens, 1, kv_rank + turning]
        query = torch.cat((plain, turned), dim=-1)  # [tokens, heads, kv_rank + turning]
        mixed = ops.attention(query, key, key, cache, index, batch, latent.scale)
        mixed = mixed.view(tokens, self.heads, -1)[..., : latent.kv_rank]
        values = [ops.linear(mixed[:, h], up) for h, up in enumerate(self.up_v)]
        return ops.linear(torch.cat(values, dim=1), self.o)

    def _in_halves(self, weight: WeightTensor, heads: int) -> WeightTensor:
        """The rows of ``heads`` heads, each a plain part and a turning one, the latter put from
        neighbours (x0 y0 x1 y1) into halves (x0 x1 y0 y1) where the checkpoint has neighbours."""
        if not self.latent.interleaved:
            return weight
        width = weight.shape[0] // heads
        order = _halves(width - self.turning, self.turning)
        rows = torch.cat([order + head * width for head in range(heads)])
        data = weight.data.index_select(0, rows)
        return WeightTensor(weight.name, weight.shape, weight.kind, data)

    def _kv_a(self, weights: Weights, name: str, bias: bool) -> Linear:
        weight = self._in_halves(weights[f"{name}.weight"], 1)
        if not bias:
            return self.ops.load_linear([weight])
        vector = self.ops.load_vector(self._in_halves(weights[f"{name}.bias"], 1))
        return self.ops.load_linear([weight], vector)

    def _up(self, weight: WeightTensor) -> tuple[list[Linear], list[Linear]]:
        """kv_b's parts by head: ``[kv_rank, plain]``, transposed for queries (in float32 where
        blocks cannot be), and ``[value, kv_rank]``."""
        ops, latent = self.ops, self.latent
        plain = latent.plain_dim
        keys: list[Linear] = []
        values: list[Linear] = []
        for head in range(self.heads):
            first = head * (plain + latent.value_dim)
            key = rows(weight, range(first, first + plain))
            data = key.data if key.kind in FLOAT_KINDS else key.to_float()
            kind = key.kind if key.kind in FLOAT_KINDS else "F32"
            turned = data.t().contiguous()
            keys.append(
                ops.load_linear([WeightTensor(key.name, tuple(turned.shape), kind, turned)])
            )
            own = range(first + plain, first + plain + latent.value_dim)
            values.append(ops.load_linear([rows(weight, own)]))
        return keys, values


def _halves(plain: int, turning: int) -> Tensor:
    """Where the rows of one head come from: plain ones stay, neighbours part."""
    pairs = torch.arange(turning).view(-1, 2)  # [turning / 2, 2]
    return torch.cat((torch.arange(plain), plain + pairs[:, 0], plain + pairs[:, 1]))


class DenseFeedForward:
    """down(silu(gate) * up): of the first layers, and what all tokens share in the others."""

    def __init__(self, weights: Weights, ops: Ops, prefix: str) -> None:
        self.ops = ops
        self.gate_up = stack(ops, weights, [f"{prefix}.gate_proj", f"{prefix}.up_proj"], bias=False)
        self.down = stack(ops, weights, [f"{prefix}.down_proj"], bias=False)

    def forward(self, x: Tensor, batch: PagedBatch) -> Tensor:
        """``[tokens, hidden]``, normed → ``[tokens, hidden]``."""
        return self.ops.linear(self.ops.silu_and_mul(self.ops.linear(x, self.gate_up)), self.down)


class Mixture:
    """Router, experts and the shared feed-forward of one layer."""

    def __init__(self, experts: ExpertsConfig, weights: Weights, ops: Ops, mlp: str) -> None:
        assert experts.gating is not None
        self.ops = ops
        self.config = experts
        self.gating = experts.gating
        self.router = ops.load_linear([weights[f"{mlp}.gate.weight"]])
        self.bias = ops.load_vector(weights[f"{mlp}.gate.e_score_correction_bias"])
        names = [f"{mlp}.experts.{expert}" for expert in range(experts.count)]
        self.experts = ops.load_experts(
            [[weights[f"{n}.gate_proj.weight"], weights[f"{n}.up_proj.weight"]] for n in names],
            [weights[f"{n}.down_proj.weight"] for n in names],
        )
        self.shared = DenseFeedForward(weights, ops, f"{mlp}.shared_experts")

    def forward(self, x: Tensor, batch: PagedBatch) -> Tensor:
        """``[tokens, hidden]``, normed → ``[tokens, hidden]``."""
        ops, experts, gating = self.ops, self.config, self.gating
        routing = route_by_groups(
            ops.linear(x, self.router),
            self.bias,
            groups=gating.groups,
            used=gating.groups_per_token,
            per_token=experts.per_token,
            normalize=experts.normalize,
            scaling=gating.scaling,
        )
        routed = mix_experts(ops, x, routing, self.experts, batch)
        return ops.add(routed, self.shared.forward(x, batch))


class Layer:
    """One transformer block."""

    def __init__(self, config: ArchitectureConfig, weights: Weights, ops: Ops, index: int) -> None:
        prefix = f"model.layers.{index}"
        self.ops = ops
        self.index = index
        self.eps = config.rms_norm_eps
        self.input_norm = ops.load_vector(weights[f"{prefix}.input_layernorm.weight"])
        self.attention = LatentAttention(config, weights, ops, f"{prefix}.self_attn")
        self.post_norm = ops.load_vector(weights[f"{prefix}.post_attention_layernorm.weight"])
        self.mlp: Mixture | DenseFeedForward
        if index in config.expert_layers:
            assert config.experts is not None
            self.mlp = Mixture(config.experts, weights, ops, f"{prefix}.mlp")
        else:
            self.mlp = DenseFeedForward(weights, ops, f"{prefix}.mlp")

    def forward(self, x: Tensor, batch: PagedBatch, cache: KVCache, rope: RopeTable) -> Tensor:
        """``[tokens, hidden]`` residual stream → the same, after this block."""
        ops = self.ops
        normed = ops.rms_norm(x, self.input_norm, self.eps)
        x = ops.add(x, self.attention.forward(normed, self.index, batch, cache, rope))
        return ops.add(x, self.mlp.forward(ops.rms_norm(x, self.post_norm, self.eps), batch))


class Layers:
    """Blocks one after the other, of a target or of a draft."""

    def __init__(
        self, config: ArchitectureConfig, weights: Weights, ops: Ops, positions: int
    ) -> None:
        """Their positions stay below ``positions``."""
        self.ops = ops
        self.rope = build_rope(config, positions, ops.device)
        self.blocks = [Layer(config, weights, ops, i) for i in range(config.num_hidden_layers)]

    def __len__(self) -> int:
        return len(self.blocks)

    def run(
        self, x: Tensor, batch: PagedBatch, cache: KVCache, taps: Sequence[int] = ()
    ) -> ModelOutput:
        """The residual stream ``[tokens, hidden]`` before them → after them, and after as many of
        them as each of ``taps`` says."""
        batch = self.ops.prepare(batch, cache.block_size)
        tapped = {0: x} if 0 in taps else {}
        for block in self.blocks:
            x = block.forward(x, batch, cache, self.rope)
            if block.index + 1 in taps:
                tapped[block.index + 1] = x
        return ModelOutput(x, tapped)


class Model:
    """Weights on a backend and the forward pass. Holds no state of any sequence."""

    def __init__(
        self, config: ArchitectureConfig, weights: Weights, ops: Ops, max_model_len: int
    ) -> None:
        """``weights`` as `open_checkpoint` gives them; positions stay below ``max_model_len``."""
        check_length(config, max_model_len)
        self.config = config
        self.ops = ops
        self.embedding = ops.load_embedding(weights[EMBEDDING])
        self.layers = Layers(config, weights, ops, max_model_len)
        self.final_norm = ops.load_vector(weights[FINAL_NORM])
        tied = config.tie_word_embeddings
        self.head = self.embedding if tied else ops.load_linear([weights[HEAD]])

    @property
    def kv_spec(self) -> KVSpec:
        config = self.config
        return KVSpec(config.num_hidden_layers, config.num_key_value_heads, config.head_dim)

    def forward(
        self,
        ids: Tensor,
        batch: PagedBatch,
        cache: KVCache,
        taps: Sequence[int] = (),
        logits_at: Sequence[int] = (),
        read_at: Sequence[int] | None = None,
    ) -> ModelOutput:
        """``[tokens]`` int64 → hidden states, the residual stream after each of ``taps``, and the
        logits of the tokens at ascending ``logits_at``."""
        assert all(0 <= tap <= len(self.layers) for tap in taps), taps
        found = self.layers.run(self.ops.embedding(ids, self.embedding), batch, cache, taps)
        if not logits_at:
            return found
        return replace(found, logits=self.compute_logits(pick_rows(found.hidden, logits_at)))

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """``[rows, hidden]`` before the final norm → ``[rows, vocab]``."""
        eps = self.config.rms_norm_eps
        return self.ops.norm_linear(hidden, self.final_norm, eps, self.head)
