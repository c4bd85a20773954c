"""Engines whose tensors lie on a CUDA device, over the test driver. test_gpu.py needs a GPU."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trtllm_stand_in as standing_in_trtllm
import vllm_stand_in as standing_in
from cuda_engine import CudaEngine, test_driver
from kvbm_rs import (
    BuildFailed,
    Config,
    InvalidArgument,
    KvBlockManager,
    Layout,
    Namespace,
    Tensor,
    TokenSequence,
    Worker,
    layout_of,
)
from trtllm_stand_in import trtllm as trtllm  # a fixture
from vllm_stand_in import vllm as vllm  # a fixture

BLOCKS, BYTES, PAGE = 16, 4096, 4
PROMPT = list(range(50, 67))  # 4 blocks and a token

_LIBRARY = test_driver()

pytestmark = pytest.mark.skipif(
    _LIBRARY is None,
    reason="KVBM_CUDA_DRIVER names no test driver: `cargo xtask test --only python` builds it",
)


@pytest.fixture
def engine() -> Iterator[CudaEngine]:
    assert _LIBRARY is not None
    engine = CudaEngine(_LIBRARY, BLOCKS, BYTES)
    yield engine
    engine.close()


def config() -> Config:
    config = Config()
    config.set("host.capacity", "32")
    config.set("policy.admission", "all")
    return config


def namespace() -> Namespace:
    return Namespace("m", page_size=PAGE)


def finish(manager: KvBlockManager, request: str) -> int:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for done in manager.finished():
            assert done.request == request, done
            return done.arrived
        manager.wait_finished(0.01)
    raise AssertionError("the load did not end")


def test_copies_wait_for_the_engines_stream(engine: CudaEngine) -> None:
    layout = layout_of(engine.tensors, page_size=PAGE)
    assert (layout.device, layout.block_bytes) == ("cuda:0", 2 * BYTES)
    engine.delay(2000)
    with KvBlockManager(config(), layout, namespace()) as manager:
        tokens = TokenSequence(manager.namespace, PROMPT)
        for round in range(5):
            ids, to = [0, 1, 2, 3], [8, 9, 10, 11]
            manager.released(ids)
            for at, block in enumerate(ids):
                engine.compute(block, 99)
                engine.compute(block, 10 * round + at)
            # What is queued is not done: the copy waits on the device.
            fence = manager.fence_after(engine.event())
            assert manager.offload(ids, tokens, 0, fence).started == 4
            assert manager.wait_offloads(20)
            for block in to:
                engine.compute(block, 77)
            found = manager.look_up("r", tokens)
            assert found is not None and found.blocks == 4
            manager.commit("r", to, manager.fence_after(engine.event()))
            assert finish(manager, "r") == 4
            engine.synchronize()
            assert all(engine.holds(block, 10 * round + at) for at, block in enumerate(to)), (
                f"round {round}: written before the engine was done, or not at all"
            )
            manager.clear("g2")
        assert manager.status()["tiers"]["g2"]["quarantined"] == 0
    gc.collect()
    assert len(engine.destroyed) == 10, "events are kept until they are complete, and no longer"


def test_a_layer_is_saved_when_the_stream_has_passed_it(engine: CudaEngine) -> None:
    engine.delay(2000)
    with KvBlockManager(
        config(), layout_of(engine.tensors, page_size=PAGE), namespace()
    ) as manager:
        tokens = TokenSequence(manager.namespace, PROMPT)
        ids, to = [0, 1, 2, 3], [8, 9, 10, 11]
        assert manager.offload_by_layer(ids, tokens).started == 4
        for at, block in enumerate(ids):
            engine.compute(block, 99)
            engine.compute(block, at)
        # What is queued is not done: the gates open when the stream is behind the events.
        for layer in range(len(engine.tensors)):
            manager.layer_done(layer, engine.event())
        assert manager.wait_offloads(20), "without the end of the iteration"
        found = manager.look_up("r", tokens)
        assert found is not None and found.blocks == 4
        manager.commit("r", to, manager.fence_after(engine.event()), by_layer=True)
        assert all(manager.wait_layer("r", layer, 20) for layer in range(len(engine.tensors)))
        assert finish(manager, "r") == 4
        engine.synchronize()
        assert all(engine.holds(block, at) for at, block in enumerate(to))
        manager.step()
    gc.collect()
    assert len(engine.destroyed) == 3, "events are kept until they are complete, and no longer"


def test_an_audit_compares_on_the_device(engine: CudaEngine, tmp_path: Path) -> None:
    settings = config()
    settings.set("disk.dir", str(tmp_path))
    settings.set("disk.capacity", "64")
    settings.set("disk.drive_writes_per_day", "0")
    settings.set("offload.g2_g3.write_through", "true")
    with KvBlockManager(
        settings, layout_of(engine.tensors, page_size=PAGE), namespace()
    ) as manager:
        tokens = TokenSequence(manager.namespace, PROMPT)
        for at in range(4):
            engine.compute(at, at if at != 2 else 55)
        manager.offload([0, 1, 2, 3], tokens, 0, manager.fence_after(engine.event()))
        assert manager.wait_offloads(20)
        for at in range(4):
            engine.compute(8 + at, at)
        manager.look_up("audit", tokens)
        manager.audit("audit", [8, 9, 10, 11], manager.fence_after(engine.event()))
        deadline = time.monotonic() + 20
        while not (over := manager.finished()):
            assert time.monotonic() < deadline
            manager.wait_finished(0.01)
        assert (over[0].arrived, over[0].wanted) == (2, 4)
        assert (over[0].failed, over[0].differing) == (1, 1)
        assert "differ" in over[0].failures[0] and "g1_g2 slot 2" in over[0].failures[0]
        assert len(manager.places(tokens)) == 2, "the wrong block is on no tier any more"
        engine.synchronize()
        assert all(engine.holds(8 + at, at) for at in range(4)), "an audit writes nothing"


def test_a_worker_takes_events_of_its_stream(engine: CudaEngine, tmp_path: Path) -> None:
    layout = layout_of(engine.tensors, page_size=PAGE)
    path = tmp_path / "w.sock"
    engine.delay(2000)
    with (
        Worker(config(), layout, model="m", rank=0, ranks=1, socket=path) as worker,
        KvBlockManager(
            config(),
            Layout.of_workers(BLOCKS, PAGE, [BYTES] * 2),
            namespace(),
            workers=[path],
        ) as manager,
    ):
        tokens = TokenSequence(manager.namespace, PROMPT)
        for at in range(4):
            engine.compute(at, at)
        manager.offload([0, 1, 2, 3], tokens, 0, manager.fence(1))
        worker.signal(1, engine.event())
        assert manager.wait_offloads(20)
        manager.look_up("r", tokens)
        for at in range(4):
            engine.compute(4 + at, 9)
        manager.commit("r", [4, 5, 6, 7], manager.fence(2))
        worker.signal(2, engine.event())
        assert finish(manager, "r") == 4
        engine.synchronize()
        assert all(engine.holds(4 + at, at) for at in range(4))
        with pytest.raises(InvalidArgument, match="do not lie on a device of this process"):
            manager.fence_after(engine.event())


def vllm_on_device(engine: CudaEngine, vllm: Any, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The stand-in for vLLM has its tensors on the device from now on. One entry for each event
    that the connector records.
    """

    def on_device(blocks: int, size: int) -> Any:
        shape = (blocks, 2, size, 64)
        count = int(np.prod(shape))
        memory = (ctypes.c_float * count).from_address(engine.allocate(4 * count))
        return np.ctypeslib.as_array(memory).reshape(shape).view(standing_in.Tensor)

    def views(name: str, tensor: Any, num_blocks: int) -> list[Tensor]:
        shape = list(tensor.shape)
        return [Tensor(tensor.data_ptr(), shape, dtype="float32", device="cuda:0", owner=engine)]

    recorded: list[bool] = []

    def recorded_event() -> Any:
        recorded.append(True)
        return engine.event()

    monkeypatch.setattr(standing_in, "tensor", on_device)
    monkeypatch.setattr(vllm.compat, "block_views", views)
    monkeypatch.setattr(vllm.compat, "recorded_event", recorded_event)
    return recorded


