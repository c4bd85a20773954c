"""What makes loads fail: each fault returns a function that undoes it."""

from __future__ import annotations

import errno
import mmap
import os
import random
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine import Engine

__all__ = ["FAULTS", "Reads", "abort_while_loading"]


class Reads:
    """Reads of slot files, which `read_faults.c` makes late or lets fail in a process that has it
    preloaded.
    """

    #: Names the file that it maps.
    NAME = "READ_FAULTS"
    _COUNTS = ("seen", "late", "failed")

    def __init__(self) -> None:
        with open(os.environ[self.NAME], "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        assert self.NAME.lower() in Path("/proc/self/maps").read_text(), "nothing is preloaded"

    @classmethod
    def is_there(cls) -> bool:
        return cls.NAME in os.environ

    @classmethod
    def environment(cls, folder: Path) -> dict[str, str]:
        """Of a process to be started. Compiles the library."""
        source, library = Path(__file__).parent / "read_faults.c", folder / "read_faults.so"
        file = folder / "read_faults.state"
        file.write_bytes(bytes(4096))
        compiler = ["cc", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
        subprocess.run([*compiler, "-o", library, source, "-ldl"], check=True)
        return {cls.NAME: str(file), "LD_PRELOAD": str(library)}

    def become(self, late_s: float = 0.0, error: int = 0) -> None:
        """From now on each read takes so much longer, and ends with this error."""
        struct.pack_into("=qq", self._memory, 0, int(late_s * 1e6), error)

    @property
    def counts(self) -> dict[str, int]:
        return dict(zip(self._COUNTS, struct.unpack_from("=qqq", self._memory, 16)))


def slot_files(disk: Path) -> list[Path]:
    files = [path for path in disk.rglob("*") if path.is_file() and path.stat().st_size > 1 << 20]
    assert files, f"no slot file below {disk}"
    return files


def corrupt(engine: Engine, disk: Path, rng: random.Random) -> Callable[[], None]:
    """Flips a byte in each 8 KiB of what is there."""
    for path in slot_files(disk):
        with open(path, "r+b") as file:
            for at in range(0, path.stat().st_size, 8192):
                file.seek(at + rng.randrange(4096))
                byte = file.read(1)
                if byte and byte != b"\0":
                    file.seek(-1, os.SEEK_CUR)
                    file.write(bytes([byte[0] ^ 1]))
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return lambda: None


def corrupt_rank_1(engine: Engine, disk: Path, rng: random.Random) -> Callable[[], None]:
    """As `corrupt`, on the second of two ranks alone."""
    (folder,) = disk.rglob("rank-1-of-2")
    return corrupt(engine, folder, rng)


def truncated(engine: Engine, disk: Path, rng: random.Random) -> Callable[[], None]:
    """Cuts the slot files off, so that reads come back short; their length returns afterwards,
    their bytes do not.
    """
    lengths = {path: path.stat().st_size for path in slot_files(disk)}
    for path in lengths:
        os.truncate(path, 4096)

    def undo() -> None:
        for path, length in lengths.items():
            os.truncate(path, length)

    return undo


#: The deadline of a load in these tests, in seconds.
DEADLINE = 1.0


def collected_late(engine: Engine, disk: Path, rng: random.Random) -> Callable[[], None]:
    """Results of loads are seen late, by up to twice the deadline."""
    worker = engine.loader
    collect, until = worker._collect, time.monotonic() + 2 * DEADLINE * rng.random()
    worker._collect = lambda: collect() if time.monotonic() >= until else None

    def undo() -> None:
        worker._collect = collect

    return undo


def late(engine: Engine, disk: Path, rng: random.Random) -> Callable[[], None]:
    """Each read of the disk takes longer, by up to twice the deadline."""
    reads = Reads()
    reads.become(late_s=2 * DEADLINE * rng.random())
    return reads.become


def io_error(engine: Engine, disk: Path, rng: random.Random) -> Callable[[], None]:
    """Each read of the disk ends with an I/O error."""
    reads = Reads()
    reads.become(error=errno.EIO)
    return reads.become


def stopped(engine: Engine, disk: Path, rng: random.Random) -> Callable[[], None]:
    """The process of a worker stops when a load begins, for up to twice the deadline: its copies
    come behind the deadline.
    """
    scheduler = engine.connector
    load, process = scheduler._load, engine.core.model_executor.workers[-1].proc
    timers: list[threading.Timer] = []

    def load_and_stop(*args: Any) -> None:
        load(*args)
        os.kill(process.pid, signal.SIGSTOP)
        timer = threading.Timer(2 * DEADLINE * rng.random(), os.kill, (process.pid, signal.SIGCONT))
        timers.append(timer)
        timer.start()

    scheduler._load = load_and_stop

    def undo() -> None:
        scheduler._load = load
        assert timers, "no load began"
        for timer in timers:
            timer.join()

    return undo


def aborted(engine: Engine, disk: Path, rng: random.Random) -> Callable[[], None]:
    return late(engine, disk, rng)


FAULTS = {
    "corrupt": corrupt,
    "corrupt_rank_1": corrupt_rank_1,
    "truncated": truncated,
    "collected_late": collected_late,
    "late": late,
    "io_error": io_error,
    "stopped": stopped,
    "aborted": aborted,
}


def abort_while_loading(engine: Engine, prompt: list[int]) -> None:
    """Adds the request, lets its load begin, and aborts it."""
    from vllm import SamplingParams

    llm_engine = engine.llm.llm_engine
    request = f"aborted-{time.monotonic_ns()}"
    llm_engine.add_request(
        request,
        {"prompt_token_ids": prompt},
        SamplingParams(temperature=0, max_tokens=4, ignore_eos=True),
    )
    llm_engine.step()
    llm_engine.abort_request([request])
