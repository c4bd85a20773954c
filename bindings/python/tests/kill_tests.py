"""What happens when one side of an engine in two processes is killed. Run for every place of its
tensors: test_kill.py has those in host memory, test_gpu.py the others.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from engine_process import PAGE, EngineProcess, manager_of
from kvbm_rs import KvBlockManager, KvbmError, TokenSequence

__all__ = ["kill_the_manager", "kill_the_worker"]

PROMPT = list(range(70, 70 + 4 * PAGE + 1))
_PATIENCE = 60.0


class _Fences:
    """Numbers of points that both sides name alike."""

    def __init__(self, engine: EngineProcess, manager: KvBlockManager) -> None:
        self.engine, self.manager, self._last = engine, manager, 0

    def store(self, byte: int) -> TokenSequence:
        """Computes and stores a prompt in the first four blocks, unless it is stored. An assertion
        fails where it is.
        """
        tokens = TokenSequence(self.manager.namespace, PROMPT)
        for block in range(4):
            self.engine.ask("compute", block, byte + block)
        self._last += 1
        fence = self.manager.fence(self._last)
        self.manager.before_reuse([0, 1, 2, 3], 10)
        begun = self.manager.offload([0, 1, 2, 3], tokens, 0, fence)
        self.engine.ask("signal", self._last)
        assert self.manager.wait_offloads(_PATIENCE)
        assert begun.started == 4, begun
        return tokens

    def load(self, tokens: TokenSequence) -> int:
        """Loads it into the next four blocks. How many arrived."""
        found = self.manager.look_up("r", tokens)
        assert found is not None
        if not found.blocks:
            self.manager.abandon("r")
            return 0
        self._last += 1
        load = self.manager.load("r", [4, 5, 6, 7][: found.blocks], self.manager.fence(self._last))
        self.engine.ask("signal", self._last)
        return load.wait(_PATIENCE).arrived


def kill_the_worker(folder: Path, place: str) -> None:
    """The worker is killed: the manager serves nothing of what it held, and the next worker of the
    rank is used as if nothing had been.
    """
    socket = folder / "w.sock"
    engine = EngineProcess(socket, place)
    manager = manager_of(socket)
    try:
        fences = _Fences(engine, manager)
        tokens = fences.store(10)
        assert fences.load(tokens) == 4
        assert all(engine.ask("holds", 4 + at, 10 + at) == "True" for at in range(4))
        engine.kill()
        engine = fences.engine = EngineProcess(socket, place)
        deadline = time.monotonic() + _PATIENCE
        while True:
            # What the first one had counts until the manager hears of the second one.
            try:
                fences.store(20)
                break
            except (AssertionError, KvbmError):
                assert time.monotonic() < deadline
                time.sleep(0.05)
        assert fences.load(tokens) == 4
        assert all(engine.ask("holds", 4 + at, 20 + at) == "True" for at in range(4))
    finally:
        manager.close()
        engine.end()


def kill_the_manager(folder: Path, place: str) -> None:
    """The manager is killed in the middle of its work: the worker serves the next one, and the
    engine's tensors are as the engine left them.
    """
    socket = folder / "w.sock"
    engine = EngineProcess(socket, place)
    try:
        for block in range(8, 16):
            engine.ask("compute", block, 100 + block)
        process = subprocess.Popen(
            [sys.executable, __file__, str(socket)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None and process.stdout.readline().strip() == "busy"
        process.kill()
        process.wait(30)
        with manager_of(socket) as manager:
            fences = _Fences(engine, manager)
            tokens = fences.store(30)
            assert fences.load(tokens) == 4
            assert all(engine.ask("holds", 4 + at, 30 + at) == "True" for at in range(4))
            assert all(engine.ask("holds", at, 100 + at) == "True" for at in range(8, 16))
    finally:
        engine.end()


def _be_busy(socket: str) -> None:
    """A manager that copies blocks 8 to 15 until it is killed."""
    manager = manager_of(Path(socket))
    print("busy", flush=True)
    for number in range(1_000_000):
        tokens = TokenSequence(manager.namespace, [number] * 8 * PAGE)
        manager.offload(list(range(8, 16)), tokens)
        manager.wait_offloads(10)
        manager.clear("g2")


if __name__ == "__main__":
    _be_busy(sys.argv[1])
