"""`resolve`: the one pure pass from what was asked to what runs.

    EngineConfig, ModelFacts, MachineFacts, DrafterFacts  ──►  Resolved

Every value that was left open is *chosen* with a reason; every value that was asked for and runs
differently is *adjusted* with a reason; what can be neither is refused, naming field and value.
Under ``strict_config`` an adjustment is refused too. Nothing is read and nothing is changed here:
equal inputs give equal results. Beyond this point there is no "auto" and no stray None.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from drumline.config.engine_config import EngineConfig
from drumline.config.facts import DrafterFacts, ModelFacts
from drumline.config.machine import MachineFacts
from drumline.config.mesh import Mesh
from drumline.config.notes import Adjustment, Choice, Notes
from drumline.config.resolve_parallel import (
    free_rank_bytes,
    rank_bytes_per_token,
    resolve_mesh,
)
from drumline.config.resolve_speculation import (
    resolve_prefix_caching,
    resolve_range,
    resolve_tokens,
)
from drumline.config.sizes import format_bytes
from drumline.config.speculative import SHORTCUTS, SpeculativeConfig
from drumline.core.errors import ConfigError

BATCHED_TOKENS_DEFAULT = 512
FREE_MEMORY_SHARE_PERCENT = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """What runs. ``config`` has every field filled; the fields below are the same values, typed.

    ``num_kv_blocks`` counts a replica's blocks of ``config.cache.block_size`` tokens;
    ``kv_cache_bytes`` is what they take on the rank that holds most, the drafter's own keys and
    values included. ``speculation`` is complete: its
    ``max_model_len`` is the number of positions the drafter is used for, at most the target's.
    """

    config: EngineConfig
    model: ModelFacts
    machine: MachineFacts
    device: str
    dtype: str
    kv_cache_dtype: str
    ops_backend: str
    threads: int
    max_model_len: int
    max_num_batched_tokens: int
    num_kv_blocks: int
    kv_cache_bytes: int
    mesh: Mesh
    speculation: SpeculativeConfig | None = None
    drafter: DrafterFacts | None = None
    asked_keys: tuple[str, ...] = ()  # keys of the speculative config that were asked for
    choices: tuple[Choice, ...] = ()
    adjustments: tuple[Adjustment, ...] = ()

    @property
    def max_num_seqs(self) -> int:
        """Most requests that run at once."""
        return self.config.scheduler.max_num_seqs

    @property
    def num_speculative_tokens(self) -> int:
        """Most drafts per request and step; 0 without speculation."""
        if self.speculation is None:
            return 0
        assert self.speculation.num_speculative_tokens is not None
        return self.speculation.num_speculative_tokens

    @property
    def block_size(self) -> int:
        """Tokens per cache block."""
        return self.config.cache.block_size


def resolve(
    asked: EngineConfig,
    model: ModelFacts,
    machine: MachineFacts,
    drafter: DrafterFacts | None = None,
) -> Resolved:
    """What runs when ``asked`` meets ``model`` on ``machine``; see the module's text.

    ``drafter`` goes with ``asked.speculation``: both or neither.

    Raises `ConfigError` naming the field and the value that cannot be had, and what can.
    """
    notes = Notes()
    mesh = resolve_mesh(asked, model, notes)
    device = asked.device
    if asked.runtime.device == "auto":
        notes.choose("device", device, "this release computes on the CPU")
    dtype = asked.model.dtype
    if dtype == "auto":
        dtype = notes.choose("dtype", "float32", "float32 is what the CPU ops compute in")
    backend = _ops_backend(asked, machine, notes)
    kv_dtype = _kv_cache_dtype(asked, dtype, backend, notes)
    threads = _threads(asked, machine, mesh, notes)
    spec = resolve_tokens(asked, drafter, mesh, notes)
    token_bytes = rank_bytes_per_token(model, drafter, kv_dtype, mesh)
    block_bytes = token_bytes * asked.cache.block_size
    free = free_rank_bytes(machine, model, drafter, mesh)
    length, blocks = _length_and_blocks(asked, model, free, block_bytes, notes)
    if spec is not None and drafter is not None:
        spec = resolve_range(spec, drafter, length, notes)
    batched = _batched_tokens(asked, length, spec, notes)
    _note_rope(model, length, notes)
    prefix_caching = resolve_prefix_caching(asked, spec, notes)
    _refuse_adjustments(asked, notes)
    budget = asked.cache.kv_cache_memory_bytes
    config = _with_speculation(asked, spec).with_fields(
        device=device,
        dtype=dtype,
        kv_cache_dtype=kv_dtype,
        ops_backend=backend,
        threads=threads,
        enable_expert_parallel=mesh.expert_parallel,
        max_model_len=length,
        max_num_batched_tokens=batched,
        enable_prefix_caching=prefix_caching,
        kv_cache_memory_bytes=blocks * block_bytes if budget is None else budget,
    )
    return Resolved(
        config=config,
        model=model,
        machine=machine,
        device=device,
        dtype=dtype,
        kv_cache_dtype=kv_dtype,
        ops_backend=backend,
        threads=threads,
        max_model_len=length,
        max_num_batched_tokens=batched,
        num_kv_blocks=blocks,
        kv_cache_bytes=blocks * block_bytes,
        mesh=mesh,
        speculation=spec,
        drafter=drafter,
        asked_keys=tuple(sorted(asked.speculation_keys or ())),
        choices=tuple(notes.choices),
        adjustments=tuple(notes.adjustments),
    )


def _with_speculation(asked: EngineConfig, spec: SpeculativeConfig | None) -> EngineConfig:
    """The same config with every key of its speculation filled in, and no shortcut."""
    if spec is None:
        return asked
    text = json.dumps(spec.to_mapping(), sort_keys=True, separators=(",", ":"))
    return asked.with_fields(speculative_config=text, **dict.fromkeys(SHORTCUTS))


def _refuse_adjustments(asked: EngineConfig, notes: Notes) -> None:
    if asked.runtime.strict_config and notes.adjustments:
        listed = "; ".join(str(adjustment) for adjustment in notes.adjustments)
        raise ConfigError("strict_config", True, f"these would be adjusted: {listed}")


def _kv_cache_dtype(asked: EngineConfig, dtype: str, backend: str, notes: Notes) -> str:
    stored: str = asked.cache.kv_cache_dtype
    if stored == "auto" and backend == "native" and asked.model.dtype == "auto":
        stored = notes.choose("kv_cache_dtype", "float16", "half of what native attention reads")
    elif stored == "auto":
        stored = notes.choose("kv_cache_dtype", dtype, "follows dtype")
    return stored


def _ops_backend(asked: EngineConfig, machine: MachineFacts, notes: Notes) -> str:
    backend = asked.runtime.ops_backend
    if machine.native_ops:
        reason = "compiled operations are there"
        return notes.choose("ops_backend", "native", reason) if backend == "auto" else backend
    reason = "the native module was not built"
    if backend == "auto":
        backend = notes.choose("ops_backend", "reference", reason)
    elif backend == "native":
        backend = notes.adjust("ops_backend", "native", "reference", reason)
    return backend


def _threads(asked: EngineConfig, machine: MachineFacts, mesh: Mesh, notes: Notes) -> int:
    if asked.runtime.threads is None:
        reason = f"physical cores among the {machine.available_cores} available"
        threads = machine.physical_cores
        if mesh.size > 1:
            reason = f"{reason}, shared by {mesh.size} ranks"
            threads = max(1, threads // mesh.size)
        return int(notes.choose("threads", threads, reason))
    if asked.runtime.threads > machine.available_cores:
        reason = f"only {machine.available_cores} processors are available to this process"
        return int(notes.adjust("threads", asked.runtime.threads, machine.available_cores, reason))
    return asked.runtime.threads


def _length_and_blocks(
    asked: EngineConfig,
    model: ModelFacts,
    free: tuple[int, str],
    block_bytes: int,
    notes: Notes,
) -> tuple[int, int]:
    """(max_model_len, cache blocks): a request of full length always fits the cache."""
    size = asked.cache.block_size
    length = asked.model.max_model_len
    if length is not None and length > model.longest:
        stretched = f" ({model.rope_type} rope scaling)" if model.rope_type != "default" else ""
        problem = f"the checkpoint covers at most {model.longest} tokens{stretched}"
        raise ConfigError("max_model_len", length, problem)
    wanted = length if length is not None else _natural_length(model)
    budget, words = _kv_budget(asked, *free)
    most = budget // block_bytes  # blocks that the budget pays for
    if most * size < (2 if length is None else length):
        _refuse_small_cache(asked, wanted, budget, words, block_bytes)
    if length is None:
        reason = "the checkpoint's length"
        if most * size < wanted:
            reason = f"what {words} holds; the checkpoint covers {wanted}"
        length = notes.choose("max_model_len", min(wanted, most * size), reason)
    needed = asked.scheduler.max_num_seqs * -(-length // size)
    if asked.cache.kv_cache_memory_bytes is not None:
        return length, most
    blocks = min(needed, most)
    reason = f"{asked.scheduler.max_num_seqs} requests of {length} tokens"
    if blocks < needed:
        reason = f"{words}; {reason} would need {format_bytes(needed * block_bytes)}"
    notes.choose("kv_cache_memory_bytes", blocks * block_bytes, reason)
    return length, blocks


def _note_rope(model: ModelFacts, length: int, notes: Notes) -> None:
    if model.rope_type == "dynamic" and length > model.original_length:
        notes.adjust(
            "rope_scaling",
            "dynamic: the base grows with the sequence",
            f"the base for {length} tokens, at every position",
            "a token's numbers must not depend on how long the sequence becomes",
        )


def _natural_length(model: ModelFacts) -> int:
    """The length taken when none is asked for: under dynamic scaling the original one, because a
    base fixed for a longer range would change short requests too."""
    if model.rope_type != "dynamic":
        return model.longest
    return min(model.original_length, model.longest)


def _kv_budget(asked: EngineConfig, free: int, ranks: str) -> tuple[int, str]:
    """Bytes a rank's cache may take, and the words for where that number comes from."""
    explicit = asked.cache.kv_cache_memory_bytes
    if explicit is not None:
        return explicit, f"kv_cache_memory_bytes={explicit}"
    budget = free * FREE_MEMORY_SHARE_PERCENT // 100
    share = f"{FREE_MEMORY_SHARE_PERCENT}% of the free {format_bytes(free)}{ranks}"
    return budget, f"{format_bytes(budget)} ({share})"


