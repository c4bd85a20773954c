"""The part `tier`: vLLM's own offloading with a tier below its CPU tier, kvbm's or vLLM's files.

python tiering.py NAME '{"model": FOLDER, ...}'
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

from engine import Engine
from scenarios import is_clean, left_in, main, scenario
from workload import conversations

__all__ = ["files_tier", "judge", "native"]

#: Of vLLM's CPU tier below which a tier is tested: less than the prompts need.
_CPU_BYTES = 24 << 20


def judge(suite: Any) -> None:
    """kvbm's disk, and vLLM's files, behind vLLM's own CPU offloading, with a restart."""
    size, right = suite.sizes["restart"], suite.right["restart"]
    seconds: dict[str, float] = {}
    for kind in ("kvbm",) if suite.quick else ("kvbm", "files"):
        base = {
            "program": "tiering.py",
            "model": suite.tiny,
            "kind": kind,
            "folder": suite.fresh(f"tier-{kind}"),
            "reference": right,
        }
        first = suite.run(f"tier {kind} fill", "tiering", **base, **size)
        suite.drop_page_cache()
        again = suite.run(f"tier {kind} restart", "tiering", **base, **size)
        for label, found in (("fill", first), ("restart", again)):
            suite.check(
                f"tier {kind}, {label}: tokens are right",
                found.get("unequal") == 0,
                found,
            )
        share = again.get("found", 0) / max(1, again.get("wanted", 1))
        suite.row(f"tier_restart_hits {kind}", share)
        seconds[kind] = again.get("median_s", 0.0)
        if kind == "kvbm":
            suite.check("tier kvbm: 95 % is found after a restart", share >= 0.95, again)
            failures = first.get("failures"), again.get("failures")
            suite.check("tier kvbm: nothing failed", failures == ({}, {}), failures)
            left = first.get("left"), again.get("left")
            suite.check(
                "tier kvbm: nothing is left behind", is_clean(first) and is_clean(again), left
            )
    if len(seconds) == 2 and all(seconds.values()):
        suite.row("tier_ttft_over_files", seconds["kvbm"] / seconds["files"])


def native(host_bytes: int, tier: dict[str, Any] | None) -> dict[str, Any]:
    """vLLM's own offloading, whose copies this project's tests make with torch: it has no form for
    the CPU.
    """
    extra: dict[str, Any] = {
        "cpu_bytes_to_use": host_bytes,
        "spec_name": "HostSpec" if tier is None else "HostTieringSpec",
        "spec_module_path": "native_offloading",
    }
    if tier is not None:
        extra["secondary_tiers"] = [tier]
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


def files_tier(folder: str) -> dict[str, Any]:
    """vLLM's file tier."""
    return {"type": "fs", "root_dir": folder, "n_read_threads": 4, "n_write_threads": 4}


def kvbm_tier(folder: str) -> dict[str, Any]:
    """kvbm's disk."""
    return {
        "type": "KvbmTier",
        "module_path": "kvbm_rs.vllm",
        "disk": folder,
        "disk_capacity": "1GiB",
        "disk.drive_writes_per_day": 0,
        "policy.admission": "all",
    }


def settle(engine: Engine) -> None:
    """Until no copy between vLLM's CPU tier and the tier below runs."""
    manager = engine.connector.connector_scheduler.manager
    end = time.monotonic() + 60
    while manager.has_pending_work():
        assert time.monotonic() < end, "copies of the tier do not end"
        engine.tokens([[5] * 8], 1)


@scenario
def tiering(
    model: str, kind: str, folder: str, count: int, longest: int, reference: str, **settings: Any
) -> dict[str, Any]:
    """The prompts one by one, each without vLLM's own prefix cache. What of them was found on the
    tiers, which tokens are wrong, and the time to the first token. The engine ends in order.
    """
    tier = {"files": files_tier, "kvbm": kvbm_tier}[kind](folder)
    engine = Engine(model, native(_CPU_BYTES, tier), **settings)
    free = engine.free_blocks()
    prompts = conversations(count, longest, 5)
    right = json.loads(Path(reference).read_text())
    unequal, found, times = 0, 0, []
    for prompt, tokens in zip(prompts, right, strict=True):
        engine.forget_own_prefixes()
        began = time.perf_counter()
        (output,) = engine.generate([prompt], 4)
        times.append(time.perf_counter() - began)
        unequal += list(output.outputs[0].token_ids) != tokens
        # The last token is computed in any case.
        found += min(output.num_cached_tokens, (len(prompt) - 1) // 32 * 32)
    settle(engine)
    below = engine.connector.connector_scheduler.manager.secondary_tiers[0]
    result: dict[str, Any] = {
        "wanted": sum((len(prompt) - 1) // 32 * 32 for prompt in prompts),
        "found": found,
        "unequal": unequal,
        "median_s": statistics.median(times),
        "failures": dict(below.failures.counts) if kind == "kvbm" else {},
    }
    if kind == "kvbm":
        jobs = below._opened
        result["left"] = left_in(jobs._store.manager) | {
            "jobs": jobs.pending,
            "missing_blocks": free - engine.free_blocks(),
        }
    engine.close()
    return result


if __name__ == "__main__":
    main()
