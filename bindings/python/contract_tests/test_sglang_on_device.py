"""`KvbmLinker` over a pool on a CUDA device, of the test driver: memory of the host, with streams
whose operations are late.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cuda_engine import CudaEngine, test_driver
from sglang_pools import DIM, HEADS, LAYERS, PAGE, PAGES
from test_sglang_linker import keys, linker, offloaded, transfer

_ROW = HEADS * DIM * 2
_LIBRARY = test_driver()

pytestmark = pytest.mark.skipif(
    _LIBRARY is None,
    reason="KVBM_CUDA_DRIVER names no test driver: `cargo xtask test --only contracts` builds it",
)


class OnDevice:
    """A buffer of a pool as torch has it on a device."""

    device = "cuda:0"

    def __init__(self, engine: CudaEngine) -> None:
        self.address = engine.allocate(PAGES * PAGE * _ROW)
        memory = (ctypes.c_ubyte * (PAGES * PAGE * _ROW)).from_address(self.address)
        flat = torch.frombuffer(memory, dtype=torch.float16)
        self.tensor = flat.view(PAGES * PAGE, HEADS, DIM)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)


class Pool:
    """SGLang's KV pool, as far as the linker reads it, and a stream that computes into it."""

    layer_num = LAYERS

    def __init__(self, engine: CudaEngine) -> None:
        self.engine = engine
        self.k_buffer = [OnDevice(engine) for _ in range(LAYERS)]
        self.v_buffer = [OnDevice(engine) for _ in range(LAYERS)]

    def compute(self, page: int, byte: int) -> None:
        """Queues the computation of a page on the stream."""
        for at, buffer in enumerate([*self.k_buffer, *self.v_buffer]):
            self.engine.call(
                "cuMemsetD8Async",
                ctypes.c_uint64(buffer.address + page * PAGE * _ROW),
                ctypes.c_ubyte(byte + at),
                ctypes.c_size_t(PAGE * _ROW),
                self.engine.stream,
            )

    def has_layer(self, layer: int, page: int, byte: int) -> bool:
        """Whether a layer of the page is what was computed for `byte`."""
        rows = slice(page * PAGE, (page + 1) * PAGE)
        return all(
            bool((buffer.tensor[rows].view(torch.uint8) == byte + at).all())
            for at, buffer in (
                (layer, self.k_buffer[layer]),
                (LAYERS + layer, self.v_buffer[layer]),
            )
        )


@pytest.fixture
def engine() -> Iterator[CudaEngine]:
    assert _LIBRARY is not None
    engine = CudaEngine(_LIBRARY, 1, 4096)
    yield engine
    engine.close()


def on_device(engine: CudaEngine) -> tuple[Pool, Any]:
    """A pool, and a linker that takes the events of its stream."""
    pool = Pool(engine)
    store = linker(pool, extra={"host.pinned": True})
    # SGLang's own method asks torch, which has no device here.
    store.record_offload_ready = lambda: [object(), engine.event()]
    return pool, store


def test_copies_wait_for_the_stream_that_computes(engine: CudaEngine) -> None:
    pool, store = on_device(engine)
    engine.delay(2000)
    for turn in range(5):
        names, byte = keys(3, seed=1000 * turn), 10 * turn
        for page in range(3):
            pool.compute(page, 200)
            pool.compute(page, byte + page)
        # What is queued is not done: the copies wait on the device.
        assert store.offload(transfer(names, [0, 1, 2]))
        assert offloaded(store), store.failures.counts
        for page in (8, 9, 10):
            pool.compute(page, 150)
        assert store.lookup("r", transfer(names)) == [1, 2, 3]
        assert store.load("r", transfer(names, [8, 9, 10]))
        index = store.start_layer_wise_loading()
        assert store.finish_layer_wise_loading(index), store.failures.counts
        engine.synchronize()
        for at in range(3):
            assert all(pool.has_layer(layer, 8 + at, byte + at) for layer in range(LAYERS)), (
                f"turn {turn}, page {at}: written before the stream was there, or not at all"
            )
    assert store.failures.counts == {}
    store.close()


def test_a_layer_that_is_complete_is_in_place(engine: CudaEngine) -> None:
    pool, store = on_device(engine)
    names = keys(4)
    for page in range(4):
        pool.compute(page, page)
    assert store.offload(transfer(names, [0, 1, 2, 3]))
    assert offloaded(store)
    counter, complete = store.layer_done_counter, store.layer_done_counter.complete
    seen: list[list[bool]] = []

    def completes(index: int, layer: int) -> None:
        seen.append(
            [
                all(pool.has_layer(other, 8 + page, page) for page in range(4))
                for other in range(LAYERS)
            ]
        )
        complete(index, layer)

    counter.complete = completes
    for _ in range(3):
        engine.delay(0)
        for page in range(8, 12):
            pool.compute(page, 150)
        engine.synchronize()
        seen.clear()
        assert store.lookup("r", transfer(names)) == [1, 2, 3, 4]
        assert store.load("r", transfer(names, [8, 9, 10, 11]))
        engine.delay(10000)
        index = store.start_layer_wise_loading()
        counter.set_consumer(index)
        for layer in range(LAYERS):
            counter.wait_until(layer)
            assert seen[layer][: layer + 1] == [True] * (layer + 1), "what is complete is in place"
        assert store.finish_layer_wise_loading(index)
    store.close()


def test_an_event_that_cannot_be_followed_fails_the_batch(engine: CudaEngine) -> None:
    pool, store = on_device(engine)
    names = keys(1)
    pool.compute(0, 1)
    assert store.offload(transfer(names, [0])) and offloaded(store)
    assert store.lookup("r", transfer(names)) == [1]
    assert store.load("r", transfer(names, [8]))
    store.record_offload_ready = lambda: ["no event"]
    index = store.start_layer_wise_loading()
    assert index >= 0, "-1 would say that there was nothing to load"
    assert store.finish_layer_wise_loading(index) is False
    assert store.offload(transfer(keys(1, seed=9), [0])) is False
    assert store.failures.counts == {"load": 1, "offload": 1}
    store.close()
