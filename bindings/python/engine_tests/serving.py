"""The part `serve`: `vllm serve` as an operator starts it. kvbm is installed from its wheel, one
option names the connector, and prompts come over HTTP.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from workload import unrelated

__all__ = ["judge"]

_BLOCK = 32

#: Seconds without a change on disk, after which everything is there.
_QUIET = 2.0

#: What the environment of an operator does not have.
_OURS = ("PYTHONPATH", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL")


class Server:
    """A server of vLLM until the end of the `with`, which stops it as an operator does."""

    def __init__(self, suite: Any, label: str, *arguments: str) -> None:
        self._suite, self._label, self._arguments = suite, label, arguments
        self.log = suite.work / f"serve-{label.replace(' ', '-')}.log"
        self._address = f"http://127.0.0.1:{_free_port()}"

    def __enter__(self) -> Server:
        self._began = time.monotonic()
        environment = {name: value for name, value in os.environ.items() if name not in _OURS}
        environment |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "1"}
        command = Path(sys.prefix) / "bin" / "vllm"
        host, port = self._address.removeprefix("http://").split(":")
        settings = f"--dtype float32 --block-size {_BLOCK} --max-model-len 2048 --enforce-eager"
        print(f"--- serve, {self._label}", flush=True)
        with open(self.log, "w") as log:
            self._process = subprocess.Popen(
                [command, "serve", self._suite.tiny, "--host", host, "--port", port]
                + [*settings.split(), *self._arguments],
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return self

    def is_ready(self) -> bool:
        """Waits until it answers. False where it ended, or does not answer in time."""
        end = self._began + self._suite.patience
        while self._process.poll() is None and time.monotonic() < end:
            try:
                self._get("/health")
                return True
            except OSError:
                time.sleep(0.2)
        return False

    def complete(self, prompts: list[str]) -> list[list[int]]:
        """The tokens that follow each prompt."""
        with ThreadPoolExecutor(4) as requests:
            return list(requests.map(self._complete, prompts))

    def _complete(self, prompt: str) -> list[int]:
        asked = {"model": self._suite.tiny, "prompt": prompt, "max_tokens": 8, "temperature": 0}
        asked |= {"ignore_eos": True, "return_token_ids": True}
        tokens: list[int] = json.loads(self._get("/v1/completions", asked))["choices"][0][
            "token_ids"
        ]
        return tokens

    def count(self, name: str) -> float:
        """A counter of vLLM's."""
        lines = re.findall(rf"^vllm:{name}_total{{.*}} (\S+)$", self._get("/metrics"), re.MULTILINE)
        return sum(map(float, lines))

    def _get(self, path: str, body: Any = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._address + path, data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=self._suite.patience) as answer:
            return str(answer.read().decode())

    def __exit__(self, *_raised: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._suite.check(f"serve, {self._label}: it stops", False, f"see {self.log}")
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        seconds = round(time.monotonic() - self._began, 1)
        self._suite.details[f"serve, {self._label}"] = {"seconds": seconds}
        print(f"    {seconds} s", flush=True)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def judge(suite: Any) -> None:
    """Runs servers and says what must hold of them."""
    import kvbm_rs

    is_installed = Path(kvbm_rs.__file__).is_relative_to(sys.prefix)
    version = importlib.metadata.version("kvbm-rs")
    suite.check("serve: kvbm is installed", is_installed, f"{version}, {kvbm_rs.__file__}")
    lengths = range(100, 700, 50)
    tokens = [unrelated(1, length, 500 + length)[0] for length in lengths]
    # The tokenizer has a word for each token.
    prompts = [" ".join(f"t{token}" for token in prompt) for prompt in tokens]
    wanted = sum((length - 1) // _BLOCK * _BLOCK for length in lengths)
    disk = Path(suite.fresh("disk-serve"))
    # One process less, and the same tokens.
    right = _life(suite, "without kvbm", prompts, disk, "--distributed-executor-backend", "uni")
    options = {"host": "64MiB", "disk": str(disk), "disk_capacity": "1GiB"}
    transfer = {"kv_connector": "KvbmConnector", "kv_role": "kv_both"}
    transfer |= {"kv_load_failure_policy": "recompute", "kv_connector_extra_config": options}
    line = ("--kv-transfer-config", json.dumps(transfer))
    first = _life(suite, "first life", prompts, disk, *line)
    second = _life(suite, "after a restart", prompts, disk, *line)
    for label, life in (("first life", first), ("after a restart", second)):
        for what, holds in {
            "tokens are those of a server without kvbm": "tokens" in right
            and life.get("tokens") == right["tokens"],
            "the log says what the connector does": "GiB of host memory" in life.get("line", ""),
            "no block failed": life.get("failed_blocks") == 0,
            "no error inside the connector": life.get("errors") == 0,
        }.items():
            suite.check(f"serve, {label}: {what}", holds, life)
    share = second.get("hit_tokens_g3", 0) / wanted
    suite.row("serve_restart_hits", share)
    suite.check("serve: everything is found on disk after a restart", share == 1, second)
    if not suite.quick:
        _judge_stop(suite, prompts, right, wanted, options)
    is_ours = bool(second) and second["external_hits"] == second["hit_tokens_g3"]
    suite.check("serve: vLLM's external hits are kvbm's", is_ours, second)


def _judge_stop(
    suite: Any, prompts: list[str], right: dict[str, Any], wanted: int, options: dict[str, Any]
) -> None:
    """Workers in processes of their own, and a stop that is given time: vLLM ends the workers
    before the scheduler. Nothing goes to disk before, so everything has to be saved then.
    """
    disk = Path(suite.fresh("disk-stop"))
    options = options | {"disk": str(disk), "offload.g2_g3.write_through": False}
    options |= {"offload.g2_g3.watermark": 1, "offload.g2_g3.ahead_share": 0}
    options |= {"offload.g2_g3.idle_iterations": 0}
    transfer = {"kv_connector": "KvbmConnector", "kv_role": "kv_both"}
    transfer |= {"kv_load_failure_policy": "recompute", "kv_connector_extra_config": options}
    line = ("--kv-transfer-config", json.dumps(transfer), "--distributed-executor-backend", "mp")
    line = (*line, "--shutdown-timeout", "60")
    lives = {
        label: _life(suite, label, prompts, disk, *line, waits=False)
        for label in ("stopped in time", "after the stop")
    }
    second = lives["after the stop"]
    suite.row("serve_stop_hits", second.get("hit_tokens_g3", 0) / wanted)
    log = (suite.work / "serve-stopped-in-time.log").read_text()
    # Those of the connector, and those of the Rust code.
    warnings = re.findall(r"^.*WARNING.*(?:kvbm: |\[logs\.py).*$", log, re.MULTILINE)
    for what, holds, found in (
        ("everything is found on disk", second.get("hit_tokens_g3") == wanted, second),
        ("tokens are right", "tokens" in right and second.get("tokens") == right["tokens"], second),
        ("the log has no warning of kvbm", not warnings, warnings),
    ):
        suite.check(f"serve, stopped in time: {what}", holds, found)


def _life(
    suite: Any, label: str, prompts: list[str], disk: Path, *arguments: str, waits: bool = True
) -> dict[str, Any]:
    """Tokens and counters of a server's life; nothing where it does not answer. `waits`: it is
    stopped when what it computed is on disk.
    """
    with Server(suite, label, *arguments) as server:
        is_ready = server.is_ready()
        suite.check(f"serve, {label}: it answers", is_ready, f"see {server.log}")
        if not is_ready:
            return {}
        found: dict[str, Any] = {"tokens": server.complete(prompts)}
        names = ("hit_tokens_g2", "hit_tokens_g3", "saved_blocks", "loaded_blocks")
        for name in (*names, "failed_blocks", "errors"):
            found[name] = server.count(f"kvbm_{name}")
        found["external_hits"] = server.count("external_prefix_cache_hits")
        lines = re.findall(r"kvbm: .*\(ready in .*", server.log.read_text())
        found["line"] = lines[0] if lines else ""
        if waits:
            _wait_written(disk)
    counts = {name: value for name, value in found.items() if name != "tokens"}
    print(f"    {json.dumps(counts)}", flush=True)
    return found


def _wait_written(disk: Path) -> None:
    """Until no journal changes any more. vLLM's processes are killed when a server is stopped,
    unless it is given time (`--shutdown-timeout`).
    """
    while any(time.time() - file.stat().st_mtime < _QUIET for file in disk.rglob("journal.kvbm")):
        time.sleep(0.2)
