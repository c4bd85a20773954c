"""`KvbmLinker` against the published package's own pool, factory, wrapper and layer counter."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvbm_rs import ConfigInvalid, KvbmError, doctor
from kvbm_rs.engine_names import missing
from kvbm_rs.sglang import _sglang_compat as compat
from kvbm_rs.sglang._sglang_settings import settings_of
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinkerWrapper
from sglang.srt.server_args import ServerArgs
from sglang_pools import PAGE, PAGES, indices, local_model, page_hashes

LAYERS = 3


def keys(count: int, seed: int = 0) -> list[str]:
    return page_hashes(list(range(seed, seed + count * PAGE)))


def device_pool() -> Any:
    """SGLang's own KV pool, in host memory."""
    return MHATokenToKVPool(
        PAGES * PAGE,
        PAGE,
        torch.float16,
        2,
        16,
        LAYERS,
        "cpu",
        False,
        start_layer=0,
        end_layer=LAYERS - 1,
        enable_alt_stream=False,
    )


def linker(pool: Any, disk: Path | None = None, **changes: Any) -> Any:
    """A linker as SGLang's factory makes it."""
    extra: dict[str, Any] = {"host": "64", "host.pinned": False, "policy.admission": "all"}
    if disk is not None:
        extra |= {"disk": str(disk), "disk_capacity": "128", "disk.drive_writes_per_day": 0}
    args = changes.pop("args", SimpleNamespace(model_path="test/model", tp_size=1))
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=None,
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool),
        page_size=PAGE,
    )
    config = {
        "linker": "KvbmLinker",
        "linker_module_path": "kvbm_rs.sglang",
        "linker_extra_config": extra | changes.pop("extra", {}),
    }
    return create_unified_cache_linker(
        args,
        params,
        backend="dynamic",
        config=config,
        components=changes.pop("components", {ComponentType.FULL}),
    )


def transfer(names: list[str], pages: list[int] | None = None) -> list[PoolTransfer]:
    where = None if pages is None else indices(pages)
    return [PoolTransfer(name=PoolName.KV, keys=names, device_indices=where)]


def fill(pool: Any, page: int) -> None:
    for at, buffer in enumerate([*pool.k_buffer, *pool.v_buffer]):
        rows = buffer[page * PAGE : (page + 1) * PAGE]
        rows.copy_(torch.randn(rows.shape, generator=torch.Generator().manual_seed(page * 10 + at)))


def same(pool: Any, page: int, other: Any, there: int) -> bool:
    return all(
        torch.equal(
            mine[page * PAGE : (page + 1) * PAGE], theirs[there * PAGE : (there + 1) * PAGE]
        )
        for mine, theirs in zip(
            [*pool.k_buffer, *pool.v_buffer], [*other.k_buffer, *other.v_buffer]
        )
    )


def layer_same(pool: Any, layer: int, page: int, there: int) -> bool:
    """Whether a layer of two pages is the same."""
    return all(
        torch.equal(
            buffer[page * PAGE : (page + 1) * PAGE], buffer[there * PAGE : (there + 1) * PAGE]
        )
        for buffer in (pool.k_buffer[layer], pool.v_buffer[layer])
    )


def offloaded(store: Any) -> bool:
    deadline = time.monotonic() + 60
    while store.num_completed_offloads() == 0:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return bool(store.pop_completed_offload())


def stored(store: Any, pool: Any, names: list[str], pages: list[int]) -> None:
    for page in pages:
        fill(pool, page)
    assert store.offload(transfer(names, pages))
    assert offloaded(store)


def test_the_installed_sglang_has_what_is_used() -> None:
    assert missing(compat.LINKER) == []


