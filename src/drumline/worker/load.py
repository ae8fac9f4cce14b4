"""From a resolved configuration and an opened checkpoint to a worker that is warm."""

from __future__ import annotations

import time

import torch

from drumline.config import Resolved
from drumline.drafting.base import TargetModel
from drumline.models.checkpoint import Checkpoint
from drumline.models.registry import model_module
from drumline.ops import load_ops
from drumline.ops.base import PagedBatch
from drumline.sampling.accept import Verifier
from drumline.sampling.sampler import Sampler
from drumline.worker.worker import Worker

WARMUP_TOKENS = 32


def load_worker(resolved: Resolved, checkpoint: Checkpoint) -> Worker:
    """Loads weights and allocates the cache, ``resolved.kv_cache_bytes`` of it."""
    torch.set_num_threads(resolved.threads)
    ops = load_ops(resolved.ops_backend, resolved.device)
    with torch.inference_mode():
        module = model_module(checkpoint.config.model_type)
        model: TargetModel = module.Model(
            checkpoint.config, checkpoint.tensors, ops, resolved.max_model_len
        )
        spec = model.kv_spec
        cache = ops.allocate_kv(
            spec.layers,
            resolved.num_kv_blocks,
            resolved.block_size,
            spec.kv_heads,
            spec.head_dim,
            resolved.kv_cache_dtype,
        )
    sampler = Sampler(checkpoint.config.vocab_size, resolved.config.model.logprobs_mode)
    return Worker(model, ops, cache, Verifier(sampler))


def warm_up(worker: Worker, tokens: int = WARMUP_TOKENS) -> float:
    """Runs passes that write nothing, so that no request pays for first calls; returns the seconds
    that one token took in the second of them."""
    count = min(tokens, worker.cache.block_size)
    batch = PagedBatch(
        positions=torch.arange(count, device=worker.ops.device),
        slots=torch.full((count,), -1, dtype=torch.int64, device=worker.ops.device),
        query_start=(0, count),
        block_tables=((0,),),
    )
    ids = torch.zeros(count, dtype=torch.int64, device=worker.ops.device)
    seconds = 0.0
    with torch.inference_mode():
        for _ in range(2):
            began = time.monotonic()
            output = worker.model.forward(ids, batch, worker.cache)
            worker.model.compute_logits(output.hidden[-1:])
            seconds = time.monotonic() - began
    return seconds / count
