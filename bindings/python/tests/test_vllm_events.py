"""What followers of vLLM's events hear of blocks that kvbm keeps."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import PAGE_SIZE, FakeEngine
from kvbm_rs import KvBlockManager, TokenSequence
from kvbm_rs.vllm import _vllm_compat as compat
from kvbm_rs.vllm import events as module
from kvbm_rs.vllm.events import CacheEvents


class Lost:
    """Stands for a gap."""


class Factory:
    """vLLM's event objects as tuples. None says that all of vLLM's blocks are gone, too."""

    def stored(
        self, block: bytes, parent: bytes | None, tokens: list[int], *about: Any
    ) -> tuple[str, bytes, str]:
        return "stored", block, about[2]

    def removed(
        self, block: bytes, medium: str, group: int | None = None
    ) -> tuple[str, bytes, str]:
        return "removed", block, medium


@pytest.fixture(autouse=True)
def factory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "EventFactory", Factory)
    monkeypatch.setattr(module, "Gap", Lost)


class Feed:
    """A manager's events, some of which are lost."""

    def __init__(self, manager: KvBlockManager) -> None:
        self._manager, self._events = manager, manager.events()
        self.loses = False

    def take(self) -> list[Any]:
        assert self._manager.pump_events()
        came: list[Any] = self._events.take(0.0)
        return [Lost()] if self.loses else came


class Prompt:
    """A prompt of blocks, whose hashes vLLM would know as `name` and a number."""

    def __init__(self, manager: KvBlockManager, name: str, blocks: int) -> None:
        tokens = [sum(name.encode()) * 1000 + at for at in range(blocks * PAGE_SIZE)]
        self.sequence = TokenSequence(manager.namespace, tokens)
        self.names = [f"{name}{at}".encode() for at in range(blocks)]
        self.view = SimpleNamespace(
            block_hashes=self.names,
            adapter=None,
            tokens=lambda first, end: tokens[first:end],
        )

    def store(self, manager: KvBlockManager, events: CacheEvents) -> None:
        request: Any = self
        events.note(request, 0, len(self.names))
        manager.before_reuse(list(range(len(self.names))), 10)
        manager.offload(list(range(len(self.names))), self.sequence)
        assert manager.wait_offloads(10)


def follow(manager: KvBlockManager) -> tuple[CacheEvents, Feed]:
    events, feed = CacheEvents(manager, PAGE_SIZE), Feed(manager)
    events._events = feed  # type: ignore[assignment]
    return events, feed


def test_a_gap_removes_what_is_gone_and_stores_what_is_new(manager: KvBlockManager) -> None:
    events, feed = follow(manager)
    first, second = Prompt(manager, "a", 3), Prompt(manager, "b", 2)
    first.store(manager, events)
    assert events.take() == [("stored", name, "CPU") for name in first.names]
    manager.clear("g2")
    second.store(manager, events)
    feed.loses = True
    told = events.take()
    assert sorted(told) == sorted(
        [("removed", name, "CPU") for name in first.names]
        + [("stored", name, "CPU") for name in second.names]
    )
    # A second gap, behind which nothing changed.
    assert events.take() == []
    feed.loses = False
    manager.clear("g2")
    assert sorted(events.take()) == [("removed", name, "CPU") for name in second.names]


def test_events_that_were_on_their_way_are_not_published_twice(manager: KvBlockManager) -> None:
    events, feed = follow(manager)
    prompt = Prompt(manager, "a", 3)
    prompt.store(manager, events)
    manager.clear("g2")
    prompt.store(manager, events)
    assert manager.pump_events()
    on_their_way = feed._events.take(0.0)
    feed.loses = True
    assert events.take() == [("stored", name, "CPU") for name in prompt.names]
    events._events = SimpleNamespace(take=lambda: on_their_way)  # type: ignore[assignment]
    assert len(on_their_way) == 9
    assert events.take() == []


def test_a_block_on_disk_stays_stored_until_its_last_copy_goes(
    engine: FakeEngine, tmp_path: Path
) -> None:
    with engine.manager(tmp_path) as manager:
        events, _ = follow(manager)
        prompt = Prompt(manager, "a", 2)
        prompt.store(manager, events)
        assert manager.flush(10) == 2
        mediums = [("CPU", name) for name in prompt.names] + [
            ("STORAGE", name) for name in prompt.names
        ]
        assert sorted((medium, name) for _, name, medium in events.take()) == mediums
        manager.clear("g2")
        assert sorted(events.take()) == [("removed", name, "CPU") for name in prompt.names]
        manager.clear("g3")
        assert sorted(events.take()) == [("removed", name, "STORAGE") for name in prompt.names]
