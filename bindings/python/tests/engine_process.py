"""The worker's side of an engine in a process of its own: it can be killed.

Run as a program, it has two tensors of blocks, serves them at a socket, and does what lines on its
standard input say. Each line has an answer.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from kvbm_rs import Config, KvBlockManager, Layout, Namespace, Worker, layout_of

__all__ = ["BLOCKS", "BYTES", "PAGE", "EngineProcess", "manager_of", "settings"]

BLOCKS, BYTES, PAGE = 16, 65536, 4


def settings() -> Config:
    config = Config()
    config.set("host.capacity", "32")
    config.set("policy.admission", "all")
    return config


def manager_of(socket: Path) -> KvBlockManager:
    """The manager over the blocks of one such process."""
    layout = Layout.of_workers(BLOCKS, PAGE, [BYTES] * 2)
    return KvBlockManager(settings(), layout, Namespace("m", page_size=PAGE), workers=[socket])


class EngineProcess:
    """The process, seen from outside. `place`: `"numpy"`, `"cuda"` or `"locked"`."""

    def __init__(self, socket: Path, place: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(socket), place],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._answer() == "ready"

    def ask(self, *words: object) -> str:
        assert self._process.stdin is not None
        print(*words, file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the engine ended with status {self._process.wait(10)}"
        return line.strip()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(30)

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.communicate("end\n", timeout=30)


class _Tensors:
    """Two tensors of blocks."""

    def __init__(self, place: str) -> None:
        shape = (BLOCKS, BYTES)
        self.is_on_device = place == "cuda"
        self.tensors: list[Any]
        if place == "numpy":
            self.tensors = [np.zeros(shape, dtype=np.uint8) for _ in range(2)]
            return
        import torch

        self.torch = torch
        if place == "cuda":
            self.tensors = [torch.zeros(shape, dtype=torch.uint8, device="cuda") for _ in range(2)]
            return
        # Memory that other processes map and that the driver has page-locked, as an engine's host
        # pool is.
        self.tensors = [torch.zeros(shape, dtype=torch.uint8).share_memory_() for _ in range(2)]
        for tensor in self.tensors:
            code = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
            assert int(code) == 0, f"cudaHostRegister says {code}"

    def compute(self, block: int, byte: int) -> None:
        for layer, tensor in enumerate(self.tensors):
            tensor[block] = byte + layer

    def event(self) -> Any:
        if not self.is_on_device:
            return None
        event = self.torch.cuda.Event()
        event.record()
        return event

    def holds(self, block: int, byte: int) -> bool:
        if self.is_on_device:
            self.torch.cuda.synchronize()
        return all(
            bool((tensor[block] == byte + layer).all()) for layer, tensor in enumerate(self.tensors)
        )


def _serve(socket: str, place: str) -> None:
    tensors = _Tensors(place)
    layout = layout_of(tensors.tensors, page_size=PAGE)
    with Worker(settings(), layout, model="m", rank=0, ranks=1, socket=socket) as worker:
        print("ready", flush=True)
        for line in sys.stdin:
            word, *numbers = line.split()
            if word == "end":
                break
            values = [int(number) for number in numbers]
            answer: object = "done"
            if word == "compute":
                tensors.compute(*values)
            elif word == "signal":
                worker.signal(values[0], tensors.event())
            elif word == "holds":
                answer = tensors.holds(*values)
            else:
                raise ValueError(f"unknown order {word!r}")
            print(answer, flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2])
