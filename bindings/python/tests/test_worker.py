"""Workers at sockets, and a manager that knows their memory only by number."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import LAYERS, NUM_BLOCKS, PAGE_SIZE, FakeEngine
from kvbm_rs import (
    BuildFailed,
    ClosedError,
    Config,
    InvalidArgument,
    KvBlockManager,
    Layout,
    Namespace,
    TokenSequence,
    Worker,
    layout_of,
    sockets,
)

BLOCK_BYTES = 2 * PAGE_SIZE * 64 * 4


def config() -> Config:
    config = Config()
    config.set("host.capacity", "64")
    config.set("host.pinned", "false")
    config.set("policy.admission", "all")
    return config


def worker(engine: FakeEngine, rank: int, ranks: int, path: Path) -> Worker:
    layout = layout_of(engine.tensors, page_size=PAGE_SIZE)
    assert layout.tensor_bytes == [BLOCK_BYTES] * LAYERS
    return Worker(config(), layout, model="test", rank=rank, ranks=ranks, socket=path)


def manager(paths: list[Path], num_blocks: int = NUM_BLOCKS) -> KvBlockManager:
    layout = Layout.of_workers(num_blocks, PAGE_SIZE, [BLOCK_BYTES] * LAYERS)
    namespace = Namespace("test", weights="1", page_size=PAGE_SIZE)
    return KvBlockManager(config(), layout, namespace, workers=paths)


def test_copies_wait_for_every_worker(tmp_path: Path) -> None:
    engines = [FakeEngine(), FakeEngine()]
    paths = [tmp_path / f"{rank}.sock" for rank in range(2)]
    with (
        worker(engines[0], 0, 2, paths[0]) as first,
        worker(engines[1], 1, 2, paths[1]) as second,
        manager(paths) as made,
    ):
        assert first.socket == paths[0]
        tokens = TokenSequence(made.namespace, list(range(2 * PAGE_SIZE)))
        assert made.offload([3, 4], tokens, 0, made.fence(1)).started == 2
        deadline = time.monotonic() + 10
        while first.wait_idle([3, 4], 0.0) != [3, 4]:
            assert time.monotonic() < deadline, "the plan does not reach the worker"
        # Now the engine computes.
        for rank, engine in enumerate(engines):
            engine.compute(3, 10 + rank)
            engine.compute(4, 20 + rank)
        first.signal(1)
        assert first.wait_idle([3, 4], 5.0) == []
        assert not made.wait_offloads(0.05), "the second rank has not computed yet"
        second.signal(1)
        assert made.wait_offloads(10)

        found = made.look_up("r", tokens)
        assert found is not None and found.blocks == 2
        assert made.load_tags("r") == [], "there is no load yet"
        load = made.load("r", [7, 8], made.fence(2))
        (tag,) = made.load_tags("r")
        assert made.load_tags("other") == []
        assert first.drain_finished() == second.drain_finished() == [], "offloads have no tag"
        first.signal(2)
        deadline, over = time.monotonic() + 10, first.drain_finished()
        while not over:
            assert time.monotonic() < deadline, "the part of the first rank is not over"
            over = first.drain_finished()
        assert [(plan.tag, plan.path, plan.arrived, plan.failed) for plan in over] == [
            (tag, "g2_g1", 2, 0)
        ]
        assert engines[0].holds(7, 10) and engines[0].holds(8, 20), "its bytes are in place"
        assert not load.is_done() and second.drain_finished() == []
        assert first.drain_finished() == [], "each is told once"
        second.signal(2)
        assert load.wait(10).arrived == 2
        (plan,) = second.drain_finished()
        assert repr(plan) == f'FinishedPlan(tag={tag}, path="g2_g1", arrived=2, failed=0)'
        assert made.load_tags("r") == [], "its end was told"
        for rank, engine in enumerate(engines):
            assert engine.holds(7, 10 + rank) and engine.holds(8, 20 + rank)
        with pytest.raises(InvalidArgument, match="2"):
            made.fence(2)


def test_a_worker_and_a_manager_that_do_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "0.sock"
    with worker(FakeEngine(), 0, 1, path), pytest.raises(BuildFailed, match="blocks of G1 differs"):
        manager([path], NUM_BLOCKS + 1)


def test_what_a_worker_refuses(tmp_path: Path) -> None:
    made = worker(FakeEngine(), 0, 1, tmp_path / "0.sock")
    made.close()
    made.close()
    assert made.closed and not (tmp_path / "0.sock").exists()
    with pytest.raises(ClosedError, match="the Worker was closed"):
        made.signal(1)
    with pytest.raises(ClosedError, match="the Worker was closed"):
        made.drain_finished()
    with pytest.raises(BuildFailed, match="rank"):
        worker(FakeEngine(), 2, 2, tmp_path / "2.sock")
    layout = Layout.of_workers(4, PAGE_SIZE, [64])
    with pytest.raises(InvalidArgument, match="workers in other processes"):
        Worker(config(), layout, model="m", rank=0, ranks=1, socket=tmp_path / "3.sock")
    with pytest.raises(InvalidArgument, match="workers in other processes"):
        KvBlockManager(config(), layout, Namespace("m", page_size=PAGE_SIZE))
    with pytest.raises(InvalidArgument, match="tensor 1: 0 bytes"):
        Layout.of_workers(4, PAGE_SIZE, [64, 0])


def test_sockets_lie_in_a_private_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = tmp_path / f"kvbm-{os.getuid()}"
    assert sockets.private_path("a") == str(folder / "a.sock")
    assert folder.stat().st_mode & 0o777 == 0o700
    with socket.socket(socket.AF_UNIX) as alive:
        alive.bind(str(folder / "alive.sock"))
        alive.listen()
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(folder / "dead.sock"))
        old = time.time() - 1000
        for name in ("alive.sock", "dead.sock"):
            os.utime(folder / name, (old, old))
        with socket.socket(socket.AF_UNIX) as young:
            young.bind(str(folder / "young.sock"))
        sockets.private_path("b")
        assert sorted(path.name for path in folder.iterdir()) == ["alive.sock", "young.sock"]
    with pytest.raises(BuildFailed, match="more than 107 bytes"):
        sockets.private_path("x" * 200)
    folder.chmod(0o755)
    with pytest.raises(BuildFailed, match="no private folder"):
        sockets.private_path("a")


def test_tensors_live_as_long_as_the_worker(tmp_path: Path) -> None:
    array = np.zeros((NUM_BLOCKS, BLOCK_BYTES), dtype=np.uint8)
    layout = layout_of([array], page_size=PAGE_SIZE)
    made = Worker(config(), layout, model="m", rank=0, ranks=1, socket=tmp_path / "0.sock")
    view = np.asarray(array)
    del array, layout
    assert view.nbytes and not made.closed
    made.close()
