"""What people know from vLLM and this release does not do: refused by name, never ignored.

Each entry is the sentence a person gets who asks for it as a flag, a file's key, an environment
variable or a Python argument. A feature that arrives leaves this table and joins the parts.
"""

from __future__ import annotations

_ONE_RANK = "not in this release; see nnodes, node_rank and data_parallel_size_local"
_EXPERTS = "experts lie on ranks by ascending id, and tokens go to them; there is no choice"
_TLS = "put a reverse proxy in front of the server for that"
_TOOLS = "tool calls and reasoning parsers are not in this release"
_LATER = "not in this release"
_MEMORY = "say how much memory the cache may take with kv_cache_memory_bytes"
_NOTHING = "there is nothing to switch: this release has no graphs, no compiler and no streams"

REFUSED: dict[str, str] = {
    # model
    "tokenizer": "the tokenizer comes with the checkpoint",
    "tokenizer_mode": "the tokenizer comes with the checkpoint",
    "tokenizer_revision": "the tokenizer comes with the checkpoint",
    "skip_tokenizer_init": "the tokenizer comes with the checkpoint",
    "code_revision": "code from a checkpoint is never run",
    "trust_remote_code": "code from a checkpoint is never run",
    "hf_overrides": "change the checkpoint's config.json instead",
    "hf_config_path": "the configuration is read from the checkpoint",
    "config_format": "the format is recognised from the files",
    "load_format": "the format is recognised from the files",
    "override_generation_config": "give the defaults with each request",
    "download_dir": "set HF_HOME for hub models, DRUMLINE_CACHE for embedded ones",
    "enable_lora": _LATER,
    "lora_modules": _LATER,
    "runner": "this release generates text, no embeddings",
    "task": "this release generates text, no embeddings",
    "limit_mm_per_prompt": "this release reads text only",
    # memory and execution
    "gpu_memory_utilization": _MEMORY,
    "device_memory_utilization": _MEMORY,
    "num_gpu_blocks_override": _MEMORY,
    "swap_space": "preempted requests are recomputed, not swapped",
    "cpu_offload_gb": _LATER,
    "kv_offloading_size": _LATER,
    "kv_transfer_config": _LATER,
    "calculate_kv_scales": _LATER,
    "prefix_caching_hash_algo": "prefixes are hashed with SHA-256 always",
    "enforce_eager": _NOTHING,
    "compilation_config": _NOTHING,
    "async_scheduling": _NOTHING,
    "max_num_active_seqs": "max_num_seqs is the limit on running requests",
    "max_num_queued_tokens": "max_num_queued_reqs is the limit on waiting requests",
    "max_num_partial_prefills": _LATER,
    "max_long_partial_prefills": _LATER,
    "long_prefill_token_threshold": _LATER,
    "scheduler_cls": _LATER,
    "stream_interval": "every token is streamed as it comes",
    # ranks and machines
    "data_parallel_rank": _ONE_RANK,
    "data_parallel_start_rank": _ONE_RANK,
    "data_parallel_hybrid_lb": _ONE_RANK,
    "data_parallel_external_lb": _ONE_RANK,
    "data_parallel_multi_port_external_lb": _ONE_RANK,
    "dp_sync_interval": _ONE_RANK,
    "disable_nccl_for_dp_synchronization": _ONE_RANK,
    "prefill_schedule_interval": _ONE_RANK,
    "prefill_context_parallel_size": _ONE_RANK,
    "decode_context_parallel_size": _ONE_RANK,
    "api_server_count": _ONE_RANK,
    "distributed_executor_backend": _ONE_RANK,
    "distributed_timeout_seconds": "waits end with step_timeout_seconds",
    "cpu_distributed_timeout_seconds": "waits end with step_timeout_seconds",
    "enable_fault_tolerance": _ONE_RANK,
    "fault_tolerance_config": _ONE_RANK,
    "all2all_backend": _EXPERTS,
    "enable_eplb": _EXPERTS,
    "eplb_config": _EXPERTS,
    "expert_placement_strategy": _EXPERTS,
    "enable_elastic_ep": _EXPERTS,
    "elastic_ep_max_dp_size": _EXPERTS,
    "moe_backend": _EXPERTS,
    # speculation
    "per_request_spec_decode_metrics": "LLM and generate --json report each output's speculation",
    # server
    "uds": _TLS,
    "ssl_keyfile": _TLS,
    "ssl_certfile": _TLS,
    "ssl_ca_certs": _TLS,
    "ssl_cert_reqs": _TLS,
    "root_path": _TLS,
    "middleware": "code named by a flag is never run",
    "enable_auto_tool_choice": _TOOLS,
    "tool_call_parser": _TOOLS,
    "reasoning_parser": _TOOLS,
    "structured_outputs_config": "grammars are not in this release",
    "enable_request_id_headers": _LATER,
    "disable_log_stats": _LATER,
    "aggregate_engine_logging": _LATER,
    "enable_log_requests": "requests are never logged",
    "otlp_traces_endpoint": "tracing is not in this release",
    "enable_per_request_metrics": _LATER,
    "sse_keep_alive_interval": _LATER,
}

# Short forms of the above, as vLLM spells them.
REFUSED_SHORT: dict[str, str] = {
    "-dpn": "data_parallel_rank",
    "-dpr": "data_parallel_start_rank",
    "-dph": "data_parallel_hybrid_lb",
    "-dpe": "data_parallel_external_lb",
    "-dpm": "data_parallel_multi_port_external_lb",
    "-pcp": "prefill_context_parallel_size",
    "-dcp": "decode_context_parallel_size",
    "-asc": "api_server_count",
}
