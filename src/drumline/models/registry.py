"""Which module computes which ``model_type``. Explicit, imported on demand, no torch here."""

from __future__ import annotations

import importlib
from types import ModuleType

# model_type of a hub config.json → module. SmolLM and SmolLM2 call themselves llama.
MODULES: dict[str, str] = {
    "llama": "drumline.models.llama",
    "mistral": "drumline.models.llama",
    "qwen2": "drumline.models.qwen2",
    "qwen3": "drumline.models.qwen3",
    "qwen3_moe": "drumline.models.qwen3_moe",
    "mixtral": "drumline.models.mixtral",
    "deepseek_v3": "drumline.models.deepseek_v3",
}

# The class a hub config.json names under ``architectures``.
CAUSAL_LM: dict[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}

# Those with experts in some layers.
WITH_EXPERTS = frozenset({"qwen3_moe", "mixtral", "deepseek_v3"})

# ``general.architecture`` of a GGUF file → model_type. Mistral files call themselves llama.
GGUF_ARCHITECTURES: dict[str, str] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


def model_module(model_type: str) -> ModuleType:
    """The module with `Model` and `tensor_shapes` for a supported model_type (else KeyError)."""
    return importlib.import_module(MODULES[model_type])
