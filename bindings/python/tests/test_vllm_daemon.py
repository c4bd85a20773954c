"""The connector over a node daemon: what holds over a manager of its own holds there too."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import test_vllm_connector as alone
from kvbm_rs import Config, ConfigInvalid, NodeServer
from kvbm_rs.vllm.options import Options
from vllm_stand_in import PROMPT, SIZE, Engine, Request, vllm

__all__ = ["vllm"]

PATIENCE = 30.0

CASES = [
    alone.test_a_prompt_comes_back,
    alone.test_the_last_token_is_never_promised,
    alone.test_what_vllm_has_itself_is_not_loaded,
    alone.test_a_promise_that_vllm_does_not_take_is_given_up,
    alone.test_a_promise_ends_when_vllm_has_the_blocks_itself,
    alone.test_a_load_that_cannot_begin_is_reported_and_ends,
    alone.test_an_aborted_request_is_received_once,
    alone.test_a_block_that_is_reused_is_not_saved,
    alone.test_chunks_and_decoded_blocks_are_saved_when_they_are_final,
    alone.test_reset_removes_everything,
]


def server(folder: Path, ranks: int) -> NodeServer:
    text = (
        f'[model]\npage_size = {SIZE}\nopaque_tensors = "2x{2 * SIZE * 64 * 4}"\n'
        '[namespace]\nmodel = "daemon"\n[host]\ncapacity = 64\npinned = false\n'
        f'[policy]\nadmission = "all"\n[parallelism]\ntensor_parallel = {ranks}\n'
    )
    return NodeServer(Config.from_toml(text), folder / "run" / "node.sock")


def engine_over(vllm: Any, folder: Path, executor: str, **extra: Any) -> Engine:
    return Engine(
        vllm,
        executor=executor,
        ranks=1 if executor == "uni" else 2,
        transfer={"engine_id": f"e-{folder.name}"},
        extra={"daemon": str(folder / "run" / "node.sock"), **extra},
    )


@pytest.fixture(params=["uni", "mp"])
def engine(vllm: Any, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    with server(tmp_path, 1 if request.param == "uni" else 2):
        engine = engine_over(vllm, tmp_path, request.param)
        assert engine.manager.wait_ready(PATIENCE), engine.manager.status()
        yield engine
        engine.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.removeprefix("test_"))
def test_as_alone(engine: Engine, case: Callable[[Engine], None]) -> None:
    case(engine)


def test_an_exception_never_leaves_a_callback(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone.test_an_exception_never_leaves_a_callback(engine, monkeypatch)


def test_synchronous_loads_end_before_the_step(vllm: Any, tmp_path: Path) -> None:
    with server(tmp_path, 1):
        engine = engine_over(vllm, tmp_path, "uni", load="sync")
        engine.compute(Request("a", PROMPT), [1, 2, 3, 4, 5])
        again, ids = Request("b", PROMPT), [11, 12, 13, 14, 15]
        assert engine.match(again) == (16, False)
        engine.allocated(again, ids, 16)
        again.num_computed_tokens = 16
        assert engine.step({"b": (again, ids, 1)}) == (set(), set())
        assert engine.holds(again, ids, 0, 17)
        engine.close()


@pytest.mark.parametrize("executor", ["uni", "mp"])
def test_the_daemon_comes_and_goes(vllm: Any, tmp_path: Path, executor: str) -> None:
    ranks = 1 if executor == "uni" else 2
    engine = engine_over(vllm, tmp_path, executor)
    try:
        request, ids = Request("a", PROMPT), [1, 2, 3, 4, 5]
        for _ in range(3):
            assert engine.match(request) == (0, False), "there is no daemon"
            request.num_computed_tokens = 0
            engine.step({"a": (request, ids, len(PROMPT))})
            engine.scheduler.request_finished_all_groups(request, (ids,))
            with server(tmp_path, ranks):
                assert engine.manager.wait_ready(PATIENCE), engine.manager.status()
                engine.compute(Request("b", PROMPT), [6, 7, 8, 9, 10])
                again, loaded = Request("c", PROMPT), [11, 12, 13, 14, 15]
                assert engine.match(again) == (16, True)
                engine.allocated(again, loaded, 16)
                assert engine.until_received("c") == set()
                assert engine.holds(again, loaded, 0, 16)
                engine.allocated(again, loaded, 0)
                # This load loses its daemon.
                lost = Request("d", PROMPT)
                assert engine.match(lost) == (16, True)
                engine.allocated(lost, [21, 22, 23, 24, 25], 16)
            received: set[str] = set()
            bad: set[int] = set()
            deadline = time.monotonic() + PATIENCE
            while not received and time.monotonic() < deadline:
                received, more = engine.step()
                bad |= more
            assert received == {"d"} and bad == {21, 22, 23, 24}
            engine.scheduler.request_finished_all_groups(lost, ([21, 22, 23, 24, 25],))
            request = Request("a", PROMPT)
        assert engine.totals["loaded_blocks"] == 12
    finally:
        engine.close()


def test_the_log_names_what_the_daemon_needs(
    vllm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvbm_rs.vllm import process

    said: list[str] = []
    monkeypatch.setattr(process.logger, "warning", lambda text, *args: said.append(text % args))
    engine = engine_over(vllm, tmp_path, "uni")
    engine.close()
    assert 'page_size = 4\nopaque_tensors = "2x2048"' in said[0] and "not attached" in said[0]


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"daemon": ""}, "'daemon' is ''"),
        ({"daemon": 7}, "'daemon' is 7"),
        ({"host": "1GiB"}, "'host' beside 'daemon': the daemon's own configuration"),
        ({"transfer.deadline": "5s"}, "'transfer.deadline' beside 'daemon'"),
        ({"audit": 0.1}, "'audit' beside 'daemon'"),
        ({"shadow": True}, "'shadow' beside 'daemon'"),
        ({"record": "/tmp/x"}, "'record' beside 'daemon'"),
        ({"hots": 1}, "'hots', which is no option: beside 'daemon' known are daemon, hashes"),
        ({"min_blocks": 0}, "'min_blocks' is 0"),
    ],
)
def test_options_that_do_not_go_with_a_daemon(extra: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigInvalid, match=text):
        Options.read({"daemon": "/run/kvbm/node.sock", **extra}, (0, 1))
