"""`KvbmHiCache` against the published package's own pools, factory and controller."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvbm_rs import ConfigInvalid, KvbmError
from kvbm_rs.engine_names import missing
from kvbm_rs.sglang import KvbmHiCache
from kvbm_rs.sglang import _sglang_compat as compat
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageExtraInfo, PoolName
from sglang.srt.runtime_context import get_context
from sglang_pools import (
    PAGE,
    PAGES,
    backend,
    fill,
    host_pool,
    indices,
    local_model,
    mla_host_pool,
    options,
    page_hashes,
    read,
)

LAYOUTS = ["layer_first", "page_first", "page_first_direct"]


def keys(count: int, seed: int = 0) -> list[str]:
    """Hashes of the pages of a prompt."""
    return page_hashes(list(range(seed, seed + count * PAGE)))


def test_the_installed_sglang_has_what_is_used() -> None:
    assert missing(compat.HICACHE) == []
    assert compat.sglang_version() in compat.CHECKED_VERSIONS
    assert missing([("sglang.srt.mem_cache.hicache_storage", "HiCacheStorage", ("gone",))]) == [
        "sglang.srt.mem_cache.hicache_storage.HiCacheStorage.gone"
    ]


@pytest.mark.parametrize("make", [host_pool, mla_host_pool])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_come_back_exactly(layout: str, make: Callable[[str], Any]) -> None:
    pool = make(layout)
    storage = backend(pool, options(), is_mla_model=make is mla_host_pool)
    names = keys(5)
    pages = {page: fill(pool, page, seed) for seed, page in enumerate([3, 1, 7, 0, 9])}
    before = {page: read(pool, page) for page in range(pool.page_num)}
    assert storage.batch_set_v1(names, indices(list(pages))) == [True] * 5
    assert storage.batch_get_v1(names, indices([20, 31, 22, 30, 24])) == [True] * 5
    for there, here in zip(pages, [20, 31, 22, 30, 24]):
        assert torch.equal(read(pool, here), pages[there])
        before.pop(here)
    for page, bytes_before in before.items():
        assert torch.equal(read(pool, page), bytes_before), "no other page is touched"
    storage.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_survive_a_restart_on_disk(layout: str, tmp_path: Path) -> None:
    pool, names = host_pool(layout), keys(8)
    storage = backend(pool, options(tmp_path))
    pages = [fill(pool, page, page) for page in range(8)]
    assert all(storage.batch_set_v1(names, indices(list(range(8)))))
    storage.close()
    assert (tmp_path / "tp0-pp0-cp0-dp0").is_dir()
    other = host_pool(layout)
    storage = backend(other, options(tmp_path))
    assert storage.batch_exists(names) == 8
    assert storage.batch_get_v1(names, indices(list(range(8, 16)))) == [True] * 8
    assert all(torch.equal(read(other, 8 + at), page) for at, page in enumerate(pages))
    storage.close()


_CHILD = """
import os, signal, sys, time
from pathlib import Path
from sglang_pools import backend, fill, host_pool, indices, options, page_hashes, PAGE
pool = host_pool("page_first")
storage = backend(pool, options(Path(sys.argv[1])))
for page in range(8):
    fill(pool, page, page)
assert all(storage.batch_set_v1(page_hashes(list(range(8 * PAGE))), indices(list(range(8)))))
assert storage._store.manager.wait_offloads(60)
assert storage._store.manager.flush(60) == 8
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_pages_survive_a_killed_process(tmp_path: Path) -> None:
    child = subprocess.run(
        [sys.executable, "-c", _CHILD, str(tmp_path)], cwd=Path(__file__).parent, timeout=300
    )
    assert child.returncode == -signal.SIGKILL
    pool, wanted, names = host_pool("page_first"), host_pool("page_first"), keys(8)
    storage = backend(pool, options(tmp_path))
    assert storage.batch_get_v1(names, indices(list(range(10, 18)))) == [True] * 8
    for page in range(8):
        assert torch.equal(read(pool, 10 + page), fill(wanted, page, page))
    storage.close()


