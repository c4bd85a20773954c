"""Every contact with vLLM: what an upgrade can break, in one place.

`missing` names what the installed vLLM lacks. The connector asks at its start, and a test does.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ..engine_names import Used
from ._vllm_groups import boundary_states

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "CHECKED_VERSIONS",
    "ConfigView",
    "EventFactory",
    "RequestView",
    "StepView",
    "TIER",
    "TierView",
    "attention_backends",
    "block_views",
    "cache_groups",
    "log_level",
    "logger",
    "missing",
    "recorded_event",
    "register_connector",
    "register_tier",
    "vllm_version",
]

#: Versions of vLLM that the project's tests run.
CHECKED_VERSIONS = ("0.32",)

_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_METRICS = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"

#: What the connector uses: module, class (or None), names. Names of objects are read from
#: `__init__`, fields from the class.
_USED: tuple[Used, ...] = (
    (_BASE, None, ("KVConnectorBase_V1", "KVConnectorMetadata", "KVConnectorRole")),
    (
        _BASE,
        "KVConnectorBase_V1",
        (
            "bind_connector_metadata",
            "bind_kv_cache_manager",
            "build_connector_meta",
            "build_kv_connector_stats",
            "build_prom_metrics",
            "get_block_ids_with_load_errors",
            "get_external_cache_hit_sources",
            "get_finished",
            "get_kv_connector_stats",
            "get_handshake_metadata",
            "get_num_new_matched_tokens",
            "handle_preemptions",
            "on_new_request",
            "register_kv_caches",
            "request_finished",
            "requires_kv_delivery",
            "requires_piecewise_for_cudagraph",
            "reset_cache",
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
    ("vllm.distributed.parallel_state", None, ("get_tensor_model_parallel_rank",)),
    (_METRICS, None, ("KVConnectorPromMetrics", "KVConnectorStats")),
    (
        _METRICS,
        "KVConnectorPromMetrics",
        ("_counter_cls", "_labelnames", "per_engine_labelvalues", "observe"),
    ),
    (_METRICS, "KVConnectorStats", ("data", "aggregate", "is_empty", "reduce", "reset")),
    (
        "vllm.distributed.kv_transfer.kv_connector.factory",
        "KVConnectorFactory",
        ("register_connector", "_registry"),
    ),
    (
        "vllm.v1.metrics.cache_hit_source",
        "CacheHitSource",
        ("HOST", "DISK", "EXTERNAL_UNSPECIFIED"),
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
            "medium",
            "group_idx",
            "kv_cache_spec_kind",
            "kv_cache_spec_sliding_window",
        ),
    ),
    (
        "vllm.v1.core.kv_cache_utils",
        None,
        ("generate_block_hash_extra_keys", "maybe_convert_block_hash"),
    ),
    (
        "vllm.v1.request",
        "Request",
        (
            "request_id",
            "block_hashes",
            "all_token_ids",
            "num_tokens",
            "num_computed_tokens",
            "lora_request",
            "cache_salt",
            "mm_features",
            "skip_reading_prefix_cache",
        ),
    ),
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
    ("vllm.v1.core.kv_cache_manager", "KVCacheBlocks", ("get_block_ids",)),
    (
        "vllm.config",
        "VllmConfig",
        (
            "model_config",
            "cache_config",
            "parallel_config",
            "kv_transfer_config",
            "kv_events_config",
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
        ("block_size", "cache_dtype", "enable_prefix_caching", "prefix_caching_hash_algo"),
    ),
    ("vllm.config.scheduler", "SchedulerConfig", ("async_scheduling",)),
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
        ),
    ),
    (
        "vllm.config.model",
        "ModelConfig",
        ("model", "revision", "dtype", "hf_config", "served_model_name"),
    ),
    ("vllm.v1.kv_cache_interface", "KVCacheConfig", ("num_blocks", "kv_cache_groups")),
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
    (f"{_OFFLOAD}.tiering.factory", "SecondaryTierFactory", ("register_tier", "_registry")),
)


def vllm_version() -> str:
    """The installed version."""
    return str(importlib.import_module("vllm").__version__)


def missing(used: tuple[Used, ...] | None = None) -> list[str]:
    """What the installed vLLM lacks of `used` (what the connector uses), each as
    `module.Class.name`.
    """
    lacks = []
    for module_name, class_name, names in _USED if used is None else used:
        try:
            owner: Any = importlib.import_module(module_name)
        except ImportError:
            lacks.append(module_name)
            continue
        if class_name is not None:
            owner = getattr(owner, class_name, None)
            if owner is None:
                lacks.append(f"{module_name}.{class_name}")
                continue
        where = f"{module_name}.{class_name}" if class_name else module_name
        lacks += [f"{where}.{name}" for name in names if not _has(owner, name)]
    return lacks


def _has(owner: Any, name: str) -> bool:
    if hasattr(owner, name) or name in getattr(owner, "__struct_fields__", ()):
        return True
    for base in getattr(owner, "__mro__", ()):
        if name in vars(base).get("__annotations__", {}):
            return True
        init = vars(base).get("__init__")
        if init is not None:
            try:
                source = inspect.getsource(init)
            except (OSError, TypeError):
                continue
            if re.search(rf"\bself\.{re.escape(name)}\b", source):
                return True
    return False


def register_connector(name: str, module_path: str, class_name: str) -> None:
    """Makes a connector known by its name; a second call does nothing."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if name not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(name, module_path, class_name)


