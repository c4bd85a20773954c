"""Recordings: what is in them, who may read them, and what an error in them does."""

from __future__ import annotations

import json
import logging
import stat
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import NUM_BLOCKS, PAGE_SIZE, FakeEngine
from kvbm_rs import (
    Config,
    ConfigInvalid,
    InvalidArgument,
    KvBlockManager,
    KvbmError,
    Namespace,
    TokenSequence,
    layout_of,
)
from kvbm_rs import recording as recordings
from kvbm_rs.recording import RECORD_LIMIT, build_manager

#: Numbers that are nowhere by chance.
PROMPT = list(range(770_001, 770_018))
SECRET = "request-of-somebody"


def recorded(engine: FakeEngine, path: Path | str, limit: int = RECORD_LIMIT) -> KvBlockManager:
    config = Config()
    config.set("host.capacity", "64")
    config.set("host.pinned", "false")
    config.set("policy.admission", "all")
    return build_manager(
        config,
        layout_of(engine.tensors, page_size=PAGE_SIZE),
        Namespace("test", page_size=PAGE_SIZE),
        record=str(path),
        record_limit=limit,
    )


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_call_has_a_line_without_tokens_and_names(engine: FakeEngine, tmp_path: Path) -> None:
    path = tmp_path / "run.kvbmrec"
    with recorded(engine, path) as manager:
        sequence = TokenSequence(manager.namespace, PROMPT)
        assert manager.offload([1, 2, 3, 4], sequence).started == 4
        assert manager.wait_offloads(10)
        found = manager.look_up(SECRET, sequence, 1)
        assert found is not None and found.blocks == 3
        load = manager.load(SECRET, [11, 12, 13])
        assert load.wait(10).arrived == 3
        assert manager.released([1]) == [] and manager.before_reuse([2], 1.0) == []
        assert not manager.abandon(SECRET)
        with pytest.raises(KvbmError):
            manager.commit(SECRET, [1])
        manager.step()
        hashes = sequence.hashes
        capacity = manager.capacity
    header, *calls = lines(path)
    assert header["format"] == "kvbm-recording" and header["version"] == 1
    assert (header["blocks"], header["page_size"], header["capacity"]) == (
        NUM_BLOCKS,
        PAGE_SIZE,
        capacity,
    )
    assert [call["n"] for call in calls] == list(range(len(calls)))
    assert [call["call"] for call in calls] == [
        "offload",
        "wait_offloads",
        "look_up",
        "commit",
        "finished",
        "released",
        "before_reuse",
        "abandon",
        "commit",
        "step",
        "close",
    ]
    offload, _, look_up, commit, finished, *_ = calls
    assert offload["new"] == [hash.hex() for hash in hashes]
    assert (offload["chain"], offload["ids"], offload["started"]) == ([[0, 4]], [1, 2, 3, 4], 4)
    assert (look_up["request"], look_up["first"], look_up["blocks"]) == (0, 1, 3)
    assert look_up["by_tier"] == [0, 3, 0, 0] and "new" not in look_up
    assert (commit["request"], commit["ids"]) == (0, [11, 12, 13])
    assert (finished["arrived"], finished["wanted"], finished["failures"]) == (3, 3, 0)
    assert calls[8]["error"] and calls[-1]["complete"] is True
    text = path.read_text()
    assert SECRET not in text and not any(str(token) in text for token in PROMPT)