def test_pages_come_back_and_each_layer_is_told_in_its_turn() -> None:
    pool = device_pool()
    store, names = linker(pool), keys(6)
    stored(store, pool, names[:4], [3, 1, 7, 2])
    assert store.lookup("a", transfer(names)) == [1, 2, 3, 4]
    assert store.lookup("b", transfer(keys(2, seed=500))) == []
    assert store.start_layer_wise_loading() == -1, "nothing is queued"
    assert store.load("a", transfer(names[:3], [20, 21, 22]))
    counter = store.layer_done_counter
    moved, complete, completed = list(enumerate([3, 1, 7])), counter.complete, []

    def completes(index: int, layer: int) -> None:
        completed.append((layer, [layer_same(pool, layer, 20 + at, page) for at, page in moved]))
        complete(index, layer)

    counter.complete = completes
    index = store.start_layer_wise_loading()
    counter.set_consumer(index)
    for layer in range(LAYERS):
        counter.wait_until(layer)
    assert store.finish_layer_wise_loading(index)
    assert completed == [(layer, [True] * 3) for layer in range(LAYERS)], (
        "each in its turn, in place"
    )
    assert all(same(pool, 20 + at, pool, page) for at, page in moved)
    assert store._store.manager.open_tickets == (0, 0)
    store.close()


def test_what_is_on_disk_is_copied_to_host_memory_before_it_is_promised(tmp_path: Path) -> None:
    pool = device_pool()
    store, names = linker(pool, tmp_path), keys(6)
    stored(store, pool, names, list(range(6)))
    store.close()
    other = device_pool()
    store = linker(other, tmp_path)
    deadline = time.monotonic() + 60
    while store.lookup("a", transfer(names)) != list(range(1, 7)):
        assert time.monotonic() < deadline
    samples = store._store.manager.metrics.read()
    assert samples['kvbm_transfer_blocks_total{path="g3_g2"}'] == 6
    assert store.load("a", transfer(names, list(range(10, 16))))
    assert store.finish_layer_wise_loading(store.start_layer_wise_loading())
    assert all(same(other, 10 + at, pool, at) for at in range(6))
    store.close()


def test_pages_of_other_settings_are_not_found(tmp_path: Path) -> None:
    model, names = local_model(tmp_path / "model"), keys(2)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").write_bytes(b"1")

    def opened(**changes: Any) -> Any:
        args = ServerArgs(model_path=model, **changes)
        assert settings_of(args).unknown == (), "SGLang says all that counts"
        return linker(device_pool(), tmp_path / "disk", args=args)

    def finds(**changes: Any) -> bool:
        store = opened(**changes)
        deadline = time.monotonic() + 1
        while not (found := store.lookup("a", transfer(names))) and time.monotonic() < deadline:
            time.sleep(0.01)
        store.close()
        return bool(found == [1, 2])

    pool = device_pool()
    args = ServerArgs(model_path=model, quantization="fp8")
    store = linker(pool, tmp_path / "disk", args=args)
    stored(store, pool, names, [0, 1])
    store.close()
    assert finds(quantization="fp8")
    for changes in (
        {},
        {"quantization": "awq"},
        {"quantization": "fp8", "kv_cache_dtype": "fp8_e4m3"},
        {"quantization": "fp8", "json_model_override_args": '{"rope_theta": 5.0}'},
        {"quantization": "fp8", "lora_paths": [f"x={adapter}"]},
    ):
        assert not finds(**changes), changes
    (adapter.parent / "model" / "model.safetensors").write_bytes(b"trained")
    assert not finds(quantization="fp8")


def test_overrides_are_in_the_models_configuration(tmp_path: Path) -> None:
    model = local_model(tmp_path / "model")
    made = {
        settings_of(ServerArgs(model_path=model, json_model_override_args=text)).model_settings
        for text in ("{}", '{"rope_theta": 5.0}', '{ "rope_theta": 5.0 }')
    }
    assert None not in made and len(made) == 2


def test_a_load_that_fails_is_reported_and_raises_nothing() -> None:
    pool = device_pool()
    store, names = linker(pool), keys(4)
    stored(store, pool, names[:2], [0, 1])
    # Never looked up, and half of it is not there.
    assert store.load("a", transfer(names, [8, 9, 10, 11]))
    index = store.start_layer_wise_loading()
    store.layer_done_counter.set_consumer(index)
    store.layer_done_counter.wait_until(LAYERS - 1)
    assert store.finish_layer_wise_loading(index) is False
    # One bad load of a batch does not hurt the next batch.
    assert store.lookup("b", transfer(names[:2])) == [1, 2]
    assert store.load("b", transfer(names[:2], [8, 9]))
    assert store.finish_layer_wise_loading(store.start_layer_wise_loading())
    assert same(pool, 8, pool, 0) and same(pool, 9, pool, 1)
    assert store.failures.counts == {"load": 1}
    store.close()


