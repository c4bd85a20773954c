"""The connector's callbacks in vLLM's order, over a stand-in for vLLM's classes.

The real engine runs in `cargo xtask engine-test`; here is what it seldom does.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvbm_rs import ConfigInvalid
from vllm_stand_in import BLOCKS, PROMPT, Engine, Request
from vllm_stand_in import vllm as vllm  # a fixture


@pytest.fixture(params=["uni", "mp"])
def engine(vllm: Any, request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = Engine(vllm, executor=request.param, ranks=1 if request.param == "uni" else 2)
    yield engine
    engine.close()


def test_a_prompt_comes_back(engine: Engine) -> None:
    engine.compute(Request("a", PROMPT), [1, 2, 3, 4, 5])
    again = Request("b", PROMPT)
    assert engine.match(again) == (16, True)
    assert engine.match(again) == (16, True), "a second question has the same answer"
    ids = [11, 12, 13, 14, 15]
    engine.allocated(again, ids, 16)
    assert engine.until_received("b") == set()
    engine.allocated(again, ids, 0)
    assert engine.holds(again, ids, 0, 16)
    again.num_computed_tokens = 16
    engine.step({"b": (again, ids, 1)})
    assert engine.manager.open_tickets == (0, 0)
    assert engine.totals["hit_tokens_g2"] == 16 and engine.totals["errors"] == 0
    assert min(engine.scheduler._process.step_ns) >= 0, (
        "waits while nothing can run are no time of a step"
    )
    stats = engine.scheduler.get_kv_connector_stats()
    assert stats is not None
    counts = stats.data
    assert counts["loads"] == 1 and min(counts.values()) > 0, "Prometheus takes no negative count"
    assert engine.scheduler.get_external_cache_hit_sources(again, 16).popitem()[1] == 16


def test_steps_that_compute_prompts_are_measured(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvbm_rs.vllm import process

    told: list[tuple[int, float]] = []
    clock = iter([10.0, 10.5, 11.0, 50.0])
    stub = SimpleNamespace(prefilled=lambda tokens, elapsed: told.append((tokens, elapsed)))
    owner = engine.scheduler._process
    monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(owner, "_manager", stub)
    for tokens in (1000, 8, 2000, 0):
        owner.step_begins(tokens)
    assert told == [(1000, 0.5)], "decoding is no prompt, and a pause is no step"


def test_a_request_that_waits_has_its_blocks_brought_up(vllm: Any, tmp_path: Path) -> None:
    # A small disk has a small budget of writes.
    disk = {"disk": str(tmp_path), "disk_capacity": "64", "disk.drive_writes_per_day": 0}
    extra = disk | {"prefetch": True, "load_timeout": 5}
    engine = Engine(vllm, extra=extra)
    try:
        engine.compute(Request("a", PROMPT), [1, 2, 3, 4, 5])
        engine.manager.clear("g2")
        again = Request("b", PROMPT)
        engine.scheduler.on_new_request(again)
        assert engine.totals["prefetched_blocks"] == 4
        deadline = time.monotonic() + 10
        while "g2" not in engine.manager.places(engine.scheduler._requests["b"].sequence)[3]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert engine.match(again) == (16, True)
        engine.allocated(again, [11, 12, 13, 14, 15], 16)
        assert engine.until_received("b") == set()
        assert engine.holds(again, [11, 12, 13, 14, 15], 0, 16)
    finally:
        engine.close()


def answered(engine: Engine, request: Request) -> tuple[int | None, bool]:
    """What vLLM gets when the volume has answered."""
    deadline = time.monotonic() + 10
    while (found := engine.match(request))[0] is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return found


def test_a_question_to_a_volume_ends_with_its_request(vllm: Any, tmp_path: Path) -> None:
    engine = Engine(vllm, extra={"volume": f"dir://{tmp_path}"})
    try:
        computed, aborted = Request("a", PROMPT), Request("b", PROMPT)
        for request in (computed, aborted):
            assert engine.match(request) == (None, False), "the volume is asked"
            assert answered(engine, request) == (0, False)
        assert engine.match(computed) == (0, False), "vLLM may ask again before it has room"
        assert engine.manager.open_tickets == (2, 0)
        engine.allocated(computed, [1, 2, 3, 4, 5], 0)
        engine.scheduler.request_finished(aborted, [])
        assert engine.manager.open_tickets == (0, 0)
        unanswered = Request("c", list(range(50, 67)))
        assert engine.match(unanswered) == (None, False)
        engine.scheduler.request_finished(unanswered, [])
        assert engine.manager.open_tickets == (0, 0)
        assert engine.totals["errors"] == 0
    finally:
        engine.close()


#: Blocks go to disk when the manager ends, and not before.
KEEPS = {
    "offload.g2_g3.write_through": False,
    "offload.g2_g3.watermark": 1,
    "offload.g2_g3.ahead_share": 0,
    "offload.g2_g3.idle_iterations": 0,
}


@pytest.mark.parametrize(("executor", "ranks"), [("uni", 1), ("mp", 1), ("mp", 2)])
def test_what_is_in_host_memory_is_on_disk_when_vllm_has_stopped(
    vllm: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, executor: str, ranks: int
) -> None:
    """vLLM ends its workers first. Nothing goes to disk before there is a reason."""
    extra = {"disk": str(tmp_path), "disk_capacity": "256", "disk.drive_writes_per_day": 0}
    extra |= KEEPS
    engine = Engine(vllm, extra=extra, executor=executor, ranks=ranks)
    late = Request("b", list(range(500, 517)))
    try:
        engine.compute(Request("a", PROMPT), [1, 2, 3, 4, 5])
        # The last step's copies are under way when it stops.
        engine.match(late)
        engine.step({"b": (late, [11, 12, 13, 14, 15], late.num_tokens)})
        assert engine.manager.status()["tiers"]["g3"]["inactive"] == 0
    finally:
        with caplog.at_level(logging.INFO):
            engine.close()
    assert [record.getMessage() for record in caplog.records if record.levelno > logging.INFO] == []
    engine = Engine(vllm, extra=extra, executor=executor, ranks=ranks)
    try:
        assert engine.match(Request("a", PROMPT)) == (16, True)
        assert engine.match(Request("b", late.all_token_ids)) == (16, True)
    finally:
        engine.close()


def test_the_log_says_how_many_blocks_are_lost(
    vllm: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(
        vllm, extra={"disk": str(tmp_path), "disk_capacity": "256", **KEEPS}, executor="mp"
    )
    try:
        engine.compute(Request("a", PROMPT), [1, 2, 3, 4, 5])
        # vLLM kills it before it can say anything.
        engine.worker._process.worker.close()
    finally:
        with caplog.at_level(logging.WARNING):
            engine.close()
    lines = [record.getMessage() for record in caplog.records]
    assert any("4 blocks were not saved" in line for line in lines), lines


def test_the_last_token_is_never_promised(engine: Engine) -> None:
    engine.compute(Request("a", PROMPT[:16]), [1, 2, 3, 4])
    assert engine.match(Request("b", PROMPT[:16])) == (12, True), (
        "a prompt of whole blocks computes its last one"
    )
    assert engine.match(Request("c", PROMPT[:4])) == (0, False)


def test_what_vllm_has_itself_is_not_loaded(engine: Engine) -> None:
    engine.compute(Request("a", PROMPT), [1, 2, 3, 4, 5])
    again = Request("b", PROMPT)
    assert engine.match(again, 8) == (8, True)
    ids = [1, 2, 13, 14, 15]
    engine.allocated(again, ids, 8)
    assert engine.until_received("b") == set()
    assert engine.holds(again, ids, 0, 16)
    assert engine.match(Request("c", PROMPT), 16) == (0, False)


def test_a_promise_that_vllm_does_not_take_is_given_up(engine: Engine) -> None:
    engine.compute(Request("a", PROMPT), [1, 2, 3, 4, 5])
    again = Request("b", PROMPT)
    assert engine.match(again) == (16, True)
    engine.allocated(again, [11, 12, 13, 14, 15], 0)
    assert engine.manager.open_tickets == (0, 0)
    assert engine.step() == (set(), set())
    waiting = Request("c", PROMPT)
    assert engine.match(waiting) == (16, True)
    engine.scheduler.request_finished_all_groups(waiting, ([],))
    assert engine.manager.open_tickets == (0, 0), "a request that was aborted while it waited"


def test_a_promise_ends_when_vllm_has_the_blocks_itself(engine: Engine) -> None:
    engine.compute(Request("a", PROMPT), [1, 2, 3, 4, 5])
    again = Request("b", PROMPT)
    assert engine.match(again) == (16, True)
    assert engine.match(again, 16) == (0, False), "computed for another request meanwhile"
    assert engine.manager.open_tickets == (0, 0)


def test_a_load_that_cannot_begin_is_reported_and_ends(engine: Engine) -> None:
    engine.compute(Request("a", PROMPT), [1, 2, 3, 4, 5])
    again = Request("b", PROMPT)
    assert engine.match(again) == (16, True)
    engine.manager.abandon("b")  # its ticket was too old
    engine.allocated(again, [11, 12, 13, 14, 15], 16)
    assert engine.until_received("b") == {11, 12, 13, 14}
    assert engine.totals["failed_blocks"] == 4
    # vLLM asks again, and may have no room for another load of it.
    assert engine.match(again) == (0, False)


def test_an_aborted_request_is_received_once(engine: Engine) -> None:
    engine.compute(Request("a", PROMPT), [1, 2, 3, 4, 5])
    again = Request("b", PROMPT)
    engine.match(again)
    engine.allocated(again, [11, 12, 13, 14, 15], 16)
    engine.scheduler.request_finished_all_groups(again, ([11, 12, 13, 14, 15],))
    assert engine.until_received("b") == set()
    assert engine.step() == (set(), set())


def test_a_block_that_is_reused_is_not_saved(engine: Engine) -> None:
    """The copy of a block that another request overwrites is discarded, or was whole before."""
    first, second = Request("a", PROMPT[:8]), Request("b", list(range(500, 508)))
    engine.match(first)
    engine.step({"a": (first, [1, 2], 8)})
    engine.match(second)
    engine.step({"b": (second, [1, 2], 8)})
    assert engine.manager.wait_offloads(10)
    for request in (Request("c", PROMPT[:9]), Request("d", [*range(500, 508), 9])):
        tokens, _ = engine.match(request)
        ids = [20, 21, 22]
        if tokens:
            engine.allocated(request, ids, tokens)
            assert engine.until_received(request.request_id) == set()
            assert engine.holds(request, ids, 0, tokens)


def test_chunks_and_decoded_blocks_are_saved_when_they_are_final(engine: Engine) -> None:
    request, ids = Request("a", PROMPT), [1, 2, 3, 4, 5, 6]
    engine.match(request)
    for tokens in (6, 6, 5):
        engine.step({"a": (request, ids, tokens)})
    assert engine.totals["saved_blocks"] == 4
    for token in (7, 8, 9):
        request.all_token_ids = [*request.all_token_ids, token]
        engine.step({"a": (request, ids, 1)})
    assert engine.totals["saved_blocks"] == 5, "17 tokens of a prompt and 3 of an answer"
    drafted = Request("b", list(range(300, 306)))
    engine.match(drafted)
    engine.step({"b": (drafted, [10, 11], 6)})
    saved = engine.totals["saved_blocks"]
    assert saved == 6
    # A known token and a drafted one fill the block. The draft is rejected: another token takes its
    # place in the next step.
    drafted.all_token_ids = [*drafted.all_token_ids, 306]
    engine.step({"b": (drafted, [10, 11], 2)})
    assert engine.manager.wait_offloads(10)
    assert engine.totals["saved_blocks"] == saved, "a block with a drafted token is not final"
    drafted.num_computed_tokens, drafted.all_token_ids = 7, [*drafted.all_token_ids, 307]
    engine.step({"b": (drafted, [10, 11], 1)})
    assert engine.manager.wait_offloads(10)
    assert engine.totals["saved_blocks"] == saved + 1
    again, ids = Request("c", [*drafted.all_token_ids, 1]), [20, 21, 22]
    assert engine.match(again) == (8, True)
    engine.allocated(again, ids, 8)
    assert engine.until_received("c") == set() and engine.holds(again, ids, 0, 8)


def test_an_exception_never_leaves_a_callback(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("broken")

    for name in (
        "look_up",
        "commit",
        "offload",
        "finished",
        "released",
        "abandon",
        "forget",
        "step",
    ):
        monkeypatch.setattr(type(engine.manager), name, broken)
    request = Request("a", PROMPT)
    engine.scheduler.on_new_request(request)
    assert engine.match(request) == (0, False)
    engine.allocated(request, [1, 2, 3, 4, 5], 16)
    received, bad = engine.step({"a": (request, [1, 2, 3, 4, 5], 17)})
    assert engine.scheduler.reset_cache() is False
    assert engine.scheduler.request_finished_all_groups(request, ([],)) == (False, None)
    assert engine.totals["errors"] > 3
    assert (received, bad) == ({"a"}, {1, 2, 3, 4}), "a load that did not begin has failed"
    assert engine.totals["failed_blocks"] == 4


def test_reset_removes_everything(engine: Engine) -> None:
    engine.compute(Request("a", PROMPT), [1, 2, 3, 4, 5])
    assert engine.scheduler.reset_cache() is True
    assert engine.match(Request("b", PROMPT)) == (0, False)
    engine.compute(Request("c", PROMPT), [1, 2, 3, 4, 5])
    assert engine.match(Request("d", PROMPT)) == (16, True), "it fills again"


def test_synchronous_loads_end_before_the_step(vllm: Any) -> None:
    engine = Engine(vllm, extra={"load": "sync"})
    engine.compute(Request("a", PROMPT), [1, 2, 3, 4, 5])
    again, ids = Request("b", PROMPT), [11, 12, 13, 14, 15]
    assert engine.match(again) == (16, False)
    engine.allocated(again, ids, 16)
    again.num_computed_tokens = 16
    assert engine.step({"b": (again, ids, 1)}) == (set(), set())
    assert engine.holds(again, ids, 0, 17)
    engine.close()


def test_nothing_is_stored_of_a_step_whose_synchronous_load_failed(vllm: Any) -> None:
    """The step runs before vLLM learns of the failure, over blocks that hold anything."""
    engine = Engine(vllm, extra={"load": "sync"})
    engine.compute(Request("a", PROMPT), [1, 2, 3, 4, 5])
    again, ids = Request("b", PROMPT), [11, 12, 13, 14, 15]
    other, others = Request("x", list(range(700, 709))), [21, 22, 23]
    assert engine.match(again) == (16, False) and engine.match(other) == (0, False)
    engine.manager.abandon("b")
    engine.manager.forget(engine.manager.namespace)
    engine.allocated(again, ids, 16)
    again.num_computed_tokens = 16
    _, bad = engine.step({"b": (again, ids, 1), "x": (other, others, 9)})
    assert bad == {11, 12, 13, 14}
    assert engine.manager.wait_offloads(10)
    assert engine.match(Request("c", PROMPT)) == (0, False), "wrong bytes were stored"
    again.num_computed_tokens = other.num_computed_tokens = 0
    engine.step({"b": (again, ids, 17), "x": (other, others, 9)})
    assert engine.manager.wait_offloads(10)
    for request, tokens in ((Request("d", PROMPT), 16), (Request("y", other.all_token_ids), 8)):
        assert engine.match(request) == (tokens, False), "stored once it is computed"
        engine.allocated(request, [31, 32, 33, 34, 35], tokens)
        request.num_computed_tokens = tokens
        assert engine.step({request.request_id: (request, [31, 32, 33, 34, 35], 1)})[1] == set()
        assert engine.holds(request, [31, 32, 33, 34, 35], 0, tokens)
    engine.close()


def test_a_load_of_which_nothing_arrived_is_not_promised_again(engine: Engine) -> None:
    engine.compute(Request("a", PROMPT), [1, 2, 3, 4, 5])
    again = Request("b", PROMPT)
    assert engine.match(again) == (16, True)
    engine.scheduler._give_up("b")
    assert engine.match(again) == (0, False)
    assert engine.manager.open_tickets == (0, 0)
    assert engine.match(Request("c", PROMPT)) == (16, True)


def test_an_adapter_whose_files_change_is_computed(engine: Engine, tmp_path: Path) -> None:
    """Nothing says whether vLLM has the new weights: they may be stored under neither name."""
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"1")
    adapter = SimpleNamespace(lora_name="a", lora_path=str(tmp_path))
    first, again, later = (Request(name, PROMPT) for name in ("a", "b", "c"))
    for request in (first, again, later):
        request.lora_request = adapter
    engine.compute(first, [1, 2, 3, 4, 5])
    assert engine.match(again) == (16, True)
    weights.write_bytes(b"22")
    saved = engine.totals["saved_blocks"]
    assert engine.match(later) == (0, False)
    later.all_token_ids = list(range(900, 917))
    engine.step({"c": (later, [11, 12, 13, 14, 15], 17)})
    assert engine.manager.wait_offloads(10) and engine.totals["saved_blocks"] == saved


def test_overwritten_blocks_are_named_whatever_fails(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("broken")

    released: list[int] = []
    release = type(engine.manager).released

    def noted(manager: Any, ids: list[int]) -> Any:
        released.extend(ids)
        return release(manager, ids)

    monkeypatch.setattr(type(engine.manager), "released", noted)
    monkeypatch.setattr(engine.scheduler._process, "step_begins", broken)
    request = Request("a", PROMPT)
    engine.match(request)
    engine.step({"a": (request, [1, 2, 3, 4, 5], 17)})
    assert released == [1, 2, 3, 4, 5]


def test_shadow_mode_moves_nothing(vllm: Any) -> None:
    engine = Engine(vllm, extra={"shadow": True})
    engine.compute(Request("a", PROMPT), [1, 2, 3, 4, 5])
    again = Request("b", PROMPT)
    assert engine.match(again) == (0, False)
    assert engine.match(again) == (0, False), "vLLM asks again while the request waits"
    totals = engine.totals
    assert totals["shadow_hit_tokens"] == totals["shadow_hit_tokens_g2"] == 16
    assert totals["shadow_prompt_tokens"] == 2 * len(PROMPT)
    assert totals["loaded_blocks"] == 0 and engine.manager.open_tickets == (0, 0)
    report = engine.scheduler._process.shadow
    assert report is not None and report.requests == 2
    assert report.found_bytes == 4 * engine.manager.block_bytes
    engine.close()


def test_short_hits_are_computed(vllm: Any) -> None:
    engine = Engine(vllm, extra={"min_blocks": 5})
    engine.compute(Request("a", PROMPT), [1, 2, 3, 4, 5])
    assert engine.match(Request("b", PROMPT)) == (0, False)
    assert engine.manager.open_tickets == (0, 0)
    engine.close()


def test_a_streaming_session_that_replaces_its_last_tokens(engine: Engine) -> None:
    request = Request("a", PROMPT)
    engine.match(request)
    engine.step({"a": (request, [1, 2, 3, 4, 5], 17)})
    tracked = engine.scheduler._requests["a"]
    before = tracked.sequence.hashes
    request.all_token_ids = [*PROMPT[:12], 90, 91, 92, 93, 94]
    assert tracked.hash() == 4
    assert tracked.sequence.hashes[:3] == before[:3] and tracked.sequence.hashes[3] != before[3]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"transfer": {"kv_load_failure_policy": "fail"}}, '"kv_load_failure_policy": "recompute"'),
        ({"transfer": {"kv_role": "kv_producer"}}, "kv_both"),
        ({"parallel": {"distributed_executor_backend": "ray"}}, "'ray' on 1 nodes"),
        ({"executor": "mp", "parallel": {"nnodes": 2}}, "'mp' on 2 nodes"),
        ({"executor": "mp", "parallel": {"world_size": 2}}, "2 ranks, 1 of them tensor parallel"),
        ({"executor": "mp", "extra": {"load": "sync"}}, "'load' is 'sync'"),
        ({"async_scheduling": True, "extra": {"load": "sync"}}, "--no-async-scheduling"),
        ({"second_runner": True, "extra": {"load": "sync"}}, "VLLM_USE_V2_MODEL_RUNNER=0"),
        ({"groups": ["SlidingWindowSpec"]}, "SlidingWindowSpec"),
        ({"groups": ["MambaSpec"]}, "MambaSpec"),
        ({"extra": {"nonsense": 1}}, "'nonsense'"),
    ],
)
def test_what_would_not_work_is_refused(vllm: Any, changes: dict[str, Any], text: str) -> None:
    from kvbm_rs import ConfigInvalid

    with pytest.raises(ConfigInvalid, match=text):
        Engine(vllm, **changes)


def test_a_scheduler_without_its_worker_is_refused(vllm: Any) -> None:
    from kvbm_rs import BuildFailed

    engine = Engine(vllm)
    engine.close()
    from kvbm_rs.vllm import KvbmConnector

    with pytest.raises(BuildFailed, match="no worker has registered"):
        KvbmConnector(
            engine.config,
            vllm.role.SCHEDULER,
            SimpleNamespace(
                num_blocks=BLOCKS,
                kv_cache_groups=[
                    SimpleNamespace(kv_cache_spec=type("FullAttentionSpec", (), {})())
                ],
            ),
        )


def test_a_run_is_recorded_where_an_option_says_so(vllm: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.kvbmrec"
    extra = {"record": str(path), "record_limit": 100_000}
    engine = Engine(vllm, transfer={"engine_id": "recorded"}, extra=extra)
    engine.compute(Request("secret-a", PROMPT), [1, 2, 3, 4, 5])
    again = Request("secret-b", PROMPT)
    assert engine.match(again) == (16, True)
    engine.allocated(again, [11, 12, 13, 14, 15], 16)
    assert engine.until_received("secret-b") == set()
    engine.close()
    calls = [json.loads(line) for line in path.read_text().splitlines()]
    assert calls[0]["blocks"] == BLOCKS and "secret" not in path.read_text()
    names = [call["call"] for call in calls[1:]]
    assert [name for name in names if name in ("offload", "commit", "finished", "close")] == [
        "offload",
        "commit",
        "finished",
        "close",
    ]
    with pytest.raises(ConfigInvalid, match="record.*7"):
        Engine(vllm, transfer={"engine_id": "wrong"}, extra={"record": 7})
