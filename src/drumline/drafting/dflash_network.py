"""DFlash checkpoints and their network (block diffusion; z-lab 2026, arXiv:2602.06036).

    context   hidden_norm(fc(taps at p))          keys and values of every layer, at position p
    block     embedding(anchor, mask, mask, ...)  attends to the context before the anchor, and to
                                                  itself in both directions
    logits    head(norm(block)) at slot i         of position anchor + i
              with ``sample_from_anchor``         of position anchor + i + 1

The layers are qwen3's. In sliding-attention layers without ``sliding_window_non_causal`` the block
is causal; positions end where the window would.

Two dialects: speculators' (tap ids, own embedding and head possible, reduced vocabulary) and
z-lab's flat config with ``dflash_config`` (ids of layer outputs, embedding and head borrowed).
Knows no sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from drumline.core.errors import CheckpointError
from drumline.drafting import checkpoint as files
from drumline.models.config import ArchitectureConfig, Fields
from drumline.models.layers import KVSpec, stack
from drumline.models.rope import build_rope
from drumline.ops.base import KVCache, Linear, Ops, PagedBatch, RopeTable
from drumline.ops.weights import WeightTensor

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
_FLAT_KEYS = frozenset({"block_size", "dflash_config", "num_target_layers"})
# Of the variant "domino", which is refused, and of training.
_UNUSED = (
    "auf",
    "emb_dim",
    "gru_hidden_dim",
    "lambda_base_decay_ratio",
    "lambda_base_start",
    "pure_draft_prefix_len",
)


@dataclass(frozen=True)
class DFlashConfig:
    """One DFlash checkpoint. ``taps`` in the order in which ``fc`` takes them; ``causal``: layers
    in which a block's token sees none after it."""

    layers: ArchitectureConfig
    taps: tuple[int, ...]
    block_size: int
    mask_token_id: int
    draft_vocab: int
    sample_from_anchor: bool = False
    causal: frozenset[int] = frozenset()
    default_tokens: int | None = None
    sharpening: float = 1.0

    @property
    def tokens_max(self) -> int:
        return self.block_size - (0 if self.sample_from_anchor else 1)

    @property
    def first_slot(self) -> int:
        """The slot of the block whose output is the first draft."""
        return 0 if self.sample_from_anchor else 1


# ---------------------------------------------------------------- config and tensors


def read_config(fields: Fields, target: ArchitectureConfig) -> DFlashConfig:
    """Either dialect. CheckpointError names the key that is missing, unknown or contradicts."""
    if files.speculators_type(fields) is None:
        config = _read_flat(fields, target)
    else:
        config = _read_speculators(fields, target)
    layers = config.layers
    if layers.model_type != "qwen3":
        raise fields.fail("model_type", f"layers of {layers.model_type}; DFlash has qwen3's")
    files.check_target(fields.path, layers, target)
    if config.block_size < 2:
        raise fields.fail("block_size", "expected an integer of at least 2")
    if not 0 <= config.mask_token_id < layers.vocab_size:
        raise CheckpointError(
            fields.path,
            f"mask_token_id {config.mask_token_id} is outside 0..{layers.vocab_size - 1}",
        )
    return config


def _read_speculators(fields: Fields, target: ArchitectureConfig) -> DFlashConfig:
    envelope = files.read_envelope(fields, "dflash")
    layers = files.nested_architecture(fields)
    if fields.text("projector_type", "dflash") != "dflash":
        raise fields.fail("projector_type", "not supported; supported is dflash")
    if fields.flag("shift_label"):
        raise fields.fail("shift_label", "not supported")
    for key in _UNUSED:
        fields.get(key)
    width = fields.integer("target_hidden_size", target.hidden_size)
    files.check_width(fields.path, width, target)
    if fields.get("aux_hidden_state_layer_ids") is None:
        raise fields.fail("aux_hidden_state_layer_ids", "missing")
    non_causal = fields.flag("sliding_window_non_causal")
    types = fields.values["transformer_layer_config"].get("layer_types") or []
    slides = {index for index, kind in enumerate(types) if kind == "sliding_attention"}
    config = DFlashConfig(
        layers=layers if not slides else _windowed(fields, layers),
        taps=files.read_taps(fields, "aux_hidden_state_layer_ids", target),
        block_size=fields.integer("block_size"),
        mask_token_id=fields.integer("mask_token_id", minimum=0),
        draft_vocab=fields.integer("draft_vocab_size", layers.vocab_size),
        sample_from_anchor=fields.flag("sample_from_anchor"),
        causal=frozenset() if non_causal else frozenset(slides),
        default_tokens=envelope.tokens,
        sharpening=envelope.sharpening,
    )
    files.check_keys(fields)
    return config


