"""`EngineConfig`: what was asked for, as one frozen value made of parts.

It can be made from the parts, from Python arguments, or from everything a command line has. It
checks each field and remembers which ones were asked for, so that `resolve` can tell a choice from
an adjustment. It knows no model and no machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

from drumline.config.parts import (
    FIELDS,
    PARTS,
    CacheConfig,
    ModelConfig,
    ParallelConfig,
    RuntimeConfig,
    SchedulerConfig,
    ServerConfig,
    SpeculativePart,
)
from drumline.config.sources import Given, collect
from drumline.config.speculative import PREFIX, SHORTCUTS, SpeculativeConfig, asked_keys
from drumline.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything a person can set about the engine and its server.

    ``sources`` maps the fields that were asked for to where: a flag, a variable, a file. Equality
    compares the parts only. Raises `ConfigError` naming the field, its value and what is allowed.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    speculative: SpeculativePart = field(default_factory=SpeculativePart)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        for part, cls in PARTS.items():
            value = getattr(self, part)
            if type(value) is not cls:
                raise ConfigError(part, value, f"must be a {cls.__name__}")
        block = self.cache.block_size
        if block & (block - 1):
            raise ConfigError("block_size", block, "must be a power of two from 1 to 256")
        _ = self.speculation  # read once here, so that a mistake shows before anything is loaded

    @property
    def device(self) -> str:
        """What is computed on; it also says who drafts where that is left open."""
        device = self.runtime.device
        return "cpu" if device == "auto" else device

    @property
    def speculation_keys(self) -> dict[str, Any] | None:
        """The keys asked of speculation, shortcuts included, as typed; None: no speculation."""
        text = self.speculative.speculative_config
        shortcuts = {name: getattr(self.speculative, name) for name in SHORTCUTS}
        return asked_keys(None if text is None else json.loads(text), shortcuts)

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """Who drafts and how, read from the speculative part; None: nobody."""
        keys = self.speculation_keys
        if keys is None:
            return None
        try:
            return SpeculativeConfig.from_mapping(keys)
        except ConfigError as error:
            for shortcut, key in SHORTCUTS.items():  # name what was typed
                if error.field == PREFIX + key and getattr(self.speculative, shortcut) is not None:
                    raise ConfigError(shortcut, error.value, error.problem) from None
            raise

    @classmethod
    def from_sources(
        cls, cli: Mapping[str, Any], env: Mapping[str, str], file: Path | None = None
    ) -> Self:
        """From flags (texts by field name), environment variables and a YAML file.

        The command line wins over the environment, the environment over the file, the file over
        the defaults.
        """
        return cls._from_given(collect(cli, env, file))

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> Self:
        """From Python arguments by field name, as ``LLM(...)`` takes them. No environment."""
        return cls._from_given(collect(kwargs, {}, None, words="argument"))

    @classmethod
    def _from_given(cls, given: Given) -> Self:
        by_part: dict[str, dict[str, Any]] = {part: {} for part in PARTS}
        for name, (value, _) in given.items():
            by_part[FIELDS[name].part][name] = value
        parts: dict[str, Any] = {part: PARTS[part](**values) for part, values in by_part.items()}
        sources = {name: source for name, (_, source) in given.items()}
        return cls(**parts, sources=sources)

    def flat(self) -> dict[str, Any]:
        """Every field by name, as declared. `from_kwargs` makes an equal config of it."""
        return {name: self.get(name) for name in FIELDS}

    def get(self, name: str) -> Any:
        """One field by its flat name."""
        return getattr(getattr(self, FIELDS[name].part), name)

    @staticmethod
    def server_fields() -> frozenset[str]:
        """Names of the fields that concern the HTTP server alone."""
        return frozenset(name for name, spec in FIELDS.items() if spec.part == "server")

    def with_fields(self, **values: Any) -> Self:
        """A copy with some fields replaced, ``sources`` as they were."""
        changed: dict[str, Any] = {}
        for part in PARTS:
            own = {name: value for name, value in values.items() if FIELDS[name].part == part}
            if own:
                changed[part] = replace(getattr(self, part), **own)
        return replace(self, **changed)


assert {spec.name for spec in fields(EngineConfig)} == {*PARTS, "sources"}
