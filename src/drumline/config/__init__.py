"""What was asked for, and what runs: configuration as frozen values.

    flags, variables, file ──► EngineConfig ──► resolve ──► Resolved, with reasons
                    ModelFacts, DrafterFacts ──►   ▲
                                              MachineFacts

Every field is declared once, in `parts`; everything else here is derived from that table. This
room imports in milliseconds. It refuses to know torch, checkpoints and processes: facts about the
model and the machine come in as numbers.
"""

from drumline.config.engine_config import EngineConfig
from drumline.config.facts import DrafterFacts, ModelFacts
from drumline.config.machine import MachineFacts, read_machine
from drumline.config.notes import Adjustment, Choice
from drumline.config.parts import (
    CacheConfig,
    ModelConfig,
    ParallelConfig,
    RuntimeConfig,
    SchedulerConfig,
    ServerConfig,
    SpeculativePart,
)
from drumline.config.report import config_digest, startup_table
from drumline.config.resolve import Resolved, resolve
from drumline.config.speculative import SpeculativeConfig

__all__ = [
    "Adjustment",
    "CacheConfig",
    "Choice",
    "DrafterFacts",
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
    "SpeculativePart",
    "config_digest",
    "read_machine",
    "resolve",
    "startup_table",
]
