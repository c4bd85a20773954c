"""vLLM's own prefix cache, and the blocks of loads whose requests run in the same step.

vLLM caches such blocks before the load has begun. Where the load fails, it leaves them there until
their request has computed them again, which never happens after an abort. Other requests would
compute on wrong bytes. So kvbm takes the blocks out at once, and puts them back when their bytes
are right.

Loads run in steps only where scheduler and worker share a process, and a step ends before the next
is planned. So none of the blocks can be another request's when its step is over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import KvbmError

__all__ = ["PrefixCache"]


@dataclass
class _Withheld:
    """Blocks of a request that the cache does not know: those from `first` to `end`."""

    request: Any
    blocks: list[Any]
    first: int
    end: int


class PrefixCache:
    """Withholds blocks from vLLM's cache while the step of their load runs."""

    def __init__(self, block_size: int, is_on: bool) -> None:
        self._block_size, self._is_on = block_size, is_on
        #: vLLM's `BlockPool`; `None` until vLLM passes it.
        self._pool: Any = None
        #: Of the step that is planned, and of the one that runs.
        self._planned: list[_Withheld] = []
        self._running: list[_Withheld] = []

    def bind(self, pool: Any) -> None:
        """vLLM has built its cache."""
        self._pool = pool

    def withhold(self, request: Any, blocks: Any, first: int) -> None:
        """Takes the blocks of a request out of the cache, from block `first` on: those that are
        loaded, and those that the step computes from them.
        """
        if not self._is_on:
            return
        if self._pool is None:
            raise KvbmError("vLLM has not passed its block pool, so its cache would share the load")
        blocks = list(blocks.blocks[0])
        end = first
        while end < len(blocks) and blocks[end].block_hash is not None:
            end += 1
        self._pool.evict_blocks({block.block_id for block in blocks[first:end]})
        self._planned.append(_Withheld(request, blocks, first, end))

    def step_begins(self) -> None:
        """The planned step begins. What is left of a step that did not end stays out: its blocks
        may be others' by now.
        """
        self._running, self._planned = self._planned, []

    def step_over(self, bad: set[int]) -> None:
        """The step is over, and vLLM has freed no block of it yet. The cache gets the blocks of
        requests that have none of the `bad` blocks.
        """
        running, self._running = self._running, []
        for one in running:
            if bad.isdisjoint(block.block_id for block in one.blocks[: one.end]):
                self._pool.cache_full_blocks(
                    request=one.request,
                    blocks=one.blocks,
                    num_cached_blocks=one.first,
                    num_full_blocks=one.end,
                    block_size=self._block_size,
                    kv_cache_group_id=0,
                )
