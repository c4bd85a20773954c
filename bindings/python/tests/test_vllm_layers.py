"""Loads and saves that go layer by layer in the step that needs or computes them.

The real engine runs them in `cargo xtask engine-test --only layers`.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_stand_in import BLOCKS, PROMPT, SIZE, Engine, Request
from vllm_stand_in import vllm as vllm  # a fixture

IDS, AGAIN = [1, 2, 3, 4, 5], [11, 12, 13, 14, 15]


@pytest.fixture
def engine(vllm: Any) -> Iterator[Engine]:
    engine = Engine(vllm, extra={"layers": "on"})
    yield engine
    engine.close()


def promised(engine: Engine, name: str = "b", ids: list[int] = AGAIN) -> Request:
    """A request that is promised the prompt, and has its blocks."""
    again = Request(name, PROMPT)
    assert engine.match(again) == (16, False), "its step does not wait for the load"
    engine.allocated(again, ids, 16)
    again.num_computed_tokens = 16
    return again


def holds_layer(engine: Engine, layer: int, ids: list[int] = AGAIN) -> bool:
    return all(
        bool((engine.kv[layer][ids[at // 4], :, at % 4] == PROMPT[at] + layer).all())
        for at in range(16)
    )


def saved_bytes(engine: Engine) -> float:
    text = engine.manager.metrics_text()
    found = re.search(r'^kvbm_transfer_bytes_total\{path="g1_g2"[^}]*\} (\S+)$', text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def test_a_prompt_comes_back_while_its_step_runs(engine: Engine) -> None:
    engine.compute(Request("a", PROMPT), IDS)
    again = promised(engine)
    seen: list[tuple[int, bool]] = []
    engine.after_wait = lambda layer: seen.append((layer, holds_layer(engine, layer)))
    assert engine.step({"b": (again, AGAIN, 1)}) == (set(), set()), "vLLM asks for no end of it"
    assert seen == [(0, True), (1, True)], "each layer is there when it is needed"
    assert engine.holds(again, AGAIN, 0, 17)
    assert engine.manager.open_tickets == (0, 0) and engine.failed == set()
    assert (engine.totals["loads"], engine.totals["errors"]) == (1, 0)
    assert engine.totals["loads_by_layer"] == 1 and engine.totals["saved_by_layer_blocks"] == 4
    seen.clear()
    assert engine.step({"b": (again, AGAIN, 0)}) == (set(), set())
    assert engine.match(Request("c", PROMPT)) == (16, False)


def test_a_layer_is_saved_while_the_next_is_computed(engine: Engine) -> None:
    before: list[float] = []

    def look(layer: int) -> None:
        deadline = time.monotonic() + 10
        while layer == 1 and saved_bytes(engine) == 0 and time.monotonic() < deadline:
            time.sleep(0.001)
        before.append(saved_bytes(engine))

    engine.after_wait = look
    request = Request("a", PROMPT)
    engine.scheduler.on_new_request(request)
    engine.step({"a": (request, IDS, len(PROMPT))})
    # Of four blocks in two tensors, one tensor.
    assert before == [0, 4 * engine.kv[0][0].nbytes]
    assert engine.manager.wait_offloads(10), "the step ends with its last layer"
    assert saved_bytes(engine) == 2 * before[1] and engine.totals["saved_blocks"] == 4
    engine.after_wait = lambda layer: None
    again = promised(engine)
    engine.step({"b": (again, AGAIN, 1)})
    assert engine.holds(again, AGAIN, 0, 17)


def test_hooks_that_come_in_another_order_or_not_at_all_save_no_layer_early(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    done = type(engine.manager).layer_done

    def noted(manager: Any, layer: int, event: Any) -> None:
        told.append(layer)
        done(manager, layer, event)

    monkeypatch.setattr(type(engine.manager), "layer_done", noted)
    layers = engine.worker._layers
    layers.saves = [SimpleNamespace(ids=[])]  # type: ignore[list-item]
    layers.written("layer.1")
    assert told == [], "the one before it is not written"
    layers.written("no such layer")
    layers.written("layer.0")
    layers.written("layer.0")
    layers.end()
    assert told == [1]
    layers.begin()
    layers.saves = [SimpleNamespace(ids=[])]  # type: ignore[list-item]
    layers.end()
    assert told == [1, 1], "the end of the step stands for all"


@pytest.mark.parametrize("how", ["late", "no hook", "refused", "unknown", "broken"])
def test_a_step_whose_blocks_were_not_there_is_computed_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """vLLM learns of the blocks, and of nothing else of the step is anything kept."""
    engine.compute(Request("a", PROMPT), IDS)
    manager = type(engine.manager)

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("broken")

    other, ids = Request("x", list(range(40, 57))), [21, 22, 23, 24, 25]
    assert engine.match(other) == (0, False)
    if how == "unknown":
        again = Request("b", PROMPT)
        assert engine.match(again) == (16, False)
        blocks = SimpleNamespace(get_block_ids=broken)
        engine.scheduler.update_state_after_alloc(again, blocks, 16)
        again.num_computed_tokens = 16
    else:
        again = promised(engine)
    with monkeypatch.context() as patch:
        if how == "late":
            wait = manager.wait_layer
            patch.setattr(
                manager,
                "wait_layer",
                lambda manager, request, layer, timeout: (
                    wait(manager, request, layer, timeout) and layer == 0
                ),
            )
        elif how == "no hook":
            patch.setattr(engine.worker, "wait_for_layer_load", lambda name: None)
        elif how == "refused":
            assert engine.manager.abandon("b"), "as a ticket that is too old"
        elif how == "broken":
            patch.setattr(manager, "wait_layer", broken)
        received, bad = engine.step({"b": (again, AGAIN, 1), "x": (other, ids, 17)})
    assert received == set() and engine.failed == set()
    assert bad == set(range(BLOCKS)) if how == "unknown" else bad == set(AGAIN[:4])
    assert engine.match(Request("c", other.all_token_ids)) == (0, False), "nothing of it is stored"
    # vLLM computes both again.
    for request in (again, other):
        request.num_computed_tokens = 0
    assert engine.step({"b": (again, AGAIN, 17), "x": (other, ids, 17)}) == (set(), set())
    assert engine.manager.wait_offloads(10) and engine.manager.open_tickets == (0, 0)
    assert engine.holds(again, AGAIN, 0, 17)
    engine.step()
    is_whole = how == "no hook"
    assert engine.match(Request("d", other.all_token_ids)) == (16, is_whole), "it is offered again"
    assert engine.match(again, 0) == (0, False), "it is promised nothing again"


def test_other_requests_of_the_step_are_right_when_one_load_fails(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.compute(Request("a", PROMPT), IDS)
    manager, wait = type(engine.manager), type(engine.manager).wait_layer
    first, second = promised(engine), promised(engine, "c", [21, 22, 23, 24, 25])
    monkeypatch.setattr(
        manager,
        "wait_layer",
        lambda manager, request, layer, timeout: (
            wait(manager, request, layer, timeout) and request == "c"
        ),
    )
    seen: list[bool] = []
    engine.after_wait = lambda layer: seen.append(holds_layer(engine, layer, [21, 22, 23, 24]))
    running = {"b": (first, AGAIN, 1), "c": (second, [21, 22, 23, 24, 25], 1)}
    assert engine.step(running) == (set(), set(AGAIN[:4]))
    assert seen == [True, True]


def test_vllms_cache_gets_loaded_blocks_when_their_bytes_are_right(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM caches them before the load begins, and others would compute on them."""
    engine.compute(Request("a", PROMPT), IDS)
    # The first block was there.
    engine.pool.blocks[AGAIN[0]].block_hash = Request("a", PROMPT).block_hashes[0]
    first, second = Request("b", [*PROMPT[:16], 60, 61, 62, 63]), Request("c", PROMPT)
    assert engine.match(first, SIZE) == (12, False)
    engine.allocated(first, AGAIN, 12)
    assert engine.match(second) == (16, False)
    engine.allocated(second, [21, 22, 23, 24, 25], 16)
    seen: list[set[int]] = []
    engine.after_wait = lambda _: seen.append(set(engine.pool.cached))
    manager, wait = type(engine.manager), type(engine.manager).wait_layer
    monkeypatch.setattr(
        manager,
        "wait_layer",
        lambda manager, request, layer, timeout: (
            wait(manager, request, layer, timeout) and request == "b"
        ),
    )
    first.num_computed_tokens = second.num_computed_tokens = 16
    running = {"b": (first, AGAIN, 4), "c": (second, [21, 22, 23, 24, 25], 1)}
    assert engine.step(running) == (set(), {21, 22, 23, 24})
    assert seen == [{AGAIN[0]}, {AGAIN[0]}]
    assert engine.pool.cached == set(AGAIN), "the block that was computed is right too"
    assert [engine.pool.blocks[id].block_hash for id in AGAIN] == first.block_hashes


