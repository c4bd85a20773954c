"""Runs the scenarios with a real vLLM and judges them.

    python suite.py --work FOLDER --json FILE [--quick] [--only NAME]...

Each scenario is a process of its own. The file has `{"rows": [{"name", "value"}], "checks": [...], "details": {...}}`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import audits
import daemon
import faults
import groups
import model

HERE = Path(__file__).parent


class Suite:
    """Scenarios that ran, the rows that they give, and what must hold of them."""

    def __init__(self, work: Path, quick: bool) -> None:
        self.work, self.quick = work, quick
        self.rows: list[dict[str, Any]] = []
        self.checks: list[dict[str, Any]] = []
        self.targets: list[dict[str, Any]] = []
        self.details: dict[str, Any] = {}
        self.has_restart_reference = False
        #: Seconds for a scenario; other work on the machine may slow it down several times.
        self.patience = 900 if quick else 3600
        self.tiny, self.small = str(work / "tiny"), str(work / "small")

    def run(
        self,
        label: str,
        name: str,
        environment: dict[str, str] | None = None,
        program: str = "scenarios.py",
        **arguments: Any,
    ) -> dict[str, Any]:
        """Runs a scenario; an empty result where it failed, which is a failed check."""
        began = time.monotonic()
        print(f"--- {label}", flush=True)
        command = [sys.executable, str(HERE / program), name, json.dumps(arguments)]
        log = self.work / f"{label.replace(' ', '-')}.log"
        with open(log, "w") as file:
            try:
                done = subprocess.run(
                    command,
                    stdout=subprocess.PIPE,
                    stderr=file,
                    text=True,
                    timeout=self.patience,
                    env=os.environ | (environment or {}),
                )
            except subprocess.TimeoutExpired:
                self.check(f"{label}: ends", False, f"not within {self.patience} s")
                return {}
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        result: dict[str, Any] = json.loads(lines[-1][7:]) if lines else {}
        seconds = time.monotonic() - began
        self.details[label] = {"seconds": round(seconds, 1), **result}
        print(f"    {seconds:.1f} s: {json.dumps(result)}", flush=True)
        if not lines:
            self.check(f"{label}: ends", False, f"exit status {done.returncode}, see {log}")
        return result

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

    # ------------------------------------------------------------- scenarios

    def attributes(self) -> None:
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

    def equality(self) -> None:
        count, longest, length = (60, 1500, 2048) if self.quick else (500, 8192, 8448)
        size = {"count": count, "longest": longest, "max_model_len": length}
        right = str(self.work / "reference.json")
        self.run("reference", "reference", model=self.tiny, out=right, **size)
        small_g1 = {"num_gpu_blocks_override": (length // 32) * 3 // 2}
        tight = {"num_gpu_blocks_override": length // 32 + 4, "max_num_seqs": 8, "batch": 8}
        kinds: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
            "equal async": ({}, small_g1),
            "equal sync": ({"load": "sync"}, small_g1 | {"async_scheduling": False}),
            # The quick form has one engine less.
            "equal chunked": (
                {"hashes": "own"} if self.quick else {},
                small_g1 | {"enable_chunked_prefill": True, "max_num_batched_tokens": 256},
            ),
            "equal preempted": ({}, tight),
        }
        if not self.quick:
            kinds["equal not chunked"] = (
                {},
                small_g1 | {"enable_chunked_prefill": False, "max_num_batched_tokens": length},
            )
            kinds["equal own hashes"] = ({"hashes": "own"}, small_g1)
            kinds["equal random root"] = ({}, small_g1 | {"prefix_caching_hash_algo": "xxhash"})
            kinds["equal on disk"] = (
                {"host": "24MiB", "disk_capacity": "2GiB", "offload.g2_g3.write_through": True},
                small_g1,
            )
        unequal, disagree = 0, 0.0
        for label, (options, settings) in kinds.items():
            options = {"host": "1GiB", **options}
            if "disk_capacity" in options:
                options["disk"] = self.fresh("disk-equality")
            found = self.run(
                label,
                "equality",
                model=self.tiny,
                reference=right,
                options=options,
                **size,
                **settings,
            )
            if not found:
                unequal += count
                continue
            unequal += found["unequal"]
            self.check(
                f"{label}: prompts of 1 to {longest} tokens",
                found["lengths"] == [1, longest],
                found["lengths"],
            )
            self.check(
                f"{label}: blocks were loaded", found["loaded_blocks"] > 0, found["loaded_blocks"]
            )
            self.check(
                f"{label}: nothing is left behind", not any(found["left"].values()), found["left"]
            )
            self.check(
                f"{label}: no error inside the connector", found["errors"] == 0, found["errors"]
            )
            if label == "equal preempted":
                self.check(
                    f"{label}: requests were preempted",
                    found["preemptions"] > 0,
                    found["preemptions"],
                )
            disagree += abs(found["vllm_hits"] - found["kvbm_hits"])
        self.row("unequal_prompts", unequal)
        self.check("tokens are those without a connector", unequal == 0, unequal)
        self.row("hits_agree", float(disagree == 0))
        self.check("vLLM's external hits are ours", disagree == 0, disagree)
        control = self.run(
            "control flipped bit",
            "equality",
            model=self.tiny,
            reference=right,
            options={"host": "1GiB"},
            flip=True,
            **size,
            **small_g1,
        )
        shadow = self.run("shadow", "shadow", model=self.tiny, reference=right, **size, **small_g1)
        self.check(
            "shadow mode changes no token", shadow.get("unequal") == 0, shadow.get("unequal")
        )
        self.check(
            "shadow mode counts hits",
            shadow.get("shadow_hit_tokens", 0) > 0,
            shadow.get("shadow_hit_tokens"),
        )
        self.check(
            "shadow mode loads nothing",
            shadow.get("loaded_blocks") == shadow.get("vllm_hits") == 0,
            shadow,
        )
        differs = control.get("unequal", 0) > 0 and control.get("flipped", 0) > 0
        self.row("control_differs", float(differs))
        self.check("one wrong bit in a loaded block changes tokens", differs, control)

    def processes(self) -> None:
        """Workers in processes of their own: one rank, and two."""
        # vLLM binds ranks to NUMA nodes, or to the cores that this names.
        cores = sorted(os.sched_getaffinity(0))
        bound = {"VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"}
        if not self.quick:
            self.equal_processes("one worker", {}, {"distributed_executor_backend": "mp"})
            self.equal_processes("two ranks", bound, {"tensor_parallel_size": 2})
        found = self.run(
            "one rank fails",
            "failures",
            bound,
            model=self.tiny,
            disk=self.fresh("disk-rank-fails"),
            rounds=6 if self.quick else 24,
            kinds=["corrupt_rank_1", "late", "stopped"],
            options={
                "host": "64MiB",
                "disk_capacity": "512MiB",
                "disk.drive_writes_per_day": 0,
                "disk.read_deadline": f"{faults.DEADLINE:g}s",
                "transfer.deadline": f"{faults.DEADLINE:g}s",
            },
            max_model_len=2048,
            tensor_parallel_size=2,
        )
        self.row("processes_unequal", found.get("unequal", 1))
        self.check("two ranks: tokens are right", found.get("unequal") == 0, found)
        self.check("two ranks: blocks were loaded", found.get("loaded_blocks", 0) > 0, found)
        self.check(
            "two ranks: what one rank cannot load is computed",
            found.get("failed_blocks", 0) > 0,
            found,
        )
        self.check(
            "two ranks: nothing is left behind",
            not any(found.get("left", {"": 1}).values()),
            found.get("left"),
        )

    def equal_processes(
        self, label: str, environment: dict[str, str], settings: dict[str, Any]
    ) -> None:
        """The same tokens as without a connector, in an engine with the same processes."""
        size = {"count": 200, "longest": 4000, "max_model_len": 4608}
        right = str(self.work / f"{label.replace(' ', '-')}.json")
        self.run(
            f"reference {label}",
            "reference",
            environment,
            model=self.tiny,
            out=right,
            **size,
            **settings,
        )
        found = self.run(
            f"equal {label}",
            "equality",
            environment,
            model=self.tiny,
            reference=right,
            options={"host": "512MiB"},
            num_gpu_blocks_override=216,
            **size,
            **settings,
        )
        self.check(f"{label}: tokens are right", found.get("unequal") == 0, found)
        self.check(f"{label}: blocks were loaded", found.get("loaded_blocks", 0) > 0, found)
        self.check(
            f"{label}: vLLM's external hits are ours",
            bool(found) and found["vllm_hits"] == found["kvbm_hits"],
            found,
        )
        self.check(
            f"{label}: nothing is left behind",
            not any(found.get("left", {"": 1}).values()),
            found.get("left"),
        )
        self.check(f"{label}: no error inside the connector", found.get("errors") == 0, found)

    def restart(self) -> None:
        count, longest = (16, 800) if self.quick else (60, 4000)
        size = {"count": count, "longest": longest, "max_model_len": 8448}
        right = str(self.work / "restart.json")
        self.restart_reference(right, size)
        options = {
            "host": "256MiB",
            "disk_capacity": "2GiB",
            "offload.g2_g3.write_through": True,
            "disk.drive_writes_per_day": 0,
        }
        seeds: list[tuple[str, dict[str, str]]] = [
            ("hash seed unset", {}),
            ("hash seed set", {"PYTHONHASHSEED": "7"}),
        ]
        for label, environment in seeds:
            disk = self.fresh("disk-restart")
            self.fill_and_kill(label, disk, size, options, environment)
            found = self.run(
                f"restart {label}",
                "after_restart",
                environment,
                model=self.tiny,
                disk=disk,
                reference=right,
                options=options,
                **size,
            )
            share = found.get("found", 0) / max(1, found.get("wanted", 1))
            self.row(f"restart_hits {label}", share)
            self.check(f"restart, {label}: 95 % of what was flushed is found", share >= 0.95, share)
            self.check(
                f"restart, {label}: tokens are right",
                found.get("unequal") == 0,
                found.get("unequal"),
            )
            salted = found.get("found_with_salt")
            self.check(f"restart, {label}: no hit with another salt", salted == 0, salted)
        others: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
            ("other weights", {"weights": "2"}, {}),
            ("other block size", {}, {"block_size": 64}),
            ("other dtype", {}, {"dtype": "bfloat16"}),
            ("other revision", {}, {"revision": "another"}),
        ]
        # The same hash seed as the last engine that filled the directory.
        for label, more, settings in others if not self.quick else others[:1]:
            found = self.run(
                f"restart {label}",
                "after_restart",
                environment,
                model=self.tiny,
                disk=disk,
                options=options | more,
                **size,
                **settings,
            )
            self.check(f"{label}: no hit", found.get("found") == 0, found.get("found"))
        if not self.quick:
            self.restart_with_adapter(disk, size, options, environment)

    def restart_reference(self, out: str, size: dict[str, Any]) -> None:
        """What is right of the prompts of `restart` and `tier`; once."""
        if not self.has_restart_reference:
            self.run("restart reference", "restart_reference", model=self.tiny, out=out, **size)
            self.has_restart_reference = True

    def restart_with_adapter(
        self,
        disk: str,
        size: dict[str, Any],
        options: dict[str, Any],
        environment: dict[str, str],
    ) -> None:
        """Blocks of the model itself are found, blocks of an adapter are others."""
        adapter = self.work / "adapter"
        model.write_adapter(adapter, "tiny")
        found = self.run(
            "restart adapter",
            "after_restart",
            environment,
            model=self.tiny,
            disk=disk,
            adapter=str(adapter),
            options=options,
            **size,
        )
        share = found.get("found", 0) / max(1, found.get("wanted", 1))
        self.check("adapter: the model's own blocks are found", share >= 0.95, found)
        self.check("adapter: its tokens are others", found.get("adapter_differs", False), found)
        self.check("adapter: no hit", found.get("found_with_adapter") == 0, found)

    def fill_and_kill(
        self,
        label: str,
        disk: str,
        size: dict[str, Any],
        options: dict[str, Any],
        environment: dict[str, str],
        model: str | None = None,
    ) -> None:
        """An engine that is killed under load after its disk was flushed. With another model than
        the tiny one, no second engine is started beside it.
        """
        ready = self.work / "ready"
        ready.unlink(missing_ok=True)
        arguments = {
            "model": model or self.tiny,
            "disk": disk,
            "options": options,
            "ready": str(ready),
            **size,
        }
        command = [
            sys.executable,
            str(HERE / "scenarios.py"),
            "fill_and_wait",
            json.dumps(arguments),
        ]
        with open(self.work / "fill.log", "w") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, env=os.environ | environment
            )
            try:
                end = time.monotonic() + 600
                while not ready.exists() and process.poll() is None and time.monotonic() < end:
                    time.sleep(0.1)
                if model is None and not (self.quick and environment):
                    self.second_engine(label, disk, size, options, environment, process.pid)
            finally:
                process.send_signal(signal.SIGKILL)
                process.wait()
        self.check(f"fill, {label}", ready.exists(), "see fill.log")

    def second_engine(
        self,
        label: str,
        disk: str,
        size: dict[str, Any],
        options: dict[str, Any],
        environment: dict[str, str],
        holder: int,
    ) -> None:
        """One on a directory that another process uses."""
        second = self.run(
            f"second engine, {label}",
            "second_engine",
            environment,
            model=self.tiny,
            disk=disk,
            options=options,
            max_model_len=size["max_model_len"],
        )
        self.check(
            f"second engine, {label}: it is told who holds the directory",
            f"process {holder}" in second.get("error", ""),
            second,
        )

    def failures(self) -> None:
        rounds = 16 if self.quick else 100
        options = {
            "host": "64MiB",
            "disk_capacity": "1GiB",
            "offload.g2_g3.write_through": True,
            "disk.drive_writes_per_day": 0,
            "disk.read_deadline": f"{faults.DEADLINE:g}s",
            "volumes.longest_pause": "1s",
        }
        disk = self.fresh("disk-failures")
        found = self.run(
            "failures",
            "failures",
            model=self.tiny,
            disk=disk,
            rounds=rounds,
            options=options,
            max_model_len=2048,
        )
        self.row("failure_rounds_unequal", found.get("unequal", rounds))
        self.check(
            "failed loads: tokens are right", found.get("unequal") == 0, found.get("unequal")
        )
        self.check(
            "failed loads: blocks failed",
            found.get("failed_blocks", 0) > 0,
            found.get("failed_blocks"),
        )
        self.check(
            "failed loads: nothing is left behind",
            not any(found.get("left", {"": 1}).values()),
            found.get("left"),
        )

    def latency(self) -> None:
        prompts, rounds = (4, 12) if self.quick else (6, 24)
        base = {
            "prompts": prompts,
            "rounds": rounds,
            "length": 2048,
            "model": self.small,
            "max_model_len": 4096,
        }
        disk = {
            "host": "512MiB",
            "disk": self.fresh("disk-latency"),
            "disk_capacity": "1GiB",
            "offload.g2_g3.write_through": True,
            "disk.drive_writes_per_day": 0,
        }
        # Fills the disk, too.
        kvbm = self.run("ttft kvbm G2", "latency", kind="kvbm", options=disk, **base)
        native = self.run("ttft native", "latency", kind="native", options={}, **base)
        cold = {**base, "rounds": prompts, "prompts": prompts}
        self.drop_page_cache()
        from_disk = self.run(
            "ttft kvbm G3", "latency", kind="kvbm", options=disk | {"reuse_disk": True}, **cold
        )
        files = self.fresh("files")
        self.run(
            "ttft native file fill", "latency", kind="native_file", options={}, files=files, **base
        )
        self.drop_page_cache()
        native_file = self.run(
            "ttft native file",
            "latency",
            kind="native_file",
            options={"reuse_disk": True},
            files=files,
            **cold,
        )
        if kvbm and native:
            floor = kvbm["own_hit_s"] + kvbm["copy_s"] + 2 * kvbm["empty_step_s"]
            self.row("ttft_computed_s", kvbm["computed_s"])
            self.row("ttft_own_hit_s", kvbm["own_hit_s"])
            self.row("ttft_g2_s", kvbm["loaded_s"])
            self.row("ttft_native_s", native["loaded_s"])
            self.row("ttft_floor_s", floor)
            self.row("ttft_g2_over_native", kvbm["loaded_s"] / native["loaded_s"])
            self.row("ttft_g2_over_floor", kvbm["loaded_s"] / floor)
            self.target(
                "G2 is not slower than native offloading",
                kvbm["loaded_s"] <= native["loaded_s"],
                self.rows[-2],
            )
            self.target(
                "G2 within 1.25 of the floor", kvbm["loaded_s"] <= 1.25 * floor, self.rows[-1]
            )
        if from_disk and native_file:
            self.row("ttft_g3_s", from_disk["loaded_s"])
            self.row("ttft_native_file_s", native_file["loaded_s"])
            ratio = from_disk["loaded_s"] / native_file["loaded_s"]
            self.row("ttft_g3_over_native_file", ratio)
            self.target("G3 is not slower than the native file tier", ratio <= 1, ratio)

    def tier(self) -> None:
        """kvbm's disk, and vLLM's files, behind vLLM's own CPU offloading, with a restart."""
        count, longest = (16, 800) if self.quick else (60, 4000)
        size = {"count": count, "longest": longest, "max_model_len": 8448}
        right = str(self.work / "restart.json")
        self.restart_reference(right, size)
        seconds: dict[str, float] = {}
        for kind in ("kvbm",) if self.quick else ("kvbm", "files"):
            base = {"kind": kind, "folder": self.fresh(f"tier-{kind}"), "reference": right}
            first = self.run(f"tier {kind} fill", "tiering", model=self.tiny, **base, **size)
            self.drop_page_cache()
            again = self.run(f"tier {kind} restart", "tiering", model=self.tiny, **base, **size)
            for label, found in (("fill", first), ("restart", again)):
                self.check(
                    f"tier {kind}, {label}: tokens are right",
                    found.get("unequal") == 0,
                    found,
                )
            share = again.get("found", 0) / max(1, again.get("wanted", 1))
            self.row(f"tier_restart_hits {kind}", share)
            seconds[kind] = again.get("median_s", 0.0)
            if kind == "kvbm":
                self.check("tier kvbm: 95 % is found after a restart", share >= 0.95, again)
                failures = first.get("failures"), again.get("failures")
                self.check("tier kvbm: nothing failed", failures == ({}, {}), failures)
        if len(seconds) == 2 and all(seconds.values()):
            self.row("tier_ttft_over_files", seconds["kvbm"] / seconds["files"])

    def throughput(self) -> None:
        rounds = 3 if self.quick else 8
        base = {
            "model": self.small,
            "prompts": 8,
            "length": 512,
            "rounds": rounds,
            "max_model_len": 2048,
        }
        rates: dict[bool, list[float]] = {False: [], True: []}
        steps = 0.0
        # By turns, so that a machine that grows slower does so for both.
        for turn in range(1 if self.quick else 3):
            for with_kvbm in (False, True):
                label = f"throughput {'kvbm' if with_kvbm else 'none'} {turn}"
                found = self.run(
                    label, "throughput", use_kvbm=with_kvbm, options={"host": "512MiB"}, **base
                )
                rates[with_kvbm].append(found.get("tokens_per_s", 0.0))
                steps = max(steps, found.get("step_p50_us", 0.0))
        ratio = max(rates[True]) / max(max(rates[False]), 1e-9)
        self.row("no_reuse_throughput", ratio)
        self.row("step_p50_us", steps)
        self.target("without reuse 98 % of the throughput", ratio >= 0.98, ratio)
        self.target("200 us of a step at most", steps <= 200, steps)

    # --------------------------------------------------------------- helpers

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
    parts: dict[str, Callable[[], None]] = {
        "attributes": suite.attributes,
        "equality": suite.equality,
        "processes": suite.processes,
        "restart": suite.restart,
        "failures": suite.failures,
        "audit": lambda: audits.judge(suite),
        "groups": lambda: groups.judge(suite),
        "daemon": lambda: daemon.judge(suite),
        "tier": suite.tier,
        "latency": suite.latency,
        "throughput": suite.throughput,
    }
    unknown = [name for name in options.only if name not in parts]
    if unknown:
        parser.error(f"no part is called {unknown[0]!r}: {', '.join(parts)}")
    for name, part in parts.items():
        if not options.only or name in options.only:
            print(f"=== {name}", flush=True)
            part()
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
