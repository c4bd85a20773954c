"""The part `daemon`: vLLM whose blocks a node daemon keeps; either side is killed.

python daemon.py NAME '{"model": FOLDER, ...}'
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from engine import Engine
from scenarios import first_token, in_batches, main, prompts_of, scenario
from workload import conversations, unrelated

#: Seconds for what takes milliseconds on a machine that has nothing else to do.
_PATIENCE = 120.0


class Daemon:
    """A node daemon, a process of its own, with its files in `folder`."""

    def __init__(
        self, folder: str | Path, model: str, host: str, ranks: int = 1, one_copy: bool = False
    ) -> None:
        self.folder = Path(folder)
        self.socket = str(self.folder / "run" / "node.sock")
        self._config = self.folder / "node.toml"
        self._config.write_text(
            f'{model}[namespace]\nmodel = "engine-test"\n[host]\ncapacity = "{host}"\n'
            f"one_copy = {str(one_copy).lower()}\n"
            f'[policy]\nadmission = "all"\n[node]\nsocket = "{self.socket}"\n'
            f"[parallelism]\ntensor_parallel = {ranks}\n"
        )
        self.start()

    def start(self) -> None:
        """Returns when it listens."""
        with open(self.folder / "daemon.log", "a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvbm_rs.serve", str(self._config)],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line.startswith("kvbm serve: at"), f"{line!r}, see {log.name}"

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.kill()


# ------------------------------------------------------------------- the judge


def judge(suite: Any) -> None:
    """Runs the scenarios and says what must hold of them."""
    right, size = suite.right["daemon"], dict(suite.sizes["daemon"])
    size |= {"num_gpu_blocks_override": size["max_model_len"] // 32 * 3 // 2}
    folder = suite.fresh("daemon")
    absent = suite.run(
        "daemon absent",
        "through_daemon",
        program="daemon.py",
        model=suite.tiny,
        socket=f"{folder}/run/node.sock",
        reference=right,
        **size,
    )
    suite.check(
        "without the daemon: tokens are right, nothing is loaded, no error",
        [absent.get(name) for name in ("unequal", "loaded_blocks", "errors")] == [0, 0, 0],
        absent,
    )
    if not absent:
        return
    with Daemon(folder, absent["daemon_model"], "512MiB") as daemon:
        _judge_equal(suite, daemon, right, size)
    with Daemon(suite.fresh("daemon"), absent["daemon_model"], "256MiB") as daemon:
        _judge_engine_killed(suite, daemon)
    _judge_daemon_killed(suite, absent["daemon_model"], right, size)
    if not suite.quick:
        _judge_two_ranks(suite, "two ranks", suite.tiny, one_copy=False)
        _judge_two_ranks(suite, "two ranks of one head", suite.one_head, one_copy=True)
        _judge_latency(suite)


def _judge_equal(suite: Any, daemon: Daemon, right: str, size: dict[str, Any]) -> None:
    kinds: dict[str, dict[str, Any]] = {"one process": {}}
    if not suite.quick:
        kinds["a worker of its own"] = {"distributed_executor_backend": "mp"}
    for label, settings in kinds.items():
        found = suite.run(
            f"daemon equal, {label}",
            "through_daemon",
            program="daemon.py",
            model=suite.tiny,
            socket=daemon.socket,
            reference=right,
            **size,
            **settings,
        )
        for what, holds in {
            "tokens are right": found.get("unequal") == 0,
            "blocks were loaded": found.get("loaded_blocks", 0) > 0,
            "no block failed": found.get("failed_blocks") == 0,
            "no error inside the connector": found.get("errors") == 0,
            "vLLM's external hits are ours": bool(found)
            and found["vllm_hits"] == found["kvbm_hits"],
            "nothing is left behind": not any(found.get("left", {"": 1}).values()),
        }.items():
            suite.check(f"daemon, {label}: {what}", holds, found)
        suite.row(f"daemon_unequal {label}", found.get("unequal", -1))


def _judge_two_ranks(suite: Any, label: str, model: str, one_copy: bool) -> None:
    """Two ranks in processes of their own, each with a mover; the daemon comes after the engine.
    With one copy, both ranks have the same bytes, and host memory has them once.
    """
    cores = sorted(os.sched_getaffinity(0))
    # vLLM binds ranks to NUMA nodes, or to the cores that this names.
    bound = {"VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"}
    size = {"count": 60, "longest": 1500, "max_model_len": 2048, "tensor_parallel_size": 2}
    right = str(suite.work / f"daemon-{label.replace(' ', '-')}.json")
    suite.run(
        f"daemon reference {label}",
        "references",
        bound,
        "equality.py",
        model=model,
        wanted={right: {"twice": True, "count": size["count"], "longest": size["longest"]}},
        max_model_len=size["max_model_len"],
        tensor_parallel_size=2,
    )
    found = suite.run(
        f"daemon {label}",
        "daemon_starts_later",
        bound,
        program="daemon.py",
        model=model,
        folder=suite.fresh(f"daemon-{label.replace(' ', '-')}"),
        reference=right,
        host="256MiB",
        ranks=2,
        one_copy=one_copy,
        num_gpu_blocks_override=96,
        **size,
    )
    for what, holds in {
        "tokens are right": found.get("unequal") == 0,
        "blocks were loaded": found.get("loaded_blocks", 0) > 0,
        "no block failed": found.get("failed_blocks") == 0,
        "no error inside the connector": found.get("errors") == 0,
        "nothing is left behind": not any(found.get("left", {"": 1}).values()),
    }.items():
        suite.check(f"daemon, {label}: {what}", holds, found)
    suite.row(f"daemon_unequal {label}", found.get("unequal", -1))


def _judge_engine_killed(suite: Any, daemon: Daemon) -> None:
    size, right = suite.sizes["restart"], suite.right["restart"]
    where = {"program": "daemon.py", "model": suite.tiny, "socket": daemon.socket, **size}
    with suite.running("daemon, fill", "fill_through_daemon", **where):
        time.sleep(1)
    found = suite.run(
        "daemon, engine killed",
        "next_life",
        program="daemon.py",
        model=suite.tiny,
        socket=daemon.socket,
        reference=right,
        **size,
    )
    share = found.get("found", 0) / max(1, found.get("wanted", 1))
    suite.row("daemon_restart_hits", share)
    suite.check("daemon, engine killed: 99 % is found in G2", share >= 0.99, found)
    suite.check("daemon, engine killed: the first request has a hit", found.get("first"), found)
    suite.check("daemon, engine killed: tokens are right", found.get("unequal") == 0, found)


def _judge_daemon_killed(suite: Any, model: str, right: str, size: dict[str, Any]) -> None:
    found = suite.run(
        "daemon killed",
        "daemon_killed",
        program="daemon.py",
        model=suite.tiny,
        folder=suite.fresh("daemon-killed"),
        daemon_model=model,
        reference=right,
        kills=3 if suite.quick else 10,
        **size,
    )
    for what, holds in {
        "tokens are right": found.get("unequal") == 0,
        "every request ends": found.get("prompts") == found.get("ended", -1),
        "it attached again each time": found.get("attached") == found.get("kills", -1),
        "blocks were loaded after each": found.get("loaded") == found.get("kills", -1),
        "nothing is left behind": not any(found.get("left", {"": 1}).values()),
    }.items():
        suite.check(f"daemon killed: {what}", holds, found)
    suite.row("daemon_killed_unequal", found.get("unequal", -1))
    suite.row("daemon_killed_longest_request_s", found.get("longest_s", -1))


def _judge_latency(suite: Any) -> None:
    prompts, rounds = (4, 12) if suite.quick else (6, 24)
    base = {
        "model": suite.small,
        "prompts": prompts,
        "rounds": rounds,
        "length": 2048,
        "max_model_len": 4096,
    }
    alone = suite.run("ttft alone", "first_tokens", program="daemon.py", **base)
    folder = suite.fresh("daemon-latency")
    found = suite.run("ttft daemon", "first_tokens", program="daemon.py", folder=folder, **base)
    if alone and found:
        ratio = found["loaded_s"] / alone["loaded_s"]
        suite.row("ttft_daemon_s", found["loaded_s"])
        suite.row("ttft_daemon_over_in_process", ratio)
        suite.row("daemon_step_p50_us", found["step_p50_us"])
        suite.target("through the daemon 1.1 of in process at most", ratio <= 1.1, ratio)


# --------------------------------------------------------------- the scenarios


def through(socket: str, **options: Any) -> dict[str, Any]:
    """The configuration of our connector."""
    transfer = Engine.kvbm()
    transfer["kv_connector_extra_config"] = {"daemon": socket, **options}
    return transfer


def settle(engine: Engine) -> None:
    """Until the daemon has what was saved."""
    assert engine.connector._process.manager.wait_offloads(_PATIENCE)


def wait_ready(engine: Engine) -> None:
    manager = engine.connector._process.manager
    assert manager.wait_ready(_PATIENCE), manager.status()


def left_over(engine: Engine, free: int) -> dict[str, int]:
    """What a run must not leave behind; all 0."""
    manager = engine.connector._process.manager
    settle(engine)
    tickets, loads = manager.open_tickets
    busy = len(manager.busy(list(range(engine.connector._num_blocks))))
    missing = free - engine.free_blocks()
    return {"tickets": tickets, "loads": loads, "busy_blocks": busy, "missing_blocks": missing}


@scenario
def through_daemon(
    model: str,
    socket: str,
    reference: str,
    count: int,
    longest: int,
    **settings: Any,
) -> dict[str, Any]:
    """The same requests as without a connector, with a G1 that is too small."""
    return _compared(Engine(model, through(socket), **settings), reference, count, longest)


def _compared(
    engine: Engine,
    reference: str,
    count: int,
    longest: int,
    batch: int = 4,
    forget: bool = False,
) -> dict[str, Any]:
    """With `forget` vLLM has no prefix of its own."""
    free, process = engine.free_blocks(), engine.connector._process
    prompts = prompts_of(count, longest, 1)
    right = json.loads(Path(reference).read_text())

    def before_each() -> None:
        if forget:
            settle(engine)
            engine.forget_own_prefixes()

    got = in_batches(engine, prompts, batch, 8, before_each)
    totals = process.counters.totals
    is_there = process.manager.status()["ready"]
    return {
        "unequal": sum(one != two for one, two in zip(got, right, strict=True)),
        "loaded_blocks": totals["loaded_blocks"],
        "failed_blocks": totals["failed_blocks"],
        "errors": totals["errors"],
        "vllm_hits": engine.count("vllm:external_prefix_cache_hits"),
        "kvbm_hits": totals["hit_tokens_g2"],
        "daemon_model": process.layout.daemon_model,
        "left": left_over(engine, free) if is_there else {},
    }


@scenario
def daemon_starts_later(
    model: str,
    folder: str,
    reference: str,
    count: int,
    longest: int,
    host: str,
    ranks: int = 1,
    one_copy: bool = False,
    batch: int = 4,
    forget: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Like `through_daemon`. The daemon starts after the engine, with the model that the engine
    describes.
    """
    engine = Engine(model, through(str(Path(folder) / "run" / "node.sock")), **settings)
    with Daemon(folder, engine.connector._process.layout.daemon_model, host, ranks, one_copy):
        wait_ready(engine)
        return _compared(engine, reference, count, longest, batch, forget)


