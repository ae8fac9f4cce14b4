"""The parallel part of `resolve`: which mesh runs, and what a rank of it may take of the machine.

Pure, like the whole pass; called by `resolve` and by nobody else.
All ranks are taken to share one machine, so its free memory and its cores are divided by them.
"""

from __future__ import annotations

from drumline.config.engine_config import EngineConfig
from drumline.config.facts import DrafterFacts, ModelFacts
from drumline.config.machine import MachineFacts
from drumline.config.mesh import Mesh
from drumline.config.notes import Notes
from drumline.config.speculative import PREFIX, SpeculativeConfig
from drumline.core.errors import ConfigError


def resolve_mesh(asked: EngineConfig, model: ModelFacts, notes: Notes) -> Mesh:
    """The mesh that runs; sizes that the model cannot be cut into are refused by name."""
    parallel = asked.parallel
    stages = parallel.pipeline_parallel_size
    if stages > 1:
        problem = "not supported: layers are not cut into stages; use tensor_parallel_size"
        raise ConfigError("pipeline_parallel_size", stages, problem)
    tp, groups = parallel.tensor_parallel_size, model.attention_groups
    if tp > groups:
        sizes = ", ".join(map(str, range(1, groups + 1)))
        problem = f"the model's heads share {groups} groups of keys and values; allowed: {sizes}"
        raise ConfigError("tensor_parallel_size", tp, problem)
    experts = parallel.enable_expert_parallel
    if experts and not model.num_experts:
        reason = "the model has no experts; its replicas are independent"
        experts = notes.adjust("enable_expert_parallel", True, False, reason)
    return Mesh(parallel.data_parallel_size, tp, experts)


def check_drafter_shards(spec: SpeculativeConfig, drafter: DrafterFacts, mesh: Mesh) -> None:
    """Ranks that share the drafter: one, or all that share the target's layers."""
    name, shards = PREFIX + "draft_tensor_parallel_size", spec.draft_tensor_parallel_size
    if shards not in (1, mesh.tp):
        allowed = "1" if mesh.tp == 1 else f"1 or {mesh.tp}"
        problem = f"must be {allowed}, with tensor_parallel_size={mesh.tp}"
        raise ConfigError(name, shards, problem)
    if shards > 1 and drafter.kv_heads and shards > drafter.kv_heads:
        groups = f"the drafter's heads share {drafter.kv_heads} groups of keys and values"
        raise ConfigError(name, shards, f"must be 1: {groups}")


def without_dynamic_length(
    spec: SpeculativeConfig, mesh: Mesh, notes: Notes
) -> tuple[str, tuple[tuple[int, int, int], ...] | None]:
    """(draft_length, table) under ``dp_draft_length``.

    Replicas that agree keep both. The static policy drops what would let each choose for itself,
    as an adjustment that is one warning.
    """
    length, table = spec.draft_length, spec.num_speculative_tokens_per_batch_size
    if spec.dp_draft_length != "static":
        return length, table
    if mesh.dp == 1:
        reason = "speaks with data_parallel_size above 1; one replica has nobody to agree with"
        notes.choose(PREFIX + "dp_draft_length", "static", reason)
        return length, table
    if length == "static":
        return length, table
    reason = (
        "data parallelism does not support a dynamic draft length with dp_draft_length=static; "
        f"every step drafts num_speculative_tokens={spec.num_speculative_tokens}"
    )
    if table is None:
        notes.adjust(PREFIX + "draft_length", length, "static", reason)
    else:
        name = PREFIX + "num_speculative_tokens_per_batch_size"
        notes.adjust(name, [list(entry) for entry in table], None, reason)
        notes.choose(PREFIX + "draft_length", "static", "the table is not used")
    return "static", None


def rank_bytes_per_token(
    model: ModelFacts, drafter: DrafterFacts | None, kv_dtype: str, mesh: Mesh
) -> int:
    """Bytes one token takes in the cache of the rank that holds most of it; a drafter's are taken
    to be whole on each rank, and so is a latent key that all heads share."""
    groups = model.num_key_value_heads
    share = -(-groups // mesh.tp)
    own = -(-model.kv_bytes_per_token(kv_dtype) * share // groups)
    return own if drafter is None else own + drafter.kv_bytes_per_token(kv_dtype)


def free_rank_bytes(
    machine: MachineFacts, model: ModelFacts, drafter: DrafterFacts | None, mesh: Mesh
) -> tuple[int, str]:
    """Bytes free for each rank once all weights are there, and the words for what is divided.
    Every replica has weights of its own, every rank a drafter."""
    free = machine.free_memory_bytes - model.weight_bytes * mesh.dp
    if drafter is not None:
        free -= drafter.weight_bytes * mesh.size
    ranks = "" if mesh.size == 1 else f" for each of {mesh.size} ranks"
    return max(0, free) // mesh.size, ranks
