"""Errors inside callbacks of an engine: counted, and logged at a limited rate."""

from __future__ import annotations

import logging
import threading
import time

from .errors import KvbmError

__all__ = ["Failures"]

#: Seconds between two log lines of one place.
_INTERVAL = 10.0


class Failures:
    """Counts errors by the callback that they happened in."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._lock = threading.Lock()
        self._logged: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    @property
    def counts(self) -> dict[str, int]:
        """Errors so far, by callback."""
        with self._lock:
            return dict(self._counts)

    def add(self, where: str, error: BaseException) -> None:
        """An error in callback `where`. Logged once in ten seconds for each callback."""
        now = time.monotonic()
        with self._lock:
            count = self._counts[where] = self._counts.get(where, 0) + 1
            if now - self._logged.get(where, -_INTERVAL) < _INTERVAL:
                return
            self._logged[where] = now
        self._logger.error(
            "kvbm: %s: %s: %s (%d errors here so far)",
            where,
            type(error).__name__,
            error,
            count,
            exc_info=None if isinstance(error, KvbmError) else error,
        )
