"""The drafters' formulas from their papers, in plain torch: one dense sequence, no cache, no pages.

Written apart from `drumline.drafting` and read from the files themselves, so that an error there
is not repeated here. An entry i >= 1 is made of the target's hidden state at i - 1 and the token
at i; what a function calls ``hidden`` has one row per entry.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, silu


class Golden:
    """Common ground. ``prefix`` names layer 0's tensors in the file."""

    prefix = "layers.0."

    def __init__(self, target: Path, folder: Path) -> None:
        self.verifier = {k: v.float() for k, v in load_file(target / "model.safetensors").items()}
        raw = load_file(folder / "model.safetensors")
        self.maps = {k: raw[k] for k in ("d2t", "t2d") if k in raw}
        self.weights = {k: v.float() for k, v in raw.items() if k not in self.maps}
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        layer = self.config.get("transformer_layer_config", self.config)
        self.heads = layer["num_attention_heads"]
        self.kv_heads = layer["num_key_value_heads"]
        self.head_dim = layer["head_dim"]
        self.theta = layer["rope_theta"]
        self.eps = layer["rms_norm_eps"]
        self.experts_per_token = layer.get("num_experts_per_tok", 0)
        embedding = self.weights.get("embed_tokens.weight")
        self.embedding = (
            self.verifier["model.embed_tokens.weight"] if embedding is None else embedding
        )
        self.position_shift = 0  # of entries that a drafter made itself; a test moves it
        self.own_from: int | None = None

    # ---- what a dialect says ------------------------------------------------------------

    def fuse(self, taps: dict[int, Tensor]) -> Tensor:
        raise NotImplementedError

    def forward(self, tokens: list[int], hidden: Tensor) -> Tensor:
        raise NotImplementedError

    def feed_back(self, x: Tensor) -> Tensor:
        return x

    def logits(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    # ---- drafting ------------------------------------------------------------------------

    def to_target(self, draft_id: int) -> int:
        """A draft id is an offset from the target's: ``d2t`` is no table."""
        return draft_id + int(self.maps["d2t"][draft_id]) if self.maps else draft_id

    def chain(self, tokens: list[int], taps: dict[int, Tensor], k: int) -> tuple[Tensor, ...]:
        """Greedy drafts after ``tokens``: logits of pass 1 at every entry, then one row per
        further pass; drafts as an int tensor, last."""
        hidden = self.fuse(taps)  # rows 0 .. n - 2
        said = tokens[1:]
        self.own_from = len(said)
        found: list[Tensor] = []
        drafts: list[int] = []
        for index in range(k):
            x = self.forward(said, hidden)
            rows = self.logits(x)
            found.append(rows if index == 0 else rows[-1:])
            drafts.append(self.to_target(int(rows[-1].argmax())))
            hidden = torch.cat((hidden, self.feed_back(x[-1:])))
            said = [*said, drafts[-1]]
        return (*found, torch.tensor(drafts))

    # ---- a transformer block -------------------------------------------------------------

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * weight

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        half = self.head_dim // 2
        frequency = self.theta ** (-torch.arange(half).float() / half)
        angle = (positions.float()[:, None] * frequency)[:, None]  # [entries, 1, half]
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)

    def attend(self, x: Tensor, prefix: str) -> Tensor:
        """Causal attention of entries 1, 2, … over each other."""
        count = x.shape[0]
        positions = torch.arange(1, count + 1)
        if self.own_from is not None:
            positions[self.own_from :] += self.position_shift
        parts = {}
        for name, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads)):
            weight = self.weights[f"{prefix}self_attn.{name}_proj.weight"]
            parts[name] = linear(x, weight).view(count, heads, self.head_dim)
            norm = self.weights.get(f"{prefix}self_attn.{name}_norm.weight")
            if norm is not None:
                parts[name] = self.norm(parts[name], norm)
        q, k = self.rotate(parts["q"], positions), self.rotate(parts["k"], positions)
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, 1), parts["v"].repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(self.head_dim)
        later = torch.ones(count, count, dtype=torch.bool).triu(1)
        mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), v)
        return linear(mixed.reshape(count, -1), self.weights[f"{prefix}self_attn.o_proj.weight"])

    def mlp(self, x: Tensor, prefix: str) -> Tensor:
        w = self.weights
        if f"{prefix}mlp.gate.weight" not in w:
            gate = silu(linear(x, w[f"{prefix}mlp.gate_proj.weight"]))
            up = linear(x, w[f"{prefix}mlp.up_proj.weight"])
            return linear(gate * up, w[f"{prefix}mlp.down_proj.weight"])
        shares = linear(x, w[f"{prefix}mlp.gate.weight"]).softmax(-1)
        best = shares.topk(self.experts_per_token, -1)
        out = torch.zeros_like(x)
        for row in range(x.shape[0]):
            for share, expert in zip(best.values[row], best.indices[row].tolist(), strict=True):
                e = f"{prefix}mlp.experts.{expert}"
                gate = silu(linear(x[row], w[f"{e}.gate_proj.weight"]))
                up = linear(x[row], w[f"{e}.up_proj.weight"])
                made = linear(gate * up, w[f"{e}.down_proj.weight"])
                out[row] += share / best.values[row].sum() * made
        return out

    def block(self, x: Tensor, prefix: str) -> Tensor:
        w = self.weights
        x = x + self.attend(self.norm(x, w[f"{prefix}input_layernorm.weight"]), prefix)
        return x + self.mlp(self.norm(x, w[f"{prefix}post_attention_layernorm.weight"]), prefix)

    def final(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden, self.verifier["model.norm.weight"])


