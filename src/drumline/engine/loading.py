"""One door to an engine, of one rank or of several: both have the same surface."""

from __future__ import annotations

from drumline.config import EngineConfig
from drumline.engine.core import EngineCore
from drumline.engine.fleet_core import FleetCore
from drumline.fleet.nodes import nodes_of

Core = EngineCore | FleetCore


def load_core(config: EngineConfig) -> Core:
    """Loads the model on one rank here, or starts the ranks that are asked for. Raises
    `UsageError` for what cannot be had."""
    nodes_of(config)  # refuses what does not fit together, with one rank too
    parallel = config.parallel
    if parallel.data_parallel_size * parallel.tensor_parallel_size > 1:
        return FleetCore.load(config)
    return EngineCore.load(config)
