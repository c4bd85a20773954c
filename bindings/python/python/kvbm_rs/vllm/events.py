"""kvbm's events as vLLM publishes them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from .. import Event, Gap, KvBlockManager
from . import _vllm_compat as compat
from .groups import CacheGroups
from .requests import TrackedRequest

__all__ = ["CacheEvents"]

_MEDIUM = {"g2": "CPU", "g3": "STORAGE", "g4": "STORAGE"}

#: Blocks whose tokens are remembered for their events.
_MOST = 1 << 17


class CacheEvents:
    """Blocks that were stored and removed since the last call of `take`."""

    def __init__(
        self, manager: KvBlockManager, block_size: int, groups: CacheGroups | None = None
    ) -> None:
        self._events = manager.events()
        self._groups = groups
        self._block_size = block_size
        self._factory = compat.EventFactory()
        self._known: OrderedDict[bytes, tuple[bytes, bytes | None, list[int], str | None]] = (
            OrderedDict()
        )

    def note(self, request: TrackedRequest, first: int, end: int) -> None:
        """Remembers what events say of blocks that are about to be stored: vLLM's hashes, the
        tokens.
        """
        engine, size = request.view.block_hashes, self._block_size
        ours = request.sequence.hashes
        adapter = request.view.adapter
        for block in range(first, min(end, len(engine), len(ours))):
            parent = bytes(engine[block - 1]) if block else None
            tokens = request.view.tokens(block * size, (block + 1) * size)
            self._known[ours[block]] = (
                bytes(engine[block]),
                parent,
                tokens,
                adapter[0] if adapter else None,
            )
            self._known.move_to_end(ours[block])
        while len(self._known) > _MOST:
            self._known.popitem(last=False)

    def take(self) -> list[Any]:
        """vLLM's event objects. After a gap its followers are told to forget everything."""
        out = []
        for event in self._events.take():
            if isinstance(event, Gap):
                out.append(self._factory.cleared())
                continue
            out += self._translate(event)
        return out

    def _translate(self, event: Event) -> list[Any]:
        if event.hash is None or event.tier is None:
            return [self._factory.cleared()]
        known = self._known.get(event.hash)
        medium = _MEDIUM.get(event.tier)
        if known is None or medium is None:
            return []
        block, parent, tokens, adapter = known
        number = None if self._groups is None else event.group
        if event.kind == "store":
            about = None
            if self._groups is not None and number is not None:
                group = self._groups.groups[number]
                about = (number, group.spec_kind, group.sliding_window)
            return [
                self._factory.stored(
                    block, parent, tokens, self._block_size, adapter, medium, about
                )
            ]
        return [self._factory.removed(block, medium, number)]
