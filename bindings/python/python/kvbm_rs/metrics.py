"""Metrics of a manager."""

from __future__ import annotations

import re

from ._core import KvBlockManager as _Manager

__all__ = ["Metrics"]

_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*(?:\{.*\})?) (?P<value>[^ ]+)")


class Metrics:
    """Counters and gauges of one manager.

    `text` is what a Prometheus server reads; `read` is the same as a dictionary.
    """

    def __init__(self, manager: _Manager) -> None:
        self._manager = manager

    def text(self) -> str:
        """All metrics in the OpenMetrics text format."""
        return self._manager.metrics_text()

    def read(self) -> dict[str, float]:
        """Each sample by its name with its labels, such as `kvbm_lookup_blocks_total`."""
        samples = {}
        for line in self.text().splitlines():
            sample = _SAMPLE.match(line)
            if sample is not None:
                samples[sample["name"]] = float(sample["value"])
        return samples