def test_a_whole_load_of_a_step_is_withheld_from_vllms_cache_too(vllm: Any) -> None:
    engine = Engine(vllm, extra={"load": "sync", "layers": "off"})
    try:
        engine.compute(Request("a", PROMPT), IDS)
        again, seen = promised(engine), list[set[int]]()
        engine.after_wait = lambda _: seen.append(set(engine.pool.cached))
        assert engine.step({"b": (again, AGAIN, 1)}) == (set(), set())
        assert seen == [set(), set()] and engine.pool.cached == set(AGAIN[:4])

        def fails(_: int) -> None:
            raise RuntimeError("the step fails")

        engine.after_wait = fails
        ids = [21, 22, 23, 24, 25]
        with pytest.raises(RuntimeError, match="the step fails"):
            engine.step({"c": (promised(engine, "c", ids), ids, 1)})
        engine.step()
        assert engine.pool.cached == set(AGAIN[:4]), "what is left of a step that raised stays out"
    finally:
        engine.close()


@pytest.mark.parametrize("how", ["broken", "no pool"])
def test_what_cannot_be_withheld_from_vllms_cache_is_not_loaded(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    def broken(_: set[int]) -> None:
        raise TypeError("evict_blocks() has another parameter")

    engine.compute(Request("a", PROMPT), IDS)
    if how == "broken":
        monkeypatch.setattr(engine.pool, "evict_blocks", broken)
    else:
        engine.scheduler.bind_gpu_block_pool(None)
    again = promised(engine)
    assert engine.step({"b": (again, AGAIN, 1)}) == (set(), set(range(BLOCKS)))
    assert engine.totals["loaded_blocks"] == 0 and engine.totals["errors"] == 2


def test_a_part_of_a_load_is_reported_as_none_of_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step did not wait for the layers of blocks that arrived."""
    engine.compute(Request("a", PROMPT), IDS)
    again, finished = promised(engine), type(engine.manager).finished
    monkeypatch.setattr(
        type(engine.manager),
        "finished",
        lambda manager: [
            SimpleNamespace(request=done.request, wanted=4, arrived=3, failures=["planted"])
            for done in finished(manager)
        ],
    )
    assert engine.step({"b": (again, AGAIN, 1)}) == (set(), set(AGAIN[:4]))


def test_a_load_that_does_not_end_ends_vllm(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks may still be written, so nothing else may have them."""
    from kvbm_rs.vllm import layers, rank

    engine.compute(Request("a", PROMPT), IDS)
    again = promised(engine)
    monkeypatch.setattr(rank, "LAYER_WAIT", 0.05)
    monkeypatch.setattr(rank, "REUSE_WAIT", 0.05)
    with monkeypatch.context() as patch:
        patch.setattr(type(engine.manager), "finished", lambda manager: [])
        with pytest.raises(layers.LoadHangs, match="the load of b did not end"):
            engine.step({"b": (again, AGAIN, 1)})


def test_without_hooks_nothing_goes_by_layer_any_more(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.compute(Request("a", PROMPT), IDS)
    again = promised(engine)
    with monkeypatch.context() as patch:
        patch.setattr(engine.worker, "wait_for_layer_load", lambda name: None)
        assert engine.step({"b": (again, AGAIN, 1)}) == (set(), set(AGAIN[:4]))
    process = engine.scheduler._process
    assert not process.loads_by_layer and not process.saves_by_layer
    assert engine.match(Request("c", PROMPT)) == (16, True)


def test_a_request_computes_no_more_of_a_step_than_vllm_gives_it(vllm: Any) -> None:
    engine = Engine(vllm, longest_chunk=64)
    try:
        assert engine.scheduler._process.view.request_tokens == 64
        engine.compute(Request("a", PROMPT), IDS)
        asked: list[int] = []
        manager = type(engine.manager)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(manager, "hides_load", lambda _, blocks, tokens: asked.append(tokens))
            engine.match(Request("b", [*PROMPT[:16], *range(500, 700)]))
        assert asked == [64]
    finally:
        engine.close()


def test_loads_of_a_step_that_are_whole_and_by_layer(vllm: Any, tmp_path: Path) -> None:
    """One that is over before its step begins is there for each layer."""
    disk = {"disk": str(tmp_path), "disk_capacity": "64", "disk.drive_writes_per_day": 0}
    extra = disk | {"layers": "on", "load": "sync"}
    engine = Engine(vllm, extra=extra)
    try:
        other, ids = list(range(40, 57)), [21, 22, 23, 24, 25]
        engine.compute(Request("x", other), [6, 7, 8, 9, 10])
        assert engine.manager.flush(10)
        engine.manager.clear("g2")
        engine.compute(Request("a", PROMPT), IDS)
        again, whole = promised(engine), Request("y", other)
        assert engine.match(whole) == (16, False)
        engine.allocated(whole, ids, 16)
        whole.num_computed_tokens = 16
        running = {"b": (again, AGAIN, 1), "y": (whole, ids, 1)}
        assert engine.step(running) == (set(), set())
        assert engine.holds(again, AGAIN, 0, 17) and engine.holds(whole, ids, 0, 17)
        assert (engine.totals["loads"], engine.totals["loads_by_layer"]) == (2, 1)
        assert (engine.totals["hit_tokens_g2"], engine.totals["hit_tokens_g3"]) == (16, 16)
    finally:
        engine.close()


def test_auto_goes_by_layer_where_computing_hides_the_load(
    vllm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = {"disk": str(tmp_path), "disk_capacity": "64", "disk.drive_writes_per_day": 0}
    engine = Engine(vllm, extra=disk)
    try:
        asked: list[tuple[int, int]] = []
        hides = False

        def hides_load(_: Any, blocks: int, tokens: int) -> bool:
            asked.append((blocks, tokens))
            return hides

        engine.compute(Request("a", PROMPT), IDS)
        assert saved_bytes(engine) > 0 and engine.worker._layers.saves == [], "saves are whole"
        waiting = [Request(name, PROMPT) for name in "bce"]
        assert engine.match(waiting[0]) == (16, True), "nothing was measured"
        monkeypatch.setattr(type(engine.manager), "hides_load", hides_load)
        assert engine.match(waiting[1]) == (16, True)
        hides = True
        long = Request("d", [*PROMPT[:16], *range(500, 600)])
        assert engine.match(long) == (16, False)
        engine.allocated(long, list(range(11, 40)), 16)
        assert engine.match(waiting[2]) == (16, False)
        assert asked == [(4, 1), (4, 100), (8, 101)], "the loads of a step count together"
        long.num_computed_tokens = 16
        engine.step({"d": (long, list(range(11, 40)), 100)})
        assert engine.holds(long, list(range(11, 40)), 0, 116)
        for request in waiting:
            engine.scheduler.request_finished(request, [])
        assert engine.manager.wait_offloads(10) and engine.manager.flush(10)
        engine.manager.clear("g2")
        assert engine.match(Request("f", PROMPT)) == (16, True), "the disk has no layers"
        assert len(asked) == 3
    finally:
        engine.close()


@pytest.mark.parametrize("layers", ["on", "auto", "off"])
@pytest.mark.parametrize(
    "changes,why",
    [
        ({}, None),
        ({"caches_prefixes": False}, None),
        ({"executor": "mp", "ranks": 2}, "workers are processes of their own"),
        ({"extra": {"audit": 0.5, "shadow": False}}, "option 'audit' is set"),
        ({"async_scheduling": True}, "--no-async-scheduling"),
        ({"second_runner": True}, "VLLM_USE_V2_MODEL_RUNNER=0"),
        ({"speculative_config": SimpleNamespace()}, "drafts of tokens"),
        ({"parallel": {"use_ubatching": True}}, "microbatches"),
        ({"full_graphs": True}, "CUDA graphs"),
    ],
)
def test_what_has_no_layers_goes_whole_and_the_log_says_why(
    vllm: Any,
    caplog: pytest.LogCaptureFixture,
    layers: str,
    changes: dict[str, Any],
    why: str | None,
) -> None:
    changes = changes | {"extra": {"layers": layers} | changes.get("extra", {})}
    with caplog.at_level(logging.INFO, logger="vllm.kvbm_rs.vllm"):
        engine = Engine(vllm, **changes)
    try:
        told = [record for record in caplog.records if "not layer by layer" in record.getMessage()]
        if why is None or layers == "off":
            assert told == []
        else:
            (record,) = told
            assert why in record.getMessage()
            assert record.levelno == (logging.WARNING if layers == "on" else logging.INFO)
        process = engine.scheduler._process
        assert process.loads_by_layer == (why is None and layers != "off")
        assert process.saves_by_layer == (why is None and layers == "on")
        if "audit" not in changes["extra"]:
            engine.compute(Request("a", PROMPT), IDS)
            is_async = why is not None or layers != "on"
            assert engine.match(Request("b", PROMPT)) == (16, is_async)
    finally:
        engine.close()


def test_vllm_is_asked_for_hooks_only_where_they_are_wanted(vllm: Any) -> None:
    from kvbm_rs.vllm import KvbmConnector

    asks = KvbmConnector.requires_piecewise_for_cudagraph
    assert [asks({"layers": layers}) for layers in ("on", "auto", "off")] == [True, False, False]
    assert not asks({})
