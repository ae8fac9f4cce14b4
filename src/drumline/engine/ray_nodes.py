"""Nodes of an engine on a Ray cluster: placed, started and ended by Ray actors.

An actor is a machine's share: it runs what ``serve --headless`` runs, so that ranks come to node 0
and compute as on any other machines; Ray carries no tensor and no plan. The driver is node 0. Needs
the extra ``ray``.
"""

from __future__ import annotations

import contextlib
import socket
from typing import Any

from drumline.config import EngineConfig
from drumline.core.errors import ConfigError


class RayNodes:
    """One actor for each machine but the driver's. ``config``: the asked one, with the meeting
    place filled in; all machines are configured by it."""

    def __init__(self, asked: EngineConfig) -> None:
        try:
            import ray
        except ImportError:
            problem = "needs Ray: install the extra, drumline[ray]"
            raise ConfigError("data_parallel_backend", "ray", problem) from None
        self._ray: Any = ray
        self._owns = not self._ray.is_initialized()
        if self._owns:
            self._ray.init(log_to_driver=False, include_dashboard=False, configure_logging=False)
        self._actors: list[Any] = []
        try:
            self.config = self._placed(asked)
        except BaseException:
            self.close()
            raise

    def _placed(self, asked: EngineConfig) -> EngineConfig:
        """With as many machines as Ray has, at most one for each replica."""
        parallel = asked.parallel
        dp, local = parallel.data_parallel_size, parallel.data_parallel_size_local
        alive = len([node for node in self._ray.nodes() if node["Alive"]])
        count = parallel.nnodes if parallel.nnodes > 1 else dp // local if local else min(dp, alive)
        if dp % count:
            problem = f"{count} machines of the Ray cluster cannot hold {dp} replicas evenly"
            raise ConfigError("data_parallel_size", dp, problem)
        port, control = _free_ports(2)
        return asked.with_fields(
            nnodes=count,
            data_parallel_size_local=dp // count,
            master_addr=parallel.master_addr or self._ray.util.get_node_ip_address(),
            master_port=port,
            data_parallel_rpc_port=control,
        )

    def start(self) -> None:
        """Places one actor on each machine but this one, as far as there are others."""
        ray = self._ray
        here = ray.get_runtime_context().get_node_id()
        others = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        others = [node for node in others if node != here] or [here]
        affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        for rank in range(1, self.config.parallel.nnodes):
            place = affinity(others[(rank - 1) % len(others)], soft=False)
            actor = ray.remote(num_cpus=0, scheduling_strategy=place)(_Node).remote()
            own = self.config.with_fields(node_rank=rank, headless=True, data_parallel_backend="mp")
            actor.serve.remote(own.flat())
            self._actors.append(actor)

    def close(self) -> None:
        """Ends the actors, and Ray where it was begun here."""
        for actor in self._actors:
            with contextlib.suppress(Exception):
                self._ray.kill(actor)
        self._actors.clear()
        if self._owns:
            self._owns = False
            self._ray.shutdown()


class _Node:
    """The actor."""

    def serve(self, fields: dict[str, Any]) -> int:
        from drumline.engine.node import serve_node

        return serve_node(EngineConfig.from_kwargs(**fields))


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("", 0))
        return [probe.getsockname()[1] for probe in probes]