def test_pages_come_back_from_a_volume_that_nobody_here_knows(tmp_path: Path) -> None:
    extra: dict[str, Any] = {"volume": f"dir://{tmp_path}", "volume_capacity": "1GiB"}
    pool, names = host_pool("layer_first"), keys(8)
    storage = backend(pool, options(**extra))
    pages = [fill(pool, page, page) for page in range(8)]
    assert all(storage.batch_set_v1(names, indices(list(range(8)))))
    deadline = time.monotonic() + 60
    while not all("g4" in tiers for tiers in places(storage, names)):
        assert time.monotonic() < deadline, places(storage, names)
        storage._store.manager.step()
        time.sleep(0.01)
    storage.close()
    other = host_pool("layer_first")
    storage = backend(other, options(**extra))
    assert storage.batch_exists(keys(9)) == 8
    assert storage.batch_get_v1(names, indices(list(range(10, 18)))) == [True] * 8
    assert all(torch.equal(read(other, 10 + at), page) for at, page in enumerate(pages))
    assert storage._store.manager.open_tickets == (0, 0)
    storage.close()


def places(storage: Any, names: list[str]) -> list[list[str]]:
    store = storage._store
    found: list[list[str]] = store.manager.places(store.sequence(names))
    return found


def test_any_part_of_a_prompt_is_a_key_of_its_own() -> None:
    pool, names = host_pool("page_first"), keys(8)
    storage = backend(pool, options())
    for page in range(8):
        fill(pool, page, page)
    # The middle first: SGLang stores the part that another request computed.
    assert all(storage.batch_set_v1(names[4:6], indices([4, 5])))
    assert (storage.batch_exists(names), storage.batch_exists(names[4:])) == (0, 2)
    assert all(storage.batch_set_v1(names[:3], indices([0, 1, 2])))
    assert (storage.batch_exists(names), storage.batch_exists(names[1:])) == (3, 2)
    assert storage.exists(names[5]) and not storage.exists(names[6])
    got = storage.batch_get_v1(names, indices(list(range(10, 18))))
    assert got == [True] * 3 + [False] * 5, "up to the first that is missing"
    assert storage.batch_exists([]) == 0 and storage.batch_get_v1([], indices([0])[:0]) == []
    storage.close()


def test_more_pages_than_host_memory_holds_go_to_the_disk(tmp_path: Path) -> None:
    pool, names = host_pool("layer_first"), keys(96)
    storage = backend(pool, options(tmp_path, host="8"))
    pages = []
    for first in range(0, 96, PAGES):
        pages += [fill(pool, page, first + page) for page in range(PAGES)]
        assert all(storage.batch_set_v1(names[first : first + PAGES], indices(list(range(PAGES)))))
    assert storage._store.manager.wait_offloads(20)
    assert storage.batch_exists(names) == 96
    for first in range(0, 96, PAGES):
        there = storage.batch_get_v1(names[first : first + PAGES], indices(list(range(PAGES))))
        assert all(there)
        assert all(torch.equal(read(pool, at), pages[first + at]) for at in range(PAGES))
    storage.close()


def test_damaged_pages_are_misses(tmp_path: Path) -> None:
    pool, names = host_pool("page_first"), keys(16)
    storage = backend(pool, options(tmp_path))
    pages = [fill(pool, page, page) for page in range(16)]
    assert all(storage.batch_set_v1(names, indices(list(range(16)))))
    storage.close()
    damaged = 0
    for file in tmp_path.rglob("*"):
        if file.is_file() and "slot" in file.name:
            data = bytearray(file.read_bytes())
            for page in pages[5:7]:
                at = data.find(page.view(torch.uint8).numpy().tobytes()[:64])
                if at >= 0:
                    data[at + 10] ^= 0x40
                    damaged += 1
            file.write_bytes(bytes(data))
    assert damaged == 2, [str(file) for file in tmp_path.rglob("*")]
    other = host_pool("page_first")
    storage = backend(other, options(tmp_path))
    got = storage.batch_get_v1(names, indices(list(range(16))))
    assert got == [True] * 5 + [False] * 11
    assert all(torch.equal(read(other, at), pages[at]) for at in range(5))
    assert storage.batch_exists(names) <= 6, "what was damaged is quarantined"
    assert all(storage.batch_get_v1(names[7:], indices(list(range(20, 29))))), "others are fine"
    storage.close()


