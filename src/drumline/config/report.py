"""What is shown of a resolved configuration, and what is compared between ranks.

Reads values; decides none. Which process prints or exchanges them is not known here.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import asdict
from typing import Any

from drumline._version import __version__
from drumline.config.notes import Adjustment
from drumline.config.resolve import Resolved
from drumline.config.sizes import format_bytes
from drumline.config.speculative import PREFIX, SHORTCUTS

# Fields that may differ between ranks that share collectives, or that concern the host alone.
_LOCAL_FIELDS = frozenset(
    {"threads", "kv_cache_memory_bytes", "strict_config", "node_rank", "headless"}
    | {"data_parallel_backend"}
)

# Told key by key, as `SpeculativeConfig` has them.
_SPOKEN_FOR = frozenset({"speculative_config", *SHORTCUTS})


def startup_table(resolved: Resolved) -> list[tuple[str, str, str]]:
    """(name, value, reason) for every engine field and the facts behind them, ready to print.

    The server's fields are not in it, and no secret is.
    """
    chosen = {choice.field: choice.reason for choice in resolved.choices}
    adjusted = {note.field: note for note in resolved.adjustments}
    rows: list[tuple[str, str, str]] = []
    for name, value in resolved.config.flat().items():
        if name in resolved.config.server_fields() or name in _SPOKEN_FOR:
            continue
        if name in adjusted:
            reason = f"adjusted from {adjusted[name].asked}: {adjusted[name].reason}"
        else:
            source = resolved.config.sources.get(name)
            reason = chosen.get(name) or (f"asked ({source})" if source else "default")
        rows.append((name, _shown(name, value), reason))
    rows += _speculation(resolved, chosen, adjusted)
    rows += [
        (note.field, str(note.used), f"adjusted: {note.reason}")
        for note in resolved.adjustments
        if note.field not in resolved.config.flat() and not note.field.startswith(PREFIX)
    ]
    return rows + _facts(resolved)


def log_adjustments(resolved: Resolved, logger: logging.Logger) -> None:
    """One warning for each value that was asked for and runs differently, with its reason."""
    for adjustment in resolved.adjustments:
        logger.warning("%s", adjustment)


def digest_number(digest: str) -> int:
    """The first 63 bits of a `config_digest`, as ranks tell it to each other before a step."""
    return int(digest[:16], 16) >> 1


def _speculation(
    resolved: Resolved, chosen: dict[str, str], adjusted: dict[str, Adjustment]
) -> list[tuple[str, str, str]]:
    """A row for every key that means something to the method."""
    if resolved.speculation is None:
        return [("speculative_config", "none", "off")]
    rows = []
    asked = resolved.asked_keys
    for key, value in resolved.speculation.to_mapping().items():
        name = PREFIX + key
        reason = chosen.get(name) or ("asked" if key in asked else "default")
        if name in adjusted:
            reason = f"adjusted from {adjusted[name].asked}: {adjusted[name].reason}"
        rows.append((name, _shown(name, value), reason))
    return rows


def _facts(resolved: Resolved) -> list[tuple[str, str, str]]:
    model, machine = resolved.model, resolved.machine
    tokens = resolved.num_kv_blocks * resolved.block_size
    features = " ".join(machine.cpu_features) or "none known"
    native = "built" if machine.native_module else "not built"
    return [
        ("kv_blocks", str(resolved.num_kv_blocks), f"{tokens} tokens in the cache"),
        ("weights", format_bytes(model.weight_bytes), f"{model.model_type}, as loaded"),
        *_drafter(resolved),
        ("processor", machine.cpu_model, f"{features}; native module {native}"),
    ]


def _drafter(resolved: Resolved) -> list[tuple[str, str, str]]:
    drafter = resolved.drafter
    if drafter is None or not drafter.weight_bytes:
        return []
    return [("drafter_weights", format_bytes(drafter.weight_bytes), f"{drafter.method}, as loaded")]


def _shown(name: str, value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if name.endswith("_bytes"):
        return format_bytes(value)
    return str(value)


def config_digest(resolved: Resolved) -> str:
    """64 hexadecimal digits that are equal where two ranks would compute the same.

    It covers the version, the model's facts and every field, except what concerns the host alone:
    the server's part, thread counts and cache capacity.
    """
    config = resolved.config
    local = _LOCAL_FIELDS | frozenset(config.server_fields())
    content = {
        "version": __version__,
        "model": asdict(resolved.model),
        "drafter": None if resolved.drafter is None else asdict(resolved.drafter),
        "fields": {name: value for name, value in config.flat().items() if name not in local},
    }
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
