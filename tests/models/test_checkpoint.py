"""Loaders: what is there is read exactly; what is missing, extra or broken is one line."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from drumline.core.errors import CheckpointError
from drumline.models.checkpoint import Checkpoint, open_checkpoint
from drumline.models.gguf_loader import hub_name
from drumline.models.tiny import write_tiny

ROWS = np.random.default_rng


def refused(path: Path, message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    text = str(caught.value)
    assert message in text, text
    assert "\n" not in text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny("llama", tmp_path / "tiny", seed=1)


def edit_config(folder: Path, name: str = "config.json", **changes: Any) -> None:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder: Path, **changes: Any) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path) | changes
    save_file({k: v for k, v in tensors.items() if v is not None}, path, {"format": "pt"})


Q = "model.layers.0.self_attn.q_proj.weight"


# ---- safetensors


def test_single_and_sharded_files_hold_the_same(tmp_path: Path) -> None:
    one = open_checkpoint(write_tiny("qwen3", tmp_path / "one", seed=3))
    many = open_checkpoint(write_tiny("qwen3", tmp_path / "many", seed=3, shards=4))
    assert one.digest == many.digest
    stored = load_file(tmp_path / "one" / "model.safetensors")
    assert set(one.tensors) == set(many.tensors) == set(stored)
    for name, weight in many.tensors.items():
        assert torch.equal(weight.to_float(), stored[name])
        assert weight.name == name
    other = open_checkpoint(write_tiny("qwen3", tmp_path / "other", seed=4))
    assert other.digest != one.digest


def test_missing_unexpected_and_misshapen_tensors_are_named(folder: Path) -> None:
    original = load_file(folder / "model.safetensors")[Q]
    edit_tensors(folder, **{Q: None})
    refused(folder, f"missing tensor {Q}, expected shape [32, 32]")
    edit_tensors(folder, **{Q: original[:, :16].clone()})
    refused(folder, f"tensor {Q} has shape [32, 16], expected [32, 32]")
    edit_tensors(folder, **{Q: original, "model.layers.0.self_attn.q_proj.bias": torch.zeros(32)})
    refused(folder, "unexpected tensor model.layers.0.self_attn.q_proj.bias")
    edit_tensors(folder, **{"model.layers.0.self_attn.q_proj.bias": None, Q: original.double()})
    refused(folder, f"tensor {Q} is stored as float64, supported are F32, F16, BF16")


def test_permitted_extras(folder: Path) -> None:
    digest = open_checkpoint(folder).digest
    edit_tensors(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    assert open_checkpoint(folder).digest == digest


def test_tied_embeddings_may_repeat_the_head_but_not_differ(tmp_path: Path) -> None:
    folder = write_tiny("llama", tmp_path, seed=1, tied=True)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(folder, **{"lm_head.weight": embedding.clone()})
    assert "lm_head.weight" not in open_checkpoint(folder).tensors
    edit_tensors(folder, **{"lm_head.weight": embedding + 1})
    refused(folder, "unexpected tensor lm_head.weight: embeddings are tied, and it differs")


def test_broken_safetensors_files(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for kept in (len(whole) - 8, 100, 4, 0):
        path.write_bytes(whole[:kept])
        refused(folder, "model.safetensors: not a whole safetensors file: ")
    path.write_bytes(b"PK\x03\x04" + whole)
    refused(folder, "model.safetensors: not a whole safetensors file: ")
    path.unlink()
    refused(folder, "no model.safetensors and no model.safetensors.index.json")
    (folder / "pytorch_model.bin").write_bytes(b"")
    refused(folder, "pytorch_model.bin is a pickle, which is never loaded")


def test_broken_shards_and_indexes(tmp_path: Path) -> None:
    folder = write_tiny("llama", tmp_path, seed=1, shards=2)
    index = folder / "model.safetensors.index.json"
    original = json.loads(index.read_text())

    def write(weight_map: Any) -> None:
        index.write_text(json.dumps(original | {"weight_map": weight_map}))

    mapping = original["weight_map"]
    second = "model-00002-of-00002.safetensors"
    other = next(name for name, file in mapping.items() if file == second)
    write({k: v for k, v in mapping.items() if k != other})
    refused(folder, f"tensor {other} of {second} is not listed")
    write(mapping | {"extra.weight": second})
    refused(folder, f"tensor extra.weight is not in {second}")
    write(mapping | {"extra.weight": "model-00003.safetensors"})
    refused(folder, "names model-00003.safetensors, which is not there")
    write(mapping | {"extra.weight": "../elsewhere.safetensors"})
    refused(folder, "weight_map['extra.weight'] '../elsewhere.safetensors' is not a file name")
    write([])
    refused(folder, "weight_map missing or empty")
    write(mapping)
    first = folder / "model-00001-of-00002.safetensors"
    save_file(load_file(first) | {other: torch.zeros(1)}, folder / first, {"format": "pt"})
    refused(folder, f"tensor {other} is also in model-00001-of-00002.safetensors")
    first.unlink()
    refused(folder, "names model-00001-of-00002.safetensors, which is not there")
    index.write_text("{")
    refused(folder, "model.safetensors.index.json: is not JSON: ")


def test_there_is_no_such_path(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "nowhere: no such file or folder")
    refused(tmp_path, "config.json: no such file")


# ---- config.json


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "gpt2"},
            "model_type 'gpt2': not supported; supported are deepseek_v3, llama, mistral",
        ),
        ({"model_type": None}, "model_type: missing"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "expected LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu': not supported; supported is silu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config {'quant_method'"),
        ({"auto_map": {"AutoModel": "x.py"}}, "names code to run, and drumline runs none"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers '2': expected an integer of at least 1"),
        ({"hidden_size": None}, "hidden_size: missing"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide num_attention_heads 4"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"rms_norm_eps": -1}, "rms_norm_eps -1: expected a number of at least 0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings 'yes': expected true or false"),
        ({"eos_token_id": 128}, "eos_token_id 128 is outside 0..127"),
        ({"eos_token_id": [1, "x"]}, "expected a token id or a list of token ids"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_scaling.type 'longrope': not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0}}, "rope_scaling.factor 0: expected"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2, "beta_fast": 3}},
            "rope_scaling.beta_fast 3: not a parameter of rope type linear",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4.0}},
            "rope_scaling.high_freq_factor: missing",
        ),
        (
            {"rope_scaling": None, "rope_parameters": {"full_attention": {}}},
            "rope_parameters.full_attention {}: rope parameters by layer type are not supported",
        ),
        ({"partial_rotary_factor": 0.1}, "rotary dimension 0 must be even and in 2..8"),
        ({"logits_scaling": 8.0}, "logits_scaling 8.0: not supported"),
        ({"num_local_experts": 8}, "num_local_experts 8: not supported"),
        ({"layer_types": ["linear_attention"] * 2}, "layer_types ['linear_attention'"),
    ],
)
def test_configurations_that_are_refused(
    changes: dict[str, Any], message: str, folder: Path
) -> None:
    edit_config(folder, **changes)
    refused(folder, message)


def test_configuration_values_are_read_from_both_files(folder: Path) -> None:
    edit_config(folder, eos_token_id=2, mystery=1, torch_dtype="bfloat16", pad_token_id=-1)
    edit_config(
        folder,
        "generation_config.json",
        eos_token_id=[5, 2],
        temperature=0.6,
        top_k=20,
        top_p=0.95,
        min_p=0.1,
        repetition_penalty=1.1,
        num_beams=1,
        pad_token_id=3,
    )
    config = open_checkpoint(folder).config
    assert config.eos_token_ids == (5, 2)
    assert config.bos_token_id == 1
    assert config.pad_token_id == 3
    assert config.dtype == "bfloat16"
    sampling = config.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 20, 0.95)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.1, 1.1)
    assert config.ignored_keys == ("mystery", "generation_config.num_beams")
    edit_config(folder, "generation_config.json", top_p=1.5)
    refused(folder, "generation_config.top_p 1.5: expected a number in 0..1")
    edit_config(folder, "generation_config.json", top_p=None, do_sample=False)
    assert open_checkpoint(folder).config.sampling.temperature == 0.0


# ---- GGUF


def write_gguf(
    path: Path, folder: Path, kinds: dict[str, str] | None = None, **changes: Any
) -> Path:
    """A GGUF file of the miniature in ``folder``; llama's has llama.cpp's order of q and k rows."""
    kinds = kinds or {}
    source = open_checkpoint(folder)
    config = source.config
    arch = config.model_type
    writer = gguf.GGUFWriter(path, arch)
    values = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "rope.dimension_count": config.head_dim,
        "vocab_size": config.vocab_size,
    }
    if arch == "qwen3":
        values |= {"attention.key_length": config.head_dim}
        values |= {"attention.value_length": config.head_dim}
    extra = changes.pop("extra", {})
    for key, value in (values | changes).items():
        if value is not None:
            writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-6)
    for key, value in extra.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_float32(key, value)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
    writer.add_uint32("tokenizer.ggml.eot_token_id", 3)
    names = {hub_name(name): name for name in candidates(config.num_hidden_layers)}
    for name, weight in source.tensors.items():
        data = weight.to_float().numpy()
        for projection, heads in (("q_proj", 4), ("k_proj", 2)):
            if projection in name and arch == "llama":
                shape = (heads, 2, data.shape[0] // heads // 2, *data.shape[1:])
                data = data.reshape(shape).swapaxes(1, 2).reshape(data.shape)
        kind = kinds.get(name, "F32")
        if kind == "F32":
            writer.add_tensor(names[name], np.ascontiguousarray(data))
        else:
            quantized = gguf.quants.quantize(data, gguf.GGMLQuantizationType[kind])
            raw = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(names[name], quantized, raw_dtype=raw)
    if "factors" in kinds:
        writer.add_tensor("rope_freqs.weight", np.array([1, 2, 4, 8], np.float32))
    if "stray" in kinds:
        writer.add_tensor("blk.0.attn_sinks.weight", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def candidates(layers: int) -> list[str]:
    stems = [
        "attn_norm",
        "attn_q",
        "attn_k",
        "attn_v",
        "attn_output",
        "ffn_norm",
        "ffn_gate",
        "ffn_up",
        "ffn_down",
    ]
    blocks = [f"blk.{i}.{stem}.weight" for i in range(layers) for stem in stems]
    blocks += [f"blk.{i}.attn_{part}_norm.weight" for i in range(layers) for part in "qk"]
    blocks += [f"blk.{i}.attn_{part}.bias" for i in range(layers) for part in "qkv"]
    return ["token_embd.weight", "output_norm.weight", "output.weight", *blocks]


def same_tensors(a: Checkpoint, b: Checkpoint) -> None:
    assert set(a.tensors) == set(b.tensors)
    for name, weight in a.tensors.items():
        assert torch.equal(weight.to_float(), b.tensors[name].to_float()), name


def test_a_gguf_file_gives_what_the_hub_folder_gives(folder: Path, tmp_path: Path) -> None:
    file = open_checkpoint(write_gguf(tmp_path / "x.gguf", folder))
    hub = open_checkpoint(folder)
    same_tensors(file, hub)
    assert file.config.eos_token_ids == (2, 3)
    assert not file.config.tie_word_embeddings
    for field in ("hidden_size", "head_dim", "rotary_dim", "max_position_embeddings", "rope_theta"):
        assert getattr(file.config, field) == getattr(hub.config, field)


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_gguf_files_of_the_other_architectures(arch: str, tmp_path: Path) -> None:
    folder = write_tiny(arch, tmp_path / "hub", seed=1, head_dim=16, heads=2)
    file = open_checkpoint(write_gguf(tmp_path / "x.gguf", folder))
    hub = open_checkpoint(folder)
    same_tensors(file, hub)
    for field in ("model_type", "head_dim", "attention_bias", "rotary_dim", "mlp_bias"):
        assert getattr(file.config, field) == getattr(hub.config, field)


def test_quantized_q_and_k_are_put_in_order_as_raw_blocks(folder: Path, tmp_path: Path) -> None:
    k = Q.replace("q_proj", "k_proj")
    kinds = {Q: "Q8_0", k: "Q4_1", "lm_head.weight": "BF16", "model.embed_tokens.weight": "F16"}
    file = open_checkpoint(write_gguf(tmp_path / "x.gguf", folder, kinds))
    hub = open_checkpoint(folder)
    assert file.tensors[Q].kind == "Q8_0"
    assert file.tensors[Q].data.shape == (32, 34)
    for name, kind in kinds.items():
        assert file.tensors[name].kind == kind
        exact = hub.tensors[name].to_float().numpy()
        code = gguf.GGMLQuantizationType[kind]
        rounded = gguf.quants.dequantize(gguf.quants.quantize(exact, code), code)
        assert np.array_equal(file.tensors[name].to_float().numpy(), rounded)


def test_tied_gguf_files_have_no_head(tmp_path: Path) -> None:
    folder = write_tiny("llama", tmp_path / "tied", seed=1, tied=True)
    file = open_checkpoint(write_gguf(tmp_path / "x.gguf", folder))
    assert file.config.tie_word_embeddings
    same_tensors(file, open_checkpoint(folder))


def test_rope_factors_and_scalings_of_gguf_files(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    scaling = open_checkpoint(write_gguf(path, folder, {"factors": ""})).config.rope_scaling
    assert scaling is not None
    assert (scaling.kind, scaling.factors) == ("factors", (1.0, 2.0, 4.0, 8.0))
    yarn = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    scaling = open_checkpoint(write_gguf(path, folder, extra=yarn)).config.rope_scaling
    assert scaling is not None
    assert scaling.attention_factor == pytest.approx(1 + 0.1 * np.log(4))
    linear = yarn | {"llama.rope.scaling.type": "linear"}
    scaling = open_checkpoint(write_gguf(path, folder, extra=linear)).config.rope_scaling
    assert scaling is not None
    assert (scaling.kind, scaling.factor) == ("linear", 4.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_count": None}, "llama.block_count: missing"),
        ({"block_count": 3}, "missing tensor model.layers.2.input_layernorm.weight"),
        ({"block_count": 2**31}, "2147483648 layers, but only 21 tensors"),
        ({"feed_forward_length": 32}, "has shape [64, 32], expected [32, 32]"),
        (
            {"attention.head_count": 2, "attention.key_length": 8, "attention.value_length": 8},
            "tensor blk.0.attn_q.weight has 32 rows, expected 16",
        ),
        ({"expert_count": 4}, "llama.expert_count 4: not supported"),
        (
            {"rope.dimension_count": 4},
            "rope.dimension_count 4: must equal the head dimension",
        ),
        ({"extra": {"llama.rope.scaling.type": "longrope"}}, "supported are none, linear, yarn"),
        ({"extra": {"llama.rope.scaling.type": "yarn"}}, "rope.scaling.factor: expected a number"),
        ({"kinds": {"stray": ""}}, "unexpected tensor blk.0.attn_sinks.weight"),
        ({"kinds": {Q: "Q5_0"}}, "tensor blk.0.attn_q.weight is stored as Q5_0, not supported"),
    ],
)
def test_gguf_files_that_are_refused(
    changes: dict[str, Any], message: str, folder: Path, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "x.gguf", folder, **({"kinds": None} | changes))
    refused(path, message)


def test_broken_gguf_files(folder: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", folder)
    whole = path.read_bytes()

    def broken(data: bytes, message: str) -> None:
        path.write_bytes(data)
        refused(path, message)

    broken(b"GGML" + whole[4:], "not a GGUF file: it begins with b'GGML'")
    broken(whole[:4] + struct.pack("<I", 1) + whole[8:], "GGUF version 1 is not supported")
    broken(whole[:4] + struct.pack(">I", 3) + whole[8:], "big-endian GGUF is not supported")
    broken(b"", "truncated: shorter than a GGUF header")
    for kept in (30, 200, 900):
        broken(whole[:kept], f"truncated: the header goes on past the file's {kept} bytes")
    broken(whole[:-64], "truncated: tensor ")
    broken(
        whole[:8] + struct.pack("<Q", 1 << 60) + whole[16:], "tensor name '' is not printable text"
    )
    broken(whole[:16] + struct.pack("<Q", 1 << 60) + whole[24:], "truncated: ")
    broken(whole.replace(b"llama", b"bloom"), "general.architecture 'bloom': not supported")
    path.write_bytes(whole)
    same_tensors(open_checkpoint(path), open_checkpoint(folder))


@pytest.mark.parametrize("seed", range(6))
def test_damaged_headers_never_give_another_error(seed: int, folder: Path, tmp_path: Path) -> None:
    """Random bytes in the headers of both formats: it opens, or it is a CheckpointError."""
    rng = np.random.default_rng(seed)
    source = write_gguf(tmp_path / "x.gguf", folder)
    for path, header in ((source, 3000), (folder / "model.safetensors", 2000)):
        whole = np.frombuffer(path.read_bytes(), np.uint8)
        for _ in range(60):
            damaged = whole.copy()
            at = rng.integers(0, header, rng.integers(1, 4))
            damaged[at] = rng.integers(0, 256, at.size)
            path.write_bytes(damaged.tobytes())
            try:
                open_checkpoint(path if path == source else folder)
            except CheckpointError as error:
                assert "\n" not in str(error)


def test_unknown_architecture_keys_are_listed(folder: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", folder, extra={"llama.attention.novelty": 1.0})
    assert open_checkpoint(path).config.ignored_keys == ("llama.attention.novelty",)


@pytest.mark.model
def test_smollm2_opens_as_it_is(smollm2_path: Path) -> None:
    checkpoint = open_checkpoint(smollm2_path)
    assert len(checkpoint.tensors) == 272
    kinds = [weight.kind for weight in checkpoint.tensors.values()]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {"Q4_1": 210, "F32": 61, "Q8_0": 1}
    config = checkpoint.config
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (2,)
    assert (config.max_context_length, config.ignored_keys) == (8192, ())
    mapped = checkpoint.tensors["model.layers.0.mlp.up_proj.weight"].data
    assert not mapped.is_contiguous() or mapped.untyped_storage().nbytes() >= mapped.nbytes