@pytest.mark.parametrize("executor", ["uni", "mp"])
def test_the_connector_for_vllm_orders_copies_by_events(
    engine: CudaEngine, vllm: Any, monkeypatch: pytest.MonkeyPatch, executor: str
) -> None:
    recorded = vllm_on_device(engine, vllm, monkeypatch)
    engine.delay(1000)
    served = standing_in.Engine(
        vllm,
        transfer={"engine_id": f"on-device-{executor}"},
        executor=executor,
        extra={"audit": 0.5},
    )
    audit = served.scheduler._process.audit
    assert audit is not None
    audit._random.seed(7)
    prompt = standing_in.PROMPT
    served.compute(standing_in.Request("a", prompt), [1, 2, 3, 4, 5])
    loads = 0
    for number in range(8):
        again, ids = standing_in.Request(f"b{number}", prompt), [11, 12, 13, 14, 15]
        matched = served.match(again)
        if matched == (16, True):
            loads += 1
            served.allocated(again, ids, 16)
            assert served.until_received(again.request_id) == set()
            served.allocated(again, ids, 0)
            assert served.holds(again, ids, 0, 16)
            again.num_computed_tokens = 16
        else:
            assert matched == (0, False), "vLLM computes what is audited"
        served.step({again.request_id: (again, ids, 17 - again.num_computed_tokens)})
        served.scheduler.request_finished_all_groups(again, (ids,))
        deadline = time.monotonic() + 20
        while audit.is_open:
            assert time.monotonic() < deadline
            served.step()
    totals = served.totals
    assert 0 < loads < 8 and totals["loaded_blocks"] == 4 * loads
    assert totals["audited_blocks"] == 4 * (8 - loads)
    assert (totals["differing_blocks"], totals["errors"], totals["failed_blocks"]) == (0, 0, 0)
    assert len(recorded) >= 8, "each load and each step that saves has its event"
    served.close()


