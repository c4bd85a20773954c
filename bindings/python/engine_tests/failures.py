"""The part `failures`: loads that fail. Every request ends with the right tokens.

python failures.py NAME '{"model": FOLDER, ...}'
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import faults
from engine import Engine
from scenarios import left_over, main, scenario, settle
from workload import unrelated

__all__ = ["judge"]


def judge(suite: Any) -> None:
    """Runs the scenario and says what must hold of it."""
    rounds = 16 if suite.quick else 100
    options = {
        "host": "64MiB",
        "disk_capacity": "1GiB",
        "offload.g2_g3.write_through": True,
        "disk.drive_writes_per_day": 0,
        "disk.read_deadline": f"{faults.DEADLINE:g}s",
        "volumes.longest_pause": "1s",
    }
    disk = suite.fresh("disk-failures")
    found = suite.run(
        "failures",
        "failures",
        program="failures.py",
        model=suite.tiny,
        disk=disk,
        rounds=rounds,
        options=options,
        max_model_len=2048,
    )
    suite.row("failure_rounds_unequal", found.get("unequal", rounds))
    for what, holds in {
        "tokens are right": found.get("unequal") == 0,
        "blocks failed": found.get("failed_blocks", 0) > 0,
        "nothing is left behind": not any(found.get("left", {"": 1}).values()),
    }.items():
        suite.check(f"failed loads: {what}", holds, found)


# --------------------------------------------------------------- the scenarios


@scenario
def failures(
    model: str,
    disk: str,
    rounds: int,
    options: dict[str, Any],
    kinds: tuple[str, ...] = ("corrupt", "truncated", "late", "aborted"),
    **settings: Any,
) -> dict[str, Any]:
    """Loads that fail: bytes on disk that changed, files that became shorter, results that come
    late, requests that are aborted.
    """
    engine = Engine(model, Engine.kvbm(disk=disk, **options), **settings)
    free = engine.free_blocks()
    rng = random.Random(3)
    manager = engine.connector._process.manager
    unequal = 0
    for turn in range(rounds):
        prompt = unrelated(1, rng.randrange(200, 600), 1000 + turn)[0]
        (right,) = engine.tokens([prompt], 8)
        settle(engine)
        manager.flush(60)
        manager.clear("g2")
        engine.forget_own_prefixes()
        kind = kinds[turn % len(kinds)]
        undo = faults.FAULTS[kind](engine, Path(disk), rng)
        if kind == "aborted":
            faults.abort_while_loading(engine, prompt)
        (got,) = engine.tokens([prompt], 8)
        undo()
        unequal += got != right
        engine.forget_own_prefixes()
    totals = engine.connector._process.counters.totals
    result = {
        "rounds": rounds,
        "unequal": unequal,
        "failed_blocks": totals["failed_blocks"],
        "loaded_blocks": totals["loaded_blocks"],
        "errors": totals["errors"],
        "left": left_over(engine, free),
    }
    engine.close()
    return result


if __name__ == "__main__":
    main()
