"""What several ranks mean in `resolve`, and the engine's door until it serves them."""

from __future__ import annotations

from typing import Any

import pytest

from drumline.config import (
    DrafterFacts,
    EngineConfig,
    MachineFacts,
    ModelFacts,
    Resolved,
    config_digest,
    resolve,
    startup_table,
)
from drumline.config.mesh import Mesh
from drumline.config.resolve_parallel import rank_bytes_per_token
from drumline.core.errors import ConfigError

GIB = 2**30


def model(**changes: Any) -> ModelFacts:
    facts: dict[str, Any] = {
        "model_type": "llama",
        "max_position_embeddings": 2048,
        "vocab_size": 49152,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "weight_bytes": GIB // 2,
    }
    return ModelFacts(**{**facts, **changes})


def run(
    facts: ModelFacts | None = None, drafter: DrafterFacts | None = None, **asked: Any
) -> Resolved:
    host = {"free_memory_bytes": 16 * GIB, "total_memory_bytes": 32 * GIB}
    host |= {"available_cores": 8, "physical_cores": 6, **asked.pop("host", {})}
    config = EngineConfig.from_kwargs(**asked)
    return resolve(config, facts or model(), MachineFacts(**host), drafter)


def refused(field: str, *args: Any, **asked: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        run(*args, **asked)
    assert caught.value.field == field
    return caught.value.problem


def test_one_rank_by_default() -> None:
    assert run().mesh == Mesh(1, 1, False)


def test_replicas_and_shards() -> None:
    found = run(data_parallel_size=2, tensor_parallel_size=3)
    assert found.mesh == Mesh(dp=2, tp=3)
    assert not found.mesh.agrees
    assert found.adjustments == ()


def test_heads_are_cut_by_their_groups() -> None:
    """SmolLM2's nine heads share three groups of keys: 2 and 3 ranks work, 4 do not."""
    for size in (1, 2, 3):
        assert run(tensor_parallel_size=size).mesh.tp == size
    problem = refused("tensor_parallel_size", tensor_parallel_size=4)
    assert problem == "the model's heads share 3 groups of keys and values; allowed: 1, 2, 3"
    latent = model(num_key_value_heads=1, num_attention_heads=4)
    assert run(latent, tensor_parallel_size=4).mesh.tp == 4
    whole = latent.kv_bytes_per_token("float32")  # each rank has the key that all heads share
    assert rank_bytes_per_token(latent, None, "float32", Mesh(tp=4)) == whole
    assert rank_bytes_per_token(model(), None, "float32", Mesh(tp=3)) * 3 == (
        model().kv_bytes_per_token("float32")
    )


def test_stages_are_refused_by_name() -> None:
    assert "not supported" in refused("pipeline_parallel_size", pipeline_parallel_size=2)


def test_experts_are_spread_where_there_are_any() -> None:
    moe = model(num_experts=4)
    found = run(moe, data_parallel_size=2, tensor_parallel_size=2, enable_expert_parallel=True)
    assert found.mesh == Mesh(2, 2, True)
    assert found.mesh.agrees
    assert not run(moe, data_parallel_size=2).mesh.agrees
    dense = run(data_parallel_size=2, enable_expert_parallel=True)
    (note,) = dense.adjustments
    assert (note.field, note.asked, note.used) == ("enable_expert_parallel", True, False)
    assert dense.config.parallel.enable_expert_parallel is False
    refused("strict_config", enable_expert_parallel=True, strict_config=True)


def test_ranks_share_cores_and_memory() -> None:
    """Six cores and the free memory are divided; each replica has weights of its own."""
    assert run().threads == 6
    assert [run(data_parallel_size=size).threads for size in (2, 4, 8)] == [3, 1, 1]
    found = run(data_parallel_size=2, tensor_parallel_size=2)
    assert found.threads == 1
    (reason,) = [c.reason for c in found.choices if c.field == "threads"]
    assert reason.endswith("shared by 4 ranks")
    assert run(data_parallel_size=2, threads=5).threads == 5
    tight = {"free_memory_bytes": 3 * GIB, "total_memory_bytes": 3 * GIB}
    alone, two = (run(data_parallel_size=n, host=tight) for n in (1, 2))
    assert alone.kv_cache_bytes <= (3 * GIB - GIB // 2) * 40 // 100
    assert two.kv_cache_bytes <= 2 * GIB // 2 * 40 // 100 < alone.kv_cache_bytes
    (reason,) = [c.reason for c in two.choices if c.field == "kv_cache_memory_bytes"]
    assert "for each of 2 ranks" in reason


def test_a_shard_holds_its_share_of_the_cache() -> None:
    """The rank with two of three groups needs two thirds of the bytes for each token."""
    whole, cut = run(), run(tensor_parallel_size=2)
    assert cut.num_kv_blocks == whole.num_kv_blocks
    assert cut.kv_cache_bytes * 3 == whole.kv_cache_bytes * 2
    third = run(tensor_parallel_size=3, kv_cache_memory_bytes=2**26)
    one = run(kv_cache_memory_bytes=2**26)
    assert third.num_kv_blocks == 3 * one.num_kv_blocks


def test_who_shares_the_drafter() -> None:
    spec = {"method": "mtp", "num_speculative_tokens": 2}
    facts = DrafterFacts(method="mtp", layers=1, kv_heads=3, head_dim=64)
    name = "speculative_config.draft_tensor_parallel_size"

    def cut(tp: int, shards: int, drafter: DrafterFacts = facts) -> str | Resolved:
        asked = {**spec, "draft_tensor_parallel_size": shards}
        try:
            return run(None, drafter, tensor_parallel_size=tp, speculative_config=asked)
        except ConfigError as error:
            assert error.field == name
            return error.problem

    for tp, shards in ((1, 1), (3, 1), (3, 3)):
        found = cut(tp, shards)
        assert isinstance(found, Resolved)
        assert found.speculation is not None
        assert found.speculation.draft_tensor_parallel_size == shards
    assert cut(3, 2) == "must be 1 or 3, with tensor_parallel_size=3"
    assert cut(1, 2) == "must be 1, with tensor_parallel_size=1"
    small = DrafterFacts(method="mtp", layers=1, kv_heads=2, head_dim=64)
    assert "the drafter's heads share 2 groups" in str(cut(3, 3, small))


def test_ranks_configured_otherwise_have_other_digests() -> None:
    moe = model(num_experts=4)
    asked: list[dict[str, Any]] = [
        {},
        {"data_parallel_size": 2},
        {"data_parallel_size": 2, "enable_expert_parallel": True},
        {"tensor_parallel_size": 2},
    ]
    digests = {config_digest(run(moe, **one)) for one in asked}
    assert len(digests) == len(asked)
    rows = {name: value for name, value, _ in startup_table(run(data_parallel_size=2))}
    assert rows["data_parallel_size"] == "2"
