"""The part `failures`: loads that fail. Every request ends with the right tokens.

python failures.py NAME '{"model": FOLDER, ...}'
"""

from __future__ import annotations

import random
import re
import time
from pathlib import Path
from typing import Any

import faults
from engine import Engine
from scenarios import left_over, main, scenario, settle
from workload import unrelated

__all__ = ["judge"]

#: What happens to the disk, and with `aborted` to the request while its reads are late.
_KINDS = ("corrupt", "truncated", "late", "io_error", "aborted")


def judge(suite: Any) -> None:
    """Runs the scenario and says what must hold of it."""
    rounds = 15 if suite.quick else 100
    options = {
        "host": "64MiB",
        "disk_capacity": "1GiB",
        # The engine whose reads the tests can make fail.
        "disk.engine": "threads",
        "offload.g2_g3.write_through": True,
        "disk.drive_writes_per_day": 0,
        "disk.read_deadline": f"{faults.DEADLINE:g}s",
    }
    disk = suite.fresh("disk-failures")
    found = suite.run(
        "failures",
        "failures",
        faults.Reads.environment(suite.work),
        "failures.py",
        fresh=True,
        model=suite.tiny,
        disk=disk,
        rounds=rounds,
        options=options,
        kinds=_KINDS,
        max_model_len=2048,
    )
    suite.row("failure_rounds_unequal", found.get("unequal", rounds))
    kinds, reads = found.get("kinds", {}), found.get("reads", {})
    for what, holds in {
        "tokens are right": found.get("unequal") == 0,
        "every round had a hit on disk": found.get("without_hit") == 0,
        "the disk serves again after each": found.get("not_served_again") == 0,
        "nothing is left behind": not any(found.get("left", {"": 1}).values()),
        "no error inside the connector": found.get("errors") == 0,
        **{
            f"blocks failed where it was {kind}": kinds.get(kind, {}).get("failed_blocks", 0) > 0
            for kind in _KINDS
            if kind != "aborted"
        },
        "reads were late and failed": min(reads.get("late", 0), reads.get("failed", 0)) > 0,
    }.items():
        suite.check(f"failed loads: {what}", holds, found)


# --------------------------------------------------------------- the scenarios


@scenario
def failures(
    model: str,
    disk: str,
    rounds: int,
    options: dict[str, Any],
    kinds: tuple[str, ...],
    **settings: Any,
) -> dict[str, Any]:
    """Loads that fail, each in a round of its own. After each round nothing is left behind, and the
    disk serves the prompt.
    """
    engine = Engine(model, Engine.kvbm(disk=disk, **options), **settings)
    free = engine.free_blocks()
    rng = random.Random(3)
    totals = engine.connector._process.counters.totals
    names = ("rounds", "loads", "loaded_blocks", "failed_blocks")
    by_kind = {kind: dict.fromkeys(names, 0) for kind in kinds}
    unequal = without_hit = not_served_again = 0
    not_saved: list[dict[str, Any]] = []
    surprises: list[dict[str, Any]] = []
    left: dict[str, int] = {}
    longest_s = 0.0
    for turn in range(rounds):
        prompt = unrelated(1, rng.randrange(200, 600), 1000 + turn)[0]
        (right,), lost = compute_to_disk(engine, prompt)
        kind = kinds[turn % len(kinds)]
        not_saved += [{"round": turn, **once} for once in lost]
        there = places(engine)
        before, began = dict(totals), time.monotonic()
        undo = faults.FAULTS[kind](engine, Path(disk), rng)
        if kind == "aborted":
            faults.abort_while_loading(engine, prompt)
        (got,) = engine.tokens([prompt], 8)
        longest_s = max(longest_s, time.monotonic() - began)
        undo()
        unequal += got != right
        if totals["hit_tokens_g3"] == before["hit_tokens_g3"]:
            without_hit += 1
            changed = {name: count - before.get(name, 0) for name, count in totals.items()}
            surprises.append(
                {
                    "round": turn,
                    "kind": kind,
                    "prompt_blocks": (len(prompt) - 1) // 32,
                    "tiers_before": there,
                    "tiers_after": places(engine),
                    "counted": {name: count for name, count in changed.items() if count},
                    "failures": copy_failures(engine),
                }
            )
        by_kind[kind]["rounds"] += 1
        for name in names[1:]:
            by_kind[kind][name] += int(totals[name] - before[name])
        for name, count in left_in_the_end(engine, free).items():
            left[name] = left.get(name, 0) + count
        not_served_again += not serves_again(engine, prompt, right)
    result = {
        "rounds": rounds,
        "unequal": unequal,
        "without_hit": without_hit,
        "rounds_without_hit": surprises,
        "not_saved_at_once": not_saved,
        "not_served_again": not_served_again,
        "failed_blocks": totals["failed_blocks"],
        "loaded_blocks": totals["loaded_blocks"],
        "errors": totals["errors"],
        "longest_request_s": round(longest_s, 2),
        "kinds": by_kind,
        "reads": faults.Reads().counts if faults.Reads.is_there() else {},
        "left": left,
    }
    engine.close()
    return result


def leave_only_on_disk(engine: Engine) -> None:
    """What was computed is in no memory any more."""
    settle(engine)
    manager = engine.connector._process.manager
    manager.flush(60)
    manager.clear("g2")
    engine.forget_own_prefixes()


def compute_to_disk(
    engine: Engine, prompt: list[int]
) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """The tokens after a prompt, whose blocks are on disk alone then. A copy may fail where the
    machine is busy: its deadline is short in these tests, and runs while the engine computes. Such
    a prompt is computed again; what was missing of each try is the second result.
    """
    lost: list[dict[str, Any]] = []
    blocks = (len(prompt) - 1) // 32
    before = places(engine)["g3"]
    while True:
        right = engine.tokens([prompt], 8)
        leave_only_on_disk(engine)
        there = places(engine)
        if there["g3"] - before >= blocks and there["g2"] == 0 or len(lost) == 5:
            return right, lost
        lost.append({"blocks": blocks, "tiers": there, "failures": copy_failures(engine)})


def places(engine: Engine) -> dict[str, int]:
    """Cached blocks of each tier, in use or not."""
    tiers = engine.connector._process.manager.status()["tiers"]
    return {name: tier["active"] + tier["inactive"] for name, tier in tiers.items()}


def copy_failures(engine: Engine) -> dict[str, float]:
    """Counters of copies that failed or did not start, those above 0."""
    text = engine.connector._process.manager.metrics_text()
    found = re.findall(r"^(kvbm_\w*(?:fail|drop)\w*_total(?:{.*})?) (\S+)$", text, re.MULTILINE)
    return {name: float(count) for name, count in found if float(count)}


def left_in_the_end(engine: Engine, free: int) -> dict[str, int]:
    """What a round leaves behind once its late reads are over; all 0."""
    engine.forget_own_prefixes()
    end = time.monotonic() + 10
    while any((left := left_over(engine, free)).values()) and time.monotonic() < end:
        time.sleep(0.05)
    return left


def serves_again(engine: Engine, prompt: list[int], right: list[int]) -> bool:
    """Whether the prompt comes from disk with the right tokens, once the pause after failures is
    over.
    """
    totals, end = engine.connector._process.counters.totals, time.monotonic() + 60
    while time.monotonic() < end:
        leave_only_on_disk(engine)
        before = totals["loaded_blocks"]
        if engine.tokens([prompt], 8) != [right]:
            return False
        if totals["loaded_blocks"] > before:
            engine.forget_own_prefixes()
            return True
        time.sleep(0.1)
    return False


if __name__ == "__main__":
    main()