@scenario
def fill_through_daemon(
    model: str, socket: str, count: int, longest: int, ready: str, **settings: Any
) -> dict[str, Any]:
    """Fills the daemon's host memory, says so, and goes on until it is killed."""
    engine = Engine(model, through(socket), **settings)
    wait_ready(engine)
    engine.tokens(conversations(count, longest, 5), 1)
    settle(engine)
    print(engine.connector._process.counters.totals, flush=True)
    Path(ready).touch()
    seed = 100
    while True:
        engine.tokens(unrelated(4, 200, seed), 4)
        seed += 1


@scenario
def next_life(
    model: str, socket: str, count: int, longest: int, reference: str, **settings: Any
) -> dict[str, Any]:
    """What of the prompts that a killed engine had saved is found in host memory. Nothing is saved
    meanwhile.
    """
    engine = Engine(model, through(socket), **settings)
    engine.loader._save = lambda save, after=None: None
    prompts = conversations(count, longest, 5)
    right = json.loads(Path(reference).read_text())
    found, first, unequal = 0, False, 0
    for prompt, tokens in zip(prompts, right, strict=True):
        engine.forget_own_prefixes()
        (output,) = engine.generate([prompt], 4)
        found += output.num_cached_tokens
        # The very first prompt is a single token.
        first |= prompt is prompts[1] and output.num_cached_tokens > 0
        unequal += list(output.outputs[0].token_ids) != tokens
    totals = engine.connector._process.counters.totals
    return {
        "wanted": sum((len(prompt) - 1) // 32 * 32 for prompt in prompts),
        "found": min(found, int(totals["hit_tokens_g2"])),
        "first": first,
        "unequal": unequal,
        "errors": totals["errors"],
    }


@scenario
def daemon_killed(
    model: str,
    folder: str,
    daemon_model: str,
    reference: str,
    kills: int,
    count: int,
    longest: int,
    **settings: Any,
) -> dict[str, Any]:
    """The daemon is killed while requests run, and started again."""
    daemon = Daemon(folder, daemon_model, "256MiB")
    engine = Engine(model, through(daemon.socket), **settings)
    free, process = engine.free_blocks(), engine.connector._process
    manager, totals = process.manager, process.counters.totals
    wait_ready(engine)
    prompts = prompts_of(count, longest, 1)
    right = json.loads(Path(reference).read_text())
    unequal = ended = attached = loaded = 0
    longest_s = 0.0

    def run(at: int) -> None:
        nonlocal unequal, ended, longest_s
        for prompt, tokens in zip(prompts[at : at + 8], right[at : at + 8], strict=True):
            began = time.monotonic()
            (got,) = engine.tokens([prompt], 8)
            longest_s = max(longest_s, time.monotonic() - began)
            unequal, ended = unequal + (got != tokens), ended + 1

    for turn in range(kills):
        at = turn * 8 % (count - 8)
        run(at)
        engine.forget_own_prefixes()
        timer = threading.Timer(0.05 + 0.1 * (turn % 5), daemon.kill)
        timer.start()
        run(at)
        timer.join()
        engine.forget_own_prefixes()
        run(at)
        daemon.start()
        attached += manager.wait_ready(_PATIENCE)
        engine.forget_own_prefixes()
        run(at)
        settle(engine)
        before = totals["loaded_blocks"]
        engine.forget_own_prefixes()
        run(at)
        loaded += totals["loaded_blocks"] > before
    result = {
        "kills": kills,
        "prompts": 5 * 8 * kills,
        "ended": ended,
        "unequal": unequal,
        "attached": attached,
        "loaded": loaded,
        "failed_blocks": totals["failed_blocks"],
        "errors": totals["errors"],
        "longest_s": longest_s,
        "left": left_over(engine, free),
    }
    daemon.kill()
    return result


@scenario
def first_tokens(
    model: str,
    prompts: int,
    rounds: int,
    length: int,
    folder: str | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Time to the first token of prompts from host memory: of a daemon where there is a folder for
    it.
    """
    socket = None if folder is None else str(Path(folder) / "run" / "node.sock")
    transfer = Engine.kvbm(host="512MiB") if socket is None else through(socket)
    engine = Engine(model, transfer, **settings)
    process, daemon = engine.connector._process, None
    if folder is not None:
        # The engine was first, and attaches when the daemon comes.
        daemon = Daemon(folder, process.layout.daemon_model, "512MiB")
        wait_ready(engine)
    texts = unrelated(prompts, length, 77)
    engine.tokens(unrelated(1, length, 5), 2)
    for text in texts:
        engine.tokens([text], 1)
    assert process.manager.wait_offloads(_PATIENCE)
    times = []
    for turn in range(rounds):
        engine.forget_own_prefixes()
        times.append(first_token(engine, texts[turn % len(texts)]))
    result = {
        "loaded_s": statistics.median(times),
        "loaded_blocks": process.counters.totals["loaded_blocks"],
        "errors": process.counters.totals["errors"],
        "step_p50_us": statistics.median(process.step_ns) / 1e3,
    }
    if daemon is not None:
        daemon.kill()
    return result


if __name__ == "__main__":
    main()
