"""What a config.json says of experts and of latent attention; `hub_config` reads the rest.

Families differ in spelling and in where experts are: mixtral has them in every layer, qwen3_moe
where two keys say so, deepseek_v3 behind a few dense layers.
"""

from __future__ import annotations

from typing import Any

from drumline.models.config import (
    ExpertsConfig,
    Fields,
    GroupGating,
    LatentConfig,
    RopeScaling,
    yarn_attention_factor,
)

# Keys that count experts, with the value they may have where there are none.
NO_EXPERTS: dict[str, tuple[object, ...]] = dict.fromkeys(
    ("num_experts", "num_local_experts"), (0,)
)


def read_experts(fields: Fields, model_type: str) -> dict[str, Any]:
    """``experts`` and ``expert_layers`` of an `ArchitectureConfig` whose family has experts."""
    if model_type == "deepseek_v3":
        return _deepseek(fields)
    count = _count(fields)
    layers = fields.integer("num_hidden_layers")
    if model_type == "mixtral":
        fields.seen.add("router_jitter_noise")  # of training
        width, normalize, sparse = fields.integer("intermediate_size"), True, range(layers)
        listed = tuple(sparse)
    else:
        width, normalize = fields.integer("moe_intermediate_size"), fields.flag("norm_topk_prob")
        listed = _sparse_layers(fields, layers)
    experts = ExpertsConfig(count, _per_token(fields, count), width, normalize)
    return {"experts": experts, "expert_layers": listed}


def _count(fields: Fields) -> int:
    names = [name for name in NO_EXPERTS if fields.get(name) is not None]
    counts = {fields.integer(name) for name in names or ["num_experts"]}
    if len(counts) > 1:
        raise fields.fail("num_experts", f"num_local_experts says {fields.get(names[1])}")
    return counts.pop()


def _per_token(fields: Fields, count: int) -> int:
    per_token = fields.integer("num_experts_per_tok")
    if per_token > count:
        raise fields.fail("num_experts_per_tok", f"there are {count} experts")
    return per_token


def _sparse_layers(fields: Fields, layers: int) -> tuple[int, ...]:
    dense = fields.get("mlp_only_layers", [])
    if not isinstance(dense, list) or any(
        isinstance(layer, bool) or not isinstance(layer, int) for layer in dense
    ):
        raise fields.fail("mlp_only_layers", "expected a list of layer numbers")
    every = fields.integer("decoder_sparse_step", 1)
    return tuple(
        layer for layer in range(layers) if (layer + 1) % every == 0 and layer not in dense
    )


def _deepseek(fields: Fields) -> dict[str, Any]:
    count = fields.integer("n_routed_experts")
    per_token = _per_token(fields, count)
    groups = fields.integer("n_group", 8)
    used = fields.integer("topk_group", 4)
    if count % groups or count // groups < 2:
        raise fields.fail("n_group", f"does not cut {count} experts into groups of at least two")
    if used > groups:
        raise fields.fail("topk_group", f"there are {groups} groups")
    if per_token > used * (count // groups):
        held = used * (count // groups)
        raise fields.fail("num_experts_per_tok", f"{used} groups have {held} experts")
    for key, only in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if fields.text(key, only) != only:
            raise fields.fail(key, f"not supported; supported is {only}")
    if fields.integer("moe_layer_freq", 1) != 1:
        raise fields.fail("moe_layer_freq", "not supported; supported is 1")
    fields.seen |= {"aux_loss_alpha", "ep_size", "seq_aux"}  # of training
    width = fields.integer("moe_intermediate_size")
    first = fields.integer("first_k_dense_replace", 3, minimum=0)
    return {
        "experts": ExpertsConfig(
            count=count,
            per_token=per_token,
            width=width,
            normalize=fields.flag("norm_topk_prob", True),
            gating=GroupGating(
                groups, used, fields.number("routed_scaling_factor", 2.5, above=True)
            ),
            shared_width=width * fields.integer("n_shared_experts", 1),
        ),
        "expert_layers": tuple(range(first, fields.integer("num_hidden_layers"))),
    }


def read_latent(fields: Fields, scaling: RopeScaling | None) -> tuple[LatentConfig, int]:
    """The latent attention of deepseek_v3, and the channels of a head that turn."""
    plain = fields.integer("qk_nope_head_dim", 128)
    turning = fields.integer("qk_rope_head_dim", 64)
    stated = fields.optional_integer("qk_head_dim", minimum=1)
    if stated not in (None, plain + turning):
        raise fields.fail("qk_head_dim", f"the parts of a head have {plain} and {turning}")
    fields.seen.add("head_dim")  # transformers writes qk_rope_head_dim there
    heads = fields.integer("num_attention_heads")
    if fields.integer("num_key_value_heads", heads) != heads:
        raise fields.fail("num_key_value_heads", f"latent attention has one for each of {heads}")
    query_rank = 1536 if "q_lora_rank" not in fields.values else fields.get("q_lora_rank")
    latent = LatentConfig(
        kv_rank=fields.integer("kv_lora_rank", 512),
        query_rank=None if query_rank is None else fields.integer("q_lora_rank", 1536),
        plain_dim=plain,
        value_dim=fields.integer("v_head_dim", 128),
        interleaved=fields.flag("rope_interleave", True),
        scale=(plain + turning) ** -0.5 * _score_factor(fields, scaling),
    )
    return latent, turning


def _score_factor(fields: Fields, scaling: RopeScaling | None) -> float:
    """What ``mscale_all_dim`` of a yarn scaling multiplies scores by."""
    values = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    everywhere = values.get("mscale_all_dim")
    if scaling is None or not everywhere:
        return 1.0
    return yarn_attention_factor(scaling.factor, float(everywhere)) ** 2