def test_nothing_raises(caplog: pytest.LogCaptureFixture) -> None:
    pool = host_pool("page_first")
    storage = backend(pool, options())
    names = keys(3)
    bad: list[tuple[Any, Any]] = [
        (names, indices([0, 1])),
        (names, indices([0, 1, 2])[:-1]),
        (names, indices([0, 1, 2]) + 1),
        (names, indices([0, 1, PAGES + 5])),
        (names, indices([0, 1, 1])),
        ([1, 2, 3], indices([0, 1, 2])),
        (names, None),
        (names, "abc"),
    ]
    with caplog.at_level(logging.ERROR):
        for given, where in bad:
            assert storage.batch_set_v1(given, where) == [False] * 3, where
            assert storage.batch_get_v1(given, where) in ([False] * 3,), where
        assert storage.batch_get_v1(None, None) == [] and storage.batch_set_v1(None, None) == []
        assert storage.batch_exists(None) == 0 and storage.batch_exists([None]) == 0
        assert not storage.exists(3)
        assert storage.get("a") is None and storage.batch_get(["a"]) == [None]
        assert not storage.set("a") and not storage.batch_set(["a"], [None])
        storage.close()
        storage.close()
        assert storage.batch_set_v1(names, indices([0, 1, 2])) == [False] * 3
        assert storage.batch_get_v1(names, indices([0, 1, 2])) == [False] * 3
        assert storage.batch_exists(names) == 0 and storage.clear() is False
    errors = storage.failures.counts
    assert errors["batch_set_v1"] >= 9 and errors["batch_exists"] == 3
    assert storage.counters["errors"] == sum(errors.values())
    records = [record for record in caplog.records if record.name == "kvbm_rs.sglang"]
    # The start warns that the version of the weights is not known.
    lines = [record for record in records if record.levelname == "ERROR"]
    assert len(lines) == len(errors), "one line for each callback in ten seconds"


def test_the_controllers_own_code_stores_queries_and_fetches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The published controller's methods, over a controller that has nothing else."""
    # SGLang compiles its hash function at the first call, with libraries that are not here.
    monkeypatch.setattr(
        "sglang.srt.managers.cache_controller.get_storage_hash_str",
        lambda tokens, _last, page_size: page_hashes(tokens),
    )
    pool, names = host_pool("layer_first"), keys(6)
    storage = backend(pool, options())
    controller: Any = SimpleNamespace(
        storage_backend=storage,
        storage_host_pool=pool,
        mem_pool_host=pool,
        page_size=PAGE,
    )
    controller.page_set_func = HiCacheController._page_set_zero_copy.__get__(controller)
    pages = [fill(pool, page, page) for page in range(6)]
    backup = SimpleNamespace(
        hash_value=names, host_indices=indices(list(range(6))), prefix_keys=[], completed_tokens=0
    )
    HiCacheController._page_backup(controller, backup)
    assert backup.completed_tokens == 6 * PAGE
    fetch = SimpleNamespace(
        last_hash=None,
        token_ids=list(range(6 * PAGE)) + [7] * PAGE,
        prefix_keys=None,
        request_id="r",
    )
    found, tokens = HiCacheController._storage_hit_query(controller, fetch)
    assert (found, tokens) == (names, 6 * PAGE)
    where = indices(list(range(10, 16)))
    info = HiCacheStorageExtraInfo(prefix_keys=None)
    assert HiCacheController._page_get_zero_copy(controller, fetch, found, where, info) == 6
    assert all(torch.equal(read(pool, 10 + at), page) for at, page in enumerate(pages))
    missing_page = names[:2] + keys(1, seed=900)
    where = where[: 3 * PAGE]
    assert HiCacheController._page_get_zero_copy(controller, fetch, missing_page, where, info) == 2
    storage.close()


