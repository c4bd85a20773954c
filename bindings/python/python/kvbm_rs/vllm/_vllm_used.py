"""Names of vLLM's that kvbm uses, see `_vllm_compat`."""

from __future__ import annotations

from ..engine_names import Used

__all__ = ["CHECKED_VERSIONS", "PLUGIN", "PLUGIN_TIER", "TIER", "USED"]

#: Versions of vLLM that the project's tests run.
CHECKED_VERSIONS = ("0.32",)

_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_METRICS = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"

#: What makes the connector known by its name, in the form of `USED`.
PLUGIN: tuple[Used, ...] = (
    (
        "vllm.distributed.kv_transfer.kv_connector.factory",
        "KVConnectorFactory",
        ("register_connector",),
    ),
)

#: What makes the tier known by its name.
PLUGIN_TIER: tuple[Used, ...] = (
    (
        "vllm.v1.kv_offload.tiering.factory",
        "SecondaryTierFactory",
        ("register_tier",),
    ),
)

#: What the connector uses: module, class (or None), names. Names of objects are read from
#: `__init__`, fields from the class.
USED: tuple[Used, ...] = (
    (_BASE, None, ("KVConnectorBase_V1", "KVConnectorMetadata", "KVConnectorRole")),
    (_BASE, None, ("KVConnectorTransferResults",)),
    (_BASE, "KVConnectorTransferResults", ("finished_recving", "failed_recving")),
    (
        _BASE,
        "KVConnectorBase_V1",
        (
            "_get_connector_metadata",
            "bind_connector_metadata",
            "bind_gpu_block_pool",
            "build_connector_meta",
            "build_kv_connector_stats",
            "build_prom_metrics",
            "get_block_ids_with_load_errors",
            "get_external_cache_hit_sources",
            "get_finished",
            "get_kv_connector_stats",
            "get_handshake_metadata",
            "get_num_new_matched_tokens",
            "get_transfer_results",
            "handle_preemptions",
            "on_new_request",
            "register_kv_caches",
            "request_finished",
            "requires_kv_delivery",
            "requires_piecewise_for_cudagraph",
            "reset_cache",
            "role",
            "save_kv_layer",
            "set_xfer_handshake_metadata",
            "shutdown",
            "start_load_kv",
            "take_events",
            "update_state_after_alloc",
            "wait_for_layer_load",
            "wait_for_save",
        ),
    ),
    (_BASE, "KVConnectorRole", ("SCHEDULER", "WORKER")),
    (_BASE, None, ("KVConnectorHandshakeMetadata",)),
    (_BASE, "SupportsHMA", ("request_finished_all_groups",)),
    ("vllm", None, ("__version__",)),
    ("vllm.envs", None, ("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS",)),
    ("vllm.logger", None, ("init_logger",)),
    ("vllm.distributed.parallel_state", None, ("get_tensor_model_parallel_rank",)),
    (_METRICS, None, ("KVConnectorPromMetrics", "KVConnectorStats")),
    (
        _METRICS,
        "KVConnectorPromMetrics",
        ("_counter_cls", "per_engine_labelvalues", "observe"),
    ),
    (_METRICS, "KVConnectorStats", ("data", "aggregate", "is_empty", "reduce", "reset")),
    *PLUGIN,
    (
        "vllm.v1.metrics.cache_hit_source",
        "CacheHitSource",
        ("HOST", "DISK"),
    ),
    ("vllm.distributed.kv_events", None, ("BlockRemoved", "BlockStored", "AllBlocksCleared")),
    (
        "vllm.distributed.kv_events",
        "BlockStored",
        (
            "block_hashes",
            "parent_block_hash",
            "token_ids",
            "block_size",
            "lora_id",
            "lora_name",
            "medium",
            "group_idx",
            "kv_cache_spec_kind",
            "kv_cache_spec_sliding_window",
        ),
    ),
    (
        "vllm.distributed.kv_events",
        "BlockRemoved",
        ("block_hashes", "medium", "group_idx"),
    ),
    (
        "vllm.v1.core.kv_cache_utils",
        None,
        (
            "DEFAULT_NONE_HASH_SEED",
            "NONE_HASH",
            "generate_block_hash_extra_keys",
            "maybe_convert_block_hash",
        ),
    ),
    ("vllm.utils.hashing", None, ("get_hash_fn_by_name",)),
    (
        "vllm.v1.request",
        "Request",
        (
            "request_id",
            "block_hashes",
            "all_token_ids",
            "num_tokens",
            "num_computed_tokens",
            "num_prompt_tokens",
            "lora_request",
            "cache_salt",
            "mm_features",
            "prompt_embeds",
            "skip_reading_prefix_cache",
        ),
    ),
    ("vllm.lora.request", "LoRARequest", ("lora_name", "lora_path")),
    (
        "vllm.v1.core.sched.output",
        "SchedulerOutput",
        (
            "scheduled_new_reqs",
            "scheduled_cached_reqs",
            "num_scheduled_tokens",
            "total_num_scheduled_tokens",
            "finished_req_ids",
            "kv_connector_block_state",
            "kv_connector_metadata",
        ),
    ),
    ("vllm.v1.core.sched.output", "KVConnectorBlockState", ("get_block_ids",)),
    ("vllm.v1.core.sched.output", "NewRequestData", ("req_id", "block_ids", "num_computed_tokens")),
    (
        "vllm.v1.core.sched.output",
        "CachedRequestData",
        ("req_ids", "new_block_ids", "num_computed_tokens", "resumed_req_ids"),
    ),
    ("vllm.v1.core.kv_cache_manager", "KVCacheBlocks", ("blocks", "get_block_ids")),
    ("vllm.v1.core.kv_cache_utils", "KVCacheBlock", ("block_hash", "block_id")),
    ("vllm.v1.core.block_pool", "BlockPool", ("cache_full_blocks", "evict_blocks")),
    (
        "vllm.config",
        "VllmConfig",
        (
            "model_config",
            "cache_config",
            "compilation_config",
            "parallel_config",
            "scheduler_config",
            "speculative_config",
            "kv_transfer_config",
            "kv_events_config",
            "use_v2_model_runner",
        ),
    ),
    (
        "vllm.config.kv_transfer",
        "KVTransferConfig",
        ("engine_id", "kv_role", "kv_connector_extra_config", "kv_load_failure_policy"),
    ),
    (
        "vllm.config.cache",
        "CacheConfig",
        (
            "block_size",
            "cache_dtype",
            "enable_prefix_caching",
            "hash_block_size",
            "prefix_caching_hash_algo",
        ),
    ),
    ("vllm.config.compilation", "CompilationConfig", ("cudagraph_mode", "static_forward_context")),
    ("vllm.config.compilation", "CUDAGraphMode", ("has_full_cudagraphs",)),
    ("vllm.config.kv_events", "KVEventsConfig", ("enable_kv_cache_events",)),
    (
        "vllm.config.scheduler",
        "SchedulerConfig",
        ("async_scheduling", "long_prefill_token_threshold", "max_num_batched_tokens"),
    ),
    (
        "vllm.config.parallel",
        "ParallelConfig",
        (
            "data_parallel_size",
            "world_size",
            "tensor_parallel_size",
            "data_parallel_index",
            "decode_context_parallel_size",
            "distributed_executor_backend",
            "nnodes",
            "use_ubatching",
        ),
    ),
    (
        "vllm.config.model",
        "ModelConfig",
        (
            "model",
            "revision",
            "dtype",
            "hf_config",
            "quantization",
            "use_mla",
            "get_total_num_kv_heads",
        ),
    ),
    ("vllm.v1.kv_cache_interface", "KVCacheConfig", ("num_blocks", "kv_cache_groups")),
    ("vllm.v1.kv_cache_interface", "KVCacheGroupSpec", ("kv_cache_spec",)),
    ("vllm.model_executor.layers.attention", "Attention", ("attn_backend",)),
    ("vllm.v1.attention.backend", "AttentionBackend", ("get_name",)),
)

