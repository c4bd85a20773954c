"""Fixtures: an engine's KV tensors in numpy, and managers over them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from kvbm_rs import Config, KvBlockManager, Namespace, layout_of

PAGE_SIZE = 4
NUM_BLOCKS = 32
LAYERS = 3


class FakeEngine:
    """KV tensors of three layers and 32 blocks, as an engine has them."""

    def __init__(self) -> None:
        self.tensors = [
            np.zeros((NUM_BLOCKS, 2, PAGE_SIZE, 64), dtype=np.float32) for _ in range(LAYERS)
        ]

    def compute(self, block: int, value: float) -> None:
        for layer, tensor in enumerate(self.tensors):
            tensor[block] = value + layer / 8

    def holds(self, block: int, value: float) -> bool:
        return all(
            bool((tensor[block] == value + layer / 8).all())
            for layer, tensor in enumerate(self.tensors)
        )

    def manager(
        self, disk: Path | None = None, host: str = "64", weights: str = "1"
    ) -> KvBlockManager:
        config = Config()
        config.set("host.capacity", host)
        config.set("host.pinned", "false")
        config.set("policy.admission", "all")
        if disk is not None:
            config.set("disk.dir", str(disk))
            config.set("disk.capacity", "256")
            config.set("disk.drive_writes_per_day", "0")
            config.set("offload.g2_g3.write_through", "true")
        layout = layout_of(self.tensors, page_size=PAGE_SIZE)
        return KvBlockManager(
            config, layout, Namespace("test", weights=weights, page_size=PAGE_SIZE)
        )


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def manager(engine: FakeEngine) -> Iterator[KvBlockManager]:
    with engine.manager() as manager:
        yield manager
