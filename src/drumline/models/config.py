"""What a checkpoint says about its architecture, as one frozen value, torch-free.

`hub_config` reads it from a config.json and generation_config.json, `gguf_config` from GGUF
metadata. Both refuse by name whatever the models here do not compute; keys that are merely
unknown are listed in `ignored_keys`, so that nothing is dropped in silence.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drumline.core.errors import CheckpointError


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies differ from the plain ``base ** (-2i / rotary_dim)``.

    ``kind`` is one of
      linear   frequencies divided by ``factor``
      dynamic  NTK: the base grows with the length beyond ``original_length``
      llama3   low frequencies divided by ``factor``, middle ones blended (Llama 3.1)
      yarn     interpolation by parts and a factor on cos and sin (Peng et al. 2023)
      factors  each frequency divided by its own of ``factors`` (GGUF ``rope_freqs.weight``)
    """

    kind: str
    factor: float
    original_length: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class SamplingDefaults:
    """What the checkpoint's makers suggest; None where they say nothing.

    ``do_sample: false`` in a generation_config.json reads as temperature 0.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True)
class GroupGating:
    """How DeepSeek-V3 picks experts: by sigmoid scores and a learned bias, the best
    ``groups_per_token`` of ``groups`` first (by their two best experts), then experts in them;
    weights are the scores, times ``scaling``."""

    groups: int
    groups_per_token: int
    scaling: float


@dataclass(frozen=True)
class ExpertsConfig:
    """Experts in place of a feed-forward: ``count`` of them, each ``width`` wide, ``per_token``
    used by a token, with weights that add up to one if ``normalize`` (``norm_topk_prob``).

    ``gating`` is None where a softmax over router logits picks. ``shared_width``: one more
    feed-forward so wide that every token takes; 0 if there is none."""

    count: int
    per_token: int
    width: int
    normalize: bool
    gating: GroupGating | None = None
    shared_width: int = 0


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2): keys and values of all heads are made of one
    latent vector of ``kv_rank`` numbers, and one rotated key that all heads share.

    A head's query and key have ``plain_dim`` channels that do not turn and the config's
    ``rotary_dim`` that do; its value has ``value_dim``. ``query_rank``: queries are made of a
    latent vector too; None if of the residual stream. ``interleaved``: rope turns neighbours.
    ``scale`` multiplies scores, in place of a root of the head's size.
    """

    kv_rank: int
    query_rank: int | None
    plain_dim: int
    value_dim: int
    interleaved: bool
    scale: float


@dataclass(frozen=True)
class ArchitectureConfig:
    """The shape of a decoder-only transformer. Lengths and sizes are counts of elements.

    ``sliding_window`` is None where attention is full at any length; otherwise it is full only
    up to that many tokens, and models refuse a longer max_model_len. The layers listed in
    ``expert_layers`` have ``experts``; the others a feed-forward of ``intermediate_size``.

    With ``latent`` attention ``num_key_value_heads`` and ``head_dim`` say what is cached: one head,
    the latent vector and the shared key end to end.
    """

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rotary_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    sliding_window: int | None = None
    dtype: str | None = None
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    sampling: SamplingDefaults = SamplingDefaults()
    ignored_keys: tuple[str, ...] = ()
    experts: ExpertsConfig | None = None
    expert_layers: tuple[int, ...] = ()
    latent: LatentConfig | None = None

    def check(self, path: Path) -> ArchitectureConfig:
        """Self, or CheckpointError naming the fields that do not fit each other."""
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if heads % kv_heads:
            raise CheckpointError(
                path, f"num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}"
            )
        if self.head_dim % 2:
            raise CheckpointError(path, f"head_dim {self.head_dim} is odd, rope turns pairs")
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise CheckpointError(
                path, f"rotary dimension {self.rotary_dim} must be even and in 2..{self.head_dim}"
            )
        scaling = self.rope_scaling
        if scaling and scaling.kind == "dynamic" and self.rotary_dim < 4:
            raise CheckpointError(
                path, "dynamic rope scaling needs a rotary dimension of at least 4"
            )
        last = self.vocab_size - 1
        if self.bos_token_id is not None and not 0 <= self.bos_token_id <= last:
            raise CheckpointError(path, f"bos_token_id {self.bos_token_id} is outside 0..{last}")
        for token in self.eos_token_ids:
            if not 0 <= token <= last:
                raise CheckpointError(path, f"eos_token_id {token} is outside 0..{last}")
        return self

    @property
    def max_context_length(self) -> int:
        """The longest max_model_len the checkpoint is made for, in tokens.

        YaRN checkpoints often give the original length as max_position_embeddings; then it is
        that length times the factor.
        """
        length = self.max_position_embeddings
        if self.rope_scaling and self.rope_scaling.kind == "yarn":
            length = max(length, int(self.rope_scaling.original_length * self.rope_scaling.factor))
        return min(length, self.sliding_window) if self.sliding_window else length

    def fixed_rope_base(self, max_model_len: int) -> float | None:
        """The base that dynamic NTK scaling is fixed at, or None where nothing is fixed.

        Rope must be a function of the position alone (promise P1), so the base follows from
        max_model_len instead of the running length. A caller records this as an adjustment.
        """
        scaling = self.rope_scaling
        if scaling is None or scaling.kind != "dynamic" or max_model_len <= scaling.original_length:
            return None
        stretch = scaling.factor * max_model_len / scaling.original_length - (scaling.factor - 1)
        return float(self.rope_theta * stretch ** (self.rotary_dim / (self.rotary_dim - 2)))

    def as_json(self) -> str:
        """Canonical text of every field, for digests."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """The factor on cos and sin that YaRN recommends for a context ``factor`` times longer."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


