"""`resolve`: the one pure pass from what was asked to what runs.

    EngineConfig, ModelFacts, MachineFacts  ──►  Resolved

Every value that was left open is *chosen* with a reason; every value that was asked for and runs
differently is *adjusted* with a reason; what can be neither is refused, naming field and value.
Under ``strict_config`` an adjustment is refused too. Nothing is read and nothing is changed here:
equal inputs give equal results. Beyond this point there is no "auto" and no stray None.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any

from drumline._version import __version__
from drumline.config.engine_config import EngineConfig
from drumline.config.machine import MachineFacts
from drumline.config.sizes import format_bytes
from drumline.core.errors import ConfigError

BATCHED_TOKENS_DEFAULT = 512
FREE_MEMORY_SHARE_PERCENT = 40
BYTES_PER_NUMBER = {"float32": 4, "float16": 2, "bfloat16": 2}

# Rope scalings whose range is the stated length times the factor. llama3 and longrope already
# state the stretched length.
_STRETCHED = ("linear", "dynamic", "yarn")

# Fields that may differ between ranks that share collectives, or that concern the host alone.
_LOCAL_FIELDS = frozenset({"threads", "kv_cache_memory_bytes", "strict_config"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What `resolve` must know of a checkpoint. Lengths in tokens, weights in bytes as loaded.

    ``max_position_embeddings`` is what the checkpoint states; for yarn the range follows from
    ``original_max_position_embeddings`` × ``rope_factor`` where the former is given.
    """

    model_type: str
    max_position_embeddings: int
    vocab_size: int
    num_hidden_layers: int
    num_key_value_heads: int
    head_dim: int
    rope_type: str = "default"
    rope_factor: float = 1.0
    original_max_position_embeddings: int | None = None
    weight_bytes: int = 0

    @property
    def original_length(self) -> int:
        """The length the model was trained on, before any rope scaling."""
        return self.original_max_position_embeddings or self.max_position_embeddings

    @property
    def longest(self) -> int:
        """The longest sequence the checkpoint's rope covers."""
        if self.rope_type not in _STRETCHED:
            return self.max_position_embeddings
        base = self.max_position_embeddings
        if self.rope_type == "yarn":
            base = self.original_length
        return max(base, int(base * self.rope_factor))

    def kv_bytes_per_token(self, kv_dtype: str) -> int:
        """Bytes one token takes in the cache, keys and values of all layers."""
        numbers = 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim
        return numbers * BYTES_PER_NUMBER[kv_dtype]


@dataclass(frozen=True, slots=True)
class Choice:
    """A value that was left open, what it became, and why."""

    field: str
    used: Any
    reason: str


@dataclass(frozen=True, slots=True)
class Adjustment:
    """A value that was asked for, what runs instead, and why."""

    field: str
    asked: Any
    used: Any
    reason: str

    def __str__(self) -> str:
        return f"{self.field}: asked {self.asked}, used {self.used} ({self.reason})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """What runs. ``config`` has every field filled; the fields below are the same values, typed.

    ``num_kv_blocks`` counts blocks of ``config.cache.block_size`` tokens; ``kv_cache_bytes`` is
    what they take.
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
    choices: tuple[Choice, ...] = ()
    adjustments: tuple[Adjustment, ...] = ()

    @property
    def max_num_seqs(self) -> int:
        """Most requests that run at once."""
        return self.config.scheduler.max_num_seqs

    @property
    def block_size(self) -> int:
        """Tokens per cache block."""
        return self.config.cache.block_size


@dataclass(slots=True)
class _Notes:
    """The reasons gathered on the way; local to one call of `resolve`."""

    choices: list[Choice] = field(default_factory=list)
    adjustments: list[Adjustment] = field(default_factory=list)

    def choose(self, name: str, used: Any, reason: str) -> Any:
        self.choices.append(Choice(name, used, reason))
        return used

    def adjust(self, name: str, asked: Any, used: Any, reason: str) -> Any:
        self.adjustments.append(Adjustment(name, asked, used, reason))
        return used


def resolve(asked: EngineConfig, model: ModelFacts, machine: MachineFacts) -> Resolved:
    """What runs when ``asked`` meets ``model`` on ``machine``; see the module's text.

    Raises `ConfigError` naming the field and the value that cannot be had, and what can.
    """
    notes = _Notes()
    _refuse_later_releases(asked)
    device = asked.runtime.device
    if device == "auto":
        device = notes.choose("device", "cpu", "this release computes on the CPU")
    dtype = asked.model.dtype
    if dtype == "auto":
        dtype = notes.choose("dtype", "float32", "float32 is what the CPU ops compute in")
    kv_dtype = asked.cache.kv_cache_dtype
    if kv_dtype == "auto":
        kv_dtype = notes.choose("kv_cache_dtype", dtype, "follows dtype")
    backend = _ops_backend(asked, machine, notes)
    threads = _threads(asked, machine, notes)

    block_bytes = model.kv_bytes_per_token(kv_dtype) * asked.cache.block_size
    length, blocks = _length_and_blocks(asked, model, machine, block_bytes, notes)
    batched = _batched_tokens(asked, length, notes)
    if model.rope_type == "dynamic" and length > model.original_length:
        notes.adjust(
            "rope_scaling",
            "dynamic: the base grows with the sequence",
            f"the base for {length} tokens, at every position",
            "a token's numbers must not depend on how long the sequence becomes",
        )
    _refuse_adjustments(asked, notes)
    budget = asked.cache.kv_cache_memory_bytes
    config = asked.with_fields(
        device=device,
        dtype=dtype,
        kv_cache_dtype=kv_dtype,
        ops_backend=backend,
        threads=threads,
        max_model_len=length,
        max_num_batched_tokens=batched,
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
        choices=tuple(notes.choices),
        adjustments=tuple(notes.adjustments),
    )