def test_nothing_raises() -> None:
    pool = device_pool()
    store, names = linker(pool), keys(3)
    other = [PoolTransfer(name=PoolName.MAMBA, keys=names)]
    for bad in (None, [], other, transfer(names) + other, "x"):
        assert store.lookup("a", bad) == [], bad
        assert store.load("a", bad) is False and store.offload(bad) is False, bad
    for pages in ([1, 2], None):
        assert store.load("a", transfer(names, pages)) is False
        assert store.offload(transfer(names, pages)) is False
    assert store.offload(transfer(names, [1, 1, PAGES + 9])), "queued, then refused"
    assert offloaded(store) is False
    assert store.pop_completed_offload() is False and store.cancel_queued_load("a") is False
    assert store.finish_layer_wise_loading("no such batch") is True
    store.reset()
    store.close()
    store.close()
    assert store.lookup("a", transfer(names)) == []


def test_a_look_up_that_is_repeated_finds_what_came_since() -> None:
    pool = device_pool()
    store, names = linker(pool), keys(4)
    stored(store, pool, names[:2], [0, 1])
    assert store.lookup("a", transfer(names)) == [1, 2]
    stored(store, pool, names[2:], [2, 3])
    assert store.lookup("a", transfer(names)) == [1, 2, 3, 4]
    assert store._store.manager.open_tickets == (1, 0)
    store.close()


def test_queued_loads_are_taken_back_and_look_ups_end() -> None:
    pool = device_pool()
    store, names = linker(pool), keys(2)
    stored(store, pool, names, [0, 1])
    manager = store._store.manager
    for number in range(50):
        assert store.lookup(str(number), transfer(names)) == [1, 2]
        assert store.load(str(number), transfer(names, [4, 5]))
        assert store.cancel_queued_load(str(number))
    assert manager.open_tickets == (0, 0) and not store._looked_up and not store._queued
    assert store.lookup("a", transfer(names)) == [1, 2]
    store.reset()
    assert manager.open_tickets == (0, 0)
    store.close()


def test_sglangs_own_wrapper_drives_it() -> None:
    """The published wrapper's methods, over a cache that has nothing else."""
    pool = device_pool()
    store, names = linker(pool), keys(3)
    stored(store, pool, names, [0, 1, 2])
    wrapper: Any = SimpleNamespace(
        cache_linker=store,
        cache=SimpleNamespace(_all_reduce_attn_groups=lambda tensor, op: None),
        inflight_load_rids=["r"],
        private_load_indices={"r": None},
        inflight_load_index=-1,
        pending_offloads=[],
    )
    restorable = store.lookup("r", transfer(names))
    reduce = UnifiedCacheLinkerWrapper._sync_restorable_prefix
    assert reduce(wrapper, restorable, num_pages=3, device_hit_pages=0) == 3
    assert store.load("r", transfer(names, [10, 11, 12]))
    assert UnifiedCacheLinkerWrapper.start_layer_wise_loading(wrapper) == 0
    assert UnifiedCacheLinkerWrapper.finish_loads(wrapper) == []
    assert all(same(pool, 10 + at, pool, at) for at in range(3))
    # A request whose load fails is named.
    wrapper.inflight_load_rids = ["lost"]
    assert store.load("lost", transfer(keys(1, seed=700), [13]))
    UnifiedCacheLinkerWrapper.start_layer_wise_loading(wrapper)
    assert UnifiedCacheLinkerWrapper.finish_loads(wrapper) == ["lost"]
    store.close()


def test_what_cannot_work_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigInvalid, match="MAMBA beside full attention"):
        linker(device_pool(), components={ComponentType.FULL, ComponentType.MAMBA})
    with pytest.raises(KvbmError, match="'hots', which is no option"):
        linker(device_pool(), extra={"hots": 1})
    pool = device_pool()
    pool.kv_cache_layout = "hnd"
    with pytest.raises(ConfigInvalid, match="'hnd'"):
        linker(pool)


def test_the_doctor_finds_what_both_classes_use() -> None:
    findings = doctor.examine("sglang")["findings"]
    assert [(one["name"], one["status"]) for one in findings] == [
        ("SGLang KvbmHiCache", "ok"),
        ("SGLang KvbmLinker", "ok"),
    ]
