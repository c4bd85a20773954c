"""The part `processes`: workers in processes of their own, one rank and two."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import faults

__all__ = ["judge"]

#: Blocks reach the disk whatever they are worth.
_KEEPS = {"policy.admission": "all", "disk.drive_writes_per_day": 0}


def judge(suite: Any) -> None:
    """Workers in processes of their own: one rank, and two."""
    # vLLM binds ranks to NUMA nodes, or to the cores that this names.
    cores = sorted(os.sched_getaffinity(0))
    bound = {"VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"}
    if not suite.quick:
        _equal(suite, "one worker", {}, {"distributed_executor_backend": "mp"})
        _equal(suite, "two ranks", bound, {"tensor_parallel_size": 2})
        _one_copy(suite, bound)
    found = suite.run(
        "one rank fails",
        "failures",
        bound,
        "failures.py",
        model=suite.tiny,
        disk=suite.fresh("disk-rank-fails"),
        rounds=6 if suite.quick else 24,
        kinds=["corrupt_rank_1", "collected_late", "stopped"],
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
    suite.row("processes_unequal", found.get("unequal", 1))
    for what, holds in {
        "tokens are right": found.get("unequal") == 0,
        "blocks were loaded": found.get("loaded_blocks", 0) > 0,
        "what one rank cannot load is computed": found.get("failed_blocks", 0) > 0,
        "nothing is left behind": not any(found.get("left", {"": 1}).values()),
        "every round had a hit on disk": found.get("without_hit") == 0,
    }.items():
        suite.check(f"two ranks: {what}", holds, found)


def _one_copy(suite: Any, bound: dict[str, str]) -> None:
    """Two ranks of a model with one KV head: both have the same bytes, and the disk one copy."""
    disk = suite.fresh("disk-one-copy")
    options = {"host": "16MiB", "disk": disk, "disk_capacity": "1GiB", **_KEEPS}
    label, settings = "two ranks of one head", {"tensor_parallel_size": 2}
    _equal(suite, label, bound, settings, suite.one_head, options)
    files = [str(file) for file in Path(disk).rglob("slots.kvbm")]
    suite.check(f"{label}: the disk has one copy", len(files) == 1, files)


def _equal(
    suite: Any,
    label: str,
    environment: dict[str, str],
    settings: dict[str, Any],
    model: str | None = None,
    options: dict[str, Any] | None = None,
) -> None:
    """The same tokens as without a connector, in an engine with the same processes."""
    model = model or suite.tiny
    size = {"count": 200, "longest": 4000}
    right = str(suite.work / f"{label.replace(' ', '-')}.json")
    suite.run(
        f"reference {label}",
        "references",
        environment,
        "equality.py",
        model=model,
        wanted={right: {"twice": True, **size}},
        max_model_len=4608,
        **settings,
    )
    found = suite.run(
        f"equal {label}",
        "equality",
        environment,
        "equality.py",
        model=model,
        reference=right,
        options=options or {"host": "512MiB"},
        max_model_len=4608,
        num_gpu_blocks_override=216,
        **size,
        **settings,
    )
    for what, holds in {
        "tokens are right": found.get("unequal") == 0,
        "blocks were loaded": found.get("loaded_blocks", 0) > 0,
        "vLLM's external hits are ours": bool(found) and found["vllm_hits"] == found["kvbm_hits"],
        "nothing is left behind": not any(found.get("left", {"": 1}).values()),
        "no error inside the connector": found.get("errors") == 0,
    }.items():
        suite.check(f"{label}: {what}", holds, found)