def register_tier(name: str, module_path: str, class_name: str) -> None:
    """Makes a tier of vLLM's offloading known by its name; a second call does nothing. A vLLM
    without such tiers stays as it is.
    """
    try:
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
    except ImportError:
        return
    if name not in SecondaryTierFactory._registry:
        SecondaryTierFactory.register_tier(name, module_path, class_name)


class TierView:
    """What `KvbmTier` reads of vLLM's `OffloadingSpec`."""

    def __init__(self, offloading_spec: Any) -> None:
        self._spec, self._config = offloading_spec, offloading_spec.config

    @property
    def model(self) -> str:
        return str(self._config.model.name)

    @property
    def dtype(self) -> str:
        return str(self._config.model.dtype)

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk, in the first cache group."""
        return int(self._config.groups[0].tokens_per_block) * int(self._spec.blocks_per_chunk)

    @property
    def data_parallel(self) -> tuple[int, int]:
        """Rank and size."""
        parallel = self._config.parallel
        return int(parallel.data_parallel_index), int(parallel.data_parallel_size)

    @property
    def meaning(self) -> dict[str, Any]:
        """What decides what the bytes of a chunk are, beside the model and its weights."""
        config, parallel = self._config, self._config.parallel
        names = ("tp_size", "pp_size", "pcp_size", "dcp_size", "world_size")
        return {
            "vllm": vllm_version(),
            "layout": config.kv_cache_layout,
            "canonical": bool(config.canonical_layout),
            "replicated": bool(config.replicated_layout),
            "block_bytes": int(config.worker_kv_bytes_per_block),
            "tokens_per_hash": int(config.cache.tokens_per_hash),
            "blocks_per_chunk": int(self._spec.blocks_per_chunk),
            "groups": [
                [group.tokens_per_block, list(group.layer_names)] for group in config.groups
            ],
            "parallel": {name: int(getattr(parallel, name)) for name in names},
        }


def cache_groups(kv_cache_config: Any) -> list[str]:
    """The kinds of the cache groups, such as `FullAttentionSpec`."""
    return [type(group.kv_cache_spec).__name__ for group in kv_cache_config.kv_cache_groups]


def tensor_parallel_rank() -> int:
    """The rank of the worker in this process."""
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def recorded_event() -> Any:
    """An event behind what this worker has submitted to its CUDA stream so far."""
    import torch

    event = torch.cuda.Event()
    event.record()
    return event


def attention_backends(vllm_config: Any) -> list[str]:
    """Names of the attention backends, which decide what the bytes of a block mean; empty where
    vLLM does not say.
    """
    context = getattr(vllm_config.compilation_config, "static_forward_context", {})
    names = set()
    for layer in context.values():
        backend = getattr(layer, "attn_backend", None)
        if backend is not None:
            name = getattr(backend, "get_name", None)
            names.add(str(backend.__name__ if name is None else name()))
    return sorted(names)


class ConfigView:
    """What the connector reads of `VllmConfig`."""

    def __init__(self, vllm_config: Any, sizes: tuple[int, int] | None = None) -> None:
        """`sizes`: tokens of a block and of a hash, where the cache groups say them."""
        self._config = vllm_config
        self._transfer = vllm_config.kv_transfer_config
        self._block_size = None if sizes is None else sizes[0]
        self._hash_size = None if sizes is None else sizes[1]

    @property
    def engine_id(self) -> str:
        return str(self._transfer.engine_id)

    @property
    def extra(self) -> dict[str, Any]:
        return dict(self._transfer.kv_connector_extra_config or {})

    @property
    def failure_policy(self) -> str:
        return str(self._transfer.kv_load_failure_policy)

    @property
    def role(self) -> str:
        return str(self._transfer.kv_role)

    @property
    def block_size(self) -> int:
        return self._block_size or int(self._config.cache_config.block_size)

    @property
    def cache_dtype(self) -> str:
        return str(self._config.cache_config.cache_dtype)

    @property
    def dtype(self) -> str:
        return str(self._config.model_config.dtype).removeprefix("torch.")

    @property
    def prefix_caching(self) -> bool:
        return bool(self._config.cache_config.enable_prefix_caching)

    @property
    def hash_algorithm(self) -> str:
        return str(self._config.cache_config.prefix_caching_hash_algo)

    @property
    def hash_block_size(self) -> int:
        size = self._hash_size or getattr(self._config.cache_config, "hash_block_size", None)
        return int(size) if size else self.block_size

    @property
    def model(self) -> str:
        return str(self._config.model_config.model)

    @property
    def revision(self) -> str | None:
        config = self._config.model_config
        commit = getattr(config.hf_config, "_commit_hash", None)
        revision = commit or config.revision
        return None if revision is None else str(revision)

    @property
    def model_settings(self) -> str:
        """The model's configuration as text, overrides included."""
        return str(self._config.model_config.hf_config.to_json_string(use_diff=False))

    @property
    def quantization(self) -> str:
        return str(getattr(self._config.model_config, "quantization", None))

    @property
    def world_size(self) -> int:
        return int(self._config.parallel_config.world_size)

    @property
    def tensor_parallel(self) -> int:
        return int(self._config.parallel_config.tensor_parallel_size)

    @property
    def decode_context_parallel(self) -> int:
        return int(self._config.parallel_config.decode_context_parallel_size)

    @property
    def executor(self) -> str:
        return str(self._config.parallel_config.distributed_executor_backend)

    @property
    def has_remote_workers(self) -> bool:
        """Whether workers are processes of their own."""
        return self.executor != "uni"

    @property
    def schedules_ahead(self) -> bool:
        """Whether a step is planned before the results of the one before are known."""
        scheduler = getattr(self._config, "scheduler_config", None)
        return bool(getattr(scheduler, "async_scheduling", False))

    @property
    def nodes(self) -> int:
        return int(self._config.parallel_config.nnodes)

    @property
    def data_parallel(self) -> tuple[int, int]:
        """Rank and size."""
        parallel = self._config.parallel_config
        return int(parallel.data_parallel_index or 0), int(
            getattr(parallel, "data_parallel_size", 1)
        )

    @property
    def publishes_events(self) -> bool:
        events = self._config.kv_events_config
        return bool(events is not None and events.enable_kv_cache_events)


