"""How the connector for TensorRT-LLM measures what computing prompts costs."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
from kvbm_rs import KvBlockManager
from kvbm_rs.prefill_speed import LEAST_TOKENS
from trtllm_stand_in import PROMPT, Engine, Request, RequestData, SchedulerOutput
from trtllm_stand_in import engine as engine
from trtllm_stand_in import settings as settings
from trtllm_stand_in import trtllm as trtllm


def test_steps_that_compute_prompts_are_measured(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvbm_rs.trtllm import step_times

    told: list[tuple[int, float]] = []
    now = 0.0

    def takes(owner: Any, name: str, seconds: float) -> None:
        run = getattr(owner, name)

        def late(*args: Any, **more: Any) -> Any:
            nonlocal now
            now += seconds
            return run(*args, **more)

        monkeypatch.setattr(owner, name, late)

    takes(engine.scheduler, "build_connector_meta", 30.0)
    takes(KvBlockManager, "load", 2.0)
    takes(engine, "compute", 0.5)
    takes(KvBlockManager, "offload", 4.0)
    monkeypatch.setattr(step_times, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(step_times, "LEAST_TOKENS", 8)
    monkeypatch.setattr(
        KvBlockManager, "prefilled", lambda _, tokens, elapsed: told.append((tokens, elapsed))
    )
    prompt = list(range(100, 128))  # 7 blocks
    engine.run(Request(1, prompt[:16]), [0, 1, 2, 3])
    assert told == [(16, 0.5)], "a pause between steps does not count"
    engine.settle()
    assert engine.run(Request(2, prompt), list(range(4, 11))) == 16
    assert told[1:] == [(12, 0.5)], "neither what was loaded nor the time of that"
    engine.settle()
    assert engine.run(Request(3, prompt), list(range(11, 18))) == 24
    assert told[2:] == [], "four tokens say little"
    generated = [RequestData(number, [7], [], 18, 1) for number in range(10, 20)]
    engine.step(SchedulerOutput([], generated))
    assert told[2:] == [], "they are no prompt"
    mixed = RequestData(4, list(range(500, 510)), [20, 21, 22], 0, 10)
    forward = functools.partial(engine.compute, Request(4, mixed.new_tokens), [20, 21, 22], 0, 10)
    engine.step(SchedulerOutput([mixed], generated), forward)
    assert told[2:] == [(10, 0.5)]
    # TensorRT-LLM gave the step up, and takes another one without a plan.
    engine.scheduler.build_connector_meta(SchedulerOutput([mixed], []))
    engine.worker.start_load_kv(engine.stream)
    engine.worker.bind_connector_meta(None)
    engine.worker.start_load_kv(engine.stream)
    engine.worker.wait_for_save(engine.stream)
    assert told[3:] == []
    assert engine.scheduler._process.counters["errors"] == 0


def test_a_time_that_cannot_be_taken_costs_nothing_else(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("no clock")

    from kvbm_rs.trtllm import step_times

    monkeypatch.setattr(step_times, "LEAST_TOKENS", 8)
    monkeypatch.setattr(step_times, "HostMoment", fails)
    monkeypatch.setattr(engine.worker._times, "_moment", fails)
    engine.run(Request(1, PROMPT), [0, 1, 2, 3, 4])
    engine.settle()
    assert engine.run(Request(2, PROMPT), [5, 6, 7, 8, 9]) == 16
    assert engine.scheduler._process.failures.counts == {"prefilled": 1}


def test_steps_of_a_device_are_over_when_its_stream_says_so() -> None:
    from kvbm_rs.trtllm.step_times import StepTimes

    class Moment:
        is_passed = False

        def query(self) -> bool:
            return self.is_passed

        def elapsed_time(self, end: Any) -> float:
            assert self.is_passed and end.is_passed
            return 250.0

    made: list[Moment] = []

    def moment(_stream: Any) -> Moment:
        made.append(Moment())
        return made[-1]

    times = StepTimes(moment)
    for tokens in (1000, LEAST_TOKENS - 1, 2000):
        times.begins(tokens, "forward")
        times.ends("forward")
    assert times.over() == [] and len(made) == 4
    for one in made[:2]:
        one.is_passed = True
    assert times.over() == [(1000, 0.25)] and times.over() == []
    made[2].is_passed = True
    assert times.over() == [], "it has begun, and is not over"
    made[3].is_passed = True
    assert times.over() == [(2000, 0.25)]
    times.begins(1000, "one stream")
    times.ends("another")
    times.ends("forward")
    for _ in range(2 * StepTimes.MOST_OPEN):
        times.begins(1000, "forward")
        times.ends("forward")
    for one in made:
        one.is_passed = True
    assert times.over() == [(1000, 0.25)] * StepTimes.MOST_OPEN
