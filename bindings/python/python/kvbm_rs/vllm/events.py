"""kvbm's events as vLLM publishes them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from .. import Event, Gap, KvBlockManager
from . import _vllm_compat as compat
from .groups import CacheGroups
from .requests import TrackedRequest

__all__ = ["CacheEvents"]

_MEDIUM = {"g2": "CPU", "g3": "STORAGE", "g4": "STORAGE"}

#: kvbm's hash, the medium, the cache group.
_Key = tuple[bytes, str, int]

#: The key, and the tier: a medium may be several of them.
_Place = tuple[_Key, str]


@dataclass
class _Told:
    """What followers know to be on a medium."""

    #: vLLM's hash.
    block: bytes
    tiers: set[str]


#: Blocks whose tokens are remembered for their events.
_MOST = 1 << 17


class CacheEvents:
    """Blocks that were stored and removed since the last call of `take`."""

    def __init__(
        self, manager: KvBlockManager, block_size: int, groups: CacheGroups | None = None
    ) -> None:
        self._manager, self._events = manager, manager.events()
        self._told: dict[_Key, _Told] = {}
        #: Events below this number are published already.
        self._covered = 0
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
        """vLLM's event objects, since the last call. They concern host memory, disk and volumes
        alone: after a gap, too, the view of vLLM's own blocks stays as it is.
        """
        out = []
        for event in self._events.take():
            if isinstance(event, Gap):
                out += self._repair()
            elif event.sequence >= self._covered:
                out += self._translate(event)
        return out

    def _repair(self) -> list[Any]:
        """What followers have to receive after a gap: what is gone, and what is new. Of volumes it
        is not known what they hold.
        """
        held = self._manager.held_blocks()
        out = self._retain({_place(event) for event in held})
        for event in held:
            # Events that are still on their way are in what is held.
            self._covered = event.sequence
            out += self._translate(event)
        return out

    def _retain(self, places: set[_Place | None]) -> list[Any]:
        """Takes back what was published of blocks at other places."""
        gone = [
            (key, tier)
            for key, told in self._told.items()
            for tier in told.tiers
            if (key, tier) not in places
        ]
        return [event for key, tier in gone for event in self._removed(key, tier)]

    def _translate(self, event: Event) -> list[Any]:
        place = _place(event)
        if place is None:
            return self._retain(set())
        key, tier = place
        return self._stored(key, tier) if event.kind == "store" else self._removed(key, tier)

    def _stored(self, key: _Key, tier: str) -> list[Any]:
        hash, medium, number = key
        told = self._told.get(key)
        if told is not None:
            # On disk and on a volume: one place for followers.
            told.tiers.add(tier)
            return []
        known = self._known.get(hash)
        if known is None:
            return []
        block, parent, tokens, adapter = known
        self._told[key] = _Told(block, {tier})
        about = None
        if self._groups is not None:
            group = self._groups.groups[number]
            about = (number, group.spec_kind, group.sliding_window)
        stored = self._factory.stored
        return [stored(block, parent, tokens, self._block_size, adapter, medium, about)]

    def _removed(self, key: _Key, tier: str) -> list[Any]:
        told = self._told.get(key)
        if told is None:
            return []
        told.tiers.discard(tier)
        if told.tiers:
            return []
        del self._told[key]
        _, medium, number = key
        return [self._factory.removed(told.block, medium, None if self._groups is None else number)]


def _place(event: Event) -> _Place | None:
    """Where the block of an event is; `None` where it concerns all blocks."""
    if event.hash is None or event.tier is None:
        return None
    # The connector has no memory of G1 that is not vLLM's.
    return (event.hash, _MEDIUM[event.tier], event.group or 0), event.tier
