"""What a connector counts, and its line in the log."""

from __future__ import annotations

import logging
import threading
import time

__all__ = ["Counts"]

#: Seconds between two log lines.
_INTERVAL = 60.0


class Counts:
    """Counts by name. Logged once a minute while they change."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._logged = time.monotonic()

    def add(self, **counts: int) -> None:
        """Counts; a name with a count of 0 exists afterwards."""
        now = time.monotonic()
        with self._lock:
            for name, count in counts.items():
                self._counts[name] = self._counts.get(name, 0) + count
            if now - self._logged < _INTERVAL:
                return
            self._logged = now
            text = ", ".join(f"{name} {count}" for name, count in sorted(self._counts.items()))
        self._logger.info("kvbm: %s", text)

    def read(self) -> dict[str, int]:
        """The counts so far."""
        with self._lock:
            return dict(self._counts)
