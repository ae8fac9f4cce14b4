"""DeepSeek-V3's next-token module: against transformers, strict in both directions, and in the
engine, where no bit of output changes; mixtral and deepseek_v3 through the engine beside it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from drafting.golden_world import Piece, build, random_tokens
from drafting.test_mtp_engine import WAYS, pressed, run, soften
from drumline.core.cpu import native_available
from drumline.core.errors import CheckpointError
from drumline.models.checkpoint import open_checkpoint
from drumline.models.tiny import write_tiny
from drumline.models.tiny_drafts import add_mtp

TOKENS = random_tokens(3, 19)
K = 3


def edit(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def theirs(folder: Path) -> tuple[Any, Any]:
    """The target and its module in transformers, which finds modules of the full size only."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    mtp = MtpModel(model, 1)
    mtp.set_attn_implementation("eager")
    state: dict[str, torch.Tensor] = {}
    prefix = f"model.layers.{model.config.num_hidden_layers}."
    gates: dict[str, list[torch.Tensor]] = {"gate": [], "up": [], "down": []}
    for name, data in load_file(folder / "model.safetensors").items():
        plain = name.removeprefix(prefix)
        if plain == name or plain in ("embed_tokens.weight", "shared_head.head.weight"):
            continue
        if ".experts." in plain:
            gates[plain.split(".")[3].removesuffix("_proj")].append(data)
        elif plain == "shared_head.norm.weight":
            state["layers.0.post_norm.weight"] = data
        elif plain.split(".")[0] in ("enorm", "hnorm", "eh_proj"):
            state[f"layers.0.{plain}"] = data
        else:
            state[f"layers.0.mtp_block.{plain}"] = data
    experts = "layers.0.mtp_block.mlp.experts"
    up, gate = torch.stack(gates["up"]), torch.stack(gates["gate"])
    state[f"{experts}.gate_up_proj"] = torch.cat((gate, up), 1)
    state[f"{experts}.down_proj"] = torch.stack(gates["down"])
    missing, unexpected = mtp.load_state_dict(state, strict=False)
    assert not unexpected
    assert all(name.startswith(("embed_tokens", "shared_head", "rotary")) for name in missing)
    return model, mtp.eval()


@pytest.mark.parametrize("seed", [2, 3])
def test_agrees_with_transformers(seed: int, tmp_path: Path) -> None:
    """Logits of every entry of the first pass."""
    write_tiny("deepseek_v3", tmp_path, seed)
    before = open_checkpoint(tmp_path)
    add_mtp(tmp_path, 5)
    assert set(open_checkpoint(tmp_path).tensors) == set(before.tensors)
    world = build("mtp", tmp_path, None)
    sequence = world.sequence(TOKENS)
    world.step([Piece(sequence, 7, samples=False)], K)
    world.step([Piece(sequence, len(TOKENS) - 8, k=K)], K)
    network = world.drafter.network
    ours = {p: network.compute_logits(x[None])[0] for p, x in world.entries(sequence).items()}
    model, mtp = theirs(tmp_path)
    ids = torch.tensor(TOKENS)[None]
    with torch.no_grad():
        hidden = model.model(ids).last_hidden_state  # after the final norm
        # The entry made of (hidden at p, token at p + 1) has position p + 1 here and p there:
        # rope knows differences only.
        out = mtp.forward_layer(0, hidden[:, :-1], torch.arange(len(TOKENS) - 1)[None], None,
                            input_ids=ids[:, 1:])  # fmt: skip
        logits = model.lm_head(out)[0]
    assert logits.std() > 0.5
    for entry in range(1, len(TOKENS)):
        torch.testing.assert_close(ours[entry], logits[entry - 1], atol=1e-4, rtol=0)


def test_the_module_is_read_strictly(tmp_path: Path) -> None:
    write_tiny("deepseek_v3", tmp_path, 2)
    add_mtp(tmp_path, 5)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    extra = tensors | {"model.layers.3.enorm.weight": torch.ones(32)}
    save_file(extra, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"unexpected tensor model\.layers\.3\.enorm"):
        open_checkpoint(tmp_path)
    short = {name: data for name, data in tensors.items() if "eh_proj" not in name}
    save_file(short, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="missing tensor input_proj"):
        build("mtp", tmp_path, None)
    name = "model.layers.2.embed_tokens.weight"
    save_file(tensors | {name: tensors[name] + 1}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{name} differs from model.embed_tokens.weight"):
        build("mtp", tmp_path, None)
    save_file(tensors, file, metadata={"format": "pt"})
    edit(tmp_path, num_nextn_predict_layers=2)
    with pytest.raises(CheckpointError, match="num_nextn_predict_layers 2: not supported"):
        build("mtp", tmp_path, None)


def test_a_draft_of_its_own_has_other_layers(
    tmp_path: Path, tiny_path: Callable[..., Path]
) -> None:
    target = tiny_path(arch="llama", seed=2)
    write_tiny("deepseek_v3", tmp_path, 2)
    edit(tmp_path, num_nextn_predict_layers=1)
    for method in ("mtp", "eagle3"):
        with pytest.raises(CheckpointError, match="drafts as the module of its target's"):
            build(method, target, tmp_path)


# ---------------------------------------------------------------- in the engine


@pytest.fixture(scope="module", params=["mixtral", "deepseek_v3"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    write_tiny(request.param, folder, 3)
    add_mtp(folder, 4)
    return soften(folder, 0.2)


@pytest.mark.parametrize(
    ("backend", "cache"), [("reference", "auto"), ("native", "auto"), ("native", "int8")]
)
def test_not_one_bit_changes(backend: str, cache: str, target: Path) -> None:
    """Without drafts, with the checkpoint's own module, in chunks, and under pressure."""
    if backend == "native" and not native_available():
        pytest.skip("the native module is not built")
    settings = {"ops_backend": backend, "kv_cache_dtype": cache}
    plain = run(target, None, **settings)
    assert len({tokens for tokens, _ in plain.signatures}) > 4
    spec: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": K}
    found = run(target, spec, **settings)
    assert found.signatures == plain.signatures
    assert found.stats.drafted > 50
    for way in WAYS:
        other = spec | {"disable_padded_drafter_batch": way == "pressure"}
        pushed = run(target, other, **settings, **pressed(way, target, other))
        assert pushed.signatures == plain.signatures
        # Blocks of int8 are smaller than those that the pressure is made for.
        assert pushed.preempted > 0 or way != "pressure" or cache == "int8"
