"""What `resolve` must know of checkpoints, as numbers: the target's and the drafter's.

Made by whoever opened them. This module knows no file format and no tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

BYTES_PER_NUMBER = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
SCALE_BYTES = 4  # of each row of int8 numbers


def kv_row_bytes(head_dim: int, kv_dtype: str) -> int:
    """Bytes of one key or value of one head."""
    scale = SCALE_BYTES if kv_dtype == "int8" else 0
    return head_dim * BYTES_PER_NUMBER[kv_dtype] + scale


# Rope scalings whose range is the stated length times the factor. llama3 and longrope already
# state the stretched length.
_STRETCHED = ("linear", "dynamic", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What `resolve` must know of a checkpoint. Lengths in tokens, weights in bytes as loaded.

    ``max_position_embeddings`` is what the checkpoint states; for yarn the range follows from
    ``original_max_position_embeddings`` × ``rope_factor`` where the former is given.
    """

    model_type: str
    max_position_embeddings: int
    vocab_size: int
    num_hidden_layers: int
    num_key_value_heads: int
    head_dim: int
    rope_type: str = "default"
    rope_factor: float = 1.0
    original_max_position_embeddings: int | None = None
    weight_bytes: int = 0
    num_experts: int = 0  # experts of a layer that share its tokens; 0: the model is dense
    num_attention_heads: int = 0  # where all share one latent key; 0: heads share keys in groups

    @property
    def attention_groups(self) -> int:
        """Into how many parts attention can be cut: heads that share keys stay together, and
        where all share one latent key, each rank has that key and some of the heads."""
        return self.num_attention_heads or self.num_key_value_heads

    @property
    def original_length(self) -> int:
        """The length the model was trained on, before any rope scaling."""
        return self.original_max_position_embeddings or self.max_position_embeddings

    @property
    def longest(self) -> int:
        """The longest sequence the checkpoint's rope covers."""
        if self.rope_type not in _STRETCHED:
            return self.max_position_embeddings
        base = self.max_position_embeddings
        if self.rope_type == "yarn":
            base = self.original_length
        return max(base, int(base * self.rope_factor))

    def kv_bytes_per_token(self, kv_dtype: str) -> int:
        """Bytes one token takes in the cache, keys and values of all layers."""
        rows = 2 * self.num_hidden_layers * self.num_key_value_heads
        return rows * kv_row_bytes(self.head_dim, kv_dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterFacts:
    """What `resolve` must know of a drafter. The defaults are those of a host drafter.

    ``layers``, ``kv_heads``, ``head_dim``: its own keys and values, addressed by the target's
    block ids. ``positions_max``: positions it can take, None if it has no limit of its own.
    ``reason``: why it was chosen, where that was left to the engine (method auto).
    ``default_tokens``: the draft length its checkpoint states; ``tokens_max``: the most it can
    draft at once (block and parallel drafters). Weights in bytes as loaded.
    """

    method: str
    layers: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    positions_max: int | None = None
    default_tokens: int | None = None
    tokens_max: int | None = None
    weight_bytes: int = 0
    reason: str = ""

    def kv_bytes_per_token(self, kv_dtype: str) -> int:
        """Bytes one token takes in the drafter's own cache."""
        return 2 * self.layers * self.kv_heads * kv_row_bytes(self.head_dim, kv_dtype)
