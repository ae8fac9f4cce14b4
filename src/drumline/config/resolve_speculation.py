"""The drafter's share of `resolve`: what only checkpoints, limits and ranks can say.

Pure, like the whole pass; called by `resolve` and by nobody else.
"""

from __future__ import annotations

from dataclasses import replace

from drumline.config.draft_table import clamp_table
from drumline.config.engine_config import EngineConfig
from drumline.config.facts import DrafterFacts
from drumline.config.mesh import Mesh
from drumline.config.notes import Notes
from drumline.config.resolve_parallel import check_drafter_shards, without_dynamic_length
from drumline.config.speculative import PREFIX, TOKENS_MAX, SpeculativeConfig
from drumline.config.speculative_methods import AUTO
from drumline.core.errors import ConfigError


def resolve_tokens(
    asked: EngineConfig, drafter: DrafterFacts | None, mesh: Mesh, notes: Notes
) -> SpeculativeConfig | None:
    """The asked speculation with its draft length; the drafter's range still waits for L."""
    spec = asked.speculation
    if spec is None:
        assert drafter is None, "a drafter nobody asked for"
        return None
    assert drafter is not None, "speculation was asked for; its drafter's facts are missing"
    if spec.method == AUTO:
        spec = _settled(asked, spec, drafter, mesh, notes)
    else:
        spec = _method(asked, spec, drafter, notes)
    count = spec.num_speculative_tokens
    if count is None:
        count = _default_count(spec, drafter, notes)
    if drafter.tokens_max is not None and count > drafter.tokens_max:
        problem = f"the {drafter.method} checkpoint drafts at most {drafter.tokens_max} at once"
        raise ConfigError(PREFIX + "num_speculative_tokens", count, problem)
    missed = spec.lookup_miss_tokens
    if missed is not None and missed > count:
        problem = f"must be at most num_speculative_tokens={count}"
        raise ConfigError(PREFIX + "lookup_miss_tokens", missed, problem)
    table = spec.num_speculative_tokens_per_batch_size
    if table is not None and (clamped := clamp_table(table, count)) != table:
        reason = f"num_speculative_tokens={count} is the most"
        name = PREFIX + "num_speculative_tokens_per_batch_size"
        notes.adjust(name, _listed(table), _listed(clamped), reason)
        table = clamped
    check_drafter_shards(spec, drafter, mesh)
    spec = replace(spec, num_speculative_tokens=count, num_speculative_tokens_per_batch_size=table)
    length, table = without_dynamic_length(spec, mesh, notes)
    return replace(spec, draft_length=length, num_speculative_tokens_per_batch_size=table)


def resolve_range(
    spec: SpeculativeConfig, drafter: DrafterFacts, length: int, notes: Notes
) -> SpeculativeConfig:
    """The positions the drafter is used for, given requests of at most ``length`` tokens."""
    name, asked, own = PREFIX + "max_model_len", spec.max_model_len, drafter.positions_max
    if asked is not None and asked > length:
        raise ConfigError(name, asked, f"must be at most the target's max_model_len={length}")
    if asked is not None and own is not None and asked > own:
        raise ConfigError(name, asked, f"the drafter covers at most {own} positions")
    limit = min([length, *(bound for bound in (asked, own) if bound is not None)])
    if limit < length:
        whose = "asked for" if asked is not None else "what the drafter covers"
        reason = f"{whose}; requests may have max_model_len={length} and go on without drafts"
        notes.choose(name, limit, reason)
    elif asked is None:
        notes.choose(name, limit, f"max_model_len={length}")
    return replace(spec, max_model_len=limit)


def resolve_prefix_caching(
    asked: EngineConfig, spec: SpeculativeConfig | None, notes: Notes
) -> bool:
    """Whether requests may start from cached prefixes: a file of hidden states has every row."""
    caching = asked.cache.enable_prefix_caching
    if not caching or spec is None or spec.method != "extract_hidden_states":
        return caching
    reason = "extract_hidden_states writes a row for every position, so every one is computed"
    return bool(notes.adjust("enable_prefix_caching", True, False, reason))


def _settled(
    asked: EngineConfig, spec: SpeculativeConfig, drafter: DrafterFacts, mesh: Mesh, notes: Notes
) -> SpeculativeConfig:
    """The config of the drafter that was chosen for auto, with what auto fills in."""
    keys = asked.speculation_keys or {}
    adapts = mesh.dp == 1 or spec.dp_draft_length != "static"
    if spec.draft_length == "adaptive" and keys.get("draft_length") is None and not adapts:
        spec = replace(spec, draft_length="static")
    found = spec.settled(drafter.method, asked.device)
    notes.choose(PREFIX + "method", drafter.method, drafter.reason)
    lookup = ("prompt_lookup_min", "prompt_lookup_max", "lookup_miss_tokens")
    for name in ("num_speculative_tokens", "draft_length", *lookup):
        if keys.get(name) is None and getattr(found, name) is not None:
            notes.choose(PREFIX + name, getattr(found, name), "what method auto takes")
    return found


def _method(
    asked: EngineConfig, spec: SpeculativeConfig, drafter: DrafterFacts, notes: Notes
) -> SpeculativeConfig:
    keys = dict(asked.speculation_keys or {})
    if drafter.method == spec.method:
        if keys.get("method") is None:
            notes.choose(PREFIX + "method", spec.method, "told by the model's name")
        return spec
    if keys.get("method") is not None:
        problem = f"the draft checkpoint is one for {drafter.method}"
        raise ConfigError(PREFIX + "method", spec.method, problem)
    notes.choose(PREFIX + "method", drafter.method, "the draft checkpoint says so")
    return SpeculativeConfig.from_mapping({**keys, "method": drafter.method})


def _default_count(spec: SpeculativeConfig, drafter: DrafterFacts, notes: Notes) -> int:
    name = PREFIX + "num_speculative_tokens"
    if drafter.default_tokens is not None:
        return int(notes.choose(name, drafter.default_tokens, "stated by the draft checkpoint"))
    if spec.method == "suffix":
        depth = spec.suffix_decoding_max_tree_depth
        return int(notes.choose(name, min(depth, TOKENS_MAX), "suffix_decoding_max_tree_depth"))
    raise ConfigError(name, None, f"must be given: method {spec.method} states no draft length")


def _listed(table: tuple[tuple[int, int, int], ...]) -> list[list[int]]:
    return [list(entry) for entry in table]