def test_pages_may_be_reused_as_soon_as_a_call_is_over(tmp_path: Path) -> None:
    """SGLang says nothing when it overwrites a page, so no copy may read it by then."""
    pool, storage_names = host_pool("page_first"), keys(200)
    storage = backend(pool, options(tmp_path, host="32"))
    wanted = {}
    for turn in range(50):
        part = storage_names[turn * 4 : turn * 4 + 4]
        for at, name in enumerate(part):
            wanted[name] = fill(pool, at, turn * 4 + at)
        stored = storage.batch_set_v1(part, indices([0, 1, 2, 3]))
        # A page that comes from the disk is copied to host memory out of this pool, too.
        early = storage_names[:3]
        assert len(storage.batch_get_v1(early, indices([4, 5, 6]))) == 3
        for page in range(7):
            pool.set_from_flat_data_page(page * PAGE, torch.full_like(wanted[part[0]], -1.0))
        assert len(stored) == 4
    hits = 0
    for name, page in wanted.items():
        if storage.batch_get_v1([name], indices([12])) == [True]:
            hits += 1
            assert torch.equal(read(pool, 12), page)
    assert hits >= 32
    storage.close()


def test_threads_share_a_store_and_memory_is_bounded(tmp_path: Path) -> None:
    pool = host_pool("layer_first")
    storage = backend(pool, options(tmp_path, host="16"))
    failures: list[str] = []
    # The first pages of all threads fit into host memory; later ones push each other out.
    first_turn = threading.Barrier(4, timeout=120)

    def work(number: int) -> None:
        for turn in range(60):
            name = [f"{number}-{turn % 7}-{part}" for part in range(2)]
            pages = [number * 4, number * 4 + 1]
            wrote = [fill(pool, page, number * 1000 + turn % 7 * 10 + page) for page in pages]
            stored = storage.batch_set_v1(name, indices(pages))
            targets = [number * 4 + 2, number * 4 + 3]
            got = storage.batch_get_v1(name, indices(targets))
            for at, arrived in enumerate(got):
                if arrived and not torch.equal(read(pool, targets[at]), wrote[at]):
                    failures.append(f"{number} {turn} {at}")
            if turn == 0:
                if stored == [True, True] and not any(got):
                    failures.append(f"{number}: nothing came back")
                first_turn.wait()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert failures == [] and storage.failures.counts == {}
    manager = storage._store.manager
    assert manager.open_tickets == (0, 0)
    assert not manager._awaited and not manager._ended and not manager._others
    assert manager.status()["tiers"]["g2"]["capacity"] == 16
    storage.close()


def test_ranks_and_models_share_no_pages(tmp_path: Path) -> None:
    names = keys(2)
    pools = [host_pool("page_first") for _ in range(2)]
    ranks = [
        backend(pool, options(tmp_path), tp_rank=rank, tp_size=2) for rank, pool in enumerate(pools)
    ]
    fill(pools[0], 0, 1)
    assert ranks[0].batch_set_v1(names[:1], indices([0])) == [True]
    assert (ranks[0].batch_exists(names), ranks[1].batch_exists(names)) == (1, 0)
    for rank in ranks:
        rank.close()
    others: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"tp_size": 4}, {}),
        ({"tp_size": 2, "model_name": "other"}, {}),
        ({"tp_size": 2}, {"weights": "2"}),
    ]
    for changes, extra in others:
        other = backend(host_pool("page_first"), options(tmp_path, **extra), **changes)
        assert other.batch_exists(names) == 0, (changes, extra)
        other.close()
    other = backend(host_pool("layer_first"), options(tmp_path), tp_size=2)
    assert other.batch_exists(names) == 0, "pages of another layout"
    other.close()


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What kvbm's side of SGLang warned of."""
    records = [record for record in caplog.records if record.name == "kvbm_rs.sglang"]
    return [record.getMessage() for record in records if record.levelno >= logging.WARNING]


