"""Audits: of some requests vLLM computes what kvbm could have served, and the two are compared."""

from __future__ import annotations

import random
from typing import Any

from .. import Fence, FinishedLoad, KvBlockManager
from ..errors import ConfigInvalid
from .requests import TrackedRequest
from .stats import Counters

__all__ = ["Audit", "comparison_of"]

#: How far numbers may be apart, by their type, relative to their magnitude or to what numbers
#: around them are. The order of sums differs with the sizes of chunks and batches, and its error
#: grows with the layers; the numbers of another block are apart by more than 1.
_TOLERANCES = {"float32": 0.001, "float16": 0.05, "bfloat16": 0.25}


def comparison_of(dtype: str, cache_dtype: str, tolerance: float | None) -> tuple[str, float]:
    """What the cache's elements are, and how far they may be apart."""
    elements = dtype if cache_dtype == "auto" else cache_dtype
    if tolerance == 0:
        return "bytes", 0.0
    if elements not in _TOLERANCES:
        raise ConfigInvalid(
            f"option 'audit' with a cache of {elements}: one step of such a number is more than the error of a sum, so only "
            f"equal bytes can be accepted; set 'audit_tolerance' to 0 for that, or leave 'audit' out "
            f"(known are {', '.join(sorted(_TOLERANCES))})"
        )
    return elements, _TOLERANCES[elements] if tolerance is None else tolerance


class Audit:
    """Chooses requests, starts comparisons and takes their results."""

    def __init__(
        self, share: float, comparison: tuple[str, float], counters: Counters, logger: Any
    ) -> None:
        self._share, (self._elements, self._tolerance) = share, comparison
        self._counters, self._logger = counters, logger
        self._random = random.Random()
        self._next = 0
        #: Comparisons that are not over.
        self._open: dict[str, TrackedRequest] = {}

    @property
    def is_open(self) -> bool:
        """Whether a comparison is not over."""
        return bool(self._open)

    def takes(self, request: TrackedRequest, first: int, blocks: int) -> bool:
        """Whether the hit of a request is computed again: drawn once for each request."""
        if request.is_audited is None:
            request.is_audited = self._random.random() < self._share
            if request.is_audited:
                self._counters.add("audited_requests")
        if request.is_audited:
            request.audited = range(first, first + blocks)
        return request.is_audited

    def compare(
        self,
        manager: KvBlockManager,
        request: TrackedRequest,
        first: int,
        ids: list[int],
        after: Fence | None,
    ) -> None:
        """Engine blocks `ids` hold what vLLM computed for the blocks from `first` on: starts the
        comparison of those that kvbm could have served.
        """
        begin = max(first, request.audited.start)
        end = min(first + len(ids), request.audited.stop)
        if begin >= end:
            return
        # Blocks that are offered again are not compared again.
        request.audited = range(end, request.audited.stop)
        name = f"audit {self._next}"
        self._next += 1
        found = manager.look_up(name, request.sequence, begin)
        blocks = 0 if found is None else min(found.blocks, end - begin)
        if blocks == 0:
            # Evicted meanwhile, or on a volume.
            manager.abandon(name)
            return
        manager.audit(
            name,
            ids[begin - first : begin - first + blocks],
            after,
            elements=self._elements,
            tolerance=self._tolerance,
        )
        self._open[name] = request

    def take(self, done: FinishedLoad) -> bool:
        """Takes the result of a comparison. `False` where it is that of a load."""
        request = self._open.pop(done.request, None)
        if request is None:
            return False
        self._counters.add("audited_blocks", done.wanted - done.failed + done.differing)
        self._counters.add("differing_blocks", done.differing)
        if done.differing:
            # What vLLM computed takes the place of what was stored.
            request.offered = 0
            self._logger.error(
                "kvbm: an audit found %d of %d stored blocks that are not what vLLM computes; they are quarantined, and what "
                "was served from them is in doubt: %s",
                done.differing,
                done.wanted,
                "; ".join(done.failures[:4]),
            )
        elif done.failed:
            self._logger.debug(
                "kvbm: %d of %d blocks were not compared: %s",
                done.failed,
                done.wanted,
                done.failures[0],
            )
        return True