def _windowed(fields: Fields, layers: ArchitectureConfig) -> ArchitectureConfig:
    """``layers`` with their window: speculators goes by ``layer_types`` alone."""
    values = fields.values["transformer_layer_config"]
    inner = Fields(fields.path, values, prefix="transformer_layer_config.")
    return replace(layers, sliding_window=inner.integer("sliding_window"))


def _read_flat(fields: Fields, target: ArchitectureConfig) -> DFlashConfig:
    values = fields.get("dflash_config")
    if not isinstance(values, dict):
        problem = "missing, and so is speculators_model_type: not a DFlash checkpoint"
        raise fields.fail("dflash_config", problem)
    inner = Fields(fields.path, values, prefix="dflash_config.")
    outputs = inner.get("target_layer_ids")
    if not isinstance(outputs, list) or not all(type(layer) is int for layer in outputs):
        raise inner.fail("target_layer_ids", "expected a list of layer numbers")
    shifted = [files.tap_from_layer_output(layer) for layer in outputs]
    taps = files.read_taps(
        Fields(fields.path, {"taps": shifted}, "target_layer_ids "), "taps", target
    )
    size = inner.optional_integer("block_size") or fields.integer("block_size")
    layers = files.flat_architecture(fields, _FLAT_KEYS)
    depth = fields.integer("num_target_layers", target.num_hidden_layers)
    if depth != target.num_hidden_layers:
        problem = f"the target has {target.num_hidden_layers} layers"
        raise fields.fail("num_target_layers", problem)
    config = DFlashConfig(
        layers=layers,
        taps=taps,
        block_size=size,
        mask_token_id=inner.integer("mask_token_id", minimum=0),
        draft_vocab=layers.vocab_size,
    )
    files.check_keys(inner)
    return config