def test_the_settings_of_the_process_keep_pages_apart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang hands a backend none of its settings: they are those of its process."""
    model, names = local_model(tmp_path / "model"), keys(1)

    def finds(stores: bool = False, **changes: Any) -> bool:
        with get_context().override_server_args(model_path=model, **changes):
            pool = host_pool("page_first")
            # The name under which models are served says nothing about them.
            storage = backend(pool, options(tmp_path / "disk"), model_name="served")
        found = bool(storage.batch_exists(names) == 1)
        if stores:
            fill(pool, 0, 1)
            assert storage.batch_set_v1(names, indices([0])) == [True]
        storage.close()
        return found

    with caplog.at_level(logging.WARNING, logger="kvbm_rs.sglang"):
        assert not finds(stores=True, quantization="fp8")
        assert finds(quantization="fp8")
        assert not finds() and not finds(quantization="awq")
        assert not finds(quantization="fp8", kv_cache_dtype="fp8_e4m3")
        assert not finds(quantization="fp8", json_model_override_args='{"rope_theta": 5.0}')
        assert not warned(caplog), "SGLang says all that counts"
        backend(host_pool("page_first"), options()).close()
    unknown = "it is not known what SGLang was started with: quantization, dtype"
    assert sum(unknown in text for text in warned(caplog)) == 1


def test_clear_removes_all() -> None:
    pool, names = host_pool("page_first"), keys(3)
    storage = backend(pool, options())
    assert all(storage.batch_set_v1(names, indices([0, 1, 2])))
    assert storage.clear() is True and storage.batch_exists(names) == 0
    storage.close()


def test_calls_are_recorded_for_each_rank(tmp_path: Path) -> None:
    pool, names = host_pool("page_first"), keys(2)
    storage = backend(pool, options(record=str(tmp_path / "calls")))
    assert all(storage.batch_set_v1(names, indices([0, 1])))
    assert all(storage.batch_get_v1(names, indices([2, 3])))
    storage.close()
    (path,) = tmp_path.iterdir()
    assert path.name == "calls.tp0-pp0-cp0-dp0"
    calls = [json.loads(line).get("call") for line in path.read_text().splitlines()]
    assert {"offload", "look_up", "commit", "finished", "close"} <= set(calls)


@pytest.mark.parametrize(
    ("extra", "changes", "text"),
    [
        ({"interface_v1": 0}, {}, "interface_v1"),
        ({"hots": 1}, {}, "'hots', which is no option"),
        ({"host": None}, {}, "host"),
        ({"log_level": "LOUD"}, {}, "log_level"),
        ({}, {"is_mla_model": True, "tp_size": 2}, "MLA model on 2 tensor parallel ranks"),
        ({}, {"should_split_heads": True}, "tp_lcm_size"),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(
    extra: dict[str, Any], changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(KvbmError, match=text):
        backend(host_pool("page_first"), options(**extra), **changes)


def test_pools_that_cannot_work_are_refused() -> None:
    pool = host_pool("page_first")
    storage = backend(pool, options())
    storage.register_mem_host_pool_v2(pool, PoolName.KV)
    with pytest.raises(ConfigInvalid, match="mamba"):
        storage.register_mem_host_pool_v2(pool, PoolName.MAMBA)
    storage.close()
    pool.layout = "page_head"
    with pytest.raises(ConfigInvalid, match="'page_head': KvbmHiCache supports layer_first"):
        backend(pool, options())


def test_it_is_sglangs_own_class() -> None:
    assert issubclass(KvbmHiCache, HiCacheStorage) and not KvbmHiCache.__abstractmethods__
