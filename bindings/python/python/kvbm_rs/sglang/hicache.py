"""`KvbmHiCache`: a storage backend behind SGLang's host pool."""

from __future__ import annotations

import logging
import threading
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolName

from .. import logs
from ..counts import Counts
from ..errors import ClosedError, ConfigInvalid
from ..failures import Failures
from ..guarded import guarded
from ..page_store import PageStore
from . import _sglang_compat as compat
from .options import Options

__all__ = ["KvbmHiCache"]

logger = logging.getLogger("kvbm_rs.sglang")

_WHERE = "--hicache-storage-backend-extra-config"


def _none_of(keys: Any = (), *_args: Any, **_kwargs: Any) -> list[bool]:
    try:
        return [False] * len(keys)
    except TypeError:
        return []


class KvbmHiCache(HiCacheStorage):  # type: ignore[misc]
    """Keeps pages of SGLang's host pool in kvbm's host memory, on disk and in blob stores, one
    manager for each rank. docs/sglang.md has the options.

    What cannot work is refused at the start. Later no exception leaves a callback: what fails is a
    miss, see `failures`.
    """

    def __init__(self, storage_config: Any, _kwargs: dict[str, Any] | None = None) -> None:
        compat.check(compat.HICACHE, "KvbmHiCache")
        self.failures = Failures(logger)
        self._rank = compat.rank_of_storage(storage_config)
        self._options = Options.read(self._rank, _WHERE)
        self._lock = threading.Lock()
        self._store: PageStore | None = None
        self._page_size = 0
        self._counts = Counts(logger)

    # ---------------------------------------------------------------- lifecycle

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Opens the store over the pages of this pool. An error fails SGLang's start."""
        super().register_mem_pool_host(mem_pool_host)
        self.close()
        logs.set_level(self._options.log_level)
        layout, meaning = compat.host_pool_layout(mem_pool_host)
        namespace = compat.namespace_of(
            self._rank, self._options.weights, layout.page_size, meaning
        )
        store = PageStore(
            self._options.config,
            layout,
            namespace,
            record=self._options.record,
            record_limit=self._options.record_limit,
        )
        self._page_size = layout.page_size
        with self._lock:
            self._store = store
        _, host, disk, _ = store.manager.capacity
        on_disk = store.manager.status()["tiers"]["g3"]
        there = on_disk["inactive"] + on_disk["active"]
        logger.info(
            "kvbm: rank %s: %d pages of %d tokens (%.0f KiB) in host memory%s; layout %s",
            self._rank.folder,
            host,
            layout.page_size,
            layout.block_bytes / 1024,
            f", {disk} on disk, {there} of them from before" if disk else "",
            mem_pool_host.layout,
        )

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Pools beside the KV cache (sliding window, Mamba, indexer) are refused: their pages
        would be missing from what is stored.
        """
        if host_pool_name != PoolName.KV:
            raise ConfigInvalid(
                f"the model has a host pool {host_pool_name!s} beside the KV cache: KvbmHiCache supports models with full "
                "attention only"
            )
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    def close(self) -> None:
        """Saves what is not on disk yet and stops the manager; once."""
        with self._lock:
            store, self._store = self._store, None
        if store is not None:
            try:
                not_saved = store.close()
                if not_saved is not None:
                    logger.warning("kvbm: %s", not_saved)
            except Exception as error:
                self.failures.add("close", error)

    @property
    def counters(self) -> dict[str, int]:
        """Pages stored, loaded, refused and missed, and `errors`."""
        return self._counts.read() | {"errors": sum(self.failures.counts.values())}

    def _opened(self) -> PageStore:
        store = self._store
        if store is None:
            raise ClosedError("the store is closed: SGLang registers its host pool first")
        return store

    # -------------------------------------------------------------- interface_v1

    @guarded(_none_of)
    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Brings pages into the host pool. Which arrived; bytes from disk are verified."""
        store = self._opened()
        results = store.get(keys, compat.pages_of(host_indices, self._page_size))
        loaded = sum(results)
        self._counts.add(loaded_pages=loaded, missed_pages=len(results) - loaded)
        return results

    @guarded(_none_of)
    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Stores pages of the host pool. Which are there afterwards."""
        store = self._opened()
        results = store.put(keys, compat.pages_of(host_indices, self._page_size))
        stored = sum(results)
        self._counts.add(stored_pages=stored, refused_pages=len(results) - stored)
        return results

    @guarded(lambda *_args, **_kwargs: 0)
    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many of the first keys are there, up to the first that is not."""
        return self._opened().find(keys)

    @guarded(lambda *_args, **_kwargs: False)
    def exists(self, key: str) -> bool:
        return self._opened().find([key]) == 1

    @guarded(lambda *_args, **_kwargs: False)
    def clear(self) -> bool:
        """Removes all pages of this model and rank from all tiers."""
        logger.info("kvbm: the cache was cleared: %d pages removed", self._opened().clear())
        return True

    # -------------------------------------- interface without page numbers: misses

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        """Always a miss: SGLang calls `batch_get_v1` where `interface_v1` is set."""
        return None

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[None]:
        """Always misses, as `get`."""
        return [None] * len(keys)

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        """Never stores: SGLang calls `batch_set_v1` where `interface_v1` is set."""
        return False

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Never stores, as `set`."""
        return False
