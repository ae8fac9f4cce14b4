"""ArchitectureConfig from a hub folder: config.json and, if there, generation_config.json.

Absent keys get the defaults of ``transformers`` (which leaves some of them out on saving).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from drumline.models.config import (
    ArchitectureConfig,
    Fields,
    RopeScaling,
    read_json,
    read_sampling,
    yarn_attention_factor,
)
from drumline.models.hub_experts import NO_EXPERTS, read_experts, read_latent
from drumline.models.registry import CAUSAL_LM, WITH_EXPERTS

# Bookkeeping and training settings without influence on inference.
_HARMLESS = frozenset(
    {
        "_attn_implementation_autoset",
        "_from_model_config",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "attn_implementation",
        "chunk_size_feed_forward",
        "decoder_start_token_id",
        "dtype",
        "hidden_dropout",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_llama_config",
        "label2id",
        "max_length",
        "max_new_tokens",
        "max_window_layers",
        "model_type",
        "name_or_path",
        "num_nextn_predict_layers",  # a drafter's business
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "router_aux_loss_coef",
        "torch_dtype",
        "torchscript",
        "transformers.js_config",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    }
)

# Keys that change the computation, with the values under which they do not.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "add_cross_attention": (False,),
    "alibi": (False,),
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "auto_map": (),
    "clip_qkv": (),
    "cross_attention_hidden_size": (),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (),
    "is_encoder_decoder": (False,),
    "logit_scale": (),
    "logits_scaling": (1,),
    "no_rope_layers": (),
    "qk_norm": (False,),
    "quantization_config": (),
    "residual_multiplier": (1,),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "use_qk_norm": (False,),
}

_ROPE_KEYS: dict[str, frozenset[str]] = {
    kind: frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor", *keys.split()})
    for kind, keys in {
        "default": "",
        "linear": "factor",
        "dynamic": "factor",
        "llama3": "factor low_freq_factor high_freq_factor original_max_position_embeddings",
        "yarn": "factor original_max_position_embeddings attention_factor beta_fast beta_slow"
        " mscale mscale_all_dim truncate",
    }.items()
}

_SAMPLING = {
    name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
}


def read_hub_config(folder: Path) -> ArchitectureConfig:
    """Reads ``folder``. CheckpointError names the file and key that is missing or unsupported."""
    path = folder / "config.json"
    config = read_architecture(Fields(path, read_json(path)))
    return _with_generation_config(config, folder / "generation_config.json").check(path)


def read_architecture(fields: Fields) -> ArchitectureConfig:
    """From the keys of a config.json, or of an object inside one; `check` is left to the caller."""
    model_type = fields.text("model_type")
    if model_type not in CAUSAL_LM:
        known = ", ".join(sorted(CAUSAL_LM))
        raise fields.fail("model_type", f"not supported; supported are {known}")
    _refuse_unsupported(fields, model_type)

    max_positions = fields.integer("max_position_embeddings")
    rope_theta, partial, scaling = _read_rope(fields, max_positions, model_type)
    config = ArchitectureConfig(
        model_type=model_type,
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_hidden_layers=fields.integer("num_hidden_layers"),
        vocab_size=fields.integer("vocab_size"),
        max_position_embeddings=max_positions,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-5 if model_type == "mixtral" else 1e-6),
        rope_theta=rope_theta,
        rope_scaling=scaling,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        attention_bias=_attention_bias(fields, model_type),
        mlp_bias=fields.flag("mlp_bias") if model_type == "llama" else False,
        sliding_window=_sliding_window(fields, model_type),
        dtype=fields.get("dtype") or fields.get("torch_dtype"),
        bos_token_id=fields.optional_integer("bos_token_id"),
        pad_token_id=_pad_token(fields),
        eos_token_ids=fields.token_ids("eos_token_id"),
        **_read_heads(fields, model_type, partial, scaling),
        **(read_experts(fields, model_type) if model_type in WITH_EXPERTS else {}),
    )
    return replace(config, ignored_keys=fields.unread(_HARMLESS))


def _read_heads(
    fields: Fields, model_type: str, partial: float, scaling: RopeScaling | None
) -> dict[str, Any]:
    """The sizes of attention. ``partial``: the share of a head that turns."""
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if model_type == "deepseek_v3":
        if partial != 1.0:
            raise fields.fail(
                "partial_rotary_factor", "the parts of a head have sizes of their own"
            )
        latent, turning = read_latent(fields, scaling)
        return {
            "num_attention_heads": heads,
            "num_key_value_heads": 1,
            "head_dim": latent.kv_rank + turning,
            "rotary_dim": turning,
            "latent": latent,
        }
    head_dim = fields.optional_integer("head_dim", minimum=1)
    if head_dim is None:
        if model_type == "qwen3":
            head_dim = 128
        elif hidden % heads:
            raise fields.fail("head_dim", f"missing, and {heads} heads do not divide {hidden}")
        else:
            head_dim = hidden // heads
    kv_heads = fields.optional_integer("num_key_value_heads", minimum=1)
    if kv_heads is None and model_type != "llama":
        raise fields.fail("num_key_value_heads", "missing")
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or heads,
        "head_dim": head_dim,
        "rotary_dim": int(head_dim * partial),
    }


def _refuse_unsupported(fields: Fields, model_type: str) -> None:
    names = fields.get("architectures", [])
    expected = CAUSAL_LM[model_type]
    if names and expected.lower() not in [str(name).lower() for name in names]:
        raise fields.fail("architectures", f"not supported for {model_type}; expected {expected}")
    neutral_values = _NEUTRAL if model_type in WITH_EXPERTS else _NEUTRAL | NO_EXPERTS
    for key, neutral in neutral_values.items():
        value = fields.get(key)
        if value is not None and value not in neutral:
            if key == "auto_map":
                raise fields.fail(key, "names code to run, and drumline runs none from checkpoints")
            raise fields.fail(key, "not supported")
    if fields.text("hidden_act", "silu") not in ("silu", "swish"):
        raise fields.fail("hidden_act", "not supported; supported is silu")


def _attention_bias(fields: Fields, model_type: str) -> bool:
    """Qwen2 always has biases on q, k and v; mistral and mixtral never; the others say so."""
    if model_type == "qwen2":
        return True
    return False if model_type in ("mistral", "mixtral") else fields.flag("attention_bias")


def _pad_token(fields: Fields) -> int | None:
    """-1 is an old way of saying none."""
    pad = fields.optional_integer("pad_token_id", minimum=-1)
    return None if pad == -1 else pad


def _sliding_window(fields: Fields, model_type: str) -> int | None:
    layers = fields.integer("num_hidden_layers")
    window = fields.optional_integer("sliding_window", minimum=1)
    if model_type == "mistral" and "sliding_window" not in fields.values:
        window = 4096  # the default of transformers
    types = fields.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or not set(types) <= {"full_attention", "sliding_attention"}:
            raise fields.fail("layer_types", "expected full_attention or sliding_attention")
        if len(types) != layers:
            raise fields.fail("layer_types", f"expected one for each of the {layers} layers")
    if model_type == "qwen3_moe":  # in all layers or in none
        return (window or 4096) if fields.flag("use_sliding_window") else None
    if model_type in ("qwen2", "qwen3"):
        use = fields.flag("use_sliding_window")
        first = fields.integer("max_window_layers", 28, minimum=0)
        slides = use and ("sliding_attention" in types if types is not None else first < layers)
        return (window or 4096) if slides else None
    if types is not None and "sliding_attention" in types and window is None:
        raise fields.fail("layer_types", "sliding_attention without a sliding_window")
    return window


def _read_rope(
    fields: Fields, max_positions: int, model_type: str
) -> tuple[float, float, RopeScaling | None]:
    """(base, rotated part of a head, scaling) from either spelling of the rope keys."""
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    fields.seen |= {"rope_scaling", "rope_parameters"}
    values = fields.get(name, {})
    if not isinstance(values, dict):
        raise fields.fail(name, "expected an object")
    rope = Fields(fields.path, values, prefix=f"{name}.")
    for key, value in values.items():
        if isinstance(value, dict):
            raise rope.fail(key, "rope parameters by layer type are not supported")
    default_theta = 1e6 if model_type == "mixtral" else 1e4
    outer_theta = fields.number("rope_theta", default_theta, above=True)
    outer_partial = fields.number("partial_rotary_factor", 1.0, above=True)
    theta = rope.number("rope_theta", outer_theta, above=True)
    partial = rope.number("partial_rotary_factor", outer_partial, above=True)
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind not in _ROPE_KEYS:
        known = ", ".join(sorted(_ROPE_KEYS))
        key = "rope_type" if rope.values.get("rope_type") else "type"
        raise rope.fail(key, f"not supported; supported are {known}")
    for key, value in values.items():
        if value is not None and key not in _ROPE_KEYS[kind]:
            raise rope.fail(key, f"not a parameter of rope type {kind}")
    if kind == "default":
        return theta, partial, None
    # Some checkpoints keep the original length beside the rope parameters, not among them.
    outer_original = None
    if kind in ("llama3", "yarn"):
        outer_original = fields.optional_integer("original_max_position_embeddings", minimum=1)
    original = outer_original or rope.integer("original_max_position_embeddings", max_positions)
    return theta, partial, _scaling(rope, kind, original, max_positions)


def _scaling(rope: Fields, kind: str, original: int, max_positions: int) -> RopeScaling:
    if kind == "yarn":
        default_factor = max_positions / original
        factor = rope.number("factor", default_factor, above=True)
        attention = rope.optional_number("attention_factor")
        mscale = rope.optional_number("mscale")
        mscale_all = rope.optional_number("mscale_all_dim")
        if attention is None:
            attention = yarn_attention_factor(factor)
            if mscale and mscale_all:
                attention = yarn_attention_factor(factor, mscale) / yarn_attention_factor(
                    factor, mscale_all
                )
        return RopeScaling(
            kind,
            factor,
            original,
            beta_fast=rope.number("beta_fast", 32.0, above=True),
            beta_slow=rope.number("beta_slow", 1.0, above=True),
            truncate=rope.flag("truncate", True),
            attention_factor=attention,
        )
    if kind == "llama3":
        low = rope.number("low_freq_factor", above=True)
        high = rope.number("high_freq_factor", above=True)
        if high <= low:
            raise rope.fail("high_freq_factor", f"expected a number above low_freq_factor {low:g}")
        factor = rope.number("factor", above=True)
        return RopeScaling(kind, factor, original, low_freq_factor=low, high_freq_factor=high)
    minimum = 1.0 if kind == "dynamic" else 0.0
    return RopeScaling(kind, rope.number("factor", minimum=minimum, above=not minimum), original)


def _with_generation_config(config: ArchitectureConfig, path: Path) -> ArchitectureConfig:
    """Adds end-of-sequence ids and sampling defaults from generation_config.json, if there."""
    if not path.exists():
        return config
    fields = Fields(path, read_json(path), prefix="generation_config.")
    sampling = read_sampling(fields, _SAMPLING)
    if not fields.flag("do_sample", True):
        sampling = replace(sampling, temperature=0.0)
    eos = fields.token_ids("eos_token_id")
    bos = fields.optional_integer("bos_token_id")
    pad = _pad_token(fields)
    return replace(
        config,
        sampling=sampling,
        eos_token_ids=tuple(dict.fromkeys((*eos, *config.eos_token_ids))),
        bos_token_id=config.bos_token_id if config.bos_token_id is not None else bos,
        pad_token_id=config.pad_token_id if config.pad_token_id is not None else pad,
        ignored_keys=(*config.ignored_keys, *fields.unread(_HARMLESS)),
    )
