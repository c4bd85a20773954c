"""What goes wrong inside the connector's callbacks: each request still hears of its load's end.

vLLM's own failures and those of the disk are in `cargo xtask engine-test --only failures`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_stand_in import BLOCKS, PROMPT, Engine, Request, stand_in


@pytest.fixture(scope="module")
def vllm() -> Iterator[Any]:
    vllm = stand_in()
    missing, vllm.compat.missing = vllm.compat.missing, lambda used=None: []
    yield vllm
    vllm.compat.missing = missing


@pytest.fixture(params=["uni", "mp"])
def engine(vllm: Any, request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = Engine(vllm, executor=request.param, ranks=1 if request.param == "uni" else 2)
    yield engine
    engine.close()


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("broken")


def test_a_load_whose_blocks_are_not_known_fails_and_ends(engine: Engine) -> None:
    """The request waits: without the end of a load it would wait for ever."""
    engine.compute(Request("a", PROMPT), [1, 2, 3, 4, 5])
    again = Request("b", PROMPT)
    assert engine.match(again) == (16, True)
    engine.scheduler.update_state_after_alloc(again, SimpleNamespace(get_block_ids=broken), 16)
    assert engine.until_received("b") == set()
    assert engine.failed == {"b"}, "vLLM computes all of it"
    assert engine.manager.open_tickets == (0, 0)
    assert engine.match(again) == (0, False), "it is not promised again"
    assert engine.match(Request("c", PROMPT)) == (16, True), "the next request has its hit"


def test_a_synchronous_load_whose_blocks_are_not_known_spoils_the_step(vllm: Any) -> None:
    """Its request runs in the step, over blocks that hold anything."""
    engine = Engine(vllm, extra={"load": "sync"})
    engine.compute(Request("a", PROMPT), [1, 2, 3, 4, 5])
    again, ids = Request("b", PROMPT), [11, 12, 13, 14, 15]
    assert engine.match(again) == (16, False)
    engine.scheduler.update_state_after_alloc(again, SimpleNamespace(get_block_ids=broken), 16)
    again.num_computed_tokens = 16
    _, bad = engine.step({"b": (again, ids, 1)})
    assert bad >= set(ids[:4]) and len(bad) == BLOCKS
    assert engine.failed == set() and engine.manager.open_tickets == (0, 0)
    engine.close()


def two_matches(engine: Engine) -> tuple[Request, Request]:
    """Two requests, each of which is promised the blocks of an earlier one."""
    other = list(range(40, 57))
    engine.compute(Request("a", PROMPT), [1, 2, 3, 4, 5])
    engine.compute(Request("x", other), [6, 7, 8, 9, 10])
    first, second = Request("b", PROMPT), Request("y", other)
    assert engine.match(first) == (16, True) and engine.match(second) == (16, True)
    return first, second


def test_one_load_that_fails_hides_no_other(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = two_matches(engine)
    engine.scheduler.update_state_after_alloc(first, SimpleNamespace(get_block_ids=broken), 16)
    engine.allocated(second, [21, 22, 23, 24, 25], 16)
    monkeypatch.setattr(type(engine.manager), "abandon", broken)
    received: set[str] = set()
    for _ in range(200):
        more, bad = engine.step()
        assert bad == set()
        received |= more
        if received == {"b", "y"}:
            break
    assert received == {"b", "y"} and engine.failed == {"b"}
    assert engine.holds(second, [21, 22, 23, 24, 25], 0, 16)


def test_loads_of_a_step_wait_together_for_their_blocks(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each wait has a deadline of a second, and the engine's thread waits."""
    first, second = two_matches(engine)
    engine.allocated(first, [11, 12, 13, 14, 15], 16)
    engine.allocated(second, [21, 22, 23, 24, 25], 16)
    waits: list[list[int]] = []
    wait = type(engine.manager).before_reuse

    def noted(manager: Any, ids: list[int], timeout: float) -> Any:
        waits.append(list(ids))
        return wait(manager, ids, timeout)

    monkeypatch.setattr(type(engine.manager), "before_reuse", noted)
    engine.step()
    assert waits == [[11, 12, 13, 14, 21, 22, 23, 24]]
    engine.step()
    assert len(waits) == 1, "a step without loads does not wait"


@pytest.mark.parametrize("executor", ["uni", "mp"])
def test_a_root_that_is_not_what_is_documented(
    vllm: Any,
    tmp_path: Path,
    executor: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its hashes mean nothing to the next process; kvbm hashes tokens, and finds them again."""
    monkeypatch.setattr(Request, "block_hashes", property(_rooted_hashes))
    disk = {"disk": str(tmp_path), "disk_capacity": "64", "disk.drive_writes_per_day": 0}
    utils = sys.modules["vllm.v1.core.kv_cache_utils"]
    with caplog.at_level(logging.WARNING, logger="vllm.kvbm_rs.vllm"):
        for turn, expected in enumerate([0, 16]):
            # As vLLM does: the root comes after the connectors.
            monkeypatch.delattr(utils, "NONE_HASH", raising=False)
            name = {"engine_id": f"root-{executor}-{turn}"}
            engine = Engine(vllm, extra=disk, transfer=name, executor=executor)
            monkeypatch.setattr(utils, "NONE_HASH", os.urandom(32), raising=False)
            assert not engine.scheduler._process.own_hashes
            request = Request("a", PROMPT)
            assert engine.match(request)[0] == expected
            assert engine.scheduler._process.own_hashes
            if not expected:
                engine.compute(Request("b", PROMPT), [1, 2, 3, 4, 5])
                assert engine.manager.flush(10)
            engine.close()
    told = [record for record in caplog.records if "another root" in record.getMessage()]
    assert len(told) == 2, "once in each process"


def _rooted_hashes(request: Request) -> list[bytes]:
    root = sys.modules["vllm.v1.core.kv_cache_utils"].NONE_HASH
    return [
        root + repr(request.all_token_ids[: end * 4]).encode()
        for end in range(1, request.num_tokens // 4 + 1)
    ]


def test_a_root_that_cannot_be_read(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules["vllm.v1.core.kv_cache_utils"], "NONE_HASH")
    engine = Engine(vllm)
    engine.compute(Request("a", PROMPT), [1, 2, 3, 4, 5])
    assert engine.scheduler._process.own_hashes
    assert engine.match(Request("b", PROMPT)) == (16, True)
    assert engine.totals["errors"] == 0
    engine.close()
