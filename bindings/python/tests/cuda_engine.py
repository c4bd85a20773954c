"""An engine on the CUDA driver that `KVBM_CUDA_DRIVER` names: the test driver, which is host
memory.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import numpy as np
from kvbm_rs import Tensor

__all__ = ["CudaEngine", "test_driver"]


def test_driver() -> ctypes.CDLL | None:
    """The test driver; `None` where `KVBM_CUDA_DRIVER` names none, or a real one."""
    path = os.environ.get("KVBM_CUDA_DRIVER")
    if not path or not os.path.exists(path):
        return None
    library = ctypes.CDLL(path)
    return library if hasattr(library, "kvbm_test_left") else None


# pytest takes every function of this name for a test.
test_driver.__test__ = False  # type: ignore[attr-defined]


class CudaEvent:
    """An event, as `torch.cuda.Event` has it."""

    def __init__(self, engine: CudaEngine) -> None:
        self._engine = engine
        handle = ctypes.c_void_p()
        engine.call("cuEventCreate", ctypes.byref(handle), 0)
        self.cuda_event = handle.value

    def record(self) -> CudaEvent:
        self._engine.call("cuEventRecord", ctypes.c_void_p(self.cuda_event), self._engine.stream)
        return self

    def synchronize(self) -> None:
        self._engine.call("cuEventSynchronize", ctypes.c_void_p(self.cuda_event))

    def __del__(self) -> None:
        # On whichever thread dropped the last reference.
        engine = self._engine
        engine.destroyed.append(self.cuda_event)
        engine.call("cuCtxPushCurrent_v2", engine.context)
        engine.call("cuEventDestroy_v2", ctypes.c_void_p(self.cuda_event))
        engine.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


class TimedEvent(CudaEvent):
    """An event that knows when it was passed."""

    def query(self) -> bool:
        code: int = self._engine.library.cuEventQuery(ctypes.c_void_p(self.cuda_event))
        return code == 0

    def elapsed_time(self, end: TimedEvent) -> float:
        milliseconds = ctypes.c_float()
        begin, until = (ctypes.c_void_p(event.cuda_event) for event in (self, end))
        self._engine.call("cuEventElapsedTime", ctypes.byref(milliseconds), begin, until)
        return milliseconds.value


class CudaEngine:
    """Two tensors of blocks on a device, and a stream that computes into them."""

    def __init__(self, library: ctypes.CDLL, blocks: int, block_bytes: int) -> None:
        self.library = library
        self.destroyed: list[int | None] = []
        self.blocks, self.block_bytes = blocks, block_bytes
        self.call("cuInit", 0)
        self.context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), 0)
        self.call("cuCtxPushCurrent_v2", self.context)
        self.stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(self.stream), 1)
        self._allocated: list[int] = []
        self.addresses = [self.allocate(blocks * block_bytes) for _ in range(2)]

    def call(self, name: str, *arguments: Any) -> None:
        code = getattr(self.library, name)(*arguments)
        assert code == 0, f"{name} says {code}"

    def allocate(self, size: int) -> int:
        """The address of so many bytes of the device."""
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        self._allocated.append(address.value)
        return address.value

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors, as a framework that knows no DLPack hands them over."""
        shape = [self.blocks, self.block_bytes]
        return [
            Tensor(address, shape, dtype="uint8", device="cuda:0", owner=self)
            for address in self.addresses
        ]

    def compute(self, block: int, byte: int) -> None:
        """Queues the computation of a block."""
        for layer, address in enumerate(self.addresses):
            at = ctypes.c_uint64(address + block * self.block_bytes)
            self.call(
                "cuMemsetD8Async",
                at,
                ctypes.c_ubyte(byte + layer),
                ctypes.c_size_t(self.block_bytes),
                self.stream,
            )

    def event(self) -> CudaEvent:
        """An event behind what was queued so far."""
        return CudaEvent(self).record()

    def timed_event(self) -> TimedEvent:
        """The same, which knows when it was passed."""
        event = TimedEvent(self)
        event.record()
        return event

    def synchronize(self) -> None:
        self.call("cuStreamSynchronize", self.stream)

    def holds(self, block: int, byte: int) -> bool:
        """Whether the block is what was computed for `byte`; nothing may be queued."""
        held = []
        for address in self.addresses:
            memory = (ctypes.c_ubyte * self.block_bytes).from_address(
                address + block * self.block_bytes
            )
            held.append(np.ctypeslib.as_array(memory).copy())
        return all(bool((bytes == byte + layer).all()) for layer, bytes in enumerate(held))

    def delay(self, most_us: int) -> None:
        """The longest delay before each operation of a stream."""
        self.library.kvbm_test_delay(most_us)

    def close(self) -> None:
        self.delay(0)
        self.synchronize()
        for address in self._allocated:
            self.call("cuMemFree_v2", ctypes.c_uint64(address))
        self.call("cuStreamDestroy_v2", self.stream)
        context = ctypes.c_void_p()
        self.call("cuCtxPopCurrent_v2", ctypes.byref(context))
        self.call("cuDevicePrimaryCtxRelease_v2", 0)
