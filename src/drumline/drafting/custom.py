"""A drafter of the user's own: ``{"method": "custom_class", "model": "package.module.Class"}``.

The class is made as ``Class(speculative, context)``: the resolved speculative config and the
`DrafterContext`. It needs `propose` and `traits`; `taps`, `forget` and `close` have a default. A
class method ``facts(speculative, checkpoint)`` says what the cache must make room for, if there is
anything. What it returns is checked in every step by the worker, like any drafter's. A whole one
is in ``docs/custom-drafter.md``.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from drumline.core.errors import ConfigError
from drumline.core.traits import DrafterTraits
from drumline.drafting.base import Drafter, DrafterContext, DraftRow, Proposal
from drumline.models.checkpoint import Checkpoint
from drumline.models.layers import ModelOutput

KEY = "speculative_config.model"


def facts(speculative: Any, checkpoint: Checkpoint) -> Mapping[str, Any]:
    ask = getattr(custom_class(speculative), "facts", None)
    if ask is None:
        return {}
    found: Mapping[str, Any] = ask(speculative, checkpoint)
    return found


def load(context: DrafterContext) -> Drafter:
    made = custom_class(context.speculative)
    try:
        return CustomDrafter(made(context.speculative, context))
    except ConfigError:
        raise
    except Exception as error:
        problem = f"cannot be made: {type(error).__name__}: {error}"
        raise ConfigError(KEY, context.speculative.model, problem) from error


def custom_class(speculative: Any) -> Any:
    """The class that ``model`` names as ``package.module.Class``. ConfigError names it and what is
    missing of it."""
    path = speculative.model
    module_name, _, class_name = str(path).rpartition(".")
    if not module_name:
        raise ConfigError(KEY, path, "not a dotted path like package.module.Class")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        problem = f"module {module_name} cannot be imported: {type(error).__name__}: {error}"
        raise ConfigError(KEY, path, problem) from error
    found = getattr(module, class_name, None)
    if found is None:
        raise ConfigError(KEY, path, f"module {module_name} has no {class_name}")
    if not callable(getattr(found, "propose", None)):
        raise ConfigError(KEY, path, "has no method propose(rows, output, draft_k)")
    return found


class CustomDrafter:
    """The user's drafter with defaults for what it leaves out."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        traits = getattr(inner, "traits", None)
        if not isinstance(traits, DrafterTraits):
            problem = "has no attribute traits of type drumline.core.traits.DrafterTraits"
            raise ConfigError(KEY, type(inner).__qualname__, problem)
        self.traits = traits
        self.taps: tuple[int, ...] = tuple(getattr(inner, "taps", ()))

    def propose(
        self, rows: Sequence[DraftRow], output: ModelOutput | None, draft_k: int
    ) -> Proposal:
        found: Proposal = self.inner.propose(rows, output, draft_k)
        return found

    def forget(self, number: int) -> None:
        if hasattr(self.inner, "forget"):
            self.inner.forget(number)

    def close(self) -> None:
        if hasattr(self.inner, "close"):
            self.inner.close()
