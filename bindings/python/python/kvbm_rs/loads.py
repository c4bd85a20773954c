"""Loads: what the outcome of each is, and who waits for it."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from ._core import Fence, FinishedLoad
from .errors import KvbmError

if TYPE_CHECKING:
    from .awaiting import Awaiting

__all__ = ["Loads", "Onboarding"]


class Onboarding:
    """A load that was committed: poll it, wait for it, or await it."""

    def __init__(self, manager: Loads, request: str) -> None:
        self._manager = manager
        self._request = request
        self._ended: FinishedLoad | None = None

    @property
    def request(self) -> str:
        """Who asked for it."""
        return self._request

    def is_done(self) -> bool:
        """Whether it is over and no copy can write to its blocks any more."""
        return self.result() is not None

    def result(self) -> FinishedLoad | None:
        """How it ended; `None` while it runs."""
        if self._ended is None:
            self._ended = self._manager._result(self._request)
        return self._ended

    def layer_ready(self, layer: int) -> bool:
        """Whether the bytes of all its blocks in tensor `layer` of the layout are in place,
        verified. Of a load that is not `by_layer`, all tensors are ready at once.
        """
        if self._manager._has_layer(self._request, layer):
            return True
        result = self.result()
        return result is not None and result.arrived == result.wanted

    def wait(self, timeout: float) -> FinishedLoad:
        """Waits for its end.

        Raises `TimeoutError` after `timeout` seconds; the load goes on.
        """
        deadline = time.monotonic() + timeout
        while True:
            result = self.result()
            if result is not None:
                return result
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(
                    f"the load of request {self._request!r} is not over after {timeout} s: wait again"
                )
            self._manager.wait_finished(min(left, 0.01))

    def __await__(self) -> Generator[Any, None, FinishedLoad]:
        return self._poll().__await__()

    async def _poll(self) -> FinishedLoad:
        while (result := self.result()) is None:
            await self._manager._until_over(self._request)
        return result


class Loads:
    """Adds to `commit`, `abandon` and `finished` of the class beside it what waits for one load."""

    _lock: threading.Lock
    _awaited: set[str]
    _ended: dict[str, FinishedLoad]
    _others: list[FinishedLoad]
    _finished_fd: int | None
    #: Made when somebody awaits: a program without an event loop imports no asyncio.
    _awaiting: Awaiting | None

    def _begin_loads(self, finished_fd: int | None) -> None:
        self._lock = threading.Lock()
        self._awaited, self._ended, self._others = set(), {}, []
        self._finished_fd = finished_fd
        self._awaiting = None

    def load(
        self, request: str, ids: Any, after: Fence | None = None, **options: Any
    ) -> Onboarding:
        """`commit`, with its options, for whoever waits for one load: its result comes by the
        object that this returns, not by `finished`.
        """
        with self._lock:
            if request in self._awaited:
                raise KvbmError(
                    f"request {request!r} has a load that nobody took yet: take its result first"
                )
            self.commit(request, ids, after, **options)  # type: ignore[attr-defined]
            self._awaited.add(request)
        return Onboarding(self, request)

    def abandon(self, request: str) -> bool:
        """Drops the request's ticket, or cancels its load: its blocks may be written until `busy`
        says no. Whether there was one.
        """
        with self._lock:
            self._awaited.discard(request)
            ended = self._ended.pop(request, None)
            if self._awaiting is not None:
                self._awaiting.wake(request)
            return super().abandon(request) or ended is not None  # type: ignore[misc]

    def finished(self) -> list[FinishedLoad]:
        """Loads that are over, each once, and only when no copy can write to their blocks any more."""
        with self._lock:
            self._poll()
            others, self._others = self._others, []
            return others

    def wait_finished(self, timeout: float) -> None:
        """Waits until `finished` may have something, at most `timeout` seconds. Another thread may
        take it first.
        """
        if self._finished_fd is None:
            time.sleep(min(timeout, 0.0005))
            return
        # One for each call: a poll object refuses a second thread.
        poller = select.poll()
        poller.register(self._finished_fd, select.POLLIN)
        poller.poll(timeout * 1000)

    def _has_layer(self, request: str, layer: int) -> bool:
        """Whether a layer of a load that is not over is in place, where the class beside it knows."""
        return False

    def _over(self) -> list[FinishedLoad]:
        over: list[FinishedLoad] = super().finished()  # type: ignore[misc]
        return over

    def _poll(self) -> None:
        for done in self._over():
            if done.request in self._awaited:
                self._ended[done.request] = done
                if self._awaiting is not None:
                    self._awaiting.wake(done.request)
            else:
                self._others.append(done)

    async def _until_over(self, request: str) -> None:
        """Returns when `_result` may have an answer. Raises `KvbmError` where the load was
        abandoned.
        """
        import asyncio

        from .awaiting import Awaiting

        if self._finished_fd is None:
            await asyncio.sleep(0.001)
            return
        with self._lock:
            if request in self._ended or self.closed:  # type: ignore[attr-defined]
                return
            if request not in self._awaited:
                raise KvbmError(
                    f"the load of request {request!r} was abandoned: nothing is awaited"
                )
            if self._awaiting is None:
                self._awaiting = Awaiting(self._finished_fd)
            future = self._awaiting.add(request, self._take_over)
            awaiting = self._awaiting
        try:
            await future
        finally:
            with self._lock:
                awaiting.remove(request, future)

    def _take_over(self) -> None:
        """An event loop saw that loads are over."""
        with self._lock:
            try:
                self._poll()
            except KvbmError:
                # Each finds the error when it asks.
                if self._awaiting is not None:
                    self._awaiting.wake_all()

    def _end_awaiting(self) -> None:
        """The manager is closed: who awaits a load learns it."""
        with self._lock:
            if self._awaiting is not None:
                self._awaiting.wake_all()

    def _result(self, request: str) -> FinishedLoad | None:
        with self._lock:
            self._poll()
            ended = self._ended.pop(request, None)
            if ended is not None:
                self._awaited.discard(request)
            return ended
