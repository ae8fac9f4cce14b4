"""Replicas that a Ray cluster of two nodes starts give the tokens of one rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from drumline.core.errors import ConfigError
from drumline.engine.core import EngineCore
from drumline.engine.fleet_core import FleetCore
from drumline.engine.loading import load_core
from drumline.models import tiny_drafts
from parallel_engine.fleet import Job, bits, config, run

JOBS = [Job((3 + index, 5, 2), 5 + index) for index in range(6)]


@pytest.fixture
def cluster() -> Iterator[object]:
    """Two Ray nodes on this host, and this process as their driver."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        made.add_node(num_cpus=1)
        ray.init(address=made.address, log_to_driver=False, configure_logging=False)
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


@pytest.mark.slow
def test_two_nodes_of_a_ray_cluster(cluster: object, tiny_path: Callable[..., Path]) -> None:
    path = tiny_path("qwen3_moe", 30)
    tiny_drafts.add_mtp(path, 0)
    truth = bits(run(EngineCore.load(config(path)), JOBS))
    speculation = json.dumps({"method": "mtp", "num_speculative_tokens": 3})
    asked = config(
        path,
        data_parallel_size=2,
        enable_expert_parallel=True,
        data_parallel_backend="ray",
        speculative_config=speculation,
    )
    core = FleetCore.load(asked)
    try:
        outputs = run(core, JOBS)
        assert "node 1" in core.ranks.where(1)
    finally:
        core.close()
    assert bits(outputs) == truth
    assert {out.replica for out in outputs} == {0, 1}


def test_one_replica_needs_no_cluster(tiny_path: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="data_parallel_backend='ray': one replica needs no"):
        load_core(config(tiny_path(), data_parallel_backend="ray"))
