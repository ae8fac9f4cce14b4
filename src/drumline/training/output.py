"""A trained head as a folder in the speculators format: config.json, model.safetensors, README.md.

Three things extend the format, and other readers may ignore or refuse them: ``draft_vocab_size``
with ``d2t`` and ``t2d`` for mtp too (its head rows are the verifier's, gathered at load), an eagle3
head without ``lm_head.weight`` (``verifier_head``; its rows are gathered likewise), and
``draft_sharpening``. ``--full-vocab`` writes an mtp head without the first.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from drumline.models.config import ArchitectureConfig
from drumline.models.registry import CAUSAL_LM
from drumline.training.evaluate import Acceptance, Sharpening
from drumline.training.vocabulary import DraftVocabulary

DTYPE = torch.float16
ARCHITECTURES = {"mtp": "MTPDraftModel", "eagle3": "Eagle3DraftModel"}


@dataclass(frozen=True)
class Facts:
    """What the card says; all of it measured or chosen in this run."""

    target: str
    method: str
    licence: str
    recipe: Mapping[str, Any]
    settings: Mapping[str, Any]
    conversations: int
    held_out: int
    answer_tokens: int
    tokens_seen: int
    seconds: float
    coverage: float
    acceptance: Mapping[str, Acceptance]
    sharpening: Sharpening
    parameters: int


def round_weights(module: nn.Module) -> None:
    """To the stored precision, so that what is measured is what is written."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter.to(DTYPE).float())


def layer_config(config: ArchitectureConfig, layers: int) -> dict[str, Any]:
    """The head's layer as a hub config: a plain llama layer of the target's sizes."""
    return {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_context_length,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
    }


def head_config(
    method: str,
    config: ArchitectureConfig,
    taps: tuple[int, ...],
    vocabulary: DraftVocabulary,
    steps: int,
    sharpening: float,
    target: str,
    share_head: bool = False,
) -> dict[str, Any]:
    """config.json of a head. As the format has it, an mtp config gives the target's depth (its tap
    is the last), an eagle3 config the draft's."""
    layers = config.num_hidden_layers if method == "mtp" else 1
    content: dict[str, Any] = {
        "architectures": [ARCHITECTURES[method]],
        "speculators_model_type": method,
        "transformer_layer_config": layer_config(config, layers),
        "torch_dtype": str(DTYPE).removeprefix("torch."),
        "draft_sharpening": "greedy" if math.isinf(sharpening) else sharpening,
        "speculators_config": {
            "algorithm": method,
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": steps,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "default_proposal_method": "greedy",
            "verifier": {
                "name_or_path": target,
                "architectures": [CAUSAL_LM[config.model_type]],
            },
        },
    }
    if method == "mtp":
        content["num_nextn_predict_layers"] = 1
    else:
        content["eagle_aux_hidden_state_layer_ids"] = list(taps)
        content["norm_before_residual"] = False
        content["fc_norm"] = True
        content["verifier_head"] = share_head
    if method == "eagle3" or not vocabulary.full:
        content["draft_vocab_size"] = vocabulary.size
    return content


def write_head(
    folder: Path,
    config: Mapping[str, Any],
    module: nn.Module,
    prefix: str,
    vocabulary: DraftVocabulary,
    facts: Facts,
) -> None:
    """Weights and card first, config.json last: a folder that has it is whole."""
    tensors: dict[str, Tensor] = {
        prefix + name: value.detach().to(DTYPE).contiguous()
        for name, value in module.named_parameters(remove_duplicate=True)
    }
    if not vocabulary.full:
        tensors |= {"d2t": vocabulary.d2t, "t2d": vocabulary.t2d}
    draft = folder / "model.safetensors.new"
    save_file(tensors, draft, metadata={"format": "pt"})
    os.replace(draft, folder / "model.safetensors")
    (folder / "README.md").write_text(card(facts, vocabulary), encoding="utf-8")
    draft = folder / "config.json.new"
    draft.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    os.replace(draft, folder / "config.json")


def card(facts: Facts, vocabulary: DraftVocabulary) -> str:
    """README.md: what the head is, how it was made, how well it drafts."""
    steps = max(len(one.per_position) for one in facts.acceptance.values())
    lines = [
        "---",
        f"license: {facts.licence}",
        f"base_model: {facts.target}",
        "tags: [speculative-decoding, speculators]",
        "---",
        "",
        f"# {facts.method} head for {facts.target}",
        "",
        f"A draft head of one layer ({facts.parameters / 1e6:.2f} M parameters, 16 bit) in the "
        "speculators format, trained by `drumline train`. It guesses the next tokens; the target "
        "decides, so it changes speed and no text.",
        "",
        "```",
        f"drumline generate --model {facts.target} "
        f'-sc \'{{"method": "{facts.method}", "model": "THIS FOLDER"}}\' …',
        "```",
        "",
        "## Measured",
        "",
        f"On {facts.held_out} conversations whose prompts were never trained on; chat template, "
        f"draft length {steps}. *Position j*: share of drafts accepted up to and with the j-th. "
        "*Length*: tokens that one pass of the target yields.",
        "",
        "| answers | conversations | "
        + " | ".join(f"position {j + 1}" for j in range(steps))
        + " | length |",
        "| --- | ---: | " + "---: | " * (steps + 1),
    ]
    for name, one in facts.acceptance.items():
        rates = " | ".join(f"{rate:.3f}" for rate in one.per_position)
        lines.append(f"| {name} | {one.conversations} | {rates} | {one.mean_length:.3f} |")
    lines += [
        "",
        f"Coupled drafts at temperature {facts.sharpening.temperature:g} "
        "(`draft_sharpening` in config.json is the best):",
        "",
        "| sharpening | " + " | ".join(_beta(b) for b in facts.sharpening.agreement) + " |",
        "| --- | " + "---: | " * len(facts.sharpening.agreement),
        "| length | " + " | ".join(f"{v:.3f}" for v in facts.sharpening.agreement.values()) + " |",
        "",
        "## Made by",
        "",
        f"- data: {facts.conversations} conversations that the target wrote itself, "
        f"{facts.answer_tokens} answer tokens; nothing else was read",
        *(f"- data, {name}: {_told(value)}" for name, value in facts.recipe.items()),
        f"- draft vocabulary: {vocabulary.size} of {vocabulary.target_size} tokens, "
        f"{facts.coverage:.1%} of the held-out answers' tokens",
        *(f"- training, {name}: {value}" for name, value in facts.settings.items()),
        f"- seen in training: {facts.tokens_seen} tokens in {facts.seconds / 60:.1f} minutes",
        "",
        "## Licence",
        "",
        f"The head starts from weights of the target and learns from its text; the target's "
        f"licence is {facts.licence}.",
        "",
    ]
    return "\n".join(lines)


def _told(value: Any) -> Any:
    return f"{len(value)} texts (training/openers.py)" if isinstance(value, list) else value


def _beta(beta: float) -> str:
    return "greedy" if math.isinf(beta) else f"{beta:g}"