class GoldenEagle3(Golden):
    @property
    def first(self) -> str:
        return "layers.0." if "speculators_model_type" in self.config else "midlayer."

    def fuse(self, taps: dict[int, Tensor]) -> Tensor:
        parts = [taps[k] for k in self.config["eagle_aux_hidden_state_layer_ids"]]
        if self.config["fc_norm"]:
            parts = [
                self.norm(part, self.weights[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)
            ]
        joined = torch.cat(parts, -1)
        if self.config["norm_before_fc"]:
            joined = self.norm(joined, self.weights["input_norm.weight"])
        return linear(joined, self.weights["fc.weight"])

    def forward(self, tokens: list[int], hidden: Tensor) -> Tensor:
        w, p = self.weights, self.first
        normed = self.norm(hidden, w[f"{p}hidden_norm.weight"])
        said = self.norm(self.embedding[tokens], w[f"{p}input_layernorm.weight"])
        x = normed if self.config["norm_before_residual"] else hidden
        x = x + self.attend(torch.cat((said, normed), -1), p)
        x = x + self.mlp(self.norm(x, w[f"{p}post_attention_layernorm.weight"]), p)
        layer = 1
        while f"layers.{layer}.input_layernorm.weight" in w:
            x = self.block(x, f"layers.{layer}.")
            layer += 1
        return x

    def feed_back(self, x: Tensor) -> Tensor:
        return self.norm(x, self.weights["norm.weight"]) if self.config["norm_output"] else x

    def logits(self, x: Tensor) -> Tensor:
        if self.config["verifier_head"]:
            head = self.verifier["lm_head.weight"]
            head = head[self.maps["t2d"]] if self.maps else head
        else:
            head = self.weights["lm_head.weight"]
        return linear(self.norm(x, self.weights["norm.weight"]), head)


class GoldenEagle(Golden):
    def fuse(self, taps: dict[int, Tensor]) -> Tensor:
        return self.final(taps[max(taps)])

    def forward(self, tokens: list[int], hidden: Tensor) -> Tensor:
        w = self.weights
        x = linear(torch.cat((self.embedding[tokens], hidden), -1), w["fc.weight"])
        x = x + w["fc.bias"] if "fc.bias" in w else x
        x = x + self.attend(x, "layers.0.")
        x = x + self.mlp(self.norm(x, w["layers.0.post_attention_layernorm.weight"]), "layers.0.")
        return self.block(x, "layers.1.") if "layers.1.input_layernorm.weight" in w else x

    def logits(self, x: Tensor) -> Tensor:
        return linear(x, self.verifier["lm_head.weight"])


class GoldenMtp(Golden):
    """Speculators' spelling; ``mtp.*`` differs in names and in the norm of its hidden states."""

    names = ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")
    start, layer, normed = "mtp_layers.0.", "mtp_layers.0.", False

    def part(self, index: int) -> Tensor:
        return self.weights[f"{self.start}{self.names[index]}.weight"]

    def fuse(self, taps: dict[int, Tensor]) -> Tensor:
        last = taps[max(taps)]
        return self.final(last) if self.normed else last

    def forward(self, tokens: list[int], hidden: Tensor) -> Tensor:
        token = self.norm(self.embedding[tokens], self.part(1))
        joined = torch.cat((token, self.norm(hidden, self.part(2))), -1)
        return self.norm(self.block(linear(joined, self.part(0)), self.layer), self.part(3))

    def logits(self, x: Tensor) -> Tensor:
        head = self.verifier["lm_head.weight"]
        if self.maps:  # rows of the verifier's head, by the mask, which d2t must agree with
            head = head[self.maps["t2d"]]
        return linear(x, head)


class GoldenOwnMtp(GoldenMtp):
    names = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    start, layer, normed = "mtp.", "mtp.layers.0.", True
