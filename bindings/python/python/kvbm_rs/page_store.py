"""Pages of an engine's pool under keys: a store with blocking calls, for key-value engines."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence

from ._core import Config, ExternalSequence, Fence, Layout, Namespace
from .errors import BusyError, InvalidArgument, KvbmError, NoRoomError
from .loads import Onboarding
from .recording import RECORD_LIMIT, build_manager

__all__ = ["PageStore"]

#: Longest wait of a call, in seconds. Transfers end by themselves at `transfer.deadline`.
PATIENCE = 10.0

#: Longest wait for copies of a page that was given up.
_SETTLE = 60.0


class PageStore:
    """Stores pages of the engine's pool under the engine's keys.

    No copy touches a page of the pool when a call is over: the engine may reuse it at once. Calls
    may come from several threads. A page is a block of the manager; a key has no parent.
    """

    def __init__(
        self,
        config: Config,
        layout: Layout,
        namespace: Namespace,
        *,
        record: str | None = None,
        record_limit: int = RECORD_LIMIT,
    ) -> None:
        self.manager = build_manager(
            config, layout, namespace, record=record, record_limit=record_limit
        )
        self._numbers = itertools.count()
        # As many copies as may wait for the disk: more would be dropped.
        self._batch = max(1, self.manager.capacity[1] // 4)
        self._lock = threading.Lock()
        self._waiting = 0

    def sequence(self, keys: Sequence[str] | Sequence[bytes]) -> ExternalSequence:
        """The keys as the manager takes them."""
        encoded = [key.encode() if isinstance(key, str) else key for key in keys]
        return ExternalSequence(self.manager.namespace, encoded)

    def count(self, keys: Sequence[str] | Sequence[bytes]) -> int:
        """How many of the first keys have a page here, up to the first that has none."""
        return len(self.manager.places(self.sequence(keys)))

    def find(self, keys: Sequence[str]) -> int:
        """As `count`, and asks volumes for keys that nobody here knows."""
        known = self.count(keys)
        if known == len(keys):
            return known
        request = f"find {next(self._numbers)}"
        found = self._look_up(request, self.sequence(keys), time.monotonic() + PATIENCE)
        self.manager.abandon(request)
        return max(known, found)

    def put(
        self, keys: Sequence[str], pages: Sequence[int], after: Fence | None = None
    ) -> list[bool]:
        """Stores `pages[i]`, as it is when the engine has passed `after`, under `keys[i]`. Which
        keys have a page afterwards.
        """
        _check(keys, pages)
        stored: list[bool] = []
        for first in range(0, len(keys), self._batch):
            part = slice(first, first + self._batch)
            stored += self._put(keys[part], pages[part], after)
        return stored

    def _put(self, keys: Sequence[str], pages: Sequence[int], after: Fence | None) -> list[bool]:
        deadline = time.monotonic() + PATIENCE
        sequence = self.sequence(keys)
        self._make_room(len(keys), deadline)
        while True:
            try:
                self.manager.offload(pages, sequence, 0, after)
                break
            except (NoRoomError, BusyError):
                # Host memory is a queue in front of the disk: it drains.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.002)
        if not self.settle(pages, deadline):
            raise KvbmError(
                f"the copy of {len(keys)} pages to host memory is not over after {PATIENCE} s: the pages are not stored"
            )
        return self.present(keys)

    def _make_room(self, pages: int, deadline: float) -> None:
        """Waits for the disk, unless `pages` more copies may wait for it."""
        with self._lock:
            self._waiting += pages
            if self._waiting <= self._batch:
                return
            self._waiting = pages
        self.manager.wait_offloads(max(0.0, deadline - time.monotonic()))

    def present(self, keys: Sequence[str] | Sequence[bytes]) -> list[bool]:
        """Which keys have a page here."""
        present: list[bool] = []
        while len(present) < len(keys):
            present += [True] * self.count(keys[len(present) :])
            if len(present) < len(keys):
                present.append(False)
        return present

    def get(
        self, keys: Sequence[str], pages: Sequence[int], after: Fence | None = None
    ) -> list[bool]:
        """Brings the pages of the first keys into `pages`, up to the first that cannot be brought.
        Which keys arrived. Bytes from disk and volumes are verified. Nothing is written before the
        engine has passed `after`.
        """
        _check(keys, pages)
        deadline = time.monotonic() + PATIENCE
        sequence = self.sequence(keys)
        for last in (*[False] * 7, True):
            request = f"get {next(self._numbers)}"
            promised = self._look_up(request, sequence, deadline)
            if promised == 0:
                break
            try:
                arrived = self.load(request, pages[:promised], deadline, after)
            except InvalidArgument:
                # Tickets pin at most a quarter of a tier: another call took this one's place.
                if last:
                    raise
                continue
            return [True] * arrived + [False] * (len(keys) - arrived)
        return [False] * len(keys)

    def _look_up(self, request: str, sequence: ExternalSequence, deadline: float) -> int:
        """How many of the first keys are promised to `request`. Waits for volumes."""
        pause = 0.0002
        while (found := self.manager.look_up(request, sequence)) is None:
            if time.monotonic() > deadline:
                self.manager.abandon(request)
                return 0
            time.sleep(pause)
            pause = min(pause * 2, 0.01)
        if not found.blocks:
            # The answer of a volume is a ticket although it has no blocks.
            self.manager.abandon(request)
        return found.blocks

    def load(
        self, request: str, pages: Sequence[int], deadline: float, after: Fence | None = None
    ) -> int:
        """Loads what `request` was promised into `pages`. How many of the first arrived."""
        return self.end_load(self.manager.load(request, pages, after), pages, deadline)

    def end_load(self, onboarding: Onboarding, pages: Sequence[int], deadline: float) -> int:
        """Waits for a load into `pages`. How many of the first arrived."""
        try:
            arrived = onboarding.wait(max(0.0, deadline - time.monotonic())).arrived
        except TimeoutError:
            self.manager.abandon(onboarding.request)
            arrived = 0
        # What came from disk is also copied to host memory, out of the engine's pages.
        if not self.settle(pages, deadline):
            arrived = 0
        self.manager.finished()
        return arrived

    def settle(self, pages: Sequence[int], deadline: float) -> bool:
        """Waits until no copy touches `pages`. Whether that was before `deadline`; copies that are
        not over by then are discarded, and waited for.
        """
        if self._idle(pages, deadline):
            return True
        if self.manager.before_reuse(pages, _SETTLE):
            raise KvbmError(f"copies of the pages {list(pages)[:8]} are not over after {_SETTLE} s")
        return False

    def _idle(self, pages: Sequence[int], deadline: float) -> bool:
        pause = 0.00005
        while self.manager.busy(pages):
            if time.monotonic() > deadline:
                return False
            time.sleep(pause)
            pause = min(pause * 2, 0.002)
        return True

    def clear(self) -> int:
        """Removes all pages. How many there were."""
        return self.manager.forget(self.manager.namespace)

    def close(self, timeout: float = 10.0) -> str | None:
        """Saves what time allows. What could not be saved, as text."""
        return self.manager.close(timeout)


def _check(keys: Sequence[str], pages: Sequence[int]) -> None:
    if len(keys) != len(pages):
        raise KvbmError(f"{len(keys)} keys for {len(pages)} pages: give one key for each page")
