"""Models over ranks: what each rank is asked to build and to compute. State comes first."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from drumline.models.checkpoint import open_checkpoint
from drumline.models.registry import model_module
from drumline.models.sharding import ShardedTensors, Share, shard_config
from drumline.ops import load_ops
from drumline.ops.base import PagedBatch
from drumline.ops.sharded import ShardedOps
from parallel.told import Spans, model_traits

State = dict[str, Any]
BLOCK = 4
LENGTH = 64


def build(
    state: State, path: str, backend: str, quantization: str | None = None
) -> tuple[int, ...]:
    """Loads the rank's share of the checkpoint; returns (heads, kv heads, width, vocabulary
    rows that are here)."""
    comms = state["comms"]
    checkpoint = open_checkpoint(path, quantization)
    tp = comms.tp
    share = Share(tp.rank, tp.size, comms.ep is not None)
    config = shard_config(checkpoint.config, checkpoint.tensors, share)
    tensors = ShardedTensors(checkpoint.config, checkpoint.tensors, share)
    ops = ShardedOps(load_ops(backend, "cpu"), tp, comms.ep)
    module = model_module(config.model_type)
    model: Any = module.Model(config, tensors, ops, LENGTH)
    state["model"], state["ops"] = model, ops
    spec = model.kv_spec
    blocks = LENGTH // BLOCK
    state["cache"] = ops.allocate_kv(
        spec.layers, blocks, BLOCK, spec.kv_heads, spec.head_dim, "float32"
    )
    rows = tensors["model.embed_tokens.weight"].shape[0]
    return config.num_attention_heads, spec.kv_heads, config.intermediate_size, rows


def batch_of(start: int, count: int, padding: int = 0) -> PagedBatch:
    """Tokens ``start`` and on of one sequence, and so many of none, which have no slot."""
    positions = torch.arange(start, start + count)
    table = tuple(reversed(range(LENGTH // BLOCK)))
    slots = torch.tensor([table[p // BLOCK] * BLOCK + p % BLOCK for p in positions.tolist()])
    if not padding:
        return PagedBatch(positions, slots, (0, count), (table,))
    return PagedBatch(
        torch.cat((positions, torch.zeros(padding, dtype=torch.int64))),
        torch.cat((slots.long(), torch.full((padding,), -1))),
        (0, count, count + padding) if count else (0, padding),
        (table, (0,)) if count else ((0,),),
    )


def logits(state: State, ids: list[int], chunks: list[int], padded: int = 0) -> Tensor:
    """``[tokens, vocab]`` of a sequence computed in chunks, each pass padded to ``padded``."""
    found, at = [], 0
    for count in chunks:
        rest = max(0, padded - count)
        piece = torch.tensor(ids[at : at + count] + [0] * rest)
        out = state["model"].forward(piece, batch_of(at, count, rest), state["cache"])
        if count:
            found.append(state["model"].compute_logits(out.hidden[:count]))
        at += count
    return torch.cat(found) if found else torch.empty(0)


def taps(state: State, ids: list[int]) -> dict[int, Tensor]:
    depth = state["model"].kv_spec.layers
    out = state["model"].forward(
        torch.tensor(ids), batch_of(0, len(ids)), state["cache"], tuple(range(depth + 1))
    )
    return dict(out.taps)


def forget(state: State) -> None:
    """Makes `issued` begin here."""
    records = state["ledger"].ring().records
    state["seen"] = records[-1].sequence if records else -1


def issued(state: State) -> list[tuple[str, str, tuple[int, ...]]]:
    entries = [r.entry for r in state["ledger"].ring().records if r.sequence > state["seen"]]
    return [(entry.operation, entry.group, entry.shape) for entry in entries]


def count_pairs(state: State) -> None:
    """Counts (token, expert) pairs that this rank computes from here on."""
    inner, state["pairs"] = state["ops"].inner, 0
    plain = inner.expert_outputs

    def counted(x: Tensor, routing: Any, experts: Any) -> Tensor:
        state["pairs"] += routing.experts.numel()
        out: Tensor = plain(x, routing, experts)
        return out

    inner.expert_outputs = counted


def pairs(state: State) -> int:
    return int(state["pairs"])


def told(state: State, path: str, size: int) -> list[tuple[str, str, tuple[Any, ...]]]:
    """What the traits say of one pass of ``size`` tokens and its logits."""
    comms = state["comms"]
    spans = Spans(tp=comms.tp.size, ep=1 if comms.ep is None else comms.ep.size)
    traits = model_traits(open_checkpoint(path).config, spans)
    entries = [entry.at(size) for entry in (*traits.body, *traits.logits)]
    return [(entry.operation, entry.group, entry.shape) for entry in entries]


def use_fused(state: State, on: bool) -> bool:
    """Whether layers run in one call, where that is there; tells whether it was on."""
    ops = state["ops"]
    before = ops._fused is not None and state["model"].stack.fused is not None
    if not on:
        ops._fused = None
    return before


def enter_embedding(state: State, ids: list[int]) -> None:
    state["x"] = state["ops"].embedding(torch.tensor(ids), state["model"].embedding)


def layers_alone(state: State) -> None:
    """The layers, whose sums nobody else makes."""
    x = state["x"]
    state["ops"].run_stack(x, state["model"].stack, batch_of(0, x.shape[0]), state["cache"])
