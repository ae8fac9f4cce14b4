"""drumline: LLM inference and serving whose output does not depend on how it was batched.

The public surface is `__all__`. Names load on first use, so that ``import drumline`` costs
milliseconds and no torch.

>>> from drumline import LLM, SamplingParams
>>> outputs = LLM(model="smollm2").generate(["Hello"], SamplingParams(max_tokens=8))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from drumline._version import __version__

if TYPE_CHECKING:
    from drumline.config import EngineConfig as EngineConfig
    from drumline.core.errors import CheckpointError as CheckpointError
    from drumline.core.errors import ConfigError as ConfigError
    from drumline.core.errors import DeadlineExceeded as DeadlineExceeded
    from drumline.core.errors import DrumlineError as DrumlineError
    from drumline.core.errors import EngineDead as EngineDead
    from drumline.core.errors import EngineError as EngineError
    from drumline.core.errors import PromptTooLong as PromptTooLong
    from drumline.core.errors import Refused as Refused
    from drumline.core.errors import RequestError as RequestError
    from drumline.core.errors import UsageError as UsageError
    from drumline.core.params import SamplingParams as SamplingParams
    from drumline.engine.llm import LLM as LLM
    from drumline.engine.outputs import CompletionOutput as CompletionOutput
    from drumline.engine.outputs import RequestOutput as RequestOutput

_HOME = {
    "LLM": "drumline.engine.llm",
    "CheckpointError": "drumline.core.errors",
    "CompletionOutput": "drumline.engine.outputs",
    "ConfigError": "drumline.core.errors",
    "DeadlineExceeded": "drumline.core.errors",
    "DrumlineError": "drumline.core.errors",
    "EngineConfig": "drumline.config",
    "EngineDead": "drumline.core.errors",
    "EngineError": "drumline.core.errors",
    "PromptTooLong": "drumline.core.errors",
    "Refused": "drumline.core.errors",
    "RequestError": "drumline.core.errors",
    "RequestOutput": "drumline.engine.outputs",
    "SamplingParams": "drumline.core.params",
    "UsageError": "drumline.core.errors",
}

__all__ = [
    "LLM",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "DeadlineExceeded",
    "DrumlineError",
    "EngineConfig",
    "EngineDead",
    "EngineError",
    "PromptTooLong",
    "Refused",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "UsageError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
