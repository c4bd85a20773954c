"""What a real vLLM called on the connector: recorded, and replayed without vLLM."""

from __future__ import annotations

import gzip
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvbm_rs import ConfigInvalid
from vllm_replay import Recorded, ReplayError, replay
from vllm_stand_in import PROMPT, Request
from vllm_stand_in import Engine as AnyEngine
from vllm_stand_in import vllm as vllm  # a fixture

DATA = Path(__file__).parent / "data"


class Engine(AnyEngine):
    """One of its own: connectors of an engine share what another test may have left open."""

    def __init__(self, vllm: Any, **changes: Any) -> None:
        super().__init__(vllm, transfer={"engine_id": "recorded"}, **changes)


def run_of(vllm: Any, path: Path) -> list[dict[str, Any]]:
    """A prompt is computed, comes again and is loaded; one that is aborted."""
    engine = Engine(vllm, extra={"record_callbacks": str(path)})
    try:
        engine.compute(Request("somebody-s-request", PROMPT), [1, 2, 3, 4, 5])
        again, ids = Request("b", PROMPT), [11, 12, 13, 14, 15]
        assert engine.match(again) == (16, True)
        engine.allocated(again, ids, 16)
        assert engine.until_received("b") == set()
        engine.allocated(again, ids, 0)
        again.num_computed_tokens = 16
        engine.step({"b": (again, ids, 1)})
        engine.scheduler.request_finished_all_groups(again, (ids,))
        assert engine.match(Request("c", PROMPT)) == (16, True)
        engine.scheduler.request_finished_all_groups(Request("c", PROMPT), ([],))
    finally:
        engine.close()
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_callback_has_a_line_without_tokens_and_names(vllm: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.kvbmcalls"
    header, *calls = run_of(vllm, path)
    assert (header["format"], header["version"]) == ("kvbm-vllm-callbacks", 1)
    assert (header["blocks"], header["block_size"], header["executor"]) == (64, 4, "uni")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [call["n"] for call in calls] == list(range(len(calls)))
    names = [call["call"] for call in calls]
    assert names[:7] == [
        "register_kv_caches",
        "on_new_request",
        "get_num_new_matched_tokens",
        "build_connector_meta",
        "handle_preemptions",
        "start_load_kv",
        "wait_for_save",
    ]
    assert names[-1] == "shutdown"
    step = calls[3]
    assert step["scheduled"] == [
        {"request": 0, "tokens": 17, "known": 17, "computed": 0, "ids": [[[1, 5]]]}
    ]
    assert step["plan"]["saves"] == [[0, 0, [[1, 4]]]] and step["plan"]["reused"] == [[1, 5]]
    (matched,) = [call for call in calls if call.get("matched") == 16 and call["request"] == 1]
    assert (matched["at"], matched["is_async"], matched["tokens"]) == (0, True, 17)
    (chain,) = {
        json.dumps(call["chains"])
        for call in calls
        if call.get("request") == 0 and "chains" in call
    }
    assert json.loads(chain) == [[0, [[0, 4]]]]
    text = path.read_text()
    assert "somebody" not in text


def test_a_recording_replays(vllm: Any, tmp_path: Path) -> None:
    path = tmp_path / "run"
    run_of(vllm, path)
    counts = replay(vllm, Recorded(path.read_text()))
    assert (counts["loads"], counts["loaded_blocks"], counts["saved_blocks"]) == (1, 4, 8)
    assert counts["request_finished_all_groups"] == 3


def test_a_replay_names_the_line_that_differs(vllm: Any, tmp_path: Path) -> None:
    path = tmp_path / "run"
    run_of(vllm, path)
    good = path.read_text()

    def changed(change: Callable[[dict[str, Any]], bool]) -> tuple[str, int]:
        """The first line that `change` changes."""
        lines = good.splitlines()
        for at, line in enumerate(lines[1:], start=1):
            call = json.loads(line)
            if change(call):
                lines[at] = json.dumps(call)
                return "\n".join(lines) + "\n", at + 1
        raise AssertionError("nothing was changed")

    def promise(call: dict[str, Any]) -> bool:
        if not call.get("matched"):
            return False
        call["matched"] += 4
        return True

    def save(call: dict[str, Any]) -> bool:
        if not call.get("plan", {}).get("saves"):
            return False
        call["plan"]["saves"][0][2] = [[1, 3]]
        return True

    def load(call: dict[str, Any]) -> bool:
        if not call.get("plan", {}).get("loads"):
            return False
        call["plan"]["loads"] = []
        return True

    def computed(call: dict[str, Any]) -> bool:
        if not call.get("scheduled") or call["scheduled"][0]["request"] != 0:
            return False
        call["scheduled"][0] |= {"computed": 4, "tokens": 13}
        return True

    for change, expected in (
        (promise, "16 tokens are promised, and 20 were"),
        (save, "saves"),
        (load, "loads"),
        (computed, "is taken for computed"),
    ):
        text, line = changed(change)
        with pytest.raises(ReplayError, match=expected) as raised:
            replay(vllm, Recorded(text))
        if change is not computed:
            assert f"line {line}," in str(raised.value)
    for text, expected in (
        (good[:-10], "cut off"),
        ("", "cut off"),
        (good.replace('"n":3,', '"n":4,'), "lines are missing"),
        (good.replace("kvbm-vllm-callbacks", "other"), "no recording"),
        (good.replace('"uni"', '"mp"'), "other processes"),
        (good.replace('"call":"start_load_kv"', '"call":"unknown"'), "no such callback"),
    ):
        with pytest.raises(ReplayError, match=expected):
            replay(vllm, Recorded(text))


def test_it_ends_at_its_limit_and_the_engine_goes_on(vllm: Any, tmp_path: Path) -> None:
    path = tmp_path / "run"
    engine = Engine(vllm, extra={"record_callbacks": str(path), "record_limit": 4096})
    for _ in range(50):
        engine.step()
    engine.close()
    last = json.loads(path.read_text().splitlines()[-1])
    assert last["call"] == "stopped" and "record_limit" in last["why"]
    assert path.stat().st_size <= 4096


def test_what_cannot_be_read_ends_it_and_the_engine_goes_on(vllm: Any, tmp_path: Path) -> None:
    path = tmp_path / "run"
    engine = Engine(vllm, extra={"record_callbacks": str(path)})
    try:
        odd = Request("a", PROMPT)
        odd.num_prompt_tokens = "many"  # type: ignore[assignment]
        engine.compute(odd, [1, 2, 3, 4, 5])
        assert engine.match(Request("b", PROMPT)) == (16, True)
        assert engine.totals["errors"] == 0
    finally:
        engine.close()
    last = json.loads(path.read_text().splitlines()[-1])
    assert (last["call"], last["n"]) == ("stopped", 1) and "ValueError" in last["why"]


def test_a_wrong_path_names_the_option(vllm: Any, tmp_path: Path) -> None:
    for path, expected in (
        (str(tmp_path / "missing" / "run"), "cannot be made"),
        (7, "give the path"),
    ):
        with pytest.raises(ConfigInvalid, match=f"record_callbacks.*{expected}"):
            Engine(vllm, extra={"record_callbacks": path})


def test_workers_of_their_own_have_files_of_their_own(vllm: Any, tmp_path: Path) -> None:
    path = tmp_path / "run"
    engine = Engine(vllm, extra={"record_callbacks": str(path)}, executor="mp", ranks=2)
    engine.compute(Request("a", PROMPT), [1, 2, 3, 4, 5])
    engine.close()
    roles = {
        file.name: json.loads(file.read_text().splitlines()[0])["role"]
        for file in tmp_path.iterdir()
    }
    assert roles == {"run": "scheduler", "run.recorded-0": "worker 0", "run.recorded-1": "worker 1"}


def test_a_run_of_vllm_replays(vllm: Any) -> None:
    """vLLM 0.32 with too few blocks: conversations of several turns that wait for room, are
    promised blocks again and again, are preempted, load, and go on. The scenario `record` of
    engine_tests made it.
    """
    recorded = Recorded(
        gzip.decompress((DATA / "vllm-conversations.kvbmcalls.gz").read_bytes()).decode()
    )
    assert recorded.header["vllm"].startswith("0.32")
    counts = replay(vllm, recorded)
    assert counts["loads"] >= 10 and counts["loaded_blocks"] >= 60, counts
    assert counts["saved_blocks"] >= 100 and counts["build_connector_meta"] >= 150, counts
    # Asked again while they waited.
    assert counts["get_num_new_matched_tokens"] > 2 * counts["on_new_request"], counts


def test_your_own(vllm: Any) -> None:
    path = os.environ.get("RECORDED_CALLBACKS")
    if path is None:
        pytest.skip("RECORDED_CALLBACKS names no recording")
    print(replay(vllm, Recorded(Path(path).read_text())))
