"""DFlash against an independent computation from its description, per dialect and flag, and its
state through every kind of interruption: each draft is what the whole sequence at once gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafting.steps import BLOCK, Bench, Running
from drumline.core.cpu import native_available
from drumline.core.errors import CheckpointError
from drumline.drafting.dflash import DFlashDrafter, facts
from drumline.models.checkpoint import open_checkpoint
from drumline.models.tiny_drafts import write_dflash
from drumline.ops.base import PagedBatch

TinyPath = Callable[..., Path]
PROMPT = [7, 90, 15, 33, 64, 21, 8, 101, 56, 12, 77, 40, 31]
COUNT = 20
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "seed": 11}

FLAGS: dict[str, dict[str, Any]] = {
    "speculators": {},
    "flat": {"flat": True},
    "sample from anchor": {"sample_from_anchor": True},
    "reduced vocabulary": {"draft_vocab": 50},
    "own embedding and head": {"embedding": True, "head": True},
    "flat with its own": {"flat": True, "embedding": True, "head": True},
    "embeddings as a tap": {"taps": [0, 3, 1]},
    "one layer": {"layers": 1, "taps": [2]},
    "sliding, causal": {"layers": 3, "sliding": [0, 2]},
    "sliding, both ways": {"layers": 3, "sliding": [0, 2], "sliding_window_non_causal": True},
    "flat and sliding": {"flat": True, "sliding": [1]},
}


@pytest.fixture(scope="module")
def target(tiny_path: TinyPath) -> Path:
    return tiny_path(arch="qwen3", seed=3, layers=4, hidden=48, head_dim=16)


def dflash(path: Path, **keys: Any) -> dict[str, Any]:
    return {"method": "dflash", "model": str(path), "num_speculative_tokens": 5} | keys


# ---------------------------------------------------------------- an independent computation


@dataclass
class Golden:
    """Plain torch over whole sequences, from files and formulas; no cache, no ops, no slots."""

    draft: Path
    target: Path

    def __post_init__(self) -> None:
        config = json.loads((self.draft / "config.json").read_text())
        layers = config.get("transformer_layer_config", config)
        self.flat = "dflash_config" in config
        own = config["dflash_config"] if self.flat else config
        ids = own["target_layer_ids" if self.flat else "aux_hidden_state_layer_ids"]
        self.taps = [layer + 1 for layer in ids] if self.flat else ids
        self.mask = own["mask_token_id"]
        self.first = 0 if config.get("sample_from_anchor") else 1
        kinds = layers.get("layer_types") or ["full_attention"] * layers["num_hidden_layers"]
        one_way = not self.flat and not config["sliding_window_non_causal"]
        self.causal = [kind == "sliding_attention" and one_way for kind in kinds]
        self.dim, self.theta = layers["head_dim"], layers["rope_theta"]
        self.eps = layers["rms_norm_eps"]
        self.w = {n: t.double() for n, t in load_file(self.draft / "model.safetensors").items()}
        lent = load_file(self.target / "model.safetensors")
        names = {"embed_tokens.weight": "model.embed_tokens.weight", "lm_head.weight": ""}
        for mine, theirs in names.items():
            self.w.setdefault(mine, lent[theirs or mine].double())

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt((x * x).mean(-1, keepdim=True) + self.eps)
        return x * scale * self.w[name + ".weight"]

    def turn(self, x: Tensor, positions: Tensor) -> Tensor:
        """``[tokens, heads, dim]``, turned as complex numbers."""
        half = self.dim // 2
        frequency = self.theta ** (-torch.arange(half, dtype=torch.float64) / half)
        phase = torch.polar(torch.ones(()).double(), positions[:, None, None] * frequency)
        turned = torch.complex(x[..., :half], x[..., half:]) * phase
        return torch.cat((turned.real, turned.imag), -1)

    def attend(self, x: Tensor, context: Tensor, positions: Tensor, layer: int) -> Tensor:
        at = f"layers.{layer}.self_attn."
        both = torch.cat((context, x))
        start = len(context)
        q = (x @ self.w[at + "q_proj.weight"].T).view(len(x), -1, self.dim)
        k = (both @ self.w[at + "k_proj.weight"].T).view(len(both), -1, self.dim)
        v = (both @ self.w[at + "v_proj.weight"].T).view(len(both), -1, self.dim)
        q = self.turn(self.norm(q, at + "q_norm"), positions[start:])
        k = self.turn(self.norm(k, at + "k_norm"), positions)
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / self.dim**0.5
        if self.causal[layer]:
            later = positions[None, :] > positions[start:, None]
            scores = scores.masked_fill(later, -torch.inf)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(len(x), -1)
        return mixed @ self.w[at + "o_proj.weight"].T

    def logits(self, states: dict[int, Tensor], tokens: list[int], k: int) -> Tensor:
        """``[k, draft vocab]`` for the positions after ``tokens``, whose last is the anchor."""
        anchor = len(tokens) - 1
        fused = torch.cat([states[tap][:anchor].double() for tap in self.taps], 1)
        context = self.norm(fused @ self.w["fc.weight"].T, "hidden_norm")
        ids = [tokens[anchor]] + [self.mask] * (k - 1 + self.first)
        x = self.w["embed_tokens.weight"][ids]
        positions = torch.arange(anchor + len(ids)).double()
        for layer in range(len(self.causal)):
            at = f"layers.{layer}."
            x = x + self.attend(self.norm(x, at + "input_layernorm"), context, positions, layer)
            y = self.norm(x, at + "post_attention_layernorm")
            gate = y @ self.w[at + "mlp.gate_proj.weight"].T
            up = y @ self.w[at + "mlp.up_proj.weight"].T
            hidden = gate * torch.sigmoid(gate) * up
            x = x + hidden @ self.w[at + "mlp.down_proj.weight"].T
        return self.norm(x[self.first :], "norm") @ self.w["lm_head.weight"].T

    def drafts(self, states: dict[int, Tensor], tokens: list[int], k: int) -> tuple[int, ...]:
        logits = self.logits(states, tokens, k)
        best = logits.topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > 1e-4, "a draft that rounding could flip"
        ids = logits.argmax(1)
        if "d2t" in self.w:
            ids = ids + self.w["d2t"].long()[ids]
        return tuple(ids.tolist())


class World:
    """A bench with DFlash, the golden computation beside it, and what it was seen to compute."""

    def __init__(self, target: Path, draft: Path, backend: str = "reference", **keys: Any) -> None:
        self.bench = Bench(target, dflash(draft, **keys), backend=backend)
        self.golden = Golden(draft, target)
        drafter = self.bench.drafter
        assert isinstance(drafter, DFlashDrafter)
        self.drafter = drafter
        self.seen: list[Tensor] = []
        compute = drafter.network.compute_logits

        def watched(x: Tensor) -> Tensor:
            self.seen.append(compute(x))
            return self.seen[-1]

        drafter.network.compute_logits = watched  # type: ignore[method-assign]

    def states(self, tokens: list[int]) -> dict[int, Tensor]:
        """The target's taps over the whole sequence at once, in a cache of its own."""
        model, ops = self.bench.worker.model, self.bench.worker.ops
        spec, count = model.kv_spec, len(tokens)
        blocks = -(-count // BLOCK)
        cache = ops.allocate_kv(spec.layers, blocks, BLOCK, spec.kv_heads, spec.head_dim, "float32")
        at = torch.arange(count)
        batch = PagedBatch(at, at, (0, count), (tuple(range(blocks)),))
        output = model.forward(torch.tensor(tokens), batch, cache, tuple(set(self.golden.taps)))
        return dict(output.taps)

    def check(self, sequence: Running) -> None:
        """What was just drafted is what the golden computation drafts."""
        k = len(sequence.drafts)
        assert k
        states = self.states(sequence.tokens)
        assert sequence.drafts == self.golden.drafts(states, sequence.tokens, k)

    def follow(self, sequence: Running, count: int, k: int = 4, budget: int = 10**6) -> None:
        """Steps of one sequence, each checked."""
        while len(sequence.outputs) < count:
            self.bench.step([sequence], k, budget)
            if sequence.computed == len(sequence.tokens) - 1:  # its prefill is over
                self.check(sequence)


def baseline(target: Path, prompt: list[int], **params: Any) -> tuple[int, ...]:
    bench = Bench(target)
    sequence = bench.add(prompt, **params)
    bench.run([sequence], COUNT, 0)
    return sequence.outputs[:COUNT]


# ---------------------------------------------------------------- golden vectors


@pytest.mark.parametrize("flags", list(FLAGS))
def test_drafts_and_logits_are_those_of_the_description(
    target: Path, tmp_path: Path, flags: str
) -> None:
    world = World(target, write_dflash(target, tmp_path / "draft", 5, **FLAGS[flags]))
    sequence = world.bench.add(PROMPT)
    world.follow(sequence, 8, k=4, budget=5)
    expected = world.golden.logits(world.states(sequence.tokens), sequence.tokens, 4)
    assert expected.std() > 0.5
    assert (world.seen[-1].double() - expected).abs().max() < 1e-4


def test_every_flag_changes_what_is_computed(target: Path, tmp_path: Path) -> None:
    """The golden vectors could not tell a flag that is read and ignored, unless it matters."""
    found = {}
    for name in ("speculators", "sample from anchor", "sliding, causal", "sliding, both ways"):
        options = {"layers": 3} | FLAGS[name]
        world = World(target, write_dflash(target, tmp_path / name, 5, **options))
        sequence = world.bench.add(PROMPT)
        world.bench.step([sequence], 4)
        found[name] = world.seen[-1]
    assert (found["speculators"] - found["sample from anchor"]).abs().max() > 0.1
    assert (found["sliding, both ways"] - found["sliding, causal"]).abs().max() > 0.1
    assert torch.equal(found["sliding, both ways"], found["speculators"])


def test_the_two_dialects_count_layers_differently(target: Path, tmp_path: Path) -> None:
    """Layer output i is tap i + 1: the same network in both spellings drafts the same."""
    logits = []
    for flat in (True, False):
        draft = write_dflash(target, tmp_path / str(flat), 5, flat=flat, taps=[1, 4])
        config = json.loads((draft / "config.json").read_text())
        ids = config["dflash_config"]["target_layer_ids"] if flat else None
        assert (ids or config["aux_hidden_state_layer_ids"]) == ([0, 3] if flat else [1, 4])
        world = World(target, draft)
        world.bench.step([world.bench.add(PROMPT)], 4)
        assert world.drafter.taps == (1, 4)
        logits.append(world.seen[-1])
    assert torch.equal(*logits)


# ---------------------------------------------------------------- state


@pytest.fixture(scope="module")
def draft(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dflash(target, tmp_path_factory.mktemp("draft") / "dflash", 5)


@pytest.mark.parametrize("params", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("k", [1, 3, 5])
def test_no_token_changes(target: Path, draft: Path, k: int, params: dict[str, Any]) -> None:
    bench = Bench(target, dflash(draft))
    many = [bench.add(PROMPT, **params), bench.add(PROMPT[::-1], **params)]
    bench.run(many, COUNT, k, budget=5)
    assert many[0].outputs[:COUNT] == baseline(target, PROMPT, **params)
    assert many[1].outputs[:COUNT] == baseline(target, PROMPT[::-1], **params)
    assert many[0].drafted >= k * len(many[0].gains) > 0


@pytest.mark.skipif(not native_available(), reason="the native module is not built")
@pytest.mark.parametrize("flags", ["speculators", "sliding, causal"])
def test_compiled_operations_see_the_same_blocks(target: Path, tmp_path: Path, flags: str) -> None:
    draft = write_dflash(target, tmp_path / "draft", 5, **({"layers": 3} | FLAGS[flags]))
    world = World(target, draft, backend="native")
    sequence = world.bench.add(PROMPT)
    world.follow(sequence, 8, k=4, budget=5)
    expected = world.golden.logits(world.states(sequence.tokens), sequence.tokens, 4)
    assert (world.seen[-1].double() - expected).abs().max() < 1e-4


@pytest.mark.parametrize("padded", [True, False])
def test_rejected_drafts_leave_no_trace(target: Path, draft: Path, padded: bool) -> None:
    world = World(target, draft, disable_padded_drafter_batch=not padded)
    sequence = world.bench.add(PROMPT)
    world.follow(sequence, 16, k=5, budget=5)
    assert min(sequence.gains) == 1  # nearly all are rejected


def test_accepted_drafts_become_context(target: Path, draft: Path) -> None:
    """A target that says one token over and over accepts it; its context goes on being right."""
    world = World(target, draft)
    probe = world.bench.add(PROMPT)
    world.bench.step([probe], 1)
    likely = probe.drafts[0]
    sequence = world.bench.add(PROMPT, logit_bias={likely: 50.0})
    while len(sequence.outputs) < 16:
        world.bench.step([sequence], 3)
        assert sequence.drafts == (likely,) * 3
    assert set(sequence.gains) == {4}
    # The bias chose the drafts; the logits beneath must be those of the whole sequence.
    expected = world.golden.logits(world.states(sequence.tokens), sequence.tokens, 3)
    assert (world.seen[-1].double() - expected).abs().max() < 1e-4


def test_interruptions_leave_no_hole(target: Path, draft: Path) -> None:
    """K = 0 phases, preemption, a prefix hit, a missing slot, company."""
    world = World(target, draft)
    bench = world.bench
    one, other = bench.add(PROMPT), bench.add(PROMPT[::-1])
    world.follow(one, 3)
    for _ in range(4):
        bench.step([one, other], 0, budget=4)
    world.follow(other, 6)
    world.follow(one, 10)
    bench.preempt(one)
    world.follow(other, 14)
    world.follow(one, 14, budget=3)
    third = bench.add([*PROMPT[:12], 5, 6])
    bench.adopt(third, one, 12 // BLOCK)
    world.follow(third, 6)
    short = bench.add(PROMPT[:11])
    bench.step([short], 3, spare=0)
    bench.step([short], 3, spare=0)
    assert short.drafts == ()
    assert len(short.blocks) * BLOCK == len(short.tokens) - 1
    world.follow(short, 8)


def test_neighbours_and_their_k_do_not_matter(target: Path, draft: Path) -> None:
    world = World(target, draft)
    bench = world.bench
    many = [bench.add(PROMPT[at:]) for at in range(4)]
    for _ in range(8):
        bench.step(many, 4, budget=6)
        for sequence in many:
            if sequence.drafts:
                world.check(sequence)


# ---------------------------------------------------------------- range and passes


def test_the_range_ends_one_position_early(target: Path, tmp_path: Path) -> None:
    draft = write_dflash(target, tmp_path / "draft", 5, max_position_embeddings=24)
    world = World(target, draft)
    assert world.drafter.traits.positions_max == 24
    assert world.drafter.traits.drafter_range == 23
    assert world.drafter.network.rope.cos.shape[0] == 24
    sequence, other = world.bench.add(PROMPT), world.bench.add(PROMPT[:3])
    while len(sequence.tokens) < 30:
        world.bench.step([sequence], 5)
        if sequence.drafts:
            world.check(sequence)
            assert len(sequence.tokens) + len(sequence.drafts) <= 22
    assert sequence.drafts == ()
    world.bench.step([sequence, other], 5)
    assert len(other.drafts) == 5
    world.check(other)


def test_a_row_that_asks_beyond_the_range_gets_what_is_inside(target: Path, tmp_path: Path) -> None:
    draft = write_dflash(target, tmp_path / "draft", 5, max_position_embeddings=24)
    bench = Bench(target, dflash(draft))
    bench.ranged = False
    sequence = bench.add(PROMPT)
    while len(sequence.tokens) < 30:
        bench.step([sequence], 5)
        assert len(sequence.drafts) == max(0, min(5, 24 - len(sequence.tokens)))


def test_one_pass_in_every_step_of_the_size_that_the_script_says(target: Path, draft: Path) -> None:
    bench = Bench(target, dflash(draft))
    sequence = bench.add(PROMPT)
    sizes = []
    for k, budget in ((3, 5), (3, 5), (0, 5), (3, 5), (0, 5)):
        bench.step([sequence], k, budget)
        sizes.append([entry.size for entry in bench.ledger.passes])
    # Prefill in chunks of 5 and 5; its rest at K = 0; one token and a block of 4; no block.
    assert sizes == [[5], [5], [3], [1 + 4], [4]]
    bench.step([], 3)
    assert [entry.size for entry in bench.ledger.passes] == [0]


def test_facts_are_read_without_weights_in_memory(target: Path, draft: Path) -> None:
    from drumline.config import SpeculativeConfig

    settings = SpeculativeConfig.from_mapping({"method": "dflash", "model": str(draft)})
    found = facts(settings, open_checkpoint(target))
    assert found["layers"] == 2
    assert (found["kv_heads"], found["head_dim"]) == (2, 16)
    assert (found["default_tokens"], found["tokens_max"]) == (5, 5)


# ---------------------------------------------------------------- what is refused


def edit(draft: Path, **values: Any) -> None:
    file = draft / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize(
    ("flat", "values", "message"),
    [
        (False, {"mask_token_id": None}, "mask_token_id: missing"),
        (False, {"mask_token_id": 128}, r"mask_token_id 128 is outside 0\.\.127"),
        (False, {"block_size": 1}, "block_size 1: expected an integer of at least 2"),
        (False, {"aux_hidden_state_layer_ids": [1, 5]}, r"tap 5 is outside 0\.\.4"),
        (False, {"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids: missing"),
        (False, {"target_hidden_size": 64}, "hidden size 64, the target's is 48"),
        (False, {"projector_type": "domino"}, "projector_type 'domino': not supported"),
        (False, {"sliding_window_non_causal": 1}, "expected true or false"),
        (False, {"enable_confidence_head": True}, "enable_confidence_head True: unknown"),
        (False, {"speculators_model_type": "dspark"}, "not supported"),
        (False, {"draft_vocab_size": 200}, r"draft_vocab_size 200 is outside 1\.\.128"),
        (True, {"dflash_config": None}, "not a DFlash checkpoint"),
        (True, {"dflash_config": {"target_layer_ids": [0, 4], "mask_token_id": 0}}, "tap 5"),
        (True, {"num_target_layers": 36}, "num_target_layers 36: the target has 4 layers"),
        (True, {"block_size": None}, "block_size: missing"),
        (True, {"vocab_size": 200}, "vocab_size 200 is not the target's 128"),
        (True, {"model_type": "llama"}, "DFlash has qwen3's"),
    ],
)
def test_bad_configs_are_named(
    target: Path, tmp_path: Path, flat: bool, values: dict[str, Any], message: str
) -> None:
    draft = write_dflash(target, tmp_path / "draft", 5, flat=flat)
    edit(draft, **values)
    with pytest.raises(CheckpointError, match=message):
        Bench(target, dflash(draft))


def test_tensors_are_strict_both_ways(target: Path, tmp_path: Path) -> None:
    draft = write_dflash(target, tmp_path / "draft", 5, draft_vocab=50)
    file = draft / "model.safetensors"
    tensors = load_file(file)
    for name, problem in (
        ("lm_head.weight", "missing tensor lm_head.weight"),  # no head to borrow of 50 rows
        ("d2t", "missing tensor d2t"),
        ("layers.1.self_attn.k_norm.weight", "missing tensor layers.1.self_attn.k_norm.weight"),
    ):
        save_file({k: v for k, v in tensors.items() if k != name}, file)
        with pytest.raises(CheckpointError, match=problem):
            Bench(target, dflash(draft))
    save_file(tensors | {"markov_head.weight": torch.zeros(2)}, file)
    with pytest.raises(CheckpointError, match="unexpected tensor markov_head.weight"):
        Bench(target, dflash(draft))