class RequestView:
    """What the connector reads of a `Request`; a name for each attribute that an upgrade may move."""

    __slots__ = ("_request",)

    def __init__(self, request: Any) -> None:
        self._request = request

    @property
    def id(self) -> str:
        return str(self._request.request_id)

    @property
    def num_tokens(self) -> int:
        return int(self._request.num_tokens)

    @property
    def num_computed_tokens(self) -> int:
        return int(self._request.num_computed_tokens)

    @property
    def num_prompt_tokens(self) -> int:
        return int(self._request.num_prompt_tokens)

    @property
    def block_hashes(self) -> list[bytes]:
        """vLLM's own hash of each complete block of known tokens."""
        hashes: list[bytes] = self._request.block_hashes
        return hashes

    def tokens(self, first: int, end: int) -> list[int]:
        return list(self._request.all_token_ids[first:end])

    @property
    def skips_reading(self) -> bool:
        return bool(self._request.skip_reading_prefix_cache)

    @property
    def adapter(self) -> tuple[str, str] | None:
        """Name and path of the LoRA adapter."""
        lora = self._request.lora_request
        return None if lora is None else (str(lora.lora_name), str(lora.lora_path))

    def extra_keys(self, first: int, end: int, image: int) -> tuple[bytes | None, int]:
        """What else goes into the hash of the block of these tokens (images, salt, adapter), and
        the next image.
        """
        from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

        keys, image = generate_block_hash_extra_keys(self._request, first, end, image)
        return (None if keys is None else repr(keys).encode()), image

    @property
    def has_extra_keys(self) -> bool:
        request = self._request
        return bool(
            request.mm_features
            or request.cache_salt
            or request.lora_request is not None
            or getattr(request, "prompt_embeds", None) is not None
        )


