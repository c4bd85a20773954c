"""What the scheduler's and the worker's connector share: with one rank they are two objects of one
process.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

from .. import KvBlockManager, Layout, Namespace, layout_of, logs
from ..errors import BuildFailed, KvbmError
from ..recording import build_manager
from . import _vllm_compat as compat
from .identity import adapter_version, namespace_of, process_root_is_random
from .options import Options
from .stats import Counters

__all__ = ["EngineProcess", "engine_process", "logger"]

logger = compat.logger("kvbm_rs.vllm")

_PROCESSES: dict[str, EngineProcess] = {}
_LOCK = threading.Lock()

#: Most samples of the connector's time per step that are kept.
_SAMPLES = 100_000


def engine_process(view: compat.ConfigView) -> EngineProcess:
    """The one of this engine; made with the first of its two connectors."""
    with _LOCK:
        process = _PROCESSES.get(view.engine_id)
        if process is None:
            process = _PROCESSES[view.engine_id] = EngineProcess(view)
        return process


class EngineProcess:
    """The manager of an engine, and what both roles of the connector count."""

    def __init__(self, view: compat.ConfigView) -> None:
        self.view = view
        self.options = Options.read(view.extra, view.data_parallel)
        self.counters = Counters()
        self.step_ns: deque[int] = deque(maxlen=_SAMPLES)
        self.layout: Layout | None = None
        self.own_hashes = self._hashes_own()
        self._tensors: dict[str, Any] = {}
        self._manager: KvBlockManager | None = None
        self._namespaces: dict[tuple[str, str], Namespace] = {}
        self._spent_ns = 0
        self._logged: dict[str, float] = {}

    def _hashes_own(self) -> bool:
        if self.options.hashes == "own":
            return True
        cannot = None
        if not self.view.prefix_caching:
            cannot = "prefix caching is off, so vLLM hashes no blocks"
        elif self.view.hash_block_size != self.view.block_size:
            cannot = f"vLLM hashes blocks of {self.view.hash_block_size} tokens and caches blocks of {self.view.block_size}"
        elif process_root_is_random(self.view.hash_algorithm):
            cannot = (
                f"the root of vLLM's {self.view.hash_algorithm} hashes is random in each process"
            )
        if cannot is not None and self.options.hashes == "engine":
            raise KvbmError(
                f"option 'hashes' is 'engine', but {cannot}: leave the option out, or set it to 'own'"
            )
        return cannot is not None

    def register(self, kv_caches: dict[str, Any], num_blocks: int) -> None:
        """The worker's tensors."""
        views: list[Any] = []
        seen = set()
        for name, tensor in kv_caches.items():
            if tensor.data_ptr() in seen:
                continue  # layers that share their cache
            seen.add(tensor.data_ptr())
            views += compat.block_views(name, tensor, num_blocks)
        self.layout = layout_of(views, page_size=self.view.block_size)
        self._tensors = dict(kv_caches)

    def start(self, backends: list[str]) -> None:
        """Builds the manager; the worker has registered its tensors by now."""
        if self._manager is not None:
            return
        if self.layout is None:
            raise BuildFailed(
                "the worker has registered no KV tensors in this process: KvbmConnector needs scheduler and worker in one process "
                "(one GPU, the executor 'uni'); several processes are not supported yet"
            )
        started = time.monotonic()
        logs.set_level(compat.log_level(self.options.log_level))
        namespace = namespace_of(
            self.view, self.options.weights, self._tensors, backends, self.own_hashes
        )
        self._manager = build_manager(
            self.options.config,
            self.layout,
            namespace,
            shadow=self.options.shadow,
            record=self.options.record,
            record_limit=self.options.record_limit,
            logger=logger,
        )
        logger.info("%s", self.describe(time.monotonic() - started))

    def describe(self, seconds: float) -> str:
        """What the connector will do, in a sentence."""
        manager, tokens, layout = self.manager, self.view.block_size, self.layout
        assert layout is not None
        size = layout.block_bytes
        _, host, disk, _ = manager.capacity
        on_disk = manager.status()["tiers"]["g3"]
        parts = [f"{host * size / 2**30:.2f} GiB of host memory = {host * tokens:,} tokens"]
        if disk:
            there = on_disk["inactive"] + on_disk["active"]
            parts.append(
                f"disk for {disk * tokens:,} tokens, {there * tokens:,} of them from before"
            )
        parts.append(f"blocks of {tokens} tokens, {size / 1024:.0f} KiB")
        if self.options.shadow:
            parts.append("shadow mode: hits are counted, nothing is moved")
        else:
            parts.append(
                f"loads are {'asynchronous' if self.options.load == 'async' else 'synchronous'}, failed ones are computed"
            )
        parts.append(
            "kvbm hashes tokens" if self.own_hashes else f"vLLM's {self.view.hash_algorithm} hashes"
        )
        return f"kvbm: {'; '.join(parts)} (ready in {seconds:.2f} s)"

    @property
    def manager(self) -> KvBlockManager:
        if self._manager is None:
            raise BuildFailed("the manager was not built yet, or was closed")
        return self._manager

    @property
    def is_open(self) -> bool:
        return self._manager is not None

    def namespace_for(self, adapter: tuple[str, str] | None) -> Namespace:
        """The namespace of requests with this LoRA adapter."""
        if adapter is None:
            return self.manager.namespace
        namespace = self._namespaces.get(adapter)
        if namespace is None:
            if len(self._namespaces) >= 1024:
                self._namespaces.clear()
            namespace = self._namespaces[adapter] = self.manager.namespace.with_adapter(
                adapter_version(*adapter)
            )
        return namespace

    def close(self) -> None:
        """Ends the manager, once."""
        with _LOCK:
            _PROCESSES.pop(self.view.engine_id, None)
            manager, self._manager = self._manager, None
        if manager is not None:
            not_saved = manager.close(timeout=5.0)
            if not_saved is not None:
                logger.warning("kvbm: %s", not_saved)
        self.layout, self._tensors = None, {}

    def spent(self, began_ns: int) -> None:
        """Time that a callback took."""
        self._spent_ns += time.perf_counter_ns() - began_ns

    def waited(self, began_ns: int) -> None:
        """Time of a callback in which no request could run: the engine lost nothing by it."""
        self._spent_ns -= time.perf_counter_ns() - began_ns

    def step_over(self) -> None:
        """The step before ended, its last callback included: its time is a sample."""
        spent, self._spent_ns = max(0, self._spent_ns), 0
        self.step_ns.append(spent)
        self.counters.add("steps")
        self.counters.add("step_seconds", spent / 1e9)

    def failed(self, where: str, error: BaseException) -> None:
        """An error that costs a hit or a copy and nothing else; logged once in ten seconds for each
        place.
        """
        self.counters.add("errors")
        now = time.monotonic()
        if now - self._logged.get(where, -1e9) >= 10:
            self._logged[where] = now
            logger.error(
                "kvbm: %s: %s: %s",
                where,
                type(error).__name__,
                error,
                exc_info=not isinstance(error, KvbmError),
            )