def test_the_connector_for_vllm_goes_by_layer_on_a_device(
    engine: CudaEngine, vllm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = vllm_on_device(engine, vllm, monkeypatch)
    engine.delay(1000)
    served = standing_in.Engine(
        vllm,
        transfer={"engine_id": "layers-on-device"},
        extra={"layers": "on"},
    )
    prompt, ids = standing_in.PROMPT, [11, 12, 13, 14, 15]
    served.compute(standing_in.Request("a", prompt), [1, 2, 3, 4, 5])
    assert len(recorded) == 2, "a save has an event for each layer, and no other"
    assert served.totals["saved_by_layer_blocks"] == 4
    seen: list[bool] = []

    def look(layer: int) -> None:
        kv = served.kv[layer]
        seen.append(
            all(bool((kv[ids[at // 4], :, at % 4] == prompt[at] + layer).all()) for at in range(16))
        )

    for number in range(4):
        for kv in served.kv:
            kv[11:16] = 0
        again = standing_in.Request(f"b{number}", prompt)
        assert served.match(again) == (16, False)
        served.allocated(again, ids, 16)
        again.num_computed_tokens = 16
        served.after_wait = look
        assert served.step({again.request_id: (again, ids, 1)}) == (set(), set())
        served.after_wait = lambda layer: None
        assert served.holds(again, ids, 0, 17)
        served.scheduler.request_finished_all_groups(again, (ids,))
    assert seen == [True] * 8, "the host waits for a layer before it submits its kernels"
    assert (served.totals["loads_by_layer"], served.totals["errors"]) == (4, 0)
    served.close()


def test_the_connector_for_tensorrt_llm_orders_copies_by_events(
    engine: CudaEngine, trtllm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvbm_rs.trtllm import _trtllm_compat as compat
    from kvbm_rs.trtllm import step_times

    size, recorded = standing_in_trtllm.SIZE, []

    class OnDevice(standing_in_trtllm.Engine):
        def tensor(self) -> Any:
            return engine.tensors[0]

        def compute(self, request: Any, blocks: list[int], at: int, count: int) -> None:
            for block in range(at // size, -(-(at + count) // size)):
                engine.compute(blocks[block], 99)
                engine.compute(blocks[block], 10 + block)

    def event(stream: Any) -> Any:
        recorded.append(stream)
        return engine.event()

    told: list[tuple[int, float]] = []
    monkeypatch.setattr(compat, "recorded_event", event)
    monkeypatch.setattr(compat, "timed_event", lambda stream: stream.timed_event())
    monkeypatch.setattr(step_times, "LEAST_TOKENS", 8)
    monkeypatch.setattr(
        KvBlockManager, "prefilled", lambda _, tokens, elapsed: told.append((tokens, elapsed))
    )
    monkeypatch.setenv("KVBM_HOST_CAPACITY", "64")
    monkeypatch.setenv("KVBM_POLICY_ADMISSION", "all")
    engine.delay(2000)
    served = OnDevice()
    served.stream = engine
    prompt = standing_in_trtllm.PROMPT
    assert served.run(standing_in_trtllm.Request(0, prompt), [0, 1, 2, 3, 4]) == 0
    served.settle()
    for turn in range(1, 4):
        blocks = [5, 6, 7, 8, 9]
        for block in blocks:
            engine.compute(block, 77)
        request = standing_in_trtllm.Request(turn, prompt)
        assert served.run(request, blocks) == 16
        engine.synchronize()
        for at, block in enumerate(blocks[:4]):
            memory = (ctypes.c_ubyte * BYTES).from_address(engine.addresses[0] + block * BYTES)
            assert bytes(memory) == bytes([10 + at]) * BYTES, (turn, at)
        served.finish(request, blocks)
        served.settle()
    assert recorded == [engine] * 7, "a step that saves, and three that load and save"
    engine.synchronize()
    served.step(standing_in_trtllm.SchedulerOutput())
    assert [tokens for tokens, _ in told] == [18], "the others load 16 of their 18 tokens"
    assert all(0 < seconds < 20 for _, seconds in told)
    assert served.worker._process.counters["errors"] == 0
    served.worker.shutdown()


def test_what_cannot_work_is_refused(engine: CudaEngine, tmp_path: Path) -> None:
    view = engine.tensors[0]
    with KvBlockManager(config(), layout_of([view], page_size=PAGE), namespace()) as manager:
        with pytest.raises(InvalidArgument, match="str is no event: give a torch.cuda.Event"):
            manager.fence_after("now")
        with pytest.raises(InvalidArgument, match="record it on the engine's stream first"):
            manager.fence_after(0)
    elsewhere = Layout(BLOCKS, PAGE)
    elsewhere.add(
        view.address,
        BLOCKS * BYTES,
        block_stride=BYTES,
        block_bytes=BYTES,
        owner=view,
        device="cuda:7",
    )
    with pytest.raises(BuildFailed, match="cuda:7, and the device cannot be used"):
        KvBlockManager(config(), elsewhere, namespace())
    unknown = Layout(BLOCKS, PAGE)
    unknown.add(
        1 << 30, BLOCKS * BYTES, block_stride=BYTES, block_bytes=BYTES, owner=None, device="cuda:0"
    )
    with pytest.raises(InvalidArgument, match="0x40000000"):
        KvBlockManager(config(), unknown, namespace())
    on_host = np.zeros((BLOCKS, BYTES), dtype=np.uint8)
    layout = layout_of([on_host], page_size=PAGE)
    with (
        KvBlockManager(config(), layout, namespace()) as manager,
        pytest.raises(InvalidArgument, match="on the CPU no fence is needed"),
    ):
        manager.fence_after(engine.event())
    with (
        Worker(config(), layout, model="m", rank=0, ranks=1, socket=tmp_path / "h.sock") as worker,
        pytest.raises(InvalidArgument, match="`after` is for tensors on a CUDA device"),
    ):
        worker.signal(1, engine.event())