class StepView:
    """What the connector reads of a `SchedulerOutput`."""

    __slots__ = ("_output",)

    def __init__(self, output: Any) -> None:
        self._output = output

    @property
    def scheduled(self) -> Mapping[str, int]:
        """Tokens of each request in this step."""
        scheduled: dict[str, int] = self._output.num_scheduled_tokens
        return scheduled

    @property
    def total(self) -> int:
        return int(self._output.total_num_scheduled_tokens)

    @property
    def finished(self) -> Iterable[str]:
        """Requests that ended since the last step."""
        ended: set[str] = self._output.finished_req_ids
        return ended

    def block_ids(self, request_id: str) -> tuple[list[int], ...] | None:
        """All blocks of a scheduled request, by cache group."""
        state = self._output.kv_connector_block_state
        ids: tuple[list[int], ...] | None
        ids = None if state is None else state.get_block_ids(request_id)
        return ids

    def boundary_states(self) -> list[tuple[str, int, int, int]]:
        """See `_vllm_groups.boundary_states`."""
        return boundary_states(self._output)

    def new_blocks(self) -> Iterable[tuple[tuple[list[int], ...], int]]:
        """Blocks that requests got since the last step, by cache group, and how many tokens from
        their front are computed already.
        """
        for new in self._output.scheduled_new_reqs:
            yield new.block_ids, int(new.num_computed_tokens)
        cached = self._output.scheduled_cached_reqs
        for request_id, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens
        ):
            if blocks is not None:
                # A resumed request gets all its blocks anew; a running one only what follows.
                yield blocks, int(computed) if request_id in cached.resumed_req_ids else 0


class EventFactory:
    """Makes vLLM's event objects."""

    def __init__(self) -> None:
        from vllm.distributed import kv_events
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

        self._events = kv_events
        self._external: Callable[[Any], Any] = maybe_convert_block_hash

    def stored(
        self,
        block: bytes,
        parent: bytes | None,
        tokens: list[int],
        block_size: int,
        adapter: str | None,
        medium: str,
        group: tuple[int, str, int | None] | None = None,
    ) -> Any:
        """`group`: number, kind and window of the cache group, where there are several."""
        number, kind, window = (None, None, None) if group is None else group
        return self._events.BlockStored(
            block_hashes=[self._external(block)],
            parent_block_hash=None if parent is None else self._external(parent),
            token_ids=tokens,
            block_size=block_size,
            lora_id=None,
            medium=medium,
            lora_name=adapter,
            group_idx=number,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
        )

    def removed(self, block: bytes, medium: str, group: int | None = None) -> Any:
        return self._events.BlockRemoved(
            block_hashes=[self._external(block)], medium=medium, group_idx=group
        )

    def cleared(self) -> Any:
        return self._events.AllBlocksCleared()


def logger(name: str) -> Any:
    """A logger whose records appear where vLLM's do; kvbm's own go there too."""
    import logging

    from vllm.logger import init_logger

    init_logger(name)
    ours, theirs = logging.getLogger("kvbm"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        ours.handlers, ours.propagate = list(theirs.handlers), False
        ours.setLevel(theirs.level)
    return logging.getLogger(f"vllm.{name}")


def log_level(name: str) -> int:
    """A level's number."""
    import logging

    level = logging.getLevelName(name)
    return level if isinstance(level, int) else logging.INFO


def block_views(name: str, tensor: Any, num_blocks: int) -> list[Any]:
    """A layer's tensor as tensors whose first axis counts vLLM's blocks.

    Backends lay keys and values side by side in a block, or as two halves of the tensor; some split
    a block into several of the kernel's.
    """
    shape = list(tensor.shape)
    if shape and shape[0] % num_blocks == 0:
        return [tensor if shape[0] == num_blocks else tensor.unflatten(0, (num_blocks, -1))]
    if len(shape) > 1 and shape[0] == 2 and shape[1] % num_blocks == 0:
        return [view for half in tensor for view in block_views(name, half, num_blocks)]
    raise ValueError(
        f"layer {name}: a KV tensor of shape {shape} for {num_blocks} blocks; kvbm knows tensors whose first or second axis counts blocks"
    )
