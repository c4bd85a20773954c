"""Runs the scenarios with a real vLLM and judges them.

    python suite.py --work FOLDER --json FILE [--quick] [--only NAME]...

Each scenario is a process of its own. The file has `{"rows": [{"name", "value"}], "checks": [...],
"details": {...}}`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import audits
import daemon
import equality
import events
import failures
import groups
import layers
import model
import processes
import restarts
import serving
import speculation
import tiering
import times
from starter import start


class Suite:
    """Scenarios that ran, the rows that they give, and what must hold of them."""

    def __init__(self, work: Path, quick: bool) -> None:
        self.work, self.quick = work, quick
        self.rows: list[dict[str, Any]] = []
        self.checks: list[dict[str, Any]] = []
        self.targets: list[dict[str, Any]] = []
        self.details: dict[str, Any] = {}
        twice = {"count": 60, "longest": 1500, "max_model_len": 2048}
        restart = {"count": 16, "longest": 800, "max_model_len": 8448}
        #: Prompts of the tiny model: how many, the longest, and vLLM's limit.
        # Requests that grow: those that run together do not fit, and vLLM preempts some.
        preempted = {"count": 60, "longest": 700, "max_model_len": 2048, "tokens": 128}
        self.sizes = {"twice": twice, "daemon": twice, "restart": restart, "preempted": preempted}
        if not quick:
            self.sizes = {
                "twice": {"count": 500, "longest": 8192, "max_model_len": 8448},
                "daemon": {"count": 200, "longest": 4000, "max_model_len": 4608},
                "restart": restart | {"count": 60, "longest": 4000},
                "preempted": preempted | {"count": 500, "longest": 8192, "max_model_len": 8448},
            }
        #: Files of the right tokens. Prompts of one size and kind are one list.
        self.right = {kind: str(work / f"right-{kind}.json") for kind in self.sizes}
        if quick:
            self.right["daemon"] = self.right["twice"]
        #: Seconds for a scenario; other work on the machine may slow it down several times.
        self.patience = 900 if quick else 3600
        self.tiny, self.small = str(work / "tiny"), str(work / "small")
        self.one_head = str(work / "one-head")

    def run(
        self,
        label: str,
        name: str,
        environment: dict[str, str] | None = None,
        program: str = "scenarios.py",
        fresh: bool = False,
        **arguments: Any,
    ) -> dict[str, Any]:
        """Runs a scenario; an empty result where it failed, which is a failed check. A fresh one
        has an interpreter of its own from the start.
        """
        began = time.monotonic()
        process, log, result = self._start(label, name, environment, program, fresh, arguments)
        process.join(self.patience)
        if process.is_alive():
            process.kill()
            process.join()
            self.check(f"{label}: ends", False, f"not within {self.patience} s")
            return {}
        found: dict[str, Any] = json.loads(result.read_text()) if result.exists() else {}
        seconds = time.monotonic() - began
        self.details[label] = {"seconds": round(seconds, 1), **found}
        print(f"    {seconds:.1f} s: {json.dumps(found)}", flush=True)
        if not found:
            self.check(f"{label}: ends", False, f"exit status {process.exitcode}, see {log}")
        return found

    @contextmanager
    def running(
        self,
        label: str,
        name: str,
        environment: dict[str, str] | None = None,
        program: str = "scenarios.py",
        fresh: bool = False,
        **arguments: Any,
    ) -> Iterator[BaseProcess]:
        """A scenario that creates the file `ready` and goes on; it is killed at the end."""
        began, ready = time.monotonic(), self.work / "ready"
        ready.unlink(missing_ok=True)
        arguments |= {"ready": str(ready)}
        process, log, _ = self._start(label, name, environment, program, fresh, arguments)
        try:
            end = began + self.patience
            while not ready.exists() and process.is_alive() and time.monotonic() < end:
                time.sleep(0.1)
            self.check(f"{label}: it was ready", ready.exists(), f"see {log}")
            yield process
        finally:
            process.kill()
            process.join()
            self.details[label] = {"seconds": round(time.monotonic() - began, 1)}

    def _start(
        self,
        label: str,
        name: str,
        environment: dict[str, str] | None,
        program: str,
        fresh: bool,
        arguments: dict[str, Any],
    ) -> tuple[BaseProcess, Path, Path]:
        print(f"--- {label}", flush=True)
        file = self.work / label.replace(" ", "-").replace(",", "")
        log, result = file.with_suffix(".log"), file.with_suffix(".result")
        process = start(program, name, arguments, environment or {}, log, result, fresh)
        return process, log, result

    def row(self, name: str, value: float) -> None:
        """A figure of the report."""
        self.rows.append({"name": name, "value": round(value, 6)})
        print(f"    {name} = {value:.4g}", flush=True)

    def check(self, what: str, holds: bool, found: Any) -> None:
        """What must hold; else the run fails."""
        self.checks.append({"check": what, "holds": bool(holds), "found": found})
        if not holds:
            print(f"    FAILED: {what}: {found}", flush=True)

    def target(self, what: str, holds: bool, found: Any) -> None:
        """A time that is to be reached. The quick form measures too little to fail for it."""
        if not self.quick:
            self.check(what, holds, found)
            return
        self.targets.append({"target": what, "holds": bool(holds), "found": found})
        if not holds:
            print(f"    MISSED: {what}: {found}", flush=True)

    def attributes(self) -> None:
        """Names of vLLM."""
        found = self.run("attributes", "attributes")
        self.check(
            "vLLM has what the connector uses", found.get("missing") == [], found.get("missing")
        )
        names = [
            "vllm.v1.request.Request.a_dropped_attribute",
            "vllm.v1.dropped",
            "vllm.v1.request.DroppedClass",
        ]
        self.check(
            "what an upgrade drops is named", found.get("named") == names, found.get("named")
        )

    def compute_references(self, kinds: set[str]) -> None:
        """What is right of the tiny model's prompts of these kinds: all of it by one engine."""
        wanted = {
            self.right[kind]: {"twice": kind != "restart", **self.sizes[kind]} for kind in kinds
        }
        if wanted:
            longest = max(self.sizes[kind]["max_model_len"] for kind in kinds)
            self.run(
                "references",
                "references",
                program="equality.py",
                model=self.tiny,
                wanted=wanted,
                max_model_len=longest,
            )

    def fresh(self, name: str) -> str:
        """An empty folder."""
        folder = self.work / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return str(folder)

    def drop_page_cache(self) -> None:
        """For both sides; where that is not allowed the report says so."""
        os.sync()
        try:
            Path("/proc/sys/vm/drop_caches").write_text("1")
            dropped = True
        except OSError:
            dropped = False
        self.details["page_cache_dropped"] = dropped


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", action="append", default=[])
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    for shape in model.SHAPES:
        model.write(options.work / shape, shape)
    suite = Suite(options.work, options.quick)
    #: What each part runs, and the right tokens that it needs.
    parts: dict[str, tuple[Callable[[], None], set[str]]] = {
        "attributes": (suite.attributes, set()),
        "equality": (lambda: equality.judge(suite), {"twice", "preempted"}),
        "layers": (lambda: layers.judge(suite), {"twice"}),
        "speculation": (lambda: speculation.judge(suite), set()),
        "processes": (lambda: processes.judge(suite), set()),
        "serve": (lambda: serving.judge(suite), set()),
        "restart": (lambda: restarts.judge(suite), {"restart"}),
        "failures": (lambda: failures.judge(suite), set()),
        "events": (lambda: events.judge(suite), set()),
        "audit": (lambda: audits.judge(suite), set()),
        "groups": (lambda: groups.judge(suite), set()),
        "daemon": (lambda: daemon.judge(suite), {"daemon", "restart"}),
        "tier": (lambda: tiering.judge(suite), {"restart"}),
        "latency": (lambda: times.judge_latency(suite), set()),
        "throughput": (lambda: times.judge_throughput(suite), set()),
    }
    unknown = [name for name in options.only if name not in parts]
    if unknown:
        parser.error(f"no part is called {unknown[0]!r}: {', '.join(parts)}")
    # What only measures says nothing in the quick form, whose engines are not optimised.
    usual = parts.keys() - ({"latency", "throughput"} if options.quick else set())
    chosen = {name: part for name, part in parts.items() if name in (options.only or usual)}
    suite.compute_references(set().union(*(kinds for _, kinds in chosen.values())))
    for name, (judge, _) in chosen.items():
        print(f"=== {name}", flush=True)
        judge()
    report = {
        "quick": options.quick,
        "rows": suite.rows,
        "checks": suite.checks,
        "targets": suite.targets,
        "details": suite.details,
    }
    options.json.write_text(json.dumps(report, indent=1))
    failed = [check for check in suite.checks if not check["holds"]]
    for check in failed:
        print(f"FAILED {check['check']}: {check['found']}")
    print(f"{len(suite.checks) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
