"""kvbm's log records on their way to `logging`.

Threads of kvbm never take the GIL: they write to a bounded ring. `drain` hands its records to the
loggers `kvbm.*`. A daemon thread
drains while a manager is open; no thread starts at import.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading

from . import _core

__all__ = ["drain", "set_level", "start", "stop"]

_lock = threading.Lock()
_users = 0
_thread: threading.Thread | None = None
_stop = threading.Event()


def drain() -> int:
    """Hands the waiting records to `logging`. How many there were."""
    records, dropped = _core.drain_logs()
    for level, target, message in records:
        logging.getLogger(target.replace("::", ".")).log(level, "%s", message)
    if dropped:
        logging.getLogger("kvbm").warning("%d log records were dropped: the ring was full", dropped)
    return len(records)


def set_level(level: int) -> None:
    """Sets the lowest level that is kept, such as `logging.DEBUG`. The default is `logging.INFO`."""
    _core.set_log_level(max(0, min(level, 255)))


def start() -> None:
    """Starts the draining thread, unless it runs. Each call needs a call of `stop`."""
    global _users, _thread
    with _lock:
        _users += 1
        if _thread is None or not _thread.is_alive():
            _stop.clear()
            _thread = threading.Thread(target=_run, name="kvbm-logs", daemon=True)
            _thread.start()


def stop() -> None:
    """Ends the draining thread with the last user, and drains what is left."""
    global _users, _thread
    with _lock:
        _users = max(0, _users - 1)
        if _users == 0 and _thread is not None:
            _stop.set()
            _thread = None
    drain()


def _run() -> None:
    while not _stop.is_set():
        if _core.wait_logs(0.2):
            drain()


def _after_fork() -> None:
    """A forked child has no draining thread and no users."""
    global _users, _thread, _lock
    _lock = threading.Lock()
    _users, _thread = 0, None


atexit.register(drain)
os.register_at_fork(after_in_child=_after_fork)