_OFFLOAD = "vllm.v1.kv_offload"

#: What `KvbmTier` uses, in the same form.
TIER: tuple[Used, ...] = (
    (f"{_OFFLOAD}.base", None, ("Locality", "LookupResult", "Medium", "RequestOffloadingContext")),
    (f"{_OFFLOAD}.base", "LookupResult", ("HIT", "MISS", "RETRY")),
    (f"{_OFFLOAD}.base", "Medium", ("STORAGE",)),
    (f"{_OFFLOAD}.base", "OffloadingSpec", ("config", "blocks_per_chunk")),
    (f"{_OFFLOAD}.base", "ReqContext", ("req_id",)),
    (f"{_OFFLOAD}.tiering.base", None, ("JobResult", "SecondaryTierManager")),
    (
        f"{_OFFLOAD}.tiering.base",
        "SecondaryTierManager",
        (
            "block_size_bytes",
            "drain_jobs",
            "get_finished_jobs",
            "lookup",
            "on_new_request",
            "on_request_finished",
            "shutdown",
            "submit_load",
            "submit_store",
        ),
    ),
    (
        f"{_OFFLOAD}.tiering.base",
        "JobResult",
        ("job_id", "success", "successful_keys", "transfer_bytes", "transfer_time"),
    ),
    (f"{_OFFLOAD}.tiering.base", "TransferJob", ("job_id", "keys", "chunk_ids", "req_context")),
    (
        f"{_OFFLOAD}.config",
        "OffloadingConfig",
        (
            "cache",
            "canonical_layout",
            "groups",
            "kv_cache_layout",
            "model",
            "parallel",
            "replicated_layout",
            "worker_kv_bytes_per_block",
        ),
    ),
    (f"{_OFFLOAD}.config", "OffloadingGroupConfig", ("tokens_per_block", "layer_names")),
    (f"{_OFFLOAD}.config", "OffloadingModelConfig", ("name", "dtype")),
    (f"{_OFFLOAD}.config", "OffloadingCacheConfig", ("tokens_per_hash", "blocks_per_chunk")),
    (
        f"{_OFFLOAD}.config",
        "OffloadingParallelConfig",
        (
            "data_parallel_index",
            "data_parallel_size",
            "dcp_size",
            "pcp_size",
            "pp_size",
            "tp_size",
            "world_size",
        ),
    ),
    *PLUGIN_TIER,
)
