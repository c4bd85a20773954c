"""The wheel on a machine with a GPU and torch: run it there with

    pip install kvbm_rs-*.whl pytest numpy torch && pytest bindings/python/tests/test_gpu.py

It skips itself elsewhere. It has not been run on a GPU yet.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kill_tests import kill_the_manager, kill_the_worker
from kvbm_rs import (
    Config,
    InvalidArgument,
    KvBlockManager,
    Namespace,
    Tensor,
    TokenSequence,
    kernels,
    layout_of,
)

torch: Any = pytest.importorskip("torch", reason="torch is not installed")

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch finds no CUDA device on this machine"
)

LAYERS, BLOCKS, PAGE, HEADS, DIM = 3, 16, 16, 4, 64
PROMPT = list(range(900, 900 + 4 * PAGE + 1))


@pytest.fixture(autouse=True)
def settle() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.synchronize()


def config(disk: Path | None = None) -> Config:
    config = Config()
    config.set("host.capacity", "64")
    config.set("policy.admission", "all")
    if disk is not None:
        config.set("disk.dir", str(disk))
        config.set("disk.capacity", "128")
        config.set("disk.drive_writes_per_day", "0")
        config.set("offload.g2_g3.write_through", "true")
    return config


def blocks_first(dtype: Any) -> tuple[list[Any], list[Any]]:
    """A tensor for each layer, keys and values side by side in a block."""
    tensors = [
        torch.zeros(BLOCKS, 2, PAGE, HEADS, DIM, dtype=dtype, device="cuda") for _ in range(LAYERS)
    ]
    return tensors, tensors


def halves(dtype: Any) -> tuple[list[Any], list[Any]]:
    """A tensor for each layer, of which keys and values are halves."""
    tensors = [
        torch.zeros(2, BLOCKS, PAGE, HEADS, DIM, dtype=dtype, device="cuda") for _ in range(LAYERS)
    ]
    views = [half for tensor in tensors for half in tensor]
    return views, views


def heads_first(dtype: Any) -> tuple[list[Any], list[Any]]:
    """Tokens before heads by their shape, heads before tokens in memory."""
    tensors = [
        torch.zeros(BLOCKS, 2, HEADS, PAGE, DIM, dtype=dtype, device="cuda").permute(0, 1, 3, 2, 4)
        for _ in range(LAYERS)
    ]
    return tensors, tensors


def all_layers(dtype: Any) -> tuple[list[Any], list[Any]]:
    """One tensor with all layers of a block together."""
    tensor = torch.zeros(BLOCKS, LAYERS, 2, PAGE, HEADS, DIM, dtype=dtype, device="cuda")
    return [tensor], [tensor]


def latent(dtype: Any) -> tuple[list[Any], list[Any]]:
    """A latent for each token, with an odd size, and blocks at a stride."""
    tensors = [torch.zeros(BLOCKS, PAGE + 1, 72, dtype=dtype, device="cuda") for _ in range(LAYERS)]
    views = [tensor[:, :PAGE] for tensor in tensors]
    return views, views


LAYOUTS: list[Callable[[Any], tuple[list[Any], list[Any]]]] = [
    blocks_first,
    halves,
    heads_first,
    all_layers,
    latent,
]


class Engine:
    """Computes into tensors on a stream of its own."""

    def __init__(self, tensors: list[Any], blocks: list[Any]) -> None:
        self.tensors, self.blocks = tensors, blocks
        self.stream = torch.cuda.Stream()

    def compute(self, block: int, seed: int, *, slow: bool = False) -> None:
        """Queues the computation of a block."""
        with torch.cuda.stream(self.stream):
            for layer, tensor in enumerate(self.blocks):
                tensor[block] = 77
                if slow:
                    # Some milliseconds, in which a copy that does not wait reads the 77.
                    torch.cuda._sleep(5_000_000)
                tensor[block] = self.content(tensor, seed, layer)

    def content(self, tensor: Any, seed: int, layer: int) -> Any:
        generator = torch.Generator(device="cuda").manual_seed(1000 * seed + layer)
        values = torch.randint(0, 120, tensor[0].shape, generator=generator, device="cuda")
        return values.to(tensor.dtype)

    def event(self) -> Any:
        event = torch.cuda.Event()
        event.record(self.stream)
        return event

    def holds(self, block: int, seed: int) -> bool:
        torch.cuda.synchronize()
        return all(
            torch.equal(tensor[block], self.content(tensor, seed, layer))
            for layer, tensor in enumerate(self.blocks)
        )


def finish(manager: KvBlockManager, request: str) -> int:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for done in manager.finished():
            assert done.request == request and not done.failures, done
            return done.arrived
        manager.wait_finished(0.01)
    raise AssertionError("the load did not end")


def load(manager: KvBlockManager, tokens: TokenSequence, ids: list[int], after: Any = None) -> int:
    found = manager.look_up("r", tokens)
    assert found is not None
    manager.commit("r", ids[: found.blocks], after)
    return finish(manager, "r")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "uint8"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=[layout.__name__ for layout in LAYOUTS])
def test_blocks_of_every_layout_come_back_from_every_tier(
    layout: Any, dtype: str, tmp_path: Path
) -> None:
    engine = Engine(*layout(getattr(torch, dtype)))
    described = layout_of(engine.tensors, page_size=PAGE)
    assert described.device == f"cuda:{torch.cuda.current_device()}"
    with KvBlockManager(config(tmp_path), described, Namespace("m", page_size=PAGE)) as manager:
        tokens = TokenSequence(manager.namespace, PROMPT)
        for at in range(4):
            engine.compute(at, at)
        manager.offload([0, 1, 2, 3], tokens, 0, manager.fence_after(engine.event()))
        assert manager.wait_offloads(60)
        assert load(manager, tokens, [8, 9, 10, 11]) == 4
        assert all(engine.holds(8 + at, at) for at in range(4)), "from host memory"
        manager.flush(60)
        manager.clear("g2")
        assert load(manager, tokens, [12, 13, 14, 15]) == 4
        assert all(engine.holds(12 + at, at) for at in range(4)), "from disk"
        assert manager.wait_offloads(60)
        for block in range(4, 8):
            assert not any(bool(tensor[block].any()) for tensor in engine.blocks)


def test_copies_wait_for_the_engines_stream() -> None:
    engine = Engine(*blocks_first(torch.bfloat16))
    described = layout_of(engine.tensors, page_size=PAGE)
    with KvBlockManager(config(), described, Namespace("m", page_size=PAGE)) as manager:
        tokens = TokenSequence(manager.namespace, PROMPT)
        for round in range(10):
            manager.released([0, 1, 2, 3])
            for at in range(4):
                engine.compute(at, 10 * round + at, slow=True)
            manager.offload([0, 1, 2, 3], tokens, 0, manager.fence_after(engine.event()))
            assert manager.wait_offloads(60)
            # The engine still writes the blocks that the load goes to.
            for at in range(4):
                engine.compute(8 + at, 5000, slow=True)
            assert load(manager, tokens, [8, 9, 10, 11], manager.fence_after(engine.event())) == 4
            assert all(engine.holds(8 + at, 10 * round + at) for at in range(4)), round
            manager.clear("g2")


def test_layers_are_saved_behind_their_events_and_waited_for() -> None:
    engine = Engine(*blocks_first(torch.bfloat16))
    described = layout_of(engine.tensors, page_size=PAGE)
    with KvBlockManager(config(), described, Namespace("m", page_size=PAGE)) as manager:
        tokens = TokenSequence(manager.namespace, PROMPT)
        for round in range(10):
            manager.released([0, 1, 2, 3])
            assert manager.offload_by_layer([0, 1, 2, 3], tokens).started == 4
            for at in range(4):
                engine.compute(at, 10 * round + at, slow=True)
            for layer in range(LAYERS):
                manager.layer_done(layer, engine.event())
            assert manager.wait_offloads(60)
            found = manager.look_up("r", tokens)
            assert found is not None and found.blocks == 4
            manager.commit("r", [8, 9, 10, 11], manager.fence_after(engine.event()), by_layer=True)
            assert all(manager.wait_layer("r", layer, 60) for layer in range(LAYERS))
            assert finish(manager, "r") == 4
            assert all(engine.holds(8 + at, 10 * round + at) for at in range(4)), round
            torch.cuda.synchronize()
            manager.step()
            manager.clear("g2")


def test_what_arrived_is_there_for_kernels_that_follow() -> None:
    engine = Engine(*blocks_first(torch.float32))
    described = layout_of(engine.tensors, page_size=PAGE)
    with KvBlockManager(config(), described, Namespace("m", page_size=PAGE)) as manager:
        tokens = TokenSequence(manager.namespace, PROMPT)
        for at in range(4):
            engine.compute(at, at)
        manager.offload([0, 1, 2, 3], tokens, 0, manager.fence_after(engine.event()))
        assert manager.wait_offloads(60)
        for _ in range(50):
            for tensor in engine.blocks:
                tensor[8:12] = -1
            # Behind what the default stream was told.
            event = torch.cuda.Event()
            event.record()
            assert load(manager, tokens, [8, 9, 10, 11], manager.fence_after(event)) == 4
            with torch.cuda.stream(engine.stream):
                sums = [tensor[8:12].sum() for tensor in engine.blocks]
            torch.cuda.synchronize()
            wanted = [tensor[0:4].sum() for tensor in engine.blocks]
            assert all(itertools.starmap(torch.equal, zip(sums, wanted)))


def test_a_cuda_graph_may_compute_the_blocks() -> None:
    engine = Engine(*blocks_first(torch.float32))
    described = layout_of(engine.tensors, page_size=PAGE)
    source = torch.zeros_like(engine.blocks[0][0])
    with torch.cuda.stream(engine.stream):
        for tensor in engine.blocks:
            tensor[0] = source
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=engine.stream):
        for tensor in engine.blocks:
            tensor[0] = source * 2
    with KvBlockManager(config(), described, Namespace("m", page_size=PAGE)) as manager:
        for round in range(1, 20):
            tokens = TokenSequence(manager.namespace, [round] * PAGE)
            manager.released([0])
            with torch.cuda.stream(engine.stream):
                source.fill_(round)
                graph.replay()
            manager.offload([0], tokens, 0, manager.fence_after(engine.event()))
            assert manager.wait_offloads(60)
            assert load(manager, tokens, [9]) == 1
            torch.cuda.synchronize()
            assert all(bool((tensor[9] == 2 * round).all()) for tensor in engine.blocks)


def test_an_audit_compares_numbers_on_the_device() -> None:
    engine = Engine(*halves(torch.bfloat16))
    described = layout_of(engine.tensors, page_size=PAGE)
    with KvBlockManager(config(), described, Namespace("m", page_size=PAGE)) as manager:
        tokens = TokenSequence(manager.namespace, PROMPT)
        for at in range(4):
            engine.compute(at, at)
        manager.offload([0, 1, 2, 3], tokens, 0, manager.fence_after(engine.event()))
        assert manager.wait_offloads(60)
        for at in range(4):
            engine.compute(8 + at, at if at != 2 else 4000)
        with torch.cuda.stream(engine.stream):
            # As far apart as another order of a sum may be.
            engine.blocks[0][8] *= 1.01
        manager.look_up("audit", tokens)
        manager.audit(
            "audit",
            [8, 9, 10, 11],
            manager.fence_after(engine.event()),
            elements="bfloat16",
            tolerance=0.25,
        )
        deadline = time.monotonic() + 60
        while not (over := manager.finished()):
            assert time.monotonic() < deadline
            manager.wait_finished(0.01)
        assert (over[0].arrived, over[0].failed, over[0].differing) == (2, 1, 1), over[0].failures
        assert len(manager.places(tokens)) == 2


def test_events_of_the_engine_live_until_they_are_complete() -> None:
    engine = Engine(*all_layers(torch.float16))
    described = layout_of(engine.tensors, page_size=PAGE)
    with KvBlockManager(config(), described, Namespace("m", page_size=PAGE)) as manager:
        tokens = TokenSequence(manager.namespace, PROMPT)
        for round in range(200):
            engine.compute(0, round)
            manager.released([0])
            manager.offload([0], tokens, 0, manager.fence_after(engine.event()))
            gc.collect()
        assert manager.wait_offloads(60)
        with pytest.raises(InvalidArgument, match="record it on the engine's stream first"):
            manager.fence_after(torch.cuda.Event())


def test_tensors_of_several_devices_and_the_kernels_of_the_cpu_are_refused() -> None:
    tensor = torch.zeros(BLOCKS, 64, device="cuda")
    assert Tensor.of(tensor).device.startswith("cuda:")
    with pytest.raises(InvalidArgument, match="all tensors of a layout lie in one place"):
        layout_of([tensor, tensor.cpu()], page_size=PAGE)
    chunk = torch.zeros(PAGE, HEADS, DIM, device="cuda")
    universal = torch.zeros(HEADS, 1, 1, PAGE, DIM)
    with pytest.raises(InvalidArgument, match="in memory of cuda:"):
        kernels.block_to_universal([[chunk]], [universal])


def test_host_memory_that_torch_has_page_locked_is_host_memory() -> None:
    pool = torch.zeros(BLOCKS, PAGE, HEADS, DIM).pin_memory()
    described = layout_of([pool], page_size=PAGE)
    assert described.device == "cpu"
    with KvBlockManager(config(), described, Namespace("m", page_size=PAGE)) as manager:
        tokens = TokenSequence(manager.namespace, PROMPT)
        for at in range(4):
            pool[at] = at + 1
        manager.offload([0, 1, 2, 3], tokens)
        assert manager.wait_offloads(60)
        assert load(manager, tokens, [8, 9, 10, 11]) == 4
        assert [int(pool[8 + at].max()) for at in range(4)] == [1, 2, 3, 4]


@pytest.mark.parametrize("place", ["cuda", "locked"])
def test_a_worker_that_is_killed(tmp_path: Path, place: str) -> None:
    kill_the_worker(tmp_path, place)


@pytest.mark.parametrize("place", ["cuda", "locked"])
def test_a_manager_that_is_killed(tmp_path: Path, place: str) -> None:
    kill_the_manager(tmp_path, place)
