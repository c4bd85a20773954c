"""Stores and loads of an engine's pages that are submitted and polled: for callbacks that must not
wait.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from .errors import BusyError, InvalidArgument, KvbmError, NoRoomError
from .page_store import PATIENCE, PageStore

__all__ = ["FinishedJob", "PageJobs"]

#: Volumes are asked for so many keys at a time.
_MOST_QUESTIONS = 256

#: Longest pause between two polls of `drain`, in seconds.
_POLL = 0.002


@dataclass(frozen=True)
class FinishedJob:
    """A job that is over: no copy touches its pages any more."""

    job: int
    keys: list[bytes]
    #: For each of the keys, whether the page is here (a store) or arrived, verified (a load).
    succeeded: list[bool]
    #: From its submission to its end.
    seconds: float
    #: Why pages failed, as far as that is known.
    why: str | None = None

    @property
    def whole(self) -> bool:
        """Whether every page did."""
        return all(self.succeeded)


@dataclass
class _Store:
    job: int
    keys: list[bytes]
    pages: list[int]
    began: float
    #: Keys whose copy began.
    started: int = 0
    why: str | None = None


@dataclass
class _Load:
    job: int
    keys: list[bytes]
    pages: list[int]
    began: float
    #: Of the keys so far.
    arrived: list[bool] = field(default_factory=list)
    #: What is being loaded now: its name and how many keys it has.
    request: str | None = None
    promised: int = 0
    #: The load has begun, and its end has not been reported.
    loading: bool = False
    why: str | None = None

    @property
    def left(self) -> list[bytes]:
        return self.keys[len(self.arrived) :]


class PageJobs:
    """Jobs over a `PageStore`, which nobody else may use meanwhile. All calls come from one thread,
    and only `drain` waits.

    Stores take turns: what the disk cannot take yet waits. A job that has not begun `PATIENCE`
    seconds after its submission fails, and a load that began is given up then.
    """

    def __init__(self, store: PageStore) -> None:
        self._store = store
        self._numbers = itertools.count()
        # Pages of host memory whose copy to the disk may be waited for.
        self._batch = max(1, store.manager.capacity[1] // 2)
        #: Whether keys that nobody here knows may be on a volume.
        self.has_volumes = bool(store.manager.status()["volumes"])
        self._waiting = 0
        self._queued: deque[_Store] = deque()
        self._copying: list[_Store] = []
        self._loads: list[_Load] = []
        self._over: list[FinishedJob] = []
        #: Keys that volumes are asked for: the name of the look-up, and since when.
        self._questions: dict[bytes, tuple[str, float]] = {}

    @property
    def pending(self) -> int:
        """Jobs that are not over."""
        return len(self._queued) + len(self._copying) + len(self._loads)

    def find(self, key: bytes) -> bool | None:
        """Whether there is a page; `None` while a volume is asked."""
        if self._store.count([key]):
            self._forget(key)
            return True
        if not self.has_volumes:
            return False
        if key not in self._questions:
            self._forget_old()
            if len(self._questions) >= _MOST_QUESTIONS:
                return None
            self._questions[key] = (f"ask {next(self._numbers)}", time.monotonic())
        request, since = self._questions[key]
        found = self._store.manager.look_up(request, self._store.sequence([key]))
        if found is None and time.monotonic() - since < PATIENCE:
            return None
        self._forget(key)
        return found is not None and found.blocks > 0

    def _forget(self, key: bytes) -> None:
        question = self._questions.pop(key, None)
        if question is not None:
            self._store.manager.abandon(question[0])

    def _forget_old(self) -> None:
        """Questions of requests that ended before the answer."""
        oldest = time.monotonic() - 2 * PATIENCE
        for key in [key for key, (_, since) in self._questions.items() if since < oldest]:
            self._forget(key)

    def submit_store(self, job: int, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        """Stores `pages[i]` under `keys[i]`. The pages keep their bytes until the job is over."""
        self._queued.append(_Store(job, list(keys), list(pages), time.monotonic()))
        self._start_stores()

    def submit_load(self, job: int, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        """Brings the page of `keys[i]` into `pages[i]`. Nothing else touches the pages until the
        job is over.
        """
        load = _Load(job, list(keys), list(pages), time.monotonic())
        self._loads.append(load)
        self._advance(load)

    def finished(self) -> list[FinishedJob]:
        """Jobs that are over, each once."""
        if self.pending:
            self._poll()
        over, self._over = self._over, []
        return over

    def drain(self, timeout: float) -> None:
        """Waits until every job is over; `finished` has them then. Stores that have not begun fail.

        Raises `KvbmError` after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        for store in self._queued:
            store.why = "drained before its copy began"
        self._copying += self._queued
        self._queued.clear()
        while True:
            self._poll()
            if not self.pending:
                return
            if time.monotonic() > deadline:
                raise KvbmError(
                    f"{self.pending} jobs are not over after {timeout} s: a copy hangs; see the status of the disk and the volumes"
                )
            time.sleep(_POLL)

    def _poll(self) -> None:
        for done in self._store.manager.finished():
            for load in self._loads:
                if load.loading and load.request == done.request:
                    self._arrived(load, done.arrived, done.failures)
        for load in list(self._loads):
            self._advance(load)
        for store in list(self._copying):
            if not self._store.manager.busy(store.pages):
                self._copying.remove(store)
                here, seconds = self._store.present(store.keys), time.monotonic() - store.began
                self._over.append(FinishedJob(store.job, store.keys, here, seconds, store.why))
        self._start_stores()

    def close(self, timeout: float) -> str | None:
        """Closes the store. What could not be saved, as text."""
        return self._store.close(timeout)

    # ------------------------------------------------------------------ stores

    def _start_stores(self) -> None:
        """Starts what there is room for, in the order of the jobs."""
        while self._queued:
            store = self._queued[0]
            try:
                while store.started < len(store.keys) and self._start_part(store):
                    pass
                if store.started < len(store.keys):
                    if time.monotonic() - store.began < PATIENCE:
                        return
                    # The disk does not keep up: what began is kept.
                    store.why = f"no room in host memory within {PATIENCE:g} s"
            except KvbmError as error:
                store.why = str(error)
            self._copying.append(self._queued.popleft())

    def _start_part(self, store: _Store) -> bool:
        """Starts copies of the next keys. Whether there was room for any."""
        manager = self._store.manager
        if self._waiting >= self._batch:
            if not manager.wait_offloads(0.0):
                return False
            self._waiting = 0
        part = slice(store.started, store.started + self._batch - self._waiting)
        keys = store.keys[part]
        try:
            manager.offload(store.pages[part], self._store.sequence(keys))
        except (NoRoomError, BusyError):
            return False
        self._waiting += len(keys)
        store.started += len(keys)
        return True

    # ------------------------------------------------------------------- loads

    def _advance(self, load: _Load) -> None:
        """Takes a load as far as it goes without waiting."""
        while not load.loading:
            if not load.left:
                # What came from disk may still be copied to host memory, out of the pages.
                if not self._store.manager.busy(load.pages):
                    self._loads.remove(load)
                    seconds = time.monotonic() - load.began
                    done = FinishedJob(load.job, load.keys, load.arrived, seconds, load.why)
                    self._over.append(done)
                return
            if not self._begin_load(load):
                return
        if time.monotonic() - load.began > PATIENCE and load.request is not None:
            # Its end is reported when no copy can write to its pages any more.
            self._store.manager.abandon(load.request)

    def _begin_load(self, load: _Load) -> bool:
        """Begins to load what there is of the first keys that are left. Whether anything changed."""
        manager = self._store.manager
        is_late = time.monotonic() - load.began > PATIENCE
        if load.request is None:
            load.request = f"job {load.job} {next(self._numbers)}"
        request = load.request
        try:
            found = None if is_late else manager.look_up(request, self._store.sequence(load.left))
            if found is None and not is_late:
                return False
            if found is None or not found.blocks:
                manager.abandon(request)
                load.request = None
                late = f"not begun within {PATIENCE:g} s"
                load.why = load.why or (late if is_late else "a page is not here any more")
                # One key is missing; those behind it may be here.
                load.arrived += [False] * (len(load.left) if is_late else 1)
                return True
            first = len(load.arrived)
            manager.commit(request, load.pages[first : first + found.blocks])
        except InvalidArgument as error:
            # Tickets pin at most a quarter of a tier: another one took its place.
            load.request, load.why = None, str(error)
            return False
        except KvbmError as error:
            manager.abandon(request)
            load.request, load.why = None, str(error)
            load.arrived += [False] * len(load.left)
            return True
        load.promised, load.loading = found.blocks, True
        return True

    def _arrived(self, load: _Load, arrived: int, failures: list[str]) -> None:
        load.arrived += [True] * arrived
        if arrived < load.promised:
            load.why = failures[0] if failures else "the load was given up"
            # Those behind the one that failed may have arrived too, or be tried again.
            load.arrived.append(False)
        load.request, load.loading, load.promised = None, False, 0
