"""`KvbmConnector`: what vLLM calls."""

from __future__ import annotations

import functools
from typing import Any

from . import _vllm_compat as compat

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorRole,
        SupportsHMA,
    )
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    from .callbacks import record
    from .rank import RankSide
    from .scheduler import SchedulerSide
    from .stats import KvbmPromMetrics, KvbmStats
except ImportError:
    # What an upgrade dropped is named, all of it.
    compat.require("KvbmConnector")
    raise

from .checks import check
from .events import CacheEvents
from .layers import StepLayers
from .process import RankMemory, engine_process, logger

__all__ = ["KvbmConnector"]


class KvbmConnector(SchedulerSide, RankSide, KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Keeps vLLM's KV blocks in host memory, on disk and in blob stores. docs/vllm.md has the
    options.
    """

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        groups = check(vllm_config, kv_cache_config)
        self._groups = groups
        view = compat.ConfigView(vllm_config, None if groups is None else groups.sizes)
        self._rank = None
        if view.has_remote_workers and role == KVConnectorRole.WORKER:
            self._rank = compat.tensor_parallel_rank()
        self._process = engine_process(view, self._rank, groups)
        self._block_size = view.block_size
        self._is_async = self._process.options.load == "async"
        self._has_remote_workers = view.has_remote_workers
        self._num_blocks = int(kv_cache_config.num_blocks)
        # Of the scheduler.
        self._requests = self._process.requests
        self._to_load, self._tokens_to_compute = [], 0
        self._events = None
        self._step = 0
        # Of the worker; of the scheduler where workers are in other processes.
        self._loading = {}
        self._bad = set()
        self._late_bad = set()
        self._ended = set()
        self._failed = set()
        self._had_tokens = True
        self._layers = StepLayers(self._process)
        self._attention_backends = functools.partial(compat.attention_backends, vllm_config)
        self._publishes_events = view.publishes_events
        if self._process.callbacks is not None:
            name = "scheduler" if role == KVConnectorRole.SCHEDULER else f"worker {self._rank or 0}"
            record(self, self._process.callbacks, name, view, self._num_blocks)
        if role == KVConnectorRole.SCHEDULER and not self._has_remote_workers:
            self._start([])

    def _start(self, ranks: list[RankMemory]) -> None:
        self._process.start(self._attention_backends(), ranks)
        if self._publishes_events and self._process.options.daemon is None:
            self._events = CacheEvents(self._process.own_manager, self._block_size, self._groups)
        elif self._publishes_events:
            logger.warning(
                "kvbm: events of blocks that a node daemon keeps are published by it (its events.url), not by vLLM"
            )

    # ------------------------------------------------------------------ class

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that does not happen is a miss later, and nothing else."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """What goes layer by layer happens inside the forward pass, which a graph of all of it
        would replay without the connector.
        """
        return extra_config.get("layers") == "on"

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvbmStats:
        return KvbmStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KvbmPromMetrics:
        return KvbmPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # --------------------------------------------------------------- instance

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """Every worker listens: builds the manager."""
        if self._has_remote_workers:
            self._start([metadata[rank].memory for rank in sorted(metadata)])

    def get_kv_connector_stats(self) -> KvbmStats | None:
        if self.role != KVConnectorRole.SCHEDULER:
            return None
        counts = self._process.counters.take()
        return KvbmStats(data=counts) if counts else None

    def shutdown(self) -> None:
        try:
            self._process.close()
        except Exception as error:
            self._process.failed("shutdown", error)
