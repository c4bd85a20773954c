"""The connector for TensorRT-LLM, called in the engine's order over a stand-in for its classes."""

from __future__ import annotations

import functools
import json
import logging
import os
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvbm_rs import ConfigInvalid, KvbmError
from trtllm_stand_in import (
    BLOCKS,
    MODULE,
    PROMPT,
    SIZE,
    Engine,
    KvCacheConnectorWorker,
    Request,
    RequestData,
    SchedulerOutput,
    arguments,
)
from trtllm_stand_in import engine as engine
from trtllm_stand_in import settings as settings
from trtllm_stand_in import trtllm as trtllm


def test_a_prompt_that_comes_again_is_loaded(engine: Engine) -> None:
    first, second = [3, 1, 7, 5, 2], [10, 11, 12, 13, 14]
    assert engine.run(Request(1, PROMPT), first) == 0
    engine.finish(Request(1, PROMPT), first)
    engine.settle()
    assert engine.run(Request(2, PROMPT), second) == 16
    assert (engine.memory[second[:4]] == engine.memory[first[:4]]).all()
    # Two of its blocks are TensorRT-LLM's own: the others are loaded behind them.
    third = [*first[:2], 20, 21, 22]
    assert engine.run(Request(3, PROMPT), third, computed=8) == 8
    assert (engine.memory[[20, 21]] == engine.memory[first[2:4]]).all()
    counters = engine.scheduler._process.counters
    assert (counters["promised_blocks"], counters["loaded_blocks"], counters["errors"]) == (6, 6, 0)


def test_the_last_token_is_always_computed(engine: Engine) -> None:
    engine.run(Request(1, PROMPT[:16]), [0, 1, 2, 3])
    engine.settle()
    assert engine.run(Request(2, PROMPT[:16]), [4, 5, 6, 7]) == 12
    assert engine.run(Request(3, PROMPT), [8, 9, 10, 11, 12], computed=5) == 0, "a part of a block"


def test_chunks_and_generated_tokens_are_saved(engine: Engine) -> None:
    request, blocks = Request(1, list(PROMPT)), [0, 1, 2, 3, 4]
    engine.run(request, blocks, chunk=5)
    for token in range(6):
        request.tokens.append(token)
        new = [5] if len(request.tokens) == 21 else []
        blocks += new
        data = RequestData(1, [token], new, len(request.tokens) - 1, 1)
        at = len(request.tokens) - 1
        engine.step(
            SchedulerOutput([], [data]), functools.partial(engine.compute, request, blocks, at, 1)
        )
    engine.finish(request, blocks)
    engine.settle()
    turn = Request(2, [*request.tokens, 1, 2, 3])
    assert engine.run(turn, [10, 11, 12, 13, 14, 15, 16]) == 24
    assert (engine.memory[10:16] == engine.memory[:6]).all()


