"""Several machines: which of them runs which replicas, and where they meet.

    node 0     the front end, and the first replicas      listens at master_addr
    node 1 …   ``serve --headless``: replicas alone       come to it

All ranks of a replica are on one machine, and all machines hold equally many replicas. Ranks meet
at ``master_port`` (torch.distributed), nodes at the port after it, or ``data_parallel_rpc_port``.
Pure; opens no socket.
"""

from __future__ import annotations

from dataclasses import dataclass

from drumline.config import EngineConfig
from drumline.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Nodes:
    """``own`` of ``count`` machines, with ``replicas`` of ``tp`` ranks each."""

    count: int
    own: int
    replicas: int
    tp: int
    address: str = ""
    port: int = 0
    control_port: int = 0

    def ranks(self, node: int) -> range:
        size = self.replicas * self.tp
        return range(node * size, (node + 1) * size)

    def node_of(self, rank: int) -> int:
        return rank // (self.replicas * self.tp)


def nodes_of(config: EngineConfig) -> Nodes:
    """The machines that a configuration speaks of; one, where it names none."""
    parallel = config.parallel
    dp, tp, local = (
        parallel.data_parallel_size,
        parallel.tensor_parallel_size,
        parallel.data_parallel_size_local,
    )
    count = parallel.nnodes
    if count == 1 and local is not None and local < dp:
        count = dp // local
    replicas = dp // count if local is None else local
    if replicas * count != dp or not replicas:
        name, value = ("nnodes", count) if local is None else ("data_parallel_size_local", local)
        problem = f"{count} machines cannot hold {dp} replicas evenly"
        raise ConfigError(name, value, problem)
    if parallel.data_parallel_backend == "ray" and dp == 1:
        raise ConfigError("data_parallel_backend", "ray", "one replica needs no cluster")
    if parallel.node_rank >= count:
        problem = f"the last of {count} machines is {count - 1}"
        raise ConfigError("node_rank", parallel.node_rank, problem)
    if parallel.headless != (parallel.node_rank > 0):
        problem = "node 0 has the front end, and every other node is headless"
        raise ConfigError("headless", parallel.headless, problem)
    if count == 1:
        return Nodes(1, 0, replicas, tp)
    address = _address(config)
    control = parallel.data_parallel_rpc_port or parallel.master_port + 1
    if control == parallel.master_port:
        problem = "ranks meet at master_port; another port is needed"
        raise ConfigError("data_parallel_rpc_port", control, problem)
    return Nodes(count, parallel.node_rank, replicas, tp, address, parallel.master_port, control)


def _address(config: EngineConfig) -> str:
    given = (config.parallel.master_addr, config.parallel.data_parallel_address)
    found = sorted({address for address in given if address})
    if len(found) > 1:
        raise ConfigError("data_parallel_address", given[1], f"master_addr is {given[0]}")
    if not found:
        raise ConfigError("master_addr", None, "several machines need the address of node 0")
    return found[0]
