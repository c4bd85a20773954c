"""`KvbmLinker`: an external linker of SGLang's unified cache, on its own pool."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from queue import Queue
from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import (
    LayerWiseLoadCounter,
    UnifiedCacheLinker,
)

from .. import ExternalSequence, Fence, logs
from ..counts import Counts
from ..errors import InvalidArgument, KvbmError
from ..failures import Failures
from ..guarded import guarded
from ..loads import Onboarding
from ..page_store import PATIENCE, PageStore
from . import _sglang_compat as compat
from .options import Options

__all__ = ["KvbmLinker"]

logger = logging.getLogger("kvbm_rs.sglang")

#: Seconds that a look-up waits for pages from disk; what is late is found by the next one.
_STAGE_WAIT = 0.02

#: Pauses between two looks at the layers of a load, in seconds.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.0001, 0.001

#: Requests whose look-up is remembered at most.
_MOST_LOOK_UPS = 4096


@dataclass
class _Asked:
    """A look-up whose request may load."""

    keys: list[str]
    sequence: ExternalSequence
    #: How many of the first pages were promised.
    found: int = 0


@dataclass
class _Load:
    """A load that SGLang queued."""

    request: str
    keys: list[str]
    pages: list[int]
    #: Once it has begun.
    onboarding: Onboarding | None = None


@dataclass
class _Batch:
    """Loads that start together: the forward pass behind them waits layer by layer."""

    index: int
    loads: list[_Load]
    #: What was submitted before has ended: no kernel touches the pages any more.
    after: Fence | None


@dataclass
class _Offload:
    """Pages that SGLang keeps until it has taken the result."""

    keys: list[str]
    pages: list[int]
    #: The pages are written.
    after: Fence | None


class KvbmLinker(UnifiedCacheLinker):  # type: ignore[misc]
    """Keeps pages of SGLang's own pool in kvbm's host memory and on disk, one manager for each
    rank. docs/sglang.md has the options.

    SGLang aborts a request whose load fails. So a look-up promises only pages whose verified bytes
    lie pinned in host memory; pages on disk are copied there first.
    """

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any,
        extra_config: dict[str, Any] | None = None,
        forward_stream: Any = None,
    ) -> None:
        compat.check(compat.LINKER, "KvbmLinker")
        self.failures = Failures(logger)
        self._counts = Counts(logger)
        self.forward_stream = forward_stream
        rank = compat.rank_of_linker(server_args, params, components, extra_config)
        options = Options.read(rank, "linker_extra_config")
        logs.set_level(options.log_level)
        pool = params.token_to_kv_pool_allocator.get_kvcache()
        layout, self._parts_of_layer, meaning = compat.device_pool_layout(pool, params.page_size)
        namespace = compat.namespace_of(rank, options.weights, layout.page_size, meaning)
        self.pools = {PoolName.KV: pool}
        self._page_size = layout.page_size
        self._num_layers = int(pool.layer_num)
        self.layer_done_counter = LayerWiseLoadCounter(self._num_layers)
        self._store = PageStore(
            options.config,
            layout,
            namespace,
            record=options.record,
            record_limit=options.record_limit,
        )
        self._is_on_device = layout.device != "cpu"
        self._looked_up: dict[str, _Asked] = {}
        self._queued: dict[str, _Load] = {}
        self._loads: Queue[_Batch | None] = Queue()
        self._offloads: Queue[_Offload | None] = Queue()
        self._results: deque[bool] = deque()
        self._threads = [
            threading.Thread(target=self._run_loads, name="kvbm-loads", daemon=True),
            threading.Thread(target=self._run_offloads, name="kvbm-offloads", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        _, host, disk, _ = self._store.manager.capacity
        logger.info(
            "kvbm: rank %s: %d pages of %d tokens (%.0f KiB) in host memory%s; SGLang's pool on %s",
            rank.folder,
            host,
            layout.page_size,
            layout.block_bytes / 1024,
            f", {disk} on disk" if disk else "",
            layout.device,
        )

    @property
    def counters(self) -> dict[str, int]:
        """Pages stored, loaded, refused and missed, and `errors`."""
        return self._counts.read() | {"errors": sum(self.failures.counts.values())}

    # ------------------------------------------------------------------ look-up

    @guarded(lambda *_args, **_kwargs: [])
    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        """Every number of first pages that can be loaded. The pages stay pinned for ten seconds,
        or until the request asks again.
        """
        keys = list(compat.kv_transfer(transfers).keys or ())
        if not keys:
            return []
        known = self._looked_up.pop(rid, None)
        if known is None or known.keys != keys:
            known = _Asked(keys, self._store.sequence(keys))
        elif known.found < len(keys):
            # Its ticket would repeat the answer: more may have come from disk since.
            self._store.manager.abandon(rid)
        if len(self._looked_up) >= _MOST_LOOK_UPS:
            self._forget(next(iter(self._looked_up)))
        self._looked_up[rid] = known
        known.found = self._store.manager.stage(rid, known.sequence, timeout=_STAGE_WAIT)
        return list(range(1, known.found + 1))

    def _forget(self, rid: str) -> None:
        if self._looked_up.pop(rid, None) is not None:
            self._store.manager.abandon(rid)

    # -------------------------------------------------------------------- loads

    @guarded(lambda *_args, **_kwargs: False)
    def load(self, rid: str, transfers: list[Any]) -> bool:
        """Queues a load. The answer depends on the arguments alone: all ranks give the same."""
        transfer = compat.kv_transfer(transfers)
        keys = list(transfer.keys or ())
        pages = compat.pages_of(transfer.device_indices, self._page_size)
        if not keys or len(keys) != len(pages) or rid in self._queued:
            raise InvalidArgument(
                f"a load of {len(keys)} keys into {len(pages)} pages for request {rid!r}"
            )
        self._queued[rid] = _Load(rid, keys, pages)
        return True

    @guarded(lambda *_args, **_kwargs: False)
    def cancel_queued_load(self, rid: str) -> bool:
        """Takes a load back that has not started. Whether there was one."""
        if self._queued.pop(rid, None) is None:
            return False
        self._forget(rid)
        return True

    @guarded(lambda *_args, **_kwargs: -1)
    def start_layer_wise_loading(self) -> int:
        """Starts the queued loads as one batch. Its number; -1 where none is queued."""
        if not self._queued:
            return -1
        queued, self._queued = list(self._queued.values()), {}
        for load in queued:
            self._looked_up.pop(load.request, None)
        index: int = self.layer_done_counter.update_producer()
        try:
            self._loads.put(_Batch(index, queued, self._submitted()))
        except Exception as error:
            # -1 would say that nothing was to be loaded.
            self.failures.add("load", error)
            self.layer_done_counter.fail(index, error)
        return index

    def _submitted(self) -> Fence | None:
        """A point behind what SGLang has submitted to the device; none where its pool is in host
        memory, where what was called is done.
        """
        if not self._is_on_device:
            return None
        # The last is that of the stream that writes the pages. The first is that of the stream that
        # computed the indices, and who has read them has waited for it.
        return self._store.manager.fence_after(self.record_offload_ready()[-1])

    @guarded(lambda *_args, **_kwargs: False)
    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Waits until the batch writes to no page any more. Whether all of it arrived."""
        landed: bool = self.layer_done_counter.finish(counter_index)
        return landed

    def _run_loads(self) -> None:
        while (batch := self._loads.get()) is not None:
            try:
                self._bring(batch)
            except Exception as error:
                self.failures.add("load", error)
                self.layer_done_counter.fail(batch.index, error)
            finally:
                self._loads.task_done()
        self._loads.task_done()

    def _bring(self, batch: _Batch) -> None:
        """Loads a batch, and says of each layer when it is in place. Raises `KvbmError` where pages
        did not arrive, when none of the batch is written any more.
        """
        deadline = time.monotonic() + PATIENCE
        missing = sum(self._begin(load, batch.after) for load in batch.loads)
        begun = [load.onboarding for load in batch.loads if load.onboarding is not None]
        # The last layer is complete when all loads are over: SGLang may free the pages then.
        layer, last = 0, self._num_layers - 1
        while not missing and layer < last and self._wait_layer(begun, layer, deadline):
            self.layer_done_counter.complete(batch.index, layer)
            layer += 1
        # All of them, so that none writes when the batch is over.
        missing += sum(self._end(load, deadline) for load in batch.loads)
        if missing:
            raise KvbmError(f"{missing} promised pages did not arrive")
        for complete in range(layer, self._num_layers):
            self.layer_done_counter.complete(batch.index, complete)

    def _begin(self, load: _Load, after: Fence | None) -> int:
        """Starts a load. How many pages are known not to arrive."""
        manager = self._store.manager
        try:
            try:
                load.onboarding = manager.load(load.request, load.pages, after, by_layer=True)
                return 0
            except InvalidArgument:
                # The ticket of the look-up is too old.
                arrived = sum(self._store.get(load.keys, load.pages, after))
        except Exception as error:
            self.failures.add("load", error)
            arrived = 0
        missing = len(load.pages) - arrived
        self._counts.add(loaded_pages=arrived, missed_pages=missing)
        return missing

    def _wait_layer(self, begun: list[Onboarding], layer: int, deadline: float) -> bool:
        """Waits until every load has `layer`. Whether that came about: not where one has failed."""
        parts = range(layer * self._parts_of_layer, (layer + 1) * self._parts_of_layer)
        pause = _SHORTEST_PAUSE
        while not all(load.layer_ready(part) for load in begun for part in parts):
            if time.monotonic() > deadline or any(
                not load.layer_ready(parts[0]) for load in begun if load.is_done()
            ):
                return False
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return True

    def _end(self, load: _Load, deadline: float) -> int:
        """Waits for the end of a load that has begun. How many pages did not arrive."""
        if load.onboarding is None:
            return 0
        try:
            arrived = self._store.end_load(load.onboarding, load.pages, deadline)
        except Exception as error:
            self.failures.add("load", error)
            arrived = 0
        missing = len(load.pages) - arrived
        self._counts.add(loaded_pages=arrived, missed_pages=missing)
        return missing

    # ----------------------------------------------------------------- offloads

    @guarded(lambda *_args, **_kwargs: False)
    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        """Queues the copy of pages, which SGLang keeps until it has taken the result."""
        transfer = compat.kv_transfer(transfers)
        keys = list(transfer.keys or ())
        pages = compat.pages_of(transfer.device_indices, self._page_size)
        if not keys or len(keys) != len(pages):
            raise InvalidArgument(f"an offload of {len(keys)} keys and {len(pages)} pages")
        self._offloads.put(_Offload(keys, pages, self._submitted()))
        return True

    def _run_offloads(self) -> None:
        while (task := self._offloads.get()) is not None:
            is_stored = False
            try:
                results = self._store.put(task.keys, task.pages, task.after)
                stored = sum(results)
                self._counts.add(stored_pages=stored, refused_pages=len(results) - stored)
                is_stored = all(results)
            except Exception as error:
                self.failures.add("offload", error)
            finally:
                # In the order of the calls: one thread takes them.
                self._results.append(is_stored)
                self._offloads.task_done()
        self._offloads.task_done()

    def num_completed_offloads(self) -> int:
        """Results that wait."""
        return len(self._results)

    @guarded(lambda *_args, **_kwargs: False)
    def pop_completed_offload(self) -> bool:
        """The oldest result: whether all its pages are stored."""
        return self._results.popleft()

    # ---------------------------------------------------------------- lifecycle

    @guarded(lambda *_args, **_kwargs: None)
    def reset(self) -> None:
        """Waits for all transfers and forgets what was queued. What is stored stays."""
        self._queued.clear()
        for rid in list(self._looked_up):
            self._forget(rid)
        self._loads.join()
        self._offloads.join()
        self._results.clear()
        self.layer_done_counter.reset()

    @guarded(lambda *_args, **_kwargs: None)
    def close(self) -> None:
        """Waits for all transfers, saves what is not on disk yet and stops; once."""
        threads, self._threads = self._threads, []
        if not threads:
            return
        self.reset()
        self._loads.put(None)
        self._offloads.put(None)
        for thread in threads:
            thread.join(PATIENCE)
        not_saved = self._store.close()
        if not_saved is not None:
            logger.warning("kvbm: %s", not_saved)
