"""What all connectors share: counts, errors, settings, names of an engine, pages under keys."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from conftest import PAGE_SIZE, FakeEngine
from kvbm_rs import Config, ConfigInvalid, KvbmError, Namespace, counts, failures, layout_of
from kvbm_rs.engine_names import missing
from kvbm_rs.page_store import PageStore
from kvbm_rs.settings import read_settings

LOG = logging.getLogger("test")


def test_errors_are_counted_and_logged_at_a_limited_rate(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = failures.Failures(LOG)
    with caplog.at_level(logging.ERROR):
        for _ in range(100):
            seen.add("load", KvbmError("no"))
        seen.add("save", ValueError("why"))
        assert seen.counts == {"load": 100, "save": 1} and len(caplog.records) == 2
        assert "Traceback" not in caplog.text, "an error of kvbm says it all"
        monkeypatch.setattr(failures, "_INTERVAL", 0.0)
        seen.add("load", KvbmError("no"))
    assert "load: KvbmError: no (101 errors here so far)" in caplog.records[-1].getMessage()


def test_counts_are_logged_once_in_an_interval(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = counts.Counts(LOG)
    with caplog.at_level(logging.INFO):
        seen.add(loaded=3, missed=0)
        assert not caplog.records and seen.read() == {"loaded": 3, "missed": 0}
        monkeypatch.setattr(counts, "_INTERVAL", 0.0)
        seen.add(loaded=1)
    assert caplog.records[0].getMessage() == "kvbm: loaded 4, missed 0"


def test_settings_and_options(tmp_path: Path) -> None:
    extra = {"host": "1GiB", "disk": "/cache", "disk_capacity": "2GiB", "host.pinned": False}
    config, own = read_settings({**extra, "mine": 3}, where="X", own=("mine",), folder="tp1")
    text = config.to_toml()
    assert own == {"mine": 3}
    for line in ('dir = "/cache/tp1"', "write_through = true", "pinned = false"):
        assert line in text, line
    file = tmp_path / "kvbm.toml"
    file.write_text('[host]\ncapacity = "3GiB"\n')
    config, _ = read_settings({"config": str(file)}, where="X", own=(), folder="tp1")
    assert 'capacity = "3GiB"' in config.to_toml()


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({}, "X: option 'host' is missing"),
        ({"host": "1GiB", "disk": "/c"}, "'disk' without 'disk_capacity'"),
        ({"host": "1GiB", "hots": 1}, "X has 'hots', which is no option: known are config, disk"),
        ({"host": "1GiB", "host.capcity": 1}, "nearest"),
    ],
)
def test_options_that_make_no_sense(extra: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigInvalid, match=text):
        read_settings(extra, where="X", own=(), folder="tp0")


def test_what_a_module_lacks_is_named() -> None:
    used = [
        ("json", None, ("loads", "gone")),
        ("json", "JSONDecoder", ("decode",)),
        ("json", "Gone", ("decode",)),
        ("no_such_engine", None, ()),
    ]
    assert missing(used) == ["json.gone", "json.Gone", "no_such_engine"]


def store(engine: FakeEngine) -> PageStore:
    config = Config()
    for key, value in {"host.capacity": "64", "host.pinned": "false"}.items():
        config.set(key, value)
    config.set("policy.admission", "all")
    layout = layout_of(engine.tensors, page_size=PAGE_SIZE)
    return PageStore(config, layout, Namespace("m", page_size=PAGE_SIZE, flat=True))


def test_pages_under_keys(engine: FakeEngine) -> None:
    pages = store(engine)
    assert pages.manager.namespace.flat and not Namespace("m").flat
    for page in range(4):
        engine.compute(page, page)
    assert pages.put(["a", "b", "c"], [0, 1, 2]) == [True] * 3
    assert (pages.count(["a", "b", "c"]), pages.count(["c", "x", "a"])) == (3, 1)
    assert pages.get(["c", "a", "x", "b"], [10, 11, 12, 13]) == [True, True, False, False]
    assert engine.holds(10, 2) and engine.holds(11, 0) and engine.holds(12, 0) is False
    for keys, ids in [(["a"], [0, 1]), (["a", "b"], [0, 0]), (["a"], [99])]:
        with pytest.raises(KvbmError):
            pages.get(keys, ids)
    with pytest.raises(KvbmError):
        pages.put(["y"], [99])
    assert pages.clear() == 3 and pages.count(["a"]) == 0
    assert pages.manager.open_tickets == (0, 0)
    assert pages.close() is None


def test_no_copy_touches_a_page_when_a_call_is_over(tmp_path: Path) -> None:
    """Also not the copy to host memory of what came from disk."""
    pool = np.zeros((16, 1 << 20), dtype=np.float32)
    config = Config()
    for key, value in {
        "host.capacity": "64",
        "host.pinned": "false",
        "policy.admission": "all",
        "disk.dir": str(tmp_path),
        "disk.capacity": "16",
        "disk.drive_writes_per_day": "0",
        "offload.g2_g3.write_through": "true",
    }.items():
        config.set(key, value)
    layout = layout_of([pool], page_size=PAGE_SIZE)
    pages = PageStore(config, layout, Namespace("m", page_size=PAGE_SIZE, flat=True))
    keys = [str(key) for key in range(8)]
    for page in range(8):
        pool[page] = page
    assert all(pages.put(keys, range(8))) and pages.manager.busy(range(8)) == []
    assert pages.manager.wait_offloads(30) and pages.manager.clear("g2") == 8
    assert all(pages.get(keys, range(8, 16)))
    assert pages.manager.busy(range(8, 16)) == []
    pool[8:] = -1
    assert pages.manager.wait_offloads(30)
    pages.manager.clear("g3")
    assert all(pages.get(keys, range(8, 16))), "from host memory"
    assert [int(pool[page, 5]) for page in range(8, 16)] == list(range(8))
    assert pages.close() is None