def tensor_shapes(config: DFlashConfig, target: ArchitectureConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes as both dialects store them; embedding and head may be absent."""
    hidden = config.layers.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config.taps) * target.hidden_size),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        EMBEDDING: (config.layers.vocab_size, hidden),
        HEAD: (config.draft_vocab, hidden),
    }
    layers = files.layer_shapes(config.layers)
    return shapes | {name.removeprefix("model."): shape for name, shape in layers.items()}


def absent_tensors(config: DFlashConfig, target: ArchitectureConfig) -> tuple[str, ...]:
    """What may be borrowed: nothing if widths differ, no head for a reduced vocabulary."""
    if config.layers.hidden_size != target.hidden_size:
        return ()
    return (EMBEDDING,) if config.draft_vocab < target.vocab_size else (EMBEDDING, HEAD)


# ---------------------------------------------------------------- network


class Layer:
    """A qwen3 block whose keys and values come from the block and from the target's taps."""

    def __init__(
        self, config: ArchitectureConfig, weights: Mapping[str, WeightTensor], ops: Ops, index: int
    ) -> None:
        prefix = f"layers.{index}"
        attn, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        bias = config.attention_bias
        self.ops = ops
        self.index = index
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        self.eps = config.rms_norm_eps
        self.scale = config.head_dim**-0.5
        self.input_norm = ops.load_vector(weights[f"{prefix}.input_layernorm.weight"])
        self.q = stack(ops, weights, [f"{attn}.q_proj"], bias)
        self.kv = stack(ops, weights, [f"{attn}.k_proj", f"{attn}.v_proj"], bias)
        self.q_norm = ops.load_vector(weights[f"{attn}.q_norm.weight"])
        self.k_norm = ops.load_vector(weights[f"{attn}.k_norm.weight"])
        self.o = stack(ops, weights, [f"{attn}.o_proj"], bias)
        self.post_norm = ops.load_vector(weights[f"{prefix}.post_attention_layernorm.weight"])
        self.gate_up = stack(ops, weights, [f"{mlp}.gate_proj", f"{mlp}.up_proj"], bias=False)
        self.down = stack(ops, weights, [f"{mlp}.down_proj"], bias=False)

    def keys_values(self, x: Tensor, positions: Tensor, rope: RopeTable) -> tuple[Tensor, Tensor]:
        """``[tokens, hidden]`` → keys and values ``[tokens, kv_heads, head_dim]``."""
        ops, width = self.ops, self.kv_heads * self.head_dim
        kv = ops.linear(x, self.kv)
        k = kv[:, :width].reshape(-1, self.kv_heads, self.head_dim)
        k = ops.rope(ops.rms_norm(k, self.k_norm, self.eps), positions, rope)
        return k, kv[:, width:].reshape(-1, self.kv_heads, self.head_dim)

    def forward(
        self, x: Tensor, positions: Tensor, batch: PagedBatch, cache: KVCache, rope: RopeTable
    ) -> Tensor:
        """``[tokens, hidden]`` of blocks → the same, after this layer."""
        ops = self.ops
        normed = ops.rms_norm(x, self.input_norm, self.eps)
        q = ops.linear(normed, self.q).reshape(-1, self.heads, self.head_dim)
        q = ops.rope(ops.rms_norm(q, self.q_norm, self.eps), positions, rope)
        k, v = self.keys_values(normed, positions, rope)
        mixed = ops.attention(q, k, v, cache, self.index, batch, self.scale)
        x = ops.add(x, ops.linear(mixed, self.o))
        gate_up = ops.linear(ops.rms_norm(x, self.post_norm, self.eps), self.gate_up)
        return ops.add(x, ops.linear(ops.silu_and_mul(gate_up), self.down))


class DFlashNetwork:
    """Weights of one DFlash drafter; no state of any sequence."""

    def __init__(
        self,
        config: DFlashConfig,
        weights: Mapping[str, WeightTensor],
        ops: Ops,
        positions: int,
        embedding: Linear,
        head: Linear,
    ) -> None:
        """``embedding`` and ``head`` are the target's; a checkpoint's own take their place."""
        layers = config.layers
        self.config = config
        self.ops = ops
        self.eps = layers.rms_norm_eps
        self.rope = build_rope(layers, positions, ops.device)
        self.fc = ops.load_linear([weights["fc.weight"]])
        self.hidden_norm = ops.load_vector(weights["hidden_norm.weight"])
        self.norm = ops.load_vector(weights["norm.weight"])
        self.layers = [Layer(layers, weights, ops, i) for i in range(layers.num_hidden_layers)]
        own = EMBEDDING in weights
        self.embedding = ops.load_embedding(weights[EMBEDDING]) if own else embedding
        self.head = ops.load_linear([weights[HEAD]]) if HEAD in weights else head
        self.kv_spec = KVSpec(len(self.layers), layers.num_key_value_heads, layers.head_dim)

    def write_context(self, taps: Tensor, positions: Tensor, slots: Tensor, cache: KVCache) -> None:
        """``[tokens, taps * target hidden]`` → keys and values of all layers at ``slots``."""
        fused = self.ops.linear(taps, self.fc)
        fused = self.ops.rms_norm(fused, self.hidden_norm, self.eps)
        for layer in self.layers:
            k, v = layer.keys_values(fused, positions, self.rope)
            self.ops.write_kv(k, v, cache, layer.index, slots)

    def forward(
        self, ids: Tensor, positions: Tensor, whole: PagedBatch, causal: PagedBatch, cache: KVCache
    ) -> Tensor:
        """``[tokens]`` of blocks → ``[tokens, hidden]``. ``whole``: each token sees its block;
        ``causal``: it sees what is before it."""
        x = self.ops.embedding(ids, self.embedding)
        for layer in self.layers:
            batch = causal if layer.index in self.config.causal else whole
            x = layer.forward(x, positions, batch, cache, self.rope)
        return x

    def compute_logits(self, x: Tensor) -> Tensor:
        """``[rows, hidden]`` → ``[rows, draft vocab]``."""
        return self.ops.norm_linear(x, self.norm, self.eps, self.head)
