"""The config.json of a miniature checkpoint, architecture by architecture; `tiny` writes the rest.

Sizes that only some architectures have follow from those that all have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from drumline.core.errors import ConfigError
from drumline.models.registry import CAUSAL_LM, WITH_EXPERTS

UNK, BOS, EOS, START, PAD = 0, 1, 2, 3, 4


def base_config(
    arch: str, sizes: Mapping[str, int], vocab: int, head_dim: int | None
) -> dict[str, Any]:
    """What every architecture says, and the attention of its own."""
    heads = sizes["heads"]
    width = head_dim if head_dim is not None else sizes["hidden"] // heads
    config = {
        "architectures": [CAUSAL_LM[arch]],
        "model_type": arch,
        "hidden_size": sizes["hidden"],
        "intermediate_size": sizes["intermediate"],
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": sizes["kv_heads"],
        "head_dim": width,
        "hidden_act": "silu",
        "vocab_size": vocab,
        "max_position_embeddings": sizes["max_position_embeddings"],
        "rms_norm_eps": 1e-6,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }
    if arch == "deepseek_v3":
        return config | {
            "num_key_value_heads": heads,
            "head_dim": width,  # the part of a head that turns
            "qk_rope_head_dim": width,
            "qk_nope_head_dim": width,
            "v_head_dim": width,
            "kv_lora_rank": max(2, sizes["hidden"] // 2),
            "q_lora_rank": max(2, 3 * sizes["hidden"] // 4),
        }
    return config | ({"sliding_window": None} if arch == "mistral" else {})


def expert_config(
    arch: str,
    sizes: Mapping[str, int],
    count: int | None,
    per_token: int | None,
    normalize: bool,
    dense: Sequence[int],
) -> dict[str, Any]:
    """The keys of experts. ConfigError for those of an architecture that has none, or others."""
    if arch not in WITH_EXPERTS:
        for name, value in (("experts", count), ("experts_per_token", per_token)):
            if value is not None:
                raise ConfigError(name, value, f"{arch} has no experts")
        return {}
    count = (8 if arch == "deepseek_v3" else 4) if count is None else count
    per_token = min(2, count) if per_token is None else per_token
    if count < 1:
        raise ConfigError("experts", count, "must be at least 1")
    if not 1 <= per_token <= count:
        raise ConfigError("experts_per_token", per_token, f"must be in 1..{count}")
    if arch == "mixtral":
        if not normalize or dense:
            raise ConfigError("mixtral", arch, "has experts in all layers, whose weights add to 1")
        return {"num_local_experts": count, "num_experts_per_tok": per_token}
    keys = {
        "num_experts_per_tok": per_token,
        "moe_intermediate_size": sizes["intermediate"],
        "norm_topk_prob": normalize,
    }
    if arch == "deepseek_v3":
        return keys | _deepseek(count, per_token, sizes["layers"], dense)
    return keys | {
        "num_experts": count,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(dense),
    }


def _deepseek(count: int, per_token: int, layers: int, dense: Sequence[int]) -> dict[str, Any]:
    """Two groups, one of them used, where experts are enough for it."""
    first = len(dense) if dense else min(1, layers - 1)
    if dense and sorted(dense) != list(range(first)):
        raise ConfigError("mlp_only_layers", list(dense), "deepseek_v3 has dense layers first")
    if count < 2:
        raise ConfigError("experts", count, "deepseek_v3 has groups of at least two")
    groups = 2 if count % 2 == 0 and count // 2 >= max(2, per_token) else 1
    return {
        "n_routed_experts": count,
        "n_shared_experts": 1,
        "n_group": groups,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": first,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,
    }
