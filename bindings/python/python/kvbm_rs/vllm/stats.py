"""Counters of the connector, on their way through vLLM to its log and to Prometheus."""

from __future__ import annotations

import threading
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

__all__ = ["COUNTERS", "Counters", "KvbmPromMetrics", "KvbmStats"]

#: Name: what it counts. In Prometheus `vllm:kvbm_NAME`.
COUNTERS = {
    "look_ups": "Look-ups of requests.",
    "pending_look_ups": "Look-ups that vLLM was asked to repeat.",
    "hit_tokens_g2": "Tokens promised from host memory.",
    "hit_tokens_g3": "Tokens promised from disk.",
    "hit_tokens_g4": "Tokens promised from volumes.",
    "loads": "Loads that ended.",
    "loads_by_layer": "Of these, loads whose step began before all layers were there.",
    "loaded_blocks": "Blocks that arrived, verified.",
    "failed_blocks": "Blocks that did not arrive and were computed.",
    "load_seconds": "Time from the start of a load to its end, all loads together.",
    "prefetched_blocks": "Blocks that the disk alone had and that are copied to host memory ahead of their request.",
    "saved_blocks": "Blocks whose copy to host memory began.",
    "saved_by_layer_blocks": "Of these, blocks that were copied while their step computed them.",
    "present_blocks": "Blocks that host memory had when they were offered.",
    "refused_blocks": "Blocks that were not taken: the block before them was not there.",
    "no_room_blocks": "Blocks that found no room in host memory.",
    "steps": "Steps of the engine.",
    "step_seconds": "Time that the connector took of the steps.",
    "audited_requests": "Requests that vLLM computed although blocks of theirs were stored.",
    "audited_blocks": "Stored blocks that were compared with what vLLM computed.",
    "differing_blocks": "Of these, blocks that are not the same and were quarantined: an alarm.",
    "errors": "Errors inside the connector that cost a hit or a copy and nothing else.",
    "shadow_prompt_tokens": "Shadow mode: tokens of the requests that were looked up.",
    "shadow_hit_tokens": "Shadow mode: tokens that would have been loaded.",
    "shadow_hit_tokens_g2": "Shadow mode: of these, from host memory.",
    "shadow_hit_tokens_g3": "Shadow mode: of these, from disk.",
    "shadow_hit_tokens_g4": "Shadow mode: of these, from volumes.",
    "shadow_saved_seconds": "Shadow mode: time to compute these tokens, once the speed is known.",
}


class Counters:
    """What happened since the last call of `take`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, float] = {}
        self.totals: dict[str, float] = dict.fromkeys(COUNTERS, 0)

    def add(self, name: str, count: float = 1) -> None:
        """Counts."""
        if count > 0:
            with self._lock:
                self._counts[name] = self._counts.get(name, 0) + count
                self.totals[name] += count

    def take(self) -> dict[str, float]:
        """The counts since the last call."""
        with self._lock:
            counts, self._counts = self._counts, {}
            return counts


class KvbmStats(KVConnectorStats):  # type: ignore[misc]
    """Counts of an interval."""

    def reset(self) -> None:
        self.data: dict[str, float] = {}

    def aggregate(self, other: KVConnectorStats) -> KvbmStats:
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        return {f"kvbm {name}": round(count, 6) for name, count in sorted(self.data.items())}

    def is_empty(self) -> bool:
        return not self.data


class KvbmPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """A counter of Prometheus for each of `COUNTERS`."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: Any,
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {}
        for name, about in COUNTERS.items():
            counter = self._counter_cls(
                name=f"vllm:kvbm_{name}", documentation=about, labelnames=labelnames
            )
            self._counters[name] = {
                engine: counter.labels(*values)
                for engine, values in self.per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, count in transfer_stats_data.items():
            counters = self._counters.get(name)
            # A negative count would be an exception, which would end the engine.
            if counters is not None and engine_idx in counters and count > 0:
                counters[engine_idx].inc(count)
