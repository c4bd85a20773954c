"""Threads, forks, panics, logs and memory."""

from __future__ import annotations

import logging
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import kvbm_rs
import pytest
from conftest import FakeEngine
from kvbm_rs import (
    ForkedError,
    InternalError,
    KvBlockManager,
    KvbmError,
    TokenSequence,
    _core,
    logs,
)


def test_import_starts_no_thread() -> None:
    text = "import os, kvbm_rs; print(len(os.listdir('/proc/self/task')))"
    out = subprocess.run([sys.executable, "-c", text], check=True, capture_output=True, text=True)
    assert out.stdout.strip() == "1"


def test_use_after_fork_is_an_error(manager: KvBlockManager) -> None:
    def child(sender: multiprocessing.connection.Connection) -> None:
        try:
            manager.step()
            sender.send("used")
        except ForkedError as error:
            sender.send(str(error))

    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(sender,))
    process.start()
    assert receiver.poll(10)
    text = receiver.recv()
    process.join(10)
    assert process.exitcode == 0, "nothing is joined in the child"
    assert f"process {os.getpid()}" in text and "spawn" in text
    assert manager.step() == 1, "the parent goes on"


def test_a_panic_is_an_exception(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InternalError, match="asked for by a test") as raised:
        _core._panic_for_tests()
    assert isinstance(raised.value, Exception) and "report" in str(raised.value)
    capfd.readouterr()


def test_exceptions_form_a_hierarchy() -> None:
    for name in kvbm_rs.errors.__all__:
        assert issubclass(getattr(kvbm_rs, name), KvbmError), name


def test_logs_go_to_logging(
    engine: FakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "kvbm"), engine.manager(tmp_path / "disk"):
        deadline = time.monotonic() + 5
        while not caplog.records and time.monotonic() < deadline:
            time.sleep(0.01)
    logs.drain()
    records = [record for record in caplog.records if record.name.startswith("kvbm")]
    assert records and all(record.levelno >= logging.INFO for record in records)
    assert all("::" not in record.name for record in records)


def test_many_threads_share_a_manager(engine: FakeEngine, manager: KvBlockManager) -> None:
    failed: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for at in range(50):
                tokens = TokenSequence(manager.namespace, [seed] * 4 + [at] * 4)
                request = f"{seed}-{at}"
                manager.offload([2 * seed % 32, (2 * seed + 1) % 32], tokens)
                manager.look_up(request, tokens)
                manager.abandon(request)
                manager.step()
                manager.finished()
        except (kvbm_rs.BusyError, kvbm_rs.NoRoomError):
            return
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed and not any(thread.is_alive() for thread in threads)
    assert manager.wait_offloads(10) and manager.open_tickets == (0, 0)


def test_other_threads_run_while_a_call_waits(manager: KvBlockManager) -> None:
    ticks = 0
    stop = threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not stop.wait(0.001):
            ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    manager.events().take(0.3)
    stop.set()
    thread.join()
    assert ticks > 50


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_calls_leave_no_memory_behind(engine: FakeEngine, manager: KvBlockManager) -> None:
    """The variable PYTEST_CALLS sets how many; 1000000 is the long form."""
    calls = int(os.environ.get("PYTEST_CALLS", "20000"))
    tokens = TokenSequence(manager.namespace, range(16))
    ids = list(range(4))
    manager.offload(ids, tokens)
    assert manager.wait_offloads(10)

    def once(count: int) -> None:
        for _ in range(count // 4):
            manager.look_up("r", tokens)
            manager.abandon("r")
            TokenSequence(manager.namespace, range(16))
            manager.step()

    once(calls // 2)
    before = resident()
    once(calls)
    assert resident() - before < 4 << 20


def test_dropping_an_open_manager_ends_its_threads(engine: FakeEngine) -> None:
    logs.start()  # so that the draining thread is counted before and after
    before = len(os.listdir("/proc/self/task"))
    manager = engine.manager()
    assert len(os.listdir("/proc/self/task")) > before
    del manager
    deadline = time.monotonic() + 10
    while len(os.listdir("/proc/self/task")) > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/task")) <= before
    logs.stop()