def test_audits_and_hints_have_lines(engine: FakeEngine, tmp_path: Path) -> None:
    path = tmp_path / "run.kvbmrec"
    with recorded(engine, path) as manager:
        sequence = TokenSequence(manager.namespace, PROMPT)
        assert manager.offload([1, 2, 3, 4], sequence).started == 4
        assert manager.wait_offloads(10)
        assert manager.prefetch(sequence) == manager.session_resumes(sequence) == 0
        assert manager.prefilled(640, 0.5) and not manager.prefilled(1, 0.5)
        assert manager.look_up(SECRET, sequence) is not None
        manager.audit(SECRET, [1, 2, 3, 4])
        until = time.monotonic() + 10
        while manager.finished() == [] and time.monotonic() < until:
            time.sleep(0.001)
    calls = {call["call"]: call for call in lines(path)[1:]}
    assert calls["prefetch"]["chain"] == calls["session_resumes"]["chain"] == [[0, 4]]
    assert calls["prefetch"]["blocks"] == 0
    assert (calls["prefilled"]["tokens"], calls["prefilled"]["elapsed_us"]) == (1, 500_000)
    assert (calls["audit"]["request"], calls["audit"]["ids"]) == (0, [1, 2, 3, 4])
    assert (calls["finished"]["request"], calls["finished"]["arrived"]) == (0, 4)
    assert SECRET not in path.read_text()


def test_only_the_owner_may_read_it_and_a_restart_takes_the_next_name(
    engine: FakeEngine, tmp_path: Path
) -> None:
    path = tmp_path / "run.kvbmrec"
    for name in ("run.kvbmrec", "run.kvbmrec.1"):
        with recorded(engine, path):
            pass
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    assert lines(path)[0] == lines(tmp_path / "run.kvbmrec.1")[0]


def test_it_ends_at_its_limit_and_says_so_once(
    engine: FakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run.kvbmrec"
    with caplog.at_level(logging.WARNING), recorded(engine, path, 4096) as manager:
        for number in range(1, 200):
            assert manager.step() == number
    assert path.stat().st_size <= 4096
    assert lines(path)[-1]["call"] == "stopped" and "record_limit" in lines(path)[-1]["why"]
    assert [
        record.getMessage() for record in caplog.records if "recording" in record.getMessage()
    ] == [
        f"kvbm: the recording {path} ends after {len(lines(path)) - 2} calls: record_limit is reached"
    ]


def test_an_error_while_writing_ends_it_and_reaches_nobody(
    engine: FakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = recorded(engine, tmp_path / "run")
    recording: Any = manager._recording  # type: ignore[attr-defined]
    full = open("/dev/full", "wb", buffering=64)
    recording._file.close()
    recording._file = full
    with caplog.at_level(logging.ERROR):
        for number in range(1, 20):
            assert manager.step() == number
        sequence = TokenSequence(manager.namespace, PROMPT)
        assert manager.offload([1, 2, 3, 4], sequence).started == 4
        manager.close()
    assert recording.is_over
    assert len([record for record in caplog.records if "No space left" in record.getMessage()]) == 1


def test_lines_are_in_the_file_within_a_second_or_so(engine: FakeEngine, tmp_path: Path) -> None:
    path = tmp_path / "run"
    with recorded(engine, path) as manager:
        manager.step()
        until = time.monotonic() + 10
        while len(path.read_bytes().splitlines()) < 2:
            assert time.monotonic() < until
            time.sleep(0.05)


def test_too_many_blocks_end_it(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recordings, "_MOST_BLOCKS", 3)
    path = tmp_path / "run"
    with recorded(engine, path) as manager:
        manager.look_up("a", TokenSequence(manager.namespace, PROMPT[:8]))
        manager.look_up("b", TokenSequence(manager.namespace, PROMPT))
    assert [line.get("call") for line in lines(path)] == [None, "look_up", "stopped"]


def test_wrong_options_name_the_value(engine: FakeEngine, tmp_path: Path) -> None:
    for limit in (0, 100, True):
        with pytest.raises(ConfigInvalid, match=f"record_limit.*{limit!r}"):
            recorded(engine, tmp_path / "run", limit)
    missing = tmp_path / "missing" / "run"
    with pytest.raises(ConfigInvalid, match="record.*missing"):
        recorded(engine, missing)
    with pytest.raises(ConfigInvalid, match="give the path"):
        recorded(engine, "")
    with recorded(engine, tmp_path / "run") as manager, pytest.raises((InvalidArgument, TypeError)):
        manager.released(["x"])
