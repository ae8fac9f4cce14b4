"""The parts an `EngineConfig` is composed of: every field this release honours, and no other.

Parts are frozen and check themselves when they are made. None means "not set": `resolve` turns it
into a value with a reason, and nothing downstream sees it. Names, short forms and defaults follow
vLLM where it has them; a default that differs says why. This module declares; it reads no flags,
files or variables, and knows no model and no machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from drumline.config.fields import Field, Kind, check, fields_of, option
from drumline.config.speculative import PARALLEL_MAX, TOKENS_MAX
from drumline.core.params import SEED_LIMIT

BYTES_MAX = 2**46  # 64 TiB: a limit on typing errors, not on machines


class Part:
    """Base of the parts: checks every declared field when one is made."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for field in FIELDS.values():
            if type(self) is PARTS[field.part]:
                check(field, getattr(self, field.name))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(Part):
    """Which checkpoint runs, and how its numbers are read."""

    model: str = option(
        "smollm2",
        Kind.TEXT,
        "folder of safetensors, GGUF file, hub name, or alias",
    )
    revision: str | None = option(
        None, Kind.TEXT, "branch, tag or commit of a hub model", when_none="the hub's default"
    )
    dtype: str = option(
        "auto",
        Kind.CHOICE,
        "numbers the model computes in; auto is float32 on a CPU",
        choices=("auto", "float32"),
        later=("float16", "half", "bfloat16"),
    )
    quantization: str | None = option(
        None,
        Kind.CHOICE,
        "quantize the matrices of a float checkpoint at load; embedding and head become q8_0",
        choices=("q8_0", "q4_1", "q4_0"),
        when_none="weights run as the checkpoint stores them",
    )
    max_model_len: int | None = option(
        None,
        Kind.SIZE,
        "longest prompt plus output of a request",
        low=2,
        high=2**24,
        unit="tokens",
        when_none="what the checkpoint and the memory allow",
        minus_one_is_none=True,
    )
    seed: int | None = option(
        None,
        Kind.INTEGER,
        "seed of requests that bring none; with it, arrival order decides their draws",
        low=0,
        high=SEED_LIMIT - 1,
        when_none="fresh entropy at each start, reported with every output",
    )
    generation_config: str = option(
        "auto",
        Kind.CHOICE,
        "sampling defaults: auto reads the checkpoint's, vllm takes neutral ones",
        choices=("auto", "vllm"),
    )
    chat_template: str | None = option(
        None,
        Kind.TEXT,
        "file with a Jinja chat template",
        when_none="the checkpoint's own template",
    )
    max_logprobs: int = option(
        20,
        Kind.INTEGER,
        "most log-probabilities a request may ask per position; -1 is the vocabulary",
        low=-1,
        high=2**24,
    )
    logprobs_mode: str = option(
        "raw_logprobs",
        Kind.CHOICE,
        "report log-probabilities before (raw) or after (processed) penalties and filters",
        choices=("raw_logprobs", "processed_logprobs"),
        later=("raw_logits", "processed_logits"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig(Part):
    """Where keys and values live, and how much memory they take."""

    block_size: int = option(
        16,
        Kind.INTEGER,
        "tokens per cache block; a power of two",
        low=1,
        high=256,
        unit="tokens",
    )
    kv_cache_memory_bytes: int | None = option(
        None,
        Kind.SIZE,
        "memory for keys and values, on each rank",
        low=1,
        high=BYTES_MAX,
        unit="bytes",
        when_none="what max_num_seqs full requests need, at most 40% of the free memory",
    )
    kv_cache_dtype: str = option(
        "auto",
        Kind.CHOICE,
        "numbers that keys and values are stored in; auto is float16 beside native operations, "
        "and follows dtype if that is asked for or operations are plain",
        choices=("auto", "float32", "float16", "bfloat16", "int8"),
        later=("fp8", "fp8_e4m3", "fp8_e5m2"),
    )
    enable_prefix_caching: bool = option(
        True, Kind.SWITCH, "keep the blocks of finished prompts for requests that begin alike"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(Part):
    """Who runs in a step, and how much."""

    # vLLM's defaults (256 and 2048) are made for servers with accelerators. On a few CPU cores 16
    # rows already share each weight load, and 512 tokens keep a step under a second or so.
    max_num_seqs: int = option(
        16,
        Kind.INTEGER,
        "most requests that run at once",
        low=1,
        high=4096,
        unit="requests",
    )
    max_num_batched_tokens: int | None = option(
        None,
        Kind.SIZE,
        "most tokens in one step",
        low=1,
        high=2**20,
        unit="tokens",
        when_none="512, more if a setting needs it",
    )
    enable_chunked_prefill: bool = option(
        True, Kind.SWITCH, "cut long prompts into pieces that share steps with decoding requests"
    )
    scheduling_policy: str = option(
        "fcfs",
        Kind.CHOICE,
        "who goes first: fcfs by arrival, priority by the request's priority, then arrival",
        choices=("fcfs", "priority"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig(Part):
    """How many ranks share the work, and what they share."""

    data_parallel_size: int = option(
        1, Kind.INTEGER, "replicas of the model", short="-dp", low=1, high=PARALLEL_MAX
    )
    tensor_parallel_size: int = option(
        1, Kind.INTEGER, "ranks that share each layer", short="-tp", low=1, high=PARALLEL_MAX
    )
    pipeline_parallel_size: int = option(
        1, Kind.INTEGER, "stages the layers are cut into", short="-pp", low=1, high=PARALLEL_MAX
    )
    enable_expert_parallel: bool = option(
        False, Kind.SWITCH, "spread experts over all ranks", short="-ep"
    )
    nnodes: int = option(
        1, Kind.INTEGER, "machines that share the replicas", short="-n", low=1, high=PARALLEL_MAX
    )
    node_rank: int = option(
        0, Kind.INTEGER, "which machine this is", short="-r", low=0, high=PARALLEL_MAX - 1
    )
    master_addr: str | None = option(
        None, Kind.TEXT, "address of node 0, where all meet", when_none="needed by several machines"
    )
    master_port: int = option(
        29501, Kind.INTEGER, "port where ranks meet on node 0", low=1, high=65534
    )
    data_parallel_size_local: int | None = option(
        None,
        Kind.INTEGER,
        "replicas on each machine",
        short="-dpl",
        low=1,
        high=PARALLEL_MAX,
        when_none="data_parallel_size divided by nnodes",
    )
    data_parallel_address: str | None = option(
        None, Kind.TEXT, "the same as master_addr", short="-dpa", when_none="master_addr"
    )
    data_parallel_rpc_port: int | None = option(
        None,
        Kind.INTEGER,
        "port where machines meet on node 0",
        short="-dpp",
        low=1,
        high=65535,
        when_none="the one after master_port",
    )
    data_parallel_backend: str = option(
        "mp",
        Kind.CHOICE,
        "who starts replicas: mp machines themselves, ray a Ray cluster (extra ray)",
        short="-dpb",
        choices=("mp", "ray"),
    )
    headless: bool = option(
        False, Kind.SWITCH, "serve replicas for node 0 and answer nobody; for serve"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativePart(Part):
    """What was asked of speculation, as it was typed. `EngineConfig.speculation` reads it."""

    speculative_config: str | None = option(
        None, Kind.OBJECT, "JSON object that says who drafts", short="-sc", when_none="off"
    )
    spec_method: str | None = option(
        None, Kind.TEXT, "shortcut for the key method", when_none="speculative_config's"
    )
    spec_model: str | None = option(
        None, Kind.TEXT, "shortcut for the key model", when_none="speculative_config's"
    )
    spec_tokens: int | None = option(
        None,
        Kind.INTEGER,
        "shortcut for the key num_speculative_tokens",
        low=1,
        high=TOKENS_MAX,
        when_none="speculative_config's",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig(Part):
    """What the engine runs on, and how long it waits."""

    device: str = option(
        "auto", Kind.CHOICE, "where the model computes", choices=("auto", "cpu"), later=("cuda",)
    )
    threads: int | None = option(
        None,
        Kind.INTEGER,
        "threads that compute",
        low=1,
        high=1024,
        when_none="the physical cores this process may use",
    )
    ops_backend: str = option(
        "auto",
        Kind.CHOICE,
        "operations: reference is plain torch, native is compiled for the CPU",
        choices=("auto", "reference", "native"),
    )
    strict_config: bool = option(
        False, Kind.SWITCH, "refuse to start where a setting would be adjusted"
    )
    watchdog: str = option(
        "enforce",
        Kind.CHOICE,
        "when a step runs past its deadline: off waits, observe logs, enforce ends the engine",
        choices=("off", "observe", "enforce"),
    )
    step_timeout_seconds: float = option(
        5.0,
        Kind.SECONDS,
        "deadline of one step, before its allowance for the tokens in it",
        low=0.1,
        high=3600,
        unit="s",
    )
    startup_timeout_seconds: float = option(
        120.0, Kind.SECONDS, "deadline of loading and warming up", low=1, high=86400, unit="s"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(Part):
    """The HTTP surface. Scripts do not read it."""

    # vLLM listens on every interface by default; a server without an API key should not.
    host: str = option("127.0.0.1", Kind.TEXT, "address to listen on; 0.0.0.0 is every interface")
    port: int = option(
        8000, Kind.INTEGER, "port to listen on; 0 takes a free one", low=0, high=65535
    )
    served_model_name: tuple[str, ...] = option(
        (), Kind.TEXTS, "names clients may call the model by; the first is reported"
    )
    api_key: tuple[str, ...] = option(
        (), Kind.TEXTS, "keys of which clients must send one; prefer DRUMLINE_API_KEY", secret=True
    )
    allowed_origins: tuple[str, ...] = option(
        (), Kind.TEXTS, "web origins that browsers may call from; * is every origin"
    )
    max_num_queued_reqs: int = option(
        1024,
        Kind.INTEGER,
        "most requests that wait; more get HTTP 503 at once",
        low=0,
        high=2**20,
        unit="requests",
    )
    shutdown_timeout: float = option(
        0.0,
        Kind.SECONDS,
        "how long running requests may finish after a first signal; a second one does not wait",
        low=0,
        high=3600,
        unit="s",
    )
    max_body_bytes: int = option(
        16 * 2**20, Kind.SIZE, "largest request body", low=1024, high=2**32, unit="bytes"
    )


PARTS: dict[str, type[Part]] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "parallel": ParallelConfig,
    "speculative": SpeculativePart,
    "runtime": RuntimeConfig,
    "server": ServerConfig,
}

# The flat table: every field by name, in order of declaration. Names are unique across parts.
FIELDS: dict[str, Field] = {
    field.name: field for part, cls in PARTS.items() for field in fields_of(part, cls)
}
