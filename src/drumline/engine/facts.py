"""What the world may know of a loaded engine: plain values that cross processes.

From them a front end makes its own `Intake`, with a tokenizer of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drumline.config import EngineConfig, Resolved, startup_table
from drumline.core.errors import CheckpointError, RequestError, UsageError
from drumline.core.params import SamplingParams
from drumline.engine.intake import Intake, IntakeLimits
from drumline.models.config import SamplingDefaults
from drumline.models.gguf_file import read_gguf
from drumline.models.gguf_tokenizer import gguf_tokenizer
from drumline.models.hub_tokenizer import hub_tokenizer
from drumline.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from drumline.engine.opening import Opened


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """``defaults``: sampling parameters the checkpoint suggests. ``step_deadline_seconds``: the
    longest a step may take, allowance included. ``startup_rows``: name, value, reason."""

    model: str
    model_path: str
    limits: IntakeLimits
    defaults: Mapping[str, Any]
    seed: int | None
    step_deadline_seconds: float
    startup_rows: tuple[tuple[str, str, str], ...]
    adjustments: tuple[str, ...]
    load_seconds: float

    @property
    def default_params(self) -> SamplingParams:
        return SamplingParams.from_mapping(self.defaults)


def gather_facts(opened: Opened, token_seconds: float, load_seconds: float) -> EngineFacts:
    """``token_seconds``: what one token took at warm-up; a step may take 4 times that for each
    token it may hold, beyond step_timeout_seconds."""
    resolved = opened.resolved
    architecture = opened.checkpoint.config
    config = resolved.config
    vocab = resolved.model.vocab_size
    asked_logprobs = config.model.max_logprobs
    allowance = 4.0 * token_seconds * resolved.max_num_batched_tokens
    return EngineFacts(
        model=config.model.model,
        model_path=str(opened.path),
        limits=IntakeLimits(
            max_model_len=resolved.max_model_len,
            vocab_size=vocab,
            max_logprobs=vocab if asked_logprobs == -1 else asked_logprobs,
            kv_token_capacity=resolved.num_kv_blocks * resolved.block_size,
            eos_token_ids=architecture.eos_token_ids,
            samples_max=places(resolved),
            num_speculative_tokens=resolved.num_speculative_tokens,
        ),
        defaults=sampling_defaults(config, architecture.sampling),
        seed=config.model.seed,
        step_deadline_seconds=config.runtime.step_timeout_seconds + allowance,
        startup_rows=tuple(startup_table(resolved)),
        adjustments=tuple(str(adjustment) for adjustment in resolved.adjustments),
        load_seconds=load_seconds,
    )


def places(resolved: Resolved) -> int:
    """Samples that all replicas together may hold: those that run and those that wait."""
    config = resolved.config
    return config.server.max_num_queued_reqs + config.scheduler.max_num_seqs * resolved.mesh.dp


def sampling_defaults(config: EngineConfig, suggested: SamplingDefaults) -> dict[str, Any]:
    """The checkpoint's suggestions, unless generation_config asks for neutral ones."""
    if config.model.generation_config == "vllm":
        return {}
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    values = {name: getattr(suggested, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def open_tokenizer(path: Path, config: EngineConfig) -> Tokenizer:
    """The tokenizer of a local checkpoint alone, for a process that holds no weights."""
    if path.is_dir():
        return with_template(hub_tokenizer(path), config)
    return with_template(gguf_tokenizer(path, read_gguf(path).metadata), config)


def with_template(tokenizer: Tokenizer, config: EngineConfig) -> Tokenizer:
    """The tokenizer, with the chat template of ``--chat-template`` if one was given."""
    name = config.model.chat_template
    if name is None:
        return tokenizer
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"chat_template={name!r}: cannot be read: {error}") from None
    own = tokenizer.with_chat_template(text)
    try:
        own.apply_chat_template([{"role": "user", "content": "hello"}])
    except CheckpointError as error:
        raise UsageError(f"chat_template={name!r}: {error.problem}") from None
    except RequestError:
        return own  # it parses, and wants other conversations
    return own


def make_intake(facts: EngineFacts, tokenizer: Tokenizer) -> Intake:
    return Intake(tokenizer, facts.limits, facts.seed)