def test_blocks_that_are_given_away_are_never_stored_with_other_bytes(engine: Engine) -> None:
    for turn in range(40):
        prompt = [turn * 100 + at for at in range(18)]
        # Some are given away while they are copied, some are not.
        if turn % 8 == 0:
            engine.settle()
        engine.run(Request(turn, prompt), [0, 1, 2, 3, 4])
        engine.finish(Request(turn, prompt), [0, 1, 2, 3, 4])
        if turn % 8 == 7:
            engine.settle()
    engine.settle()
    hits = 0
    for turn in range(40):
        request = Request(1000 + turn, [turn * 100 + at for at in range(18)])
        blocks = [10, 11, 12, 13, 14]
        engine.memory[10:15] = -1
        matched = engine.run(request, blocks)
        hits += matched
        loaded = engine.memory[10 : 10 + matched // SIZE].copy()
        engine.compute(request, blocks, 0, 18)
        assert (loaded == engine.memory[10 : 10 + matched // SIZE]).all()
    assert hits >= 5 * 16, "those whose copies were over"


def test_what_is_on_disk_is_staged_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "DISK_DIR": str(tmp_path),
        "DISK_CAPACITY": "128",
        "DISK_DRIVE_WRITES_PER_DAY": "0",
    }.items():
        monkeypatch.setenv(f"KVBM_{name}", value)
    from kvbm_rs.trtllm import connector

    monkeypatch.setattr(connector, "STAGE_WAIT", 10.0)
    engine = Engine()
    engine.run(Request(1, PROMPT), [0, 1, 2, 3, 4])
    engine.settle()
    engine.worker.shutdown()
    other = Engine()
    assert other.run(Request(1, PROMPT), [5, 6, 7, 8, 9]) == 16
    assert (other.memory[5:9] == engine.memory[:4]).all()
    other.worker.shutdown()


def test_calls_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`KVBM_RECORD=FILE` here writes crates/kvbm/tests/data/recordings/trtllm-contract.kvbmrec."""
    path = Path(os.environ.get("KVBM_RECORD", tmp_path / "run.kvbmrec"))
    for name, value in {
        "RECORD": str(path),
        "HOST_CAPACITY": "40",
        "DISK_DIR": str(tmp_path / "disk"),
        "DISK_CAPACITY": "512",
        "DISK_DRIVE_WRITES_PER_DAY": "0",
    }.items():
        monkeypatch.setenv(f"KVBM_{name}", value)
    engine = Engine()
    for turn in range(24):
        # Four conversations that grow, in one place each.
        prompt = [turn % 4 * 1000 + at for at in range(14 + turn // 4)]
        blocks = [turn % 4 * 5 + at for at in range(5)]
        request = Request(turn, prompt)
        engine.run(request, blocks, chunk=6)
        engine.finish(request, blocks)
        engine.settle()
    assert engine.scheduler._process.counters["loaded_blocks"] >= 20 * 3
    engine.worker.shutdown()
    header, *calls = [json.loads(line) for line in path.read_text().splitlines()]
    assert header["blocks"] == BLOCKS and calls[-1]["call"] == "close"
    names = {call["call"] for call in calls}
    assert {"stage", "commit", "finished", "before_reuse", "offload", "step"} <= names


def test_a_recording_without_a_place_or_a_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvbm_rs.trtllm import KvbmScheduler

    monkeypatch.setenv("KVBM_RECORD_LIMIT", "much")
    with pytest.raises(ConfigInvalid, match="KVBM_RECORD_LIMIT is 'much'"):
        KvbmScheduler(arguments())
    monkeypatch.setenv("KVBM_RECORD_LIMIT", "100")
    monkeypatch.setenv("KVBM_RECORD", str(tmp_path / "run"))
    with pytest.raises(ConfigInvalid, match="record_limit.*100"):
        Engine()
    monkeypatch.setenv("KVBM_RECORD_LIMIT", "65536")
    monkeypatch.setenv("KVBM_RECORD", str(tmp_path / "missing" / "run"))
    with pytest.raises(ConfigInvalid, match="missing"):
        Engine()


@pytest.mark.parametrize(
    "more",
    [
        {"lora_task_id": 3},
        {"multimodal_hashes": [[1]]},
        {"cache_salt": "a tenant"},
        {"cache_salt_id": 1},
        {"sampling_config": SimpleNamespace(beam_width=2)},
    ],
)
def test_requests_of_more_than_tokens_share_nothing(engine: Engine, more: dict[str, Any]) -> None:
    engine.run(Request(1, PROMPT, **more), [0, 1, 2, 3, 4])
    engine.settle()
    assert engine.run(Request(2, PROMPT), [5, 6, 7, 8, 9]) == 0, "it was not saved"
    engine.settle()
    assert engine.run(Request(3, PROMPT, **more), [10, 11, 12, 13, 14]) == 0, "nor loaded"


def test_errors_cost_a_hit_and_a_broken_promise_stops_the_engine(engine: Engine) -> None:
    engine.run(Request(1, PROMPT), [0, 1, 2, 3, 4])
    engine.settle()
    bad: Any = SimpleNamespace(request_id=5)
    assert engine.scheduler.get_num_new_matched_tokens(bad, 0) == (0, False)
    assert engine.scheduler.get_num_new_matched_tokens(None, 0) == (0, False)
    assert engine.scheduler.request_finished(None, []) is False
    # What the step overwrites is not known: no copy of any block may go on.
    engine.step(SchedulerOutput([bad], []))
    request = Request(2, PROMPT)
    assert engine.scheduler.get_num_new_matched_tokens(request, 0) == (16, False)
    with pytest.raises(KvbmError, match="promised 4 blocks and has 3 for them"):
        engine.scheduler.update_state_after_alloc(request, [5, 6, 7])
    # The memory of a promised block is not there: the load cannot be carried out.
    engine.scheduler.update_state_after_alloc(request, [5, 6, 7, BLOCKS + 1])
    with pytest.raises(KvbmError):
        engine.step(SchedulerOutput([RequestData(2, PROMPT, [5, 6, 7, 8], 0, 2)], []))
    errors = engine.scheduler._process.failures.counts
    assert errors == {
        "get_num_new_matched_tokens": 2,
        "request_finished": 1,
        "build_connector_meta": 1,
    }


def test_promises_of_requests_that_never_run_end(engine: Engine) -> None:
    engine.run(Request(1, PROMPT), [0, 1, 2, 3, 4])
    engine.settle()
    manager = engine.scheduler._process.manager
    for number in range(2, 200):
        request = Request(number, PROMPT)
        assert engine.scheduler.get_num_new_matched_tokens(request, 0)[0] == 16
        engine.finish(request, [])
    assert manager.open_tickets == (0, 0) and len(engine.scheduler._requests) == 1
    assert len(engine.scheduler._process._plans) <= 16


def test_promises_of_one_step_hold_however_many_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Together they pin at most what no other promise takes back."""
    monkeypatch.setenv("KVBM_HOST_CAPACITY", "40")
    engine = Engine()
    prompts = [[number * 100 + at for at in range(18)] for number in range(6)]
    for number, prompt in enumerate(prompts):
        engine.run(Request(number, prompt), [0, 1, 2, 3, 4])
        engine.settle()
    again = [Request(100 + number, prompt) for number, prompt in enumerate(prompts)]
    matched = [engine.scheduler.get_num_new_matched_tokens(request, 0)[0] for request in again]
    assert matched == [16, 16, 8, 0, 0, 0]
    data = []
    for at, request in enumerate(again[:4]):
        blocks = list(range(8 + at * 5, 13 + at * 5))
        engine.scheduler.update_state_after_alloc(request, blocks)
        data.append(RequestData(request.request_id, request.tokens, blocks, 0, 18 - matched[at]))
    engine.step(SchedulerOutput(data, []))
    for at, request in enumerate(again[:3]):
        loaded = engine.memory[8 + at * 5 : 8 + at * 5 + matched[at] // SIZE].copy()
        engine.compute(request, list(range(5)), 0, 18)
        assert (loaded == engine.memory[: matched[at] // SIZE]).all()
    assert engine.scheduler.get_num_new_matched_tokens(Request(200, prompts[5]), 0)[0] == 16
    engine.worker.shutdown()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tensor_parallel_size": 2}, "2 ranks"),
        ({"pipeline_parallel_size": 4}, "4 ranks"),
        ({"enable_attention_dp": True}, "enable_attention_dp"),
        ({"speculative_config": object()}, "speculative_config"),
        (
            {"kv_cache_config": SimpleNamespace(tokens_per_block=4, enable_block_reuse=False)},
            "enable_block_reuse",
        ),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(changes: dict[str, Any], text: str) -> None:
    from kvbm_rs.trtllm import KvbmScheduler, KvbmWorker

    for refused in (KvbmScheduler, KvbmWorker):
        with pytest.raises(ConfigInvalid, match=text):
            refused(arguments(**changes))


def test_what_is_not_known_of_the_engine_is_warned_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.WARNING, logger="kvbm_rs.trtllm"):
        Engine().worker.shutdown()
        texts = [record.getMessage() for record in caplog.records]
        assert len(texts) == 2 and all("KVBM_NAMESPACE_WEIGHTS" in text for text in texts)
        assert "the version of the weights of m is not known" in texts[0]
        assert "quant_config, revision, the model's configuration" in texts[1]
        caplog.clear()
        monkeypatch.setenv("KVBM_NAMESPACE_WEIGHTS", "7")
        Engine().worker.shutdown()
        assert not caplog.records, "the operator says what changes"


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvbm_rs.trtllm import KvbmScheduler

    monkeypatch.delenv("KVBM_HOST_CAPACITY")
    with pytest.raises(ConfigInvalid, match="KVBM_HOST_CAPACITY is not set"):
        KvbmScheduler(arguments())


def test_what_an_upgrade_dropped_is_named(
    trtllm: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvbm_rs.trtllm import KvbmScheduler
    from kvbm_rs.trtllm import _trtllm_compat as compat

    assert compat.missing() == []
    monkeypatch.delattr(KvCacheConnectorWorker, "wait_for_save")
    monkeypatch.delattr(trtllm, "SchedulerOutput")
    dropped = compat.missing()
    assert f"{MODULE}.KvCacheConnectorWorker.wait_for_save" in dropped
    assert f"{MODULE}.SchedulerOutput" in dropped
    with pytest.raises(ConfigInvalid, match=r"TensorRT-LLM 1.2.1 lacks .*wait_for_save"):
        KvbmScheduler(arguments())