class Fields:
    """Typed access to a mapping from a file; errors name path, key, value and what is allowed.

    JSON null counts as absent. Keys that were asked for are remembered in ``seen``.
    """

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path = path
        self.values = values
        self.prefix = prefix
        self.seen: set[str] = set()

    def fail(self, key: str, problem: str) -> CheckpointError:
        value = self.values.get(key)
        shown = "" if value is None else f" {value!r}"
        return CheckpointError(self.path, f"{self.prefix}{key}{shown[:120]}: {problem}")

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        value = self.values.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        value = self.get(key, default)
        if value is None:
            raise self.fail(key, "missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.fail(key, f"expected an integer of at least {minimum}")
        return value

    def optional_integer(self, key: str, minimum: int = 0) -> int | None:
        return None if self.get(key) is None else self.integer(key, minimum=minimum)

    def number(
        self, key: str, default: float | None = None, minimum: float = 0.0, above: bool = False
    ) -> float:
        value = self.get(key, default)
        if value is None:
            raise self.fail(key, "missing")
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not math.isfinite(value) or value < minimum or (above and value == minimum):
            raise self.fail(
                key, f"expected a number {'above' if above else 'of at least'} {minimum:g}"
            )
        return float(value)

    def optional_number(self, key: str, minimum: float = 0.0) -> float | None:
        return None if self.get(key) is None else self.number(key, minimum=minimum)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, "expected true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self.get(key, default)
        if value is None:
            raise self.fail(key, "missing")
        if not isinstance(value, str):
            raise self.fail(key, "expected a string")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One id or a list of ids; empty if absent."""
        value = self.get(key, [])
        ids = value if isinstance(value, list) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            raise self.fail(key, "expected a token id or a list of token ids")
        return tuple(ids)

    def unread(self, harmless: frozenset[str]) -> tuple[str, ...]:
        """Keys with a value that nobody asked for and that are not known to be harmless."""
        return tuple(
            f"{self.prefix}{key}"
            for key, value in self.values.items()
            if value is not None and key not in self.seen and key not in harmless
        )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; CheckpointError if it is absent, broken or something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(path, "no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(path, f"cannot be read: {error}") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(path, f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(path, f"expected a JSON object, found {type(value).__name__}")
    return value


def read_sampling(fields: Fields, names: Mapping[str, str]) -> SamplingDefaults:
    """Sampling defaults from ``fields``, where ``names`` maps our names to the file's."""
    top_p = fields.optional_number(names["top_p"])
    min_p = fields.optional_number(names["min_p"])
    for name, value in ((names["top_p"], top_p), (names["min_p"], min_p)):
        if value is not None and value > 1:
            raise fields.fail(name, "expected a number in 0..1")
    return SamplingDefaults(
        temperature=fields.optional_number(names["temperature"]),
        top_p=top_p,
        top_k=fields.optional_integer(names["top_k"]),
        min_p=min_p,
        repetition_penalty=fields.optional_number(names["repetition_penalty"]),
    )
