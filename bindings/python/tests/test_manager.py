"""A manager over an engine's tensors."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import LAYERS, NUM_BLOCKS, PAGE_SIZE, FakeEngine
from kvbm_rs import (
    ClosedError,
    Config,
    ConfigInvalid,
    ExternalSequence,
    FinishedLoad,
    InvalidArgument,
    KvBlockManager,
    KvbmError,
    KvIndex,
    Layout,
    Namespace,
    NoRoomError,
    TokenSequence,
    layout_of,
)

PROMPT = list(range(100, 117))  # 4 blocks and a token


def computed(engine: FakeEngine, manager: KvBlockManager, ids: list[int]) -> TokenSequence:
    """A prompt whose blocks were computed in `ids` and offloaded."""
    tokens = TokenSequence(manager.namespace, PROMPT)
    for at, block in enumerate(ids):
        engine.compute(block, at)
    begun = manager.offload(ids, tokens)
    assert (begun.started, begun.present, begun.refused) == (4, 0, [])
    assert manager.wait_offloads(10)
    return tokens


def load(
    manager: KvBlockManager,
    tokens: TokenSequence | ExternalSequence,
    ids: list[int],
    first: int = 0,
) -> int:
    found = manager.look_up("r", tokens, first)
    assert found is not None
    manager.commit("r", ids[: found.blocks])
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for done in manager.finished():
            assert (done.request, done.arrived, done.failures) == ("r", done.wanted, [])
            return done.arrived
        time.sleep(0.001)
    raise AssertionError("the load did not end")


def test_blocks_come_back_where_the_engine_wants_them(
    engine: FakeEngine, manager: KvBlockManager
) -> None:
    tokens = computed(engine, manager, [7, 3, 11, 0])
    assert load(manager, tokens, [20, 21, 22, 23]) == 4
    assert all(engine.holds(20 + at, at) for at in range(4))
    assert manager.open_tickets == (0, 0)
    assert [places for places in manager.places(tokens)] == [["g2"]] * 4


def test_a_part_behind_the_engines_own_prefix(engine: FakeEngine, manager: KvBlockManager) -> None:
    tokens = computed(engine, manager, [0, 1, 2, 3])
    found = manager.look_up("r", tokens, 1)
    assert found is not None and (found.blocks, found.by_tier) == (3, [0, 3, 0, 0])
    again = manager.look_up("r", tokens, 1)
    assert again is not None and again.blocks == 3, "a second look-up says the same"
    assert manager.open_tickets == (1, 0)
    assert load(manager, tokens, [9, 8], 1) == 2, "fewer ids than promised blocks"
    assert engine.holds(9, 1) and engine.holds(8, 2)


def test_tickets_end(engine: FakeEngine, manager: KvBlockManager) -> None:
    tokens = computed(engine, manager, [0, 1, 2, 3])
    assert not manager.abandon("nobody")
    manager.look_up("r", tokens)
    assert manager.abandon("r") and manager.open_tickets == (0, 0)
    with pytest.raises(InvalidArgument, match="request r has no ticket"):
        manager.commit("r", [1])
    manager.look_up("r", tokens)
    with pytest.raises(
        InvalidArgument, match="5 engine blocks for request r, which was promised 4"
    ):
        manager.commit("r", [1, 2, 3, 4, 5])
    found = manager.look_up("miss", TokenSequence(manager.namespace, [9] * 8))
    assert found is not None and found.blocks == 0


@pytest.mark.parametrize(
    "ids", [[0, 0, 1, 2], [NUM_BLOCKS, 1, 2, 3], [1, 2], np.array([0, 1, 2, -3])]
)
def test_wrong_ids_are_named(manager: KvBlockManager, ids: object) -> None:
    tokens = TokenSequence(manager.namespace, PROMPT[:4] if len(ids) == 2 else PROMPT)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument):
        manager.offload(ids, tokens)  # type: ignore[arg-type]


def test_reuse_of_a_block_discards_its_copy(engine: FakeEngine, manager: KvBlockManager) -> None:
    tokens = TokenSequence(manager.namespace, PROMPT)
    manager.offload([0, 1, 2, 3], tokens)
    assert manager.before_reuse([0, 1, 2, 3], 10) == []
    assert manager.released([0]) == []
    assert manager.wait_offloads(10)
    found = manager.look_up("r", tokens)
    assert found is not None and found.blocks in (0, 1, 2, 3, 4)


def test_a_load_is_waited_for_polled_and_awaited(
    engine: FakeEngine, manager: KvBlockManager
) -> None:
    tokens = computed(engine, manager, [0, 1, 2, 3])
    manager.look_up("a", tokens)
    onboarding = manager.load("a", [10, 11, 12, 13])
    assert onboarding.wait(10).arrived == 4 and onboarding.is_done() and engine.holds(13, 3)
    manager.look_up("b", tokens)
    other = manager.load("b", np.array([14, 15, 16, 17]))

    async def wait() -> int:
        return (await other).arrived

    assert asyncio.run(wait()) == 4 and engine.holds(17, 3)
    assert manager.finished() == []


def test_tasks_of_several_loops_await_their_loads(
    engine: FakeEngine, manager: KvBlockManager
) -> None:
    tokens = computed(engine, manager, [0, 1, 2, 3])

    async def load(name: str, first: int) -> None:
        for turn in range(20):
            request = f"{name} {turn}"
            manager.look_up(request, tokens)
            done = await manager.load(request, list(range(first, first + 4)))
            assert (done.request, done.arrived) == (request, 4)

    async def both(name: str, first: int) -> None:
        await asyncio.wait_for(asyncio.gather(load(name, first), load(f"{name}x", first + 4)), 60)

    # The other one may take a load's end from the manager: its task is woken all the same.
    over: list[int] = []

    def run(at: int) -> None:
        asyncio.run(both(f"{at}", 4 + 8 * at))
        over.append(at)

    threads = [threading.Thread(target=run, args=(at,)) for at in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(over) == [0, 1] and manager.finished() == []
    assert manager._awaiting is not None and not manager._awaiting._watched


def test_who_awaits_a_load_learns_that_it_will_not_end(engine: FakeEngine) -> None:
    manager = engine.manager()
    tokens = computed(engine, manager, [0, 1, 2, 3])

    async def ended_by(end: Any) -> None:
        manager.look_up("r", tokens)
        onboarding = manager.load("r", [4, 5, 6, 7])
        # As if it were still running: nothing of it comes from the manager any more.
        manager._over()
        while manager.open_tickets != (0, 0):
            manager._over()
        task = asyncio.ensure_future(onboarding)
        await asyncio.sleep(0.01)
        assert not task.done()
        end()
        await asyncio.wait_for(task, 20)

    with pytest.raises(KvbmError, match="request 'r' was abandoned"):
        asyncio.run(ended_by(lambda: manager.abandon("r")))
    with pytest.raises(ClosedError):
        asyncio.run(ended_by(manager.close))


def test_a_layer_of_a_load_is_ready_when_its_bytes_are_in_place(
    engine: FakeEngine, manager: KvBlockManager
) -> None:
    tokens = computed(engine, manager, [0, 1, 2, 3])
    assert not manager.layer_ready("a", 0), "there is no such load"
    assert not manager.wait_layer("a", 0, 20), "nor is one waited for"
    for by_layer in (True, False):
        manager.look_up("a", tokens)
        onboarding = manager.load("a", [10, 11, 12, 13], by_layer=by_layer)
        for layer in range(LAYERS):
            # Of a load that is over only the onboarding knows.
            assert manager.wait_layer("a", layer, 20) and onboarding.layer_ready(layer)
            assert bool((engine.tensors[layer][13] == 3 + layer / 8).all()), layer
        assert onboarding.wait(20).arrived == 4 and onboarding.layer_ready(LAYERS - 1)
        manager.released([10, 11, 12, 13])
        for block in range(10, 14):
            engine.compute(block, 99)


def test_layers_are_saved_while_the_next_are_computed(
    engine: FakeEngine, manager: KvBlockManager
) -> None:
    tokens = TokenSequence(manager.namespace, list(range(4 * PAGE_SIZE)))
    ids = [0, 1, 2, 3]
    assert manager.offload_by_layer(ids, tokens).started == 4
    for layer in range(LAYERS):
        for block in ids:
            engine.tensors[layer][block] = block + layer / 8
        manager.layer_done(layer)
    manager.step()
    assert manager.wait_offloads(20)
    assert load(manager, tokens, [20, 21, 22, 23]) == 4
    assert all(engine.holds(20 + at, at) for at in range(4))
    assert not manager.hides_load(1, 1 << 40), "too little was loaded to know"


def fill(manager: KvBlockManager, seeds: range) -> None:
    """Offloads other sequences, 31 blocks each: host memory holds two."""
    for seed in seeds:
        ids, tokens = list(range(31)), list(range(10_000 * seed, 10_000 * seed + 31 * PAGE_SIZE))
        manager.offload(ids, TokenSequence(manager.namespace, tokens))
        assert manager.wait_offloads(10)


def test_pins_keep_blocks_and_end(engine: FakeEngine, manager: KvBlockManager) -> None:
    tokens = computed(engine, manager, [0, 1, 2, 3])
    assert manager.pin(tokens, ["g2"], manager.iteration + 5) == 4
    fill(manager, range(1, 5))
    assert len(manager.places(tokens)) == 4, "pinned blocks are not evicted"
    assert manager.unpin(tokens, ["g2"]) == 4 and manager.unpin(tokens, ["g2"]) == 0
    assert manager.pin_for(tokens, ["g2", "g3"], 3600) == 4
    fill(manager, range(5, 9))
    assert len(manager.places(tokens)) == 4
    assert manager.unpin(tokens, ["g2"]) == 4
    with pytest.raises(InvalidArgument, match="is over"):
        manager.pin(tokens, ["g2"], manager.iteration)
    for tiers, text in ((["g4"], "give 'g2' or 'g3'"), ([], "no tier"), (["g9"], "g9")):
        with pytest.raises(InvalidArgument, match=text):
            manager.pin_for(tokens, tiers, 1)
    with pytest.raises(InvalidArgument, match="seconds = -1"):
        manager.pin_for(tokens, ["g2"], -1)
    last = list(range(80_000, 80_000 + 31 * PAGE_SIZE))
    assert manager.pin_for(TokenSequence(manager.namespace, last), ["g2"], 60) == 31
    with pytest.raises(NoRoomError, match="cannot be pinned"):
        manager.pin_for(tokens, ["g2"], 60)
    fill(manager, range(9, 13))
    assert manager.places(tokens) == [], "a pin that ended keeps nothing"


def test_blocks_leave_after_their_time_to_live(engine: FakeEngine, manager: KvBlockManager) -> None:
    tokens = computed(engine, manager, [0, 1, 2, 3])
    manager.set_ttl(manager.namespace, 3)
    for _ in range(10):
        manager.step()
    assert manager.places(tokens) == []
    manager.set_ttl(manager.namespace, None)
    manager.set_ttl_time(manager.namespace, 3600)
    manager.set_ttl_time(manager.namespace, None)
    with pytest.raises(InvalidArgument):
        manager.set_ttl(manager.namespace, 0)
    with pytest.raises(InvalidArgument):
        manager.set_ttl_time(manager.namespace, 0.5)


def test_blocks_are_copied_down_when_the_engine_says_so(engine: FakeEngine, tmp_path: Path) -> None:
    config = Config()
    for name, value in {
        "host.capacity": "64",
        "host.pinned": "false",
        "policy.admission": "all",
        "disk.dir": str(tmp_path),
        "disk.capacity": "256",
        "disk.drive_writes_per_day": "0",
        # No trigger copies them.
        "offload.g2_g3.ahead_share": "0",
        "offload.g2_g3.idle_iterations": "0",
    }.items():
        config.set(name, value)
    layout = layout_of(engine.tensors, page_size=PAGE_SIZE)
    with KvBlockManager(config, layout, Namespace("test", page_size=PAGE_SIZE)) as manager:
        tokens = computed(engine, manager, [0, 1, 2, 3])
        assert manager.places(tokens) == [["g2"]] * 4
        assert manager.offload_down(tokens, "g3") == 4
        assert manager.wait_offloads(20)
        assert manager.places(tokens) == [["g2", "g3"]] * 4
        with pytest.raises(InvalidArgument, match="configure G4"):
            manager.offload_down(tokens, "g4")
        with pytest.raises(InvalidArgument, match='tier "disk"'):
            manager.offload_down(tokens, "disk")


def test_the_end_of_a_load_wakes_whoever_waits(engine: FakeEngine, manager: KvBlockManager) -> None:
    """Also where the load ends while it is being committed."""
    tokens = computed(engine, manager, [0, 1, 2, 3])
    assert manager.finished_fd is not None and manager.busy([0, 1]) == []
    for turn in range(200):
        manager.look_up(f"r{turn}", tokens)
        manager.commit(f"r{turn}", [10, 11, 12, 13])
        began = time.monotonic()
        done: list[FinishedLoad] = []
        while not done and time.monotonic() - began < 10:
            manager.wait_finished(5)
            done = manager.finished()
        assert [load.arrived for load in done] == [4] and time.monotonic() - began < 4, turn


def test_several_threads_wait_for_loads(engine: FakeEngine, manager: KvBlockManager) -> None:
    tokens = computed(engine, manager, [0, 1, 2, 3])
    arrived: list[int] = []

    def wait(number: int) -> None:
        for turn in range(50):
            manager.look_up(f"{number} {turn}", tokens)
            ids = list(range(8 + number * 4, 12 + number * 4))
            arrived.append(manager.load(f"{number} {turn}", ids).wait(10).arrived)
            manager.wait_finished(0.001)

    threads = [threading.Thread(target=wait, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert arrived == [4] * 200


def test_blocks_survive_on_disk(engine: FakeEngine, tmp_path: Path) -> None:
    with engine.manager(tmp_path / "disk") as manager:
        computed(engine, manager, [0, 1, 2, 3])
        assert manager.flush(10) == 4
    other = FakeEngine()
    with other.manager(tmp_path / "disk") as manager:
        tokens = TokenSequence(manager.namespace, PROMPT)
        found = manager.look_up("r", tokens)
        assert found is not None and found.by_tier == [0, 0, 4, 0]
        assert load(manager, tokens, [5, 6, 7, 8]) == 4
        assert all(other.holds(5 + at, at) for at in range(4))
    with other.manager(tmp_path / "disk", weights="2") as manager:
        found = manager.look_up("r", TokenSequence(manager.namespace, PROMPT))
        assert found is not None and found.blocks == 0, "other weights have other blocks"


def test_what_is_staged_is_in_host_memory(engine: FakeEngine, tmp_path: Path) -> None:
    with engine.manager(tmp_path / "disk") as manager:
        tokens = computed(engine, manager, [0, 1, 2, 3])
        assert manager.clear("g2") == 4 and manager.places(tokens) == [["g3"]] * 4
        assert manager.stage("r", tokens, 1, timeout=10) == 3
        assert manager.places(tokens) == [["g2", "g3"]] * 4
        manager.clear("g3")
        onboarding = manager.load("r", [20, 21, 22])
        assert onboarding.wait(10).arrived == 3 and engine.holds(20, 1)
        assert manager.stage("s", TokenSequence(manager.namespace, [9] * 8), timeout=0) == 0
        assert manager.open_tickets == (0, 0)
        with pytest.raises(InvalidArgument, match="timeout"):
            manager.stage("r", tokens, timeout=-1)


def test_hashes_of_an_engine_that_mean_nothing_elsewhere_refuse_a_disk(
    engine: FakeEngine, tmp_path: Path
) -> None:
    config = Config()
    config.set("host.capacity", "8")
    config.set("disk.dir", str(tmp_path))
    config.set("disk.capacity", "8")
    space = Namespace("m", page_size=PAGE_SIZE, chain_root=b"r", persistent=False)
    with pytest.raises(InvalidArgument, match="changes with every process"):
        KvBlockManager(config, layout_of(engine.tensors, page_size=PAGE_SIZE), space)


def test_private_blocks_of_a_preempted_request_come_back(
    engine: FakeEngine, manager: KvBlockManager
) -> None:
    for block in (4, 9):
        engine.compute(block, block)
    parked = manager.park([4, 9], position=7)
    assert (len(parked), repr(parked)) == (2, "Parked(2 blocks)")
    assert manager.status()["tiers"]["g2"]["free"] == 62, "they take room in host memory"
    for block in (4, 9):
        engine.compute(block, 0)
    with pytest.raises(InvalidArgument, match="2"):
        manager.resume(parked, [1, 2, 3])
    assert len(parked) == 2, "what is rejected stays parked"
    manager.resume(parked, [20, 4])
    assert engine.holds(20, 4) and engine.holds(4, 9)
    assert (len(parked), manager.status()["tiers"]["g2"]["free"]) == (0, 64)
    with pytest.raises(ClosedError, match="resumed or closed"):
        manager.resume(parked, [20, 4])
    other = manager.park([20])
    other.close()
    other.close()
    assert manager.status()["tiers"]["g2"]["free"] == 64
    del other
    tenant = Namespace("test", weights="1", page_size=PAGE_SIZE, tenant_salt=b"acme")
    del_me = manager.park([20], namespace=tenant)
    del del_me
    gc.collect()
    assert manager.status()["tiers"]["g2"]["free"] == 64


def test_private_blocks_of_all_cache_groups_come_back_or_none_does() -> None:
    pages = [np.zeros((NUM_BLOCKS, 512), dtype=np.int8) for _ in range(2)]
    layout = Layout(NUM_BLOCKS, PAGE_SIZE)
    for kind, tensors in (("window=6", pages), ("full", pages), ("state", [pages[0][:, :301]])):
        layout.begin_group(kind)
        for tensor in tensors:
            layout.add_tensor(tensor)
    config = Config()
    config.set("host.capacity", "8")
    config.set("host.pinned", "false")
    namespace = Namespace("test", page_size=PAGE_SIZE)
    ids, to = [[1, 2], [3, 4, 5], [6]], [[11, 12], [13, 14, 15], [16]]
    with KvBlockManager(config, layout, namespace) as manager:
        for page in pages:
            page[:7] = np.arange(7)[:, None]
        with pytest.raises(InvalidArgument, match="2 positions for blocks of 3 cache groups"):
            manager.park_groups(ids, positions=[1, 0])
        with pytest.raises(KvbmError, match="not moved"):
            manager.park_groups([*ids, [7]])  # there is no fourth group
        assert manager.status()["tiers"]["g2"]["free"] == 8
        parked = manager.park_groups(ids, positions=[1, 0, 2])
        assert (len(parked), manager.status()["tiers"]["g2"]["free"]) == (6, 2)
        with pytest.raises(NoRoomError, match="G2 cannot give 3"):
            manager.park_groups([[7], [8], [9]])
        assert manager.status()["tiers"]["g2"]["free"] == 2, "none of them is parked"
        for page in pages:
            page[:7] = 0
        with pytest.raises(InvalidArgument, match="engine blocks for 1 of 3 batches"):
            manager.resume(parked, [11, 12])
        with pytest.raises(InvalidArgument, match="2 engine blocks for 3 blocks"):
            manager.resume_groups(parked, [[11, 12], [13, 14], [16]])
        assert len(parked) == 6, "what is rejected stays parked"
        manager.resume_groups(parked, to)
        assert (len(parked), manager.status()["tiers"]["g2"]["free"]) == (0, 8)
        for before, after in zip(sum(ids, []), sum(to, [])):
            end = 301 if before == 6 else 512
            assert (pages[0][after][:end] == before).all()
        assert not pages[0][16][301:].any(), "a state is copied at its own length"


def test_blocks_of_a_larger_priority_stay_longer(engine: FakeEngine) -> None:
    with engine.manager(host="8") as manager:
        dear, cheap = (TokenSequence(manager.namespace, [start] * 16) for start in (1, 2))
        for tokens, priority in ((dear, 100), (cheap, 0)):
            assert manager.offload([0, 1, 2, 3], tokens, priority=priority).started == 4
            assert manager.wait_offloads(10)
        # Half of host memory goes.
        more = TokenSequence(manager.namespace, [3] * 16)
        assert manager.offload([4, 5, 6, 7], more).started == 4
        assert manager.wait_offloads(10)
        assert [len(manager.places(tokens)) for tokens in (dear, cheap, more)] == [4, 0, 4]
        for wrong in (-1, 256):
            with pytest.raises(OverflowError):
                manager.offload([0], dear, priority=wrong)


def test_clear_and_forget(engine: FakeEngine, manager: KvBlockManager) -> None:
    computed(engine, manager, [0, 1, 2, 3])
    assert manager.clear("g2") == 4
    tokens = computed(engine, manager, [0, 1, 2, 3])
    assert manager.forget(manager.namespace) == 4
    found = manager.look_up("r", tokens)
    assert found is not None and found.blocks == 0
    with pytest.raises(InvalidArgument, match="g9"):
        manager.clear("g9")


def test_events_feed_an_index(engine: FakeEngine, manager: KvBlockManager) -> None:
    events, index = manager.events(), KvIndex()
    tokens = computed(engine, manager, [0, 1, 2, 3])
    assert manager.pump_events()
    taken = events.take(5)
    assert [event.kind for event in taken] == ["store"] * 4  # type: ignore[union-attr]
    assert [event.hash for event in taken] == tokens.hashes  # type: ignore[union-attr]
    assert [event.tier for event in taken] == ["g2"] * 4  # type: ignore[union-attr]
    index.apply(taken)
    assert len(index) == 4
    ((source, blocks, by_tier),) = index.find(tokens)
    assert (blocks, by_tier) == (4, [0, 4, 0, 0])
    index.forget(source)
    assert len(index) == 0
    with pytest.raises(InvalidArgument, match="int"):
        index.apply([3])  # type: ignore[list-item]


def test_metrics_and_status(engine: FakeEngine, manager: KvBlockManager) -> None:
    computed(engine, manager, [0, 1, 2, 3])
    samples = manager.metrics.read()
    assert any(name.startswith("kvbm_") for name in samples)
    assert "# EOF" in manager.metrics.text()
    status = manager.status()
    assert status["tiers"]["g2"]["capacity"] == 64 and not status["disk_down"]
    assert manager.capacity == [0, 64, 0, 0]


def test_a_closed_manager_says_so(engine: FakeEngine) -> None:
    manager = engine.manager()
    assert manager.close() is None and manager.close() is None and manager.closed
    with pytest.raises(ClosedError, match="closed"):
        manager.step()


def test_tensors_live_as_long_as_the_manager(engine: FakeEngine) -> None:
    manager = engine.manager()
    tensor = weakref.ref(engine.tensors[0])
    engine.tensors.clear()
    gc.collect()
    assert tensor() is not None
    manager.close()
    del manager
    gc.collect()
    assert tensor() is None


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [("host.capcity", "1", "nearest"), ("host.capacity", "much", "much"), ("", "", "unknown key")],
)
def test_settings_that_make_no_sense(key: str, value: str, text: str) -> None:
    with pytest.raises(ConfigInvalid, match=text):
        Config().set(key, value)


def test_a_configuration_reads_and_writes_toml(tmp_path: Path) -> None:
    config = Config.from_toml('[host]\ncapacity = "8GiB"\n')
    assert 'capacity = "8GiB"' in config.to_toml()
    with pytest.raises(ConfigInvalid, match="here:1"):
        Config.from_toml("[nothing]", "here")


def test_layouts_that_make_no_sense() -> None:
    owner = np.zeros(1024, dtype=np.uint8)
    address = owner.ctypes.data
    with pytest.raises(InvalidArgument, match="0 blocks"):
        Layout(0, 4)
    layout = Layout(4, 4)
    for length, stride, size, text in [
        (1024, 64, 128, "stride"),
        (255, 64, 64, "do not fit"),
        (0, 64, 64, "do not fit"),
    ]:
        with pytest.raises(InvalidArgument, match=text):
            layout.add(address, length, block_stride=stride, block_bytes=size, owner=owner)
    layout.add(address, 512, block_stride=128, block_bytes=64, owner=owner)
    layout.add(address + 512, 512, block_stride=100, block_bytes=62, owner=owner)
    assert (layout.num_tensors, layout.block_bytes) == (2, 126), "tensors of other sizes"
    read_only = np.zeros((4, 64), dtype=np.uint8)
    read_only.flags.writeable = False
    with pytest.raises(InvalidArgument, match="read-only"):
        layout_of([read_only], page_size=4)
    with pytest.raises(InvalidArgument, match="contiguous"):
        layout_of([np.zeros((4, 8, 8), dtype=np.uint8)[:, :, ::2]], page_size=4)


def test_blocks_at_a_stride(tmp_path: Path) -> None:
    """A tensor whose first axis is keys and values, and blocks with a gap between them."""
    whole = np.zeros((8, 2, 64), dtype=np.uint8)
    config = Config()
    config.set("host.capacity", "16")
    config.set("host.pinned", "false")
    layout = layout_of([whole[:, 0, :]], page_size=4)
    with KvBlockManager(config, layout, Namespace("m", page_size=4)) as manager:
        tokens = TokenSequence(manager.namespace, PROMPT)
        for at in range(4):
            whole[at, 0] = at + 1
            whole[at, 1] = 99
        manager.offload([0, 1, 2, 3], tokens)
        assert manager.wait_offloads(10)
        assert load(manager, tokens, [4, 5, 6, 7]) == 4
    assert [int(whole[block, 0, 0]) for block in range(4, 8)] == [1, 2, 3, 4]
    assert (whole[4:, 1] == 0).all(), "what lies between blocks is not touched"
