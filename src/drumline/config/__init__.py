"""What was asked for, and what runs: configuration as frozen values.

    flags, variables, file ──► EngineConfig ──► resolve ──► Resolved, with reasons
                                 ModelFacts ──►   ▲
                                              MachineFacts

Every field is declared once, in `parts`; everything else here is derived from that table. This
room imports in milliseconds. It refuses to know torch, checkpoints and processes: facts about the
model and the machine come in as numbers.
"""

from drumline.config.engine_config import EngineConfig
from drumline.config.machine import MachineFacts, read_machine
from drumline.config.parts import (
    CacheConfig,
    ModelConfig,
    ParallelConfig,
    RuntimeConfig,
    SchedulerConfig,
    ServerConfig,
    SpeculativeConfig,
)
from drumline.config.resolve import (
    Adjustment,
    Choice,
    ModelFacts,
    Resolved,
    config_digest,
    resolve,
    startup_table,
)

__all__ = [
    "Adjustment",
    "CacheConfig",
    "Choice",
    "EngineConfig",
    "MachineFacts",
    "ModelConfig",
    "ModelFacts",
    "ParallelConfig",
    "Resolved",
    "RuntimeConfig",
    "SchedulerConfig",
    "ServerConfig",
    "SpeculativeConfig",
    "config_digest",
    "read_machine",
    "resolve",
    "startup_table",
]
