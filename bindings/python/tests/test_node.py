"""A node daemon, and engines that attach to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import LAYERS, NUM_BLOCKS, PAGE_SIZE, FakeEngine
from kvbm_rs import (
    BuildFailed,
    ClosedError,
    Config,
    InvalidArgument,
    KvbmError,
    Layout,
    Namespace,
    NodeEngine,
    NodeMover,
    NodeServer,
    TokenSequence,
    layout_of,
)

BLOCK_BYTES = 2 * PAGE_SIZE * 64 * 4
NAMESPACE = Namespace("test", weights="1", page_size=PAGE_SIZE)
PATIENCE = 30.0


def config(folder: Path, ranks: int = 1, tensors: str | None = None) -> Config:
    return Config.from_toml(
        f'[model]\npage_size = {PAGE_SIZE}\nopaque_tensors = "{tensors or f"{LAYERS}x{BLOCK_BYTES}"}"\n'
        f'[namespace]\nmodel = "daemon"\n[host]\ncapacity = 64\npinned = false\n[policy]\nadmission = "all"\n'
        f'[parallelism]\ntensor_parallel = {ranks}\n[node]\nsocket = "{folder}/run/node.sock"\n'
    )


def socket_of(folder: Path) -> Path:
    return folder / "run" / "node.sock"


def attach(engine: FakeEngine, folder: Path, name: str) -> NodeEngine:
    layout = layout_of(engine.tensors, page_size=PAGE_SIZE)
    return NodeEngine(socket_of(folder), layout, NAMESPACE, engine=name)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def saved(engine: FakeEngine, node: NodeEngine, blocks: int = 3) -> TokenSequence:
    tokens = TokenSequence(node.namespace, list(range(blocks * PAGE_SIZE)))
    for block in range(blocks):
        engine.compute(block, 10 + block)
    assert node.offload(list(range(blocks)), tokens).started == blocks
    assert node.wait_offloads(PATIENCE)
    return tokens


def test_what_an_engine_saves_another_one_loads(tmp_path: Path) -> None:
    with NodeServer(config(tmp_path)) as server:
        assert server.socket == socket_of(tmp_path) and not server.handed_over
        first, other = FakeEngine(), FakeEngine()
        with attach(first, tmp_path, "first") as node:
            assert node.wait_ready(PATIENCE), node.status()
            assert node.status()["pid"] == os.getpid() and node.block_bytes == LAYERS * BLOCK_BYTES
            tokens = saved(first, node)
            assert [engine[0] for engine in server.engines()] == ["first"]
            assert server.status()["tiers"]["g2"]["inactive"] == 3
            assert 'kvbm_node_engines{state="ready"} 1' in server.metrics_text()
        with attach(other, tmp_path, "other") as node:
            assert node.wait_ready(PATIENCE), node.status()
            found = node.look_up("r", tokens)
            assert found is not None and (found.blocks, found.by_tier) == (3, [0, 3, 0, 0])
            load = node.load("r", [7, 8, 9], None).wait(PATIENCE)
            assert (load.arrived, load.failed, load.failures) == (3, 0, [])
            assert all(other.holds(7 + block, 10 + block) for block in range(3))
            assert node.open_tickets == (0, 0) and node.busy([7, 8, 9]) == []
            node.step()
            node.prefilled(1000, 0.1)
            assert node.prefetch(tokens) == node.session_resumes(tokens) == 0
            assert node.released([7]) == [] and node.before_reuse([8, 9], 1.0) == []
            assert node.forget(node.namespace) == 3
            again = node.look_up("r", tokens)
            assert again is not None and again.blocks == 0
            with pytest.raises(KvbmError, match="block 32 does not exist: the engine has 32"):
                node.busy([NUM_BLOCKS])
            with pytest.raises(InvalidArgument, match="wait=True"):
                node.forget(node.namespace, wait=True)
        with pytest.raises(ClosedError, match="the NodeEngine was closed"):
            node.step()


def test_every_cache_group_of_a_request_comes_back(tmp_path: Path) -> None:
    pages = [np.zeros((NUM_BLOCKS, 512), dtype=np.int8) for _ in range(2)]
    layout = Layout(NUM_BLOCKS, PAGE_SIZE)
    for kind, tensors in (
        ("window=6", pages),
        ("full", pages),
        ("state", [pages[0][:, :301]]),
    ):
        layout.begin_group(kind)
        for tensor in tensors:
            layout.add_tensor(tensor)
    assert layout.daemon_model == (
        "[model]\npage_size = 4\ngroups = [\n"
        '    "window=6 layers=2 rank_bytes=512",\n'
        '    "full layers=2 rank_bytes=512",\n'
        '    "state layers=1 rank_bytes=301",\n]\n'
    )
    settings = '[namespace]\nmodel = "daemon"\n[host]\ncapacity = 64\npinned = false\n[policy]\nadmission = "all"\n'
    socket = socket_of(tmp_path)
    with NodeServer(Config.from_toml(layout.daemon_model + settings), socket):
        with NodeEngine(socket, layout, NAMESPACE, engine="groups") as node:
            assert node.wait_ready(PATIENCE), node.status()
            tokens = TokenSequence(node.namespace, list(range(4 * PAGE_SIZE)))
            ids = [[1, 2], [3, 4, 5, 6], [7]]
            for group, first in enumerate((2, 0, 3)):
                for block in ids[group]:
                    for page in pages:
                        page[block] = 10 * group + block
                assert node.offload(ids[group], tokens, first, group=group).started == len(
                    ids[group]
                )
            assert node.wait_offloads(PATIENCE)
            found = node.look_up("r", tokens)
            assert found is not None and found.blocks == 4
            assert found.groups == [(2, 4), (0, 4), (3, 4)]
            short = node.look_up("s", tokens, end=3)
            assert short is not None and short.blocks == 0 and short.groups == []
            with pytest.raises(KvbmError, match="the engine has 3 cache groups"):
                node.commit("r", [11, 12, 13, 14])
            to = [[11, 12], [13, 14, 15, 16], [17]]
            node.commit_groups("r", to, timeout=PATIENCE)
            until(lambda: node.open_tickets == (0, 0))
            (load,) = node.finished()
            assert (load.arrived, load.wanted, load.failures) == (4, 4, [])
            for group, (blocks, loaded) in enumerate(zip(ids, to)):
                for block, into in zip(blocks, loaded):
                    end = 301 if group == 2 else 512
                    assert (pages[0][into][:end] == 10 * group + block).all()
            assert not pages[0][17][301:].any(), "a state is copied at its own length"
        one = Layout.of_workers(NUM_BLOCKS, PAGE_SIZE, [512] * 2)
        with NodeEngine(socket, one, NAMESPACE, engine="one") as node:
            until(lambda: "refuses" in (node.status()["reason"] or ""))
            assert "the engine has 1 (full), the daemon has 3 (window=6, full, state)" in str(
                node.status()["reason"]
            )


def test_without_a_daemon_everything_is_a_miss(tmp_path: Path) -> None:
    engine = FakeEngine()
    with attach(engine, tmp_path, "engine") as node:
        until(lambda: node.status()["reason"] != "not tried yet")
        tokens = TokenSequence(node.namespace, list(range(2 * PAGE_SIZE)))
        found = node.look_up("r", tokens)
        assert found is not None and found.blocks == 0
        assert node.offload([0, 1], tokens).started == 0
        with pytest.raises(KvbmError, match="not attached to the daemon"):
            node.commit("r", [0, 1])
        assert node.finished() == [] and node.released([0]) == []
        assert not node.abandon("r")
        # It attaches when the daemon comes, and again when the next one does.
        for _ in range(2):
            with NodeServer(config(tmp_path)):
                assert node.wait_ready(PATIENCE), node.status()
                saved(engine, node)
            until(lambda: not node.status()["attached"])


def test_movers_of_other_processes_wait_for_the_engine(tmp_path: Path) -> None:
    engines = [FakeEngine(), FakeEngine()]
    layout = Layout.of_workers(NUM_BLOCKS, PAGE_SIZE, [BLOCK_BYTES] * LAYERS)
    assert layout.daemon_model == '[model]\npage_size = 4\nopaque_tensors = "3x2048"\n'
    layout.replicas = 2
    assert layout.replicas == 2
    assert layout.daemon_model == (
        '[model]\npage_size = 4\nreplicas = 2\nopaque_tensors = "3x2048"\n'
    )
    with pytest.raises(InvalidArgument, match="replicas = 0"):
        layout.replicas = 0
    layout.replicas = 1
    with (
        NodeServer(config(tmp_path, ranks=2)) as server,
        NodeEngine(server.socket, layout, NAMESPACE, engine="e", ranks=2) as scheduler,
    ):
        movers = [
            NodeMover(
                server.socket,
                layout_of(engine.tensors, page_size=PAGE_SIZE),
                engine="e",
                rank=rank,
                ranks=2,
            )
            for rank, engine in enumerate(engines)
        ]
        assert scheduler.wait_ready(PATIENCE), (scheduler.status(), movers[0].status())
        tokens = TokenSequence(scheduler.namespace, list(range(2 * PAGE_SIZE)))
        assert scheduler.offload([3, 4], tokens, 0, scheduler.fence(1)).started == 2
        for rank, engine in enumerate(engines):
            engine.compute(3, 10 + rank)
            engine.compute(4, 20 + rank)
        movers[0].signal(1)
        assert not scheduler.wait_offloads(0.05), "the second rank has not computed yet"
        movers[1].signal(1)
        assert scheduler.wait_offloads(PATIENCE)
        found = scheduler.look_up("r", tokens)
        assert found is not None and found.blocks == 2
        load = scheduler.load("r", [7, 8], scheduler.fence(2))
        for mover in movers:
            assert not load.is_done()
            mover.signal(2)
        assert load.wait(PATIENCE).arrived == 2
        for rank, engine in enumerate(engines):
            assert engine.holds(7, 10 + rank) and engine.holds(8, 20 + rank)
            assert movers[rank].wait_idle([7, 8], 1.0) == []
        with pytest.raises(InvalidArgument, match="after"):
            movers[0].signal(3, after=17)
        for mover in movers:
            mover.close()
            mover.close()
        with pytest.raises(ClosedError, match="the NodeMover was closed"):
            movers[0].signal(3)


def test_what_does_not_fit_is_refused_and_says_why(tmp_path: Path) -> None:
    def reason(node: NodeEngine) -> str:
        until(lambda: "refuses" in (node.status()["reason"] or ""))
        return str(node.status()["reason"])

    with NodeServer(config(tmp_path, tensors="3x1024")):
        with attach(FakeEngine(), tmp_path, "e") as node:
            assert "the engine has 3x2048, the daemon has 3x1024" in reason(node)
        layout = Layout.of_workers(8, PAGE_SIZE, [1024] * 3)
        with NodeEngine(socket_of(tmp_path), layout, NAMESPACE, engine="f", ranks=2) as node:
            assert "the engine has 2 ranks, the daemon serves 1" in reason(node)
    with pytest.raises(BuildFailed, match=r"node\.sock"):
        blocked = tmp_path / "a file"
        blocked.touch()
        NodeServer(config(tmp_path), blocked / "node.sock")
    with pytest.raises(InvalidArgument, match="rank 2 of 2"):
        layout = layout_of(FakeEngine().tensors, page_size=PAGE_SIZE)
        NodeMover(socket_of(tmp_path), layout, engine="e", rank=2, ranks=2)
    random = Namespace("m", page_size=PAGE_SIZE, chain_root=b"x", persistent=False)
    with pytest.raises(InvalidArgument, match="process"):
        NodeEngine(socket_of(tmp_path), layout, random, engine="e")


def test_a_fence_is_for_the_object_that_made_it(tmp_path: Path) -> None:
    engine = FakeEngine()
    with engine.manager() as manager, attach(engine, tmp_path, "engine") as node:
        tokens = TokenSequence(manager.namespace, list(range(PAGE_SIZE)))
        with pytest.raises(InvalidArgument, match="made by a NodeEngine"):
            manager.offload([0], tokens, 0, node.fence(1))
        with pytest.raises(InvalidArgument, match="no fence is needed"):
            node.fence_after(17)
        with pytest.raises(InvalidArgument, match="count from 1"):
            node.fence(0)


def test_the_daemon_as_a_program(tmp_path: Path) -> None:
    """It is killed, and its engine attaches to the next one."""
    file = tmp_path / "node.toml"
    file.write_text(config(tmp_path).to_toml())

    def start() -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "kvbm_rs.serve", str(file)]
        program = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert program.stdout is not None
        line = program.stdout.readline()
        assert line == f"kvbm serve: at {socket_of(tmp_path)}; process {program.pid}\n"
        return program

    engine = FakeEngine()
    with attach(engine, tmp_path, "engine") as node:
        for number in (signal.SIGKILL, signal.SIGTERM):
            program = start()
            assert node.wait_ready(PATIENCE), node.status()
            assert node.status()["pid"] == program.pid
            tokens = saved(engine, node)
            assert node.look_up("r", tokens) is not None
            node.commit("r", [7, 8, 9])
            program.send_signal(number)
            code = program.wait(PATIENCE)
            assert code == (-number if number == signal.SIGKILL else 0)
            done: list[int] = []
            while not done:
                done = [load.wanted for load in node.finished()]
                node.wait_finished(0.01)
            assert done == [3], "the load ends, whether it arrived or not"
            until(lambda: not node.status()["attached"])
    wrong = subprocess.run(
        [sys.executable, "-m", "kvbm_rs.serve", str(tmp_path / "none")], capture_output=True
    )
    assert wrong.returncode == 1 and b"none" in wrong.stderr
    # Of a model with several cache groups, without a word of `[device]`.
    group = "layers=2 rank_bytes=512"
    file.write_text(
        f'[model]\npage_size = {PAGE_SIZE}\ngroups = ["window=6 {group}", "full {group}"]\n'
        f'[namespace]\nmodel = "daemon"\n[host]\ncapacity = 64\npinned = false\n'
        f'[node]\nsocket = "{socket_of(tmp_path)}"\n'
    )
    program = start()
    program.terminate()
    assert program.wait(PATIENCE) == 0