def _refuse_small_cache(
    asked: EngineConfig, wanted: int, budget: int, words: str, block_bytes: int
) -> None:
    size = asked.cache.block_size
    need = -(-wanted // size) * block_bytes
    holds = budget // block_bytes * size
    if asked.cache.kv_cache_memory_bytes is not None:
        problem = f"holds {holds} tokens; one request of {wanted} needs {need} bytes"
        raise ConfigError("kv_cache_memory_bytes", budget, problem)
    problem = f"the cache may take {words} and holds {holds} tokens; one request needs {need} bytes"
    raise ConfigError("max_model_len", wanted, problem)


def _batched_tokens(
    asked: EngineConfig, length: int, spec: SpeculativeConfig | None, notes: Notes
) -> int:
    scheduler = asked.scheduler
    batched = scheduler.max_num_batched_tokens
    if batched is not None:
        if not scheduler.enable_chunked_prefill and batched < length:
            problem = (
                f"must be at least max_model_len={length} when enable_chunked_prefill is off, "
                f"or long prompts could never run"
            )
            raise ConfigError("max_num_batched_tokens", batched, problem)
        return batched
    batched, reason = BATCHED_TOKENS_DEFAULT, "keeps a step short on a CPU"
    drafts = 0 if spec is None else spec.num_speculative_tokens or 0
    if scheduler.max_num_seqs * (1 + drafts) > batched:
        batched, reason = scheduler.max_num_seqs, "one token for each of max_num_seqs"
        if drafts:
            batched *= 1 + drafts
            reason = f"one token and {drafts} drafts for each of max_num_seqs"
    if not scheduler.enable_chunked_prefill and length > batched:
        batched, reason = length, "a whole prompt, because enable_chunked_prefill is off"
    return int(notes.choose("max_num_batched_tokens", batched, reason))