def _refuse_later_releases(asked: EngineConfig) -> None:
    for name in ("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size"):
        if asked.get(name) > 1:
            raise ConfigError(name, asked.get(name), "not supported yet; this release runs 1 rank")
    if asked.parallel.enable_expert_parallel:
        problem = "not supported yet; this release has no models with experts"
        raise ConfigError("enable_expert_parallel", True, problem)
    if asked.speculative.speculative_config is not None:
        problem = "not supported yet; this release does not speculate"
        raise ConfigError("speculative_config", asked.speculative.speculative_config, problem)


def _refuse_adjustments(asked: EngineConfig, notes: _Notes) -> None:
    if asked.runtime.strict_config and notes.adjustments:
        listed = "; ".join(str(adjustment) for adjustment in notes.adjustments)
        raise ConfigError("strict_config", True, f"these would be adjusted: {listed}")


def _ops_backend(asked: EngineConfig, machine: MachineFacts, notes: _Notes) -> str:
    backend = asked.runtime.ops_backend
    if machine.native_ops:
        reason = "compiled operations are there"
        return notes.choose("ops_backend", "native", reason) if backend == "auto" else backend
    reason = "this release has no compiled operations"
    if backend == "auto":
        backend = notes.choose("ops_backend", "reference", reason)
    elif backend == "native":
        backend = notes.adjust("ops_backend", "native", "reference", reason)
    return backend


def _threads(asked: EngineConfig, machine: MachineFacts, notes: _Notes) -> int:
    if asked.runtime.threads is None:
        reason = f"physical cores among the {machine.available_cores} available"
        return int(notes.choose("threads", machine.physical_cores, reason))
    if asked.runtime.threads > machine.available_cores:
        reason = f"only {machine.available_cores} processors are available to this process"
        return int(notes.adjust("threads", asked.runtime.threads, machine.available_cores, reason))
    return asked.runtime.threads


def _length_and_blocks(
    asked: EngineConfig,
    model: ModelFacts,
    machine: MachineFacts,
    block_bytes: int,
    notes: _Notes,
) -> tuple[int, int]:
    """(max_model_len, cache blocks): a request of full length always fits the cache."""
    size = asked.cache.block_size
    length = asked.model.max_model_len
    if length is not None and length > model.longest:
        stretched = f" ({model.rope_type} rope scaling)" if model.rope_type != "default" else ""
        problem = f"the checkpoint covers at most {model.longest} tokens{stretched}"
        raise ConfigError("max_model_len", length, problem)
    wanted = length if length is not None else _natural_length(model)
    budget, words = _kv_budget(asked, model, machine)
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


def _natural_length(model: ModelFacts) -> int:
    """The length taken when none is asked for: under dynamic scaling the original one, because a
    base fixed for a longer range would change short requests too."""
    return model.original_length if model.rope_type == "dynamic" else model.longest


def _kv_budget(asked: EngineConfig, model: ModelFacts, machine: MachineFacts) -> tuple[int, str]:
    """Bytes the cache may take, and the words for where that number comes from."""
    explicit = asked.cache.kv_cache_memory_bytes
    if explicit is not None:
        return explicit, f"kv_cache_memory_bytes={explicit}"
    free = max(0, machine.free_memory_bytes - model.weight_bytes)
    budget = free * FREE_MEMORY_SHARE_PERCENT // 100
    share = f"{FREE_MEMORY_SHARE_PERCENT}% of the free {format_bytes(free)}"
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


def _batched_tokens(asked: EngineConfig, length: int, notes: _Notes) -> int:
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
    if scheduler.max_num_seqs > batched:
        batched, reason = scheduler.max_num_seqs, "one token for each of max_num_seqs"
    if not scheduler.enable_chunked_prefill and length > batched:
        batched, reason = length, "a whole prompt, because enable_chunked_prefill is off"
    return int(notes.choose("max_num_batched_tokens", batched, reason))


# ---------------------------------------------------------------- what is shown and compared


def startup_table(resolved: Resolved) -> list[tuple[str, str, str]]:
    """(name, value, reason) for every engine field and the facts behind them, ready to print.

    The server's fields are not in it, and no secret is.
    """
    chosen = {choice.field: choice.reason for choice in resolved.choices}
    adjusted = {note.field: note for note in resolved.adjustments}
    rows: list[tuple[str, str, str]] = []
    for name, value in resolved.config.flat().items():
        if name in resolved.config.server_fields():
            continue
        if name in adjusted:
            reason = f"adjusted from {adjusted[name].asked}: {adjusted[name].reason}"
        else:
            source = resolved.config.sources.get(name)
            reason = chosen.get(name) or (f"asked ({source})" if source else "default")
        rows.append((name, _shown(name, value), reason))
    rows += [
        (note.field, str(note.used), f"adjusted: {note.reason}")
        for note in resolved.adjustments
        if note.field not in resolved.config.flat()
    ]
    return rows + _facts(resolved)


def _facts(resolved: Resolved) -> list[tuple[str, str, str]]:
    model, machine = resolved.model, resolved.machine
    tokens = resolved.num_kv_blocks * resolved.block_size
    features = " ".join(machine.cpu_features) or "none known"
    native = "built" if machine.native_module else "not built"
    return [
        ("kv_blocks", str(resolved.num_kv_blocks), f"{tokens} tokens in the cache"),
        ("weights", format_bytes(model.weight_bytes), f"{model.model_type}, as loaded"),
        ("processor", machine.cpu_model, f"{features}; native module {native}"),
    ]


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
        "fields": {name: value for name, value in config.flat().items() if name not in local},
    }
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
