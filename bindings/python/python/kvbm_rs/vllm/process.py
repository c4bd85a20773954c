"""What the connectors of a process share.

With vLLM's executor `uni`, scheduler and worker are two objects of one process. With `mp`, each
worker is a process of its own: it serves the memory of its rank at a socket, and the scheduler's
process has the manager.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from .. import (
    Fence,
    KvBlockManager,
    Layout,
    Namespace,
    NodeEngine,
    NodeMover,
    Worker,
    layout_of,
    logs,
    sockets,
)
from ..errors import BuildFailed, KvbmError
from ..model_identity import adapter_stamp, adapter_version, weights_version
from ..prefill_speed import PrefillSpeed
from ..recording import build_manager
from . import _vllm_compat as compat
from . import node
from ._vllm_prefix_cache import PrefixCache
from .audit import Audit, comparison_of
from .callback_file import CallbackRecording
from .checks import why_whole
from .groups import CacheGroups, layout_of_groups
from .identity import namespace_of, process_root_is_random, root_is_fixed, tensor_shapes
from .options import Options
from .requests import TrackedRequest
from .shadow import ShadowReport
from .stats import Counters

__all__ = ["EngineProcess", "RankMemory", "engine_process", "logger"]

logger = compat.logger("kvbm_rs.vllm")

_PROCESSES: dict[str, EngineProcess] = {}
_LOCK = threading.Lock()

#: Most LoRA adapters that are distinguished.
_MOST_ADAPTERS = 65_536

#: Seconds that a worker process needs to end, once everything is saved.
_TIME_TO_END = 1.0

#: Seconds that a worker waits at least for the manager to save.
_LEAST_PATIENCE = 0.5

#: Most samples of the connector's time per step that are kept.
_SAMPLES = 100_000


def engine_process(
    view: compat.ConfigView, rank: int | None = None, groups: CacheGroups | None = None
) -> EngineProcess:
    """The one of this engine in this process; made with the first of its connectors. `rank`: of a
    worker that is a process of its own. `groups`: of a model that has several cache groups.
    """
    key = view.engine_id if rank is None else f"{view.engine_id}-{rank}"
    with _LOCK:
        process = _PROCESSES.get(key)
        if process is None:
            process = _PROCESSES[key] = EngineProcess(view, key, groups)
        return process


@dataclass(frozen=True)
class RankMemory:
    """What the manager has to know of a worker in another process."""

    rank: int
    #: Where the worker listens.
    socket: str
    num_blocks: int
    #: Bytes of a block in each tensor.
    tensor_bytes: list[int]
    #: Kinds and tensors of the cache groups, where there are several (`Layout.groups`).
    groups: list[tuple[str, list[int]]]
    #: Of the tensors, as `tensor_shapes` describes them.
    shapes: list[Any]
    #: Names of the attention backends.
    backends: list[str]


class EngineProcess:
    """The manager of an engine, or the worker of a rank, and what the connectors count."""

    def __init__(
        self, view: compat.ConfigView, key: str, groups: CacheGroups | None = None
    ) -> None:
        self.view, self._key, self.groups = view, key, groups
        self.options = Options.read(view.extra, view.data_parallel)
        if groups is not None:
            self.options.check_groups(len(groups))
        self.counters = Counters()
        #: vLLM's own.
        self.prefix_cache = PrefixCache(view.block_size, view.prefix_caching)
        self.step_ns: deque[int] = deque(maxlen=_SAMPLES)
        self.layout: Layout | None = None
        #: What vLLM calls, where that is recorded.
        self.callbacks: CallbackRecording | None = None
        if self.options.record_callbacks is not None:
            path = self.options.record_callbacks + ("" if key == view.engine_id else f".{key}")
            self.callbacks = CallbackRecording(path, self.options.record_limit, logger)
            logger.info(
                "kvbm: vLLM's calls of the connector are recorded in %s", self.callbacks.path
            )
        self.own_hashes = self._hashes_own()
        self._root_was_read = self.own_hashes
        self._tensors: dict[str, Any] = {}
        #: By name of a layer, the tensors of the layout that it has.
        self._tensors_of: dict[str, range] = {}
        #: Whether loads and saves may go layer by layer.
        self._has_layers = False
        #: On a device: behind the last layer that the manager was told of.
        self._last_layer: Any = None
        #: How fast the engine computes prompts, measured.
        self._speed = PrefillSpeed()
        #: Where a share of requests is audited.
        self.audit: Audit | None = None
        if self.options.audit:
            comparison = comparison_of(view.dtype, view.cache_dtype, self.options.audit_tolerance)
            self.audit = Audit(self.options.audit, comparison, self.counters, logger)
        #: In shadow mode.
        self.shadow: ShadowReport | None = None
        self._manager: KvBlockManager | NodeEngine | None = None
        self._worker: Worker | NodeMover | None = None
        #: Of the worker that serves its memory from this process.
        self.rank_memory: RankMemory | None = None
        #: By name and path of a LoRA adapter, what its files were at its first use, and its
        #: namespace.
        self._adapters: dict[tuple[str, str], tuple[int, Namespace]] = {}
        #: What is known of each request: of the scheduler, and of a worker in the same process.
        self.requests: dict[str, TrackedRequest] = {}
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

    def read_root(self) -> None:
        """At the first request: vLLM has the root of its hashes by then. Where other processes have
        another one, kvbm hashes tokens, so that the disk is found after a restart.
        """
        if self._root_was_read:
            return
        self._root_was_read = True
        algorithm = self.view.hash_algorithm
        try:
            if root_is_fixed(algorithm):
                return
            why = f"vLLM's {algorithm} hashes begin with another root than documented, which may be random in each process"
        except Exception as error:
            why = f"the root of vLLM's {algorithm} hashes cannot be read ({type(error).__name__}: {error})"
        # Hashes of tokens and of vLLM's hashes never meet: the namespace stays.
        self.own_hashes = True
        logger.warning("kvbm: %s: kvbm hashes tokens itself, which takes a little longer", why)

    def register(self, kv_caches: dict[str, Any], num_blocks: int) -> None:
        """The worker's tensors."""
        self._tensors = dict(kv_caches)
        if self.groups is not None:
            self.layout = layout_of_groups(self.groups, kv_caches, num_blocks)
            return
        views: list[Any] = []
        seen: dict[int, range] = {}
        for name, tensor in kv_caches.items():
            # Layers may share their cache.
            if tensor.data_ptr() not in seen:
                first = len(views)
                views += compat.block_views(name, tensor, num_blocks)
                seen[tensor.data_ptr()] = range(first, len(views))
            self._tensors_of[name] = seen[tensor.data_ptr()]
        self.layout = layout_of(views, page_size=self.view.block_size)
        self.layout.replicas = self.view.replicas

    @property
    def _is_on_device(self) -> bool:
        return self.layout is not None and self.layout.device not in (None, "cpu")

    def fence(self) -> Fence | None:
        """A point behind what vLLM has submitted to its stream so far; `None` where it computes on
        the CPU, at once.
        """
        if not self._is_on_device or self.options.shadow:
            return None
        return self.manager.fence_after(compat.recorded_event())

    def signal(self, number: int) -> None:
        """This worker has passed the point `number` of the engine's work, or has when its stream
        has.
        """
        if not self.options.shadow:
            self.worker.signal(number, compat.recorded_event() if self._is_on_device else None)

    def fence_at(self, number: int) -> Fence | None:
        """The point `number` of the work of engines whose workers are in other processes."""
        return None if self.options.shadow else self.manager.fence(number)

    def tensors_of(self, layer_name: str) -> range:
        """The tensors of the layout that a layer has; none of a layer that keeps nothing."""
        return self._tensors_of.get(layer_name, range(0))

    @property
    def num_tensors(self) -> int:
        return max((tensors.stop for tensors in self._tensors_of.values()), default=0)

    @property
    def loads_by_layer(self) -> bool:
        """Whether loads may go layer by layer."""
        return self._has_layers

    @property
    def saves_by_layer(self) -> bool:
        """Whether saves go layer by layer. Nothing waits for a save, so only where that is asked
        for.
        """
        return self._has_layers and self.options.layers == "on"

    def layer_written(self, tensor: int) -> None:
        """vLLM has written this tensor in the step and those before it, or its stream will have
        when it has passed this.
        """
        event = compat.recorded_event() if self._is_on_device else None
        self.own_manager.layer_done(tensor, event)
        self._last_layer = event

    def end_step(self) -> None:
        """The manager's iteration ends with vLLM's step."""
        event, self._last_layer = self._last_layer, None
        if event is not None:
            # The end of the iteration says that all layers are written.
            event.synchronize()
        self.manager.step()

    def serve(self, rank: int, backends: list[str]) -> None:
        """Serves the registered tensors to the manager, which is in the scheduler's process."""
        assert self.layout is not None
        logs.set_level(compat.log_level(self.options.log_level))
        ranks, socket = self.view.tensor_parallel, ""
        if self.options.daemon is not None:
            self._worker = NodeMover(
                self.options.daemon,
                self.layout,
                engine=node.engine_name(self.view),
                rank=rank,
                ranks=ranks,
            )
        elif not self.options.shadow:
            # Shadow mode moves nothing, so it needs no memory and nobody who copies.
            socket = sockets.private_path(self._key)
            self._worker = Worker(
                self.options.config,
                self.layout,
                model=self.view.model,
                rank=rank,
                ranks=ranks,
                socket=socket,
            )
        self.rank_memory = RankMemory(
            rank,
            socket,
            self.layout.num_blocks,
            self.layout.tensor_bytes,
            self.layout.groups,
            tensor_shapes(self._tensors.values()),
            backends,
        )

    @property
    def worker(self) -> Worker | NodeMover:
        if self._worker is None:
            raise BuildFailed("the worker was not built yet, or was closed")
        return self._worker

    def start(self, backends: list[str], ranks: list[RankMemory]) -> None:
        """Builds the manager: over the tensors that this process registered, or over the memory of
        `ranks`.
        """
        if self._manager is not None:
            return
        started = time.monotonic()
        logs.set_level(compat.log_level(self.options.log_level))
        shapes = tensor_shapes(self._tensors.values())
        if ranks:
            self.layout, shapes, backends = _layout_of_ranks(ranks, self.view)
        if self.layout is None:
            raise BuildFailed(
                "no worker has registered KV tensors: report it with the version of vLLM and its executor"
            )
        weights = self.options.weights
        if weights is None:
            weights = weights_version(self.view.model, self.view.revision)
            if not weights:
                logger.warning(
                    "kvbm: the version of the weights of %s is not known: set the option 'weights', or blocks of "
                    "earlier weights of that name are found",
                    self.view.model,
                )
        namespace = namespace_of(
            self.view, weights, shapes, backends, self.own_hashes, self.layout.replicas
        )
        if self.options.daemon is not None:
            self._manager = node.attach(
                self.options.daemon,
                self.layout,
                namespace.with_config(self.options.config),
                self.view,
                max(1, len(ranks)),
                logger,
            )
            logger.info("%s", self.describe(time.monotonic() - started))
            return
        self._manager = build_manager(
            self.options.config,
            self.layout,
            namespace,
            shadow=self.options.shadow,
            workers=[memory.socket for memory in ranks],
            record=self.options.record,
            record_limit=self.options.record_limit,
            logger=logger,
        )
        if self.options.shadow:
            self.shadow = ShadowReport(
                self.view.block_size,
                self.layout.block_bytes * max(1, len(ranks)) * self._blocks_of_tokens,
                self.options.prefill_tokens_per_s,
            )
        self._choose_layers()
        logger.info("%s", self.describe(time.monotonic() - started))

    def _choose_layers(self) -> None:
        if self.options.layers == "off":
            return
        why = why_whole(self.view, self.options, self.groups, self.num_tensors)
        self._has_layers = why is None
        if why is not None:
            level = logger.warning if self.options.layers == "on" else logger.info
            level("kvbm: blocks are loaded and saved whole, not layer by layer: %s", why)

    def lacks_hooks(self) -> None:
        """vLLM did not wait for each layer in a step: nothing goes by layer any more."""
        self._has_layers = False

    def describe(self, seconds: float) -> str:
        """What the connector will do, in a sentence."""
        manager, tokens, layout = self.manager, self.view.block_size, self.layout
        assert layout is not None
        size = layout.block_bytes
        parts = []
        if isinstance(manager, NodeEngine):
            parts.append(node.describe(manager, str(self.options.daemon)))
        else:
            _, host, disk, _ = manager.capacity
            on_disk = manager.status()["tiers"]["g3"]
            memory, each = host * size / 2**30, self._blocks_of_tokens
            parts.append(f"{memory:.2f} GiB of host memory = {host // each * tokens:,} tokens")
            if self.groups is not None:
                kinds = ", ".join(group.kind for group in self.groups)
                parts.append(f"{each} cache groups ({kinds})")
            if disk:
                there = (on_disk["inactive"] + on_disk["active"]) // each
                parts.append(
                    f"disk for {disk // each * tokens:,} tokens, {there * tokens:,} of them from before"
                )
        parts.append(f"blocks of {tokens} tokens, {size / 1024:.0f} KiB")
        if self._is_on_device:
            parts.append(f"tensors on {layout.device}, which was not tried on a GPU yet")
        if self.audit is not None:
            parts.append(f"{100 * self.options.audit:g} % of hits are computed again and compared")
        if self.options.shadow:
            parts.append("shadow mode: hits are counted, nothing is moved")
        else:
            loads = "asynchronous" if self.options.load == "async" else "synchronous"
            if self._has_layers:
                layers = " where that is faster" if self.options.layers == "auto" else ""
                loads += f", from host memory layer by layer{layers}"
            parts.append(f"loads are {loads}, failed ones are computed")
        parts.append(
            "kvbm hashes tokens" if self.own_hashes else f"vLLM's {self.view.hash_algorithm} hashes"
        )
        return f"kvbm: {'; '.join(parts)} (ready in {seconds:.2f} s)"

    @property
    def _blocks_of_tokens(self) -> int:
        """Blocks that the same tokens have: one in each cache group."""
        return 1 if self.groups is None else len(self.groups)

    @property
    def manager(self) -> KvBlockManager | NodeEngine:
        """Who has the blocks: a manager of this process, or a node daemon."""
        if self._manager is None:
            raise BuildFailed("the manager was not built yet, or was closed")
        return self._manager

    @property
    def own_manager(self) -> KvBlockManager:
        """The manager of this process, for what a node daemon does not do."""
        manager = self.manager
        if isinstance(manager, NodeEngine):
            raise KvbmError("the blocks are kept by a node daemon, which does not do this")
        return manager

    @property
    def is_open(self) -> bool:
        return self._manager is not None

    def namespace_for(self, adapter: tuple[str, str] | None) -> Namespace | None:
        """The namespace of requests with this LoRA adapter. `None` where its files are others than
        when it was first used: nothing says which of them vLLM has loaded.
        """
        if adapter is None:
            return self.manager.namespace
        stamp = adapter_stamp(adapter[1])
        known = self._adapters.get(adapter)
        if known is None and len(self._adapters) < _MOST_ADAPTERS:
            namespace = self.manager.namespace.with_adapter(adapter_version(*adapter))
            known = self._adapters[adapter] = (stamp, namespace)
        if known is not None and known[0] == stamp:
            return known[1]
        self.failed(
            "adapter",
            KvbmError(
                f"the files of LoRA adapter {adapter[0]} ({adapter[1]}) have changed, or {_MOST_ADAPTERS} adapters were "
                "used: its requests are computed, and nothing of them is stored; give a new adapter another name, or "
                "restart vLLM"
            ),
        )
        return None

    def forget_all(self) -> int:
        """Removes what this engine may find, with and without adapters. Waits for no disk: the
        scheduler's thread calls it. Blocks that were removed at once.
        """
        manager = self.manager
        namespaces = [manager.namespace, *(known[1] for known in self._adapters.values())]
        removed = sum(manager.forget(namespace, wait=False) for namespace in namespaces)
        if not isinstance(manager, NodeEngine):
            # Host memory and disk are this engine's own. They may have blocks of adapters that this
            # process has not seen.
            sizes = zip(("g2", "g3"), manager.capacity[1:3])
            removed += sum(manager.clear(tier, wait=False) for tier, blocks in sizes if blocks)
        return removed

    def close(self) -> None:
        """Ends the manager, or the worker, once. vLLM ends its worker processes before it closes
        the scheduler's connector. So a worker has the manager save before it ends.
        """
        with _LOCK:
            _PROCESSES.pop(self._key, None)
            manager, self._manager = self._manager, None
            worker, self._worker = self._worker, None
        try:
            self._end_worker(worker)
        finally:
            try:
                self._end_manager(manager)
            finally:
                self.layout, self._tensors = None, {}
                if self.callbacks is not None:
                    self.callbacks.close()

    @staticmethod
    def _end_worker(worker: Worker | NodeMover | None) -> None:
        if not isinstance(worker, Worker):
            if worker is not None:
                worker.close()
            return
        patience = max(_LEAST_PATIENCE, compat.worker_shutdown_seconds() - _TIME_TO_END)
        if not worker.close(timeout=patience):
            logger.warning(
                "kvbm: blocks may be lost: they were not saved within the %.1f s that vLLM gives its workers; raise "
                "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS",
                patience,
            )

    def _end_manager(self, manager: KvBlockManager | NodeEngine | None) -> None:
        if manager is None:
            return
        if self.shadow is not None and self.shadow.requests:
            logger.info("kvbm: %s", self.shadow.line())
        not_saved = manager.close(timeout=5.0)
        if not_saved is not None:
            logger.warning("kvbm: %s", not_saved)

    def count_shadow(self, request: TrackedRequest, first: int, by_tier: list[int]) -> None:
        """Counts what a request would have found, once for each request."""
        assert self.shadow is not None
        self.shadow.add(request.view.num_tokens, request.sequence.hashes, first, by_tier)
        size = self.view.block_size
        self.counters.add("shadow_prompt_tokens", request.view.num_tokens)
        self.counters.add("shadow_hit_tokens", sum(by_tier) * size)
        for tier, name in ((1, "g2"), (2, "g3"), (3, "g4")):
            self.counters.add(f"shadow_hit_tokens_{name}", by_tier[tier] * size)
        speed = self.shadow.speed.tokens_per_s
        if speed is not None:
            self.counters.add("shadow_saved_seconds", sum(by_tier) * size / speed)

    def step_begins(self, tokens: int) -> None:
        """A step of so many tokens begins. What the one before it took tells kvbm what computing
        costs.
        """
        now = time.monotonic()
        if self.shadow is not None:
            self.shadow.speed.step(tokens, now)
            if self.shadow.is_due(now):
                logger.info("kvbm: %s", self.shadow.line())
            return
        over = self._speed.step(tokens, now)
        if over is not None:
            self.manager.prefilled(*over)

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


def _layout_of_ranks(
    ranks: list[RankMemory], view: compat.ConfigView
) -> tuple[Layout, list[Any], list[str]]:
    """What all ranks have in common: layout, shapes of tensors, attention backends."""
    if len(ranks) != view.tensor_parallel:
        raise BuildFailed(
            f"{len(ranks)} workers registered KV tensors, and there are {view.tensor_parallel} ranks: see the workers' logs"
        )
    first = ranks[0]
    for memory in ranks[1:]:
        for what in ("num_blocks", "tensor_bytes", "groups", "shapes", "backends"):
            one, other = getattr(first, what), getattr(memory, what)
            if one != other:
                raise BuildFailed(
                    f"{what} of rank {memory.rank} differs from rank {first.rank}: {other} and {one}; kvbm needs ranks alike"
                )
    if first.groups:
        layout = Layout.of_workers(first.num_blocks, view.block_size, groups=first.groups)
    else:
        layout = Layout.of_workers(first.num_blocks, view.block_size, first.tensor_bytes)
        layout.replicas = view.replicas
    return layout, first.shapes, first.backends
