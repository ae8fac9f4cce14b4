"""SmolLM2-135M-Instruct from its GGUF file against transformers on the same file, float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from drumline.models.checkpoint import open_checkpoint
from drumline.ops.base import PagedBatch

pytestmark = pytest.mark.model

TOKENS = 64
TOLERANCE = 1e-3
PROMPTS = [
    "Hi",
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "def fibonacci(n):\n    ",
    "The quick brown fox jumps over the lazy dog. " * 4,
    "1, 1, 2, 3, 5, 8, 13, 21, 34,",
    "Traduisez en anglais : « Où est la gare ? »",
    "日本の首都はどこですか。",
    "🙂🙂🙂 means",
    "SELECT name, COUNT(*) FROM users GROUP BY",
    "Dear Sir or Madam,\n\nI am writing to",
    "Once upon a time, in a village by the river,",
    "    \t\n\n   odd   spacing\n",
    "Explain why the sky is blue to a child of five.",
    "<|im_start|>user\nList three prime numbers.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\nYou answer in rhymes.<|im_end|>\n"
    "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n",
    '{"name": "Ada", "born": 1815, "fields": [',
    "E = mc^2, where E is",
    "AAAA BBBB AAAA BBBB AAAA",
    "In 1969, Apollo 11 carried Neil Armstrong, Buzz Aldrin and Michael Collins to",
]


def transformers_model(path: Path) -> LlamaForCausalLM:
    """The file in transformers, through the `gguf` package alone: reading, dequantization and the
    order of q's and k's rows share nothing with the code under test."""
    reader = gguf.GGUFReader(path)

    def field(key: str) -> Any:
        return reader.fields[key].contents()

    heads, kv_heads = field("llama.attention.head_count"), field("llama.attention.head_count_kv")
    config = LlamaConfig(
        vocab_size=field("llama.vocab_size"),
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=field("llama.context_length"),
        rms_norm_eps=field("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        tie_word_embeddings=True,
    )
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    model = LlamaForCausalLM(config)
    left = {tensor.name: tensor for tensor in reader.tensors}
    state = {}
    for name in model.state_dict():
        if name == "lm_head.weight":
            continue
        stem = names.get_name(name.removesuffix(".weight"))
        tensor = left.pop(f"{stem}.weight")
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        for projection, count in (("q_proj", heads), ("k_proj", kv_heads)):
            if projection in name:
                half = values.shape[0] // count // 2
                order = [
                    count_at * 2 * half + 2 * pair + member
                    for count_at in range(count)
                    for member in (0, 1)
                    for pair in range(half)
                ]
                values = values[order]
        state[name] = torch.from_numpy(values.copy())
    assert not left
    missing = model.load_state_dict(state, strict=False)
    assert missing.missing_keys == ["lm_head.weight"]
    model.tie_weights()
    return model.eval()


def decode_batch(run: Any, position: list[int], blocks_each: int) -> PagedBatch:
    """One token of every sequence; sequence s owns blocks s * blocks_each and on."""
    size = run.cache.block_size
    tables = tuple(
        tuple(range(s * blocks_each, (s + 1) * blocks_each)) for s in range(len(position))
    )
    slots = [tables[s][p // size] * size + p % size for s, p in enumerate(position)]
    starts = tuple(range(len(position) + 1))
    return PagedBatch(torch.tensor(position), torch.tensor(slots), starts, tables)


def prefill_batch(run: Any, sequence: int, length: int, blocks_each: int) -> PagedBatch:
    size = run.cache.block_size
    table = tuple(range(sequence * blocks_each, (sequence + 1) * blocks_each))
    positions = torch.arange(length)
    return PagedBatch(positions, positions + table[0] * size, (0, length), (table,))


def greedy(run: Any, prompts: list[list[int]], blocks_each: int) -> tuple[list[list[int]], Any]:
    """Sequences extended by TOKENS greedy tokens, and their logits ``[prompts, TOKENS, vocab]``."""
    rows = []
    for s, ids in enumerate(prompts):
        batch = prefill_batch(run, s, len(ids), blocks_each)
        rows.append(run.model.forward(torch.tensor(ids), batch, run.cache).hidden[-1:])
    sequences = [list(ids) for ids in prompts]
    steps = [run.model.compute_logits(torch.cat(rows))]
    for _ in range(TOKENS - 1):
        chosen = steps[-1].argmax(-1)
        positions = [len(sequence) for sequence in sequences]
        for sequence, token in zip(sequences, chosen.tolist(), strict=True):
            sequence.append(token)
        out = run.model.forward(chosen, decode_batch(run, positions, blocks_each), run.cache)
        steps.append(run.model.compute_logits(out.hidden))
    return sequences, torch.stack(steps, 1)


def test_parity_with_transformers(smollm2_path: Path, runner: Callable[..., Any]) -> None:
    checkpoint = open_checkpoint(smollm2_path)
    tokenizer = checkpoint.tokenizer()
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    assert len(prompts) == 20
    length_max = max(len(ids) for ids in prompts) + TOKENS
    blocks_each = -(-length_max // 16)
    run = runner(checkpoint, 16 * blocks_each * len(prompts))
    sequences, ours = greedy(run, prompts, blocks_each)

    theirs = transformers_model(smollm2_path)
    agreed = 0
    worst = 0.0
    for ids, sequence, logits in zip(prompts, sequences, ours, strict=True):
        with torch.no_grad():
            reference = theirs(torch.tensor(sequence)[None]).logits[0, len(ids) - 1 :]
        assert reference.shape == logits.shape
        worst = max(worst, float((logits - reference).abs().max()))
        best = reference.topk(2).values
        clear = best[:, 0] - best[:, 1] > TOLERANCE
        same = logits.argmax(-1) == reference.argmax(-1)
        assert same[clear].all()
        agreed += int(same.sum())
    total = len(prompts) * TOKENS
    print(f"largest logit difference {worst:.2e}, argmax equal at {agreed} of {total} positions")
    assert worst < TOLERANCE
    assert agreed >= 0.99 * total
