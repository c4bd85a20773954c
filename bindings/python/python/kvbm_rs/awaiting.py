"""Who awaits a load: event loops that watch a manager's `finished_fd`."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable

__all__ = ["Awaiting"]


class Awaiting:
    """Futures of tasks by request, and the event loops that watch for them. Its owner's lock guards
    it; the futures are set on their own loops.
    """

    def __init__(self, finished_fd: int) -> None:
        self._finished_fd = finished_fd
        self._futures: dict[str, list[asyncio.Future[None]]] = {}
        #: For each loop its own descriptor, which stays what it is when the manager is closed, and
        #: how many futures it has.
        self._watched: dict[asyncio.AbstractEventLoop, tuple[int, int]] = {}

    def add(self, request: str, on_readable: Callable[[], None]) -> asyncio.Future[None]:
        """A future of the running loop, which calls `on_readable` when loads may be over."""
        loop = asyncio.get_running_loop()
        watched = self._watched.get(loop)
        if watched is None:
            fd, count = os.dup(self._finished_fd), 0
            loop.add_reader(fd, on_readable)
        else:
            fd, count = watched
        self._watched[loop] = (fd, count + 1)
        future = loop.create_future()
        self._futures.setdefault(request, []).append(future)
        return future

    def remove(self, request: str, future: asyncio.Future[None]) -> None:
        """Ends what `add` began, on the future's loop."""
        futures = self._futures.get(request, [])
        if future in futures:
            futures.remove(future)
        if not futures:
            self._futures.pop(request, None)
        loop = future.get_loop()
        fd, count = self._watched.pop(loop)
        if count > 1:
            self._watched[loop] = (fd, count - 1)
        else:
            loop.remove_reader(fd)
            os.close(fd)

    def wake(self, request: str) -> None:
        """Wakes who awaits the load of `request`; any thread may."""
        for future in self._futures.get(request, ()):
            # A loop that was closed meanwhile has nobody to wake.
            with contextlib.suppress(RuntimeError):
                future.get_loop().call_soon_threadsafe(_set, future)

    def wake_all(self) -> None:
        """Wakes everybody."""
        for request in list(self._futures):
            self.wake(request)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
