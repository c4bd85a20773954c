"""Many calls, and many threads, on one manager.

    python stress.py [--calls N] [--warm-up N] [--threads N] [--seconds S] [--json FILE]

`cargo xtask python-stress` runs it. The exit status is 1 where memory grows, bytes are wrong, or
something is left behind.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from kvbm_rs import (
    BusyError,
    Config,
    InvalidArgument,
    KvBlockManager,
    LostError,
    Namespace,
    NoRoomError,
    TokenSequence,
    layout_of,
)

PAGE = 4

#: Growth of resident memory, after the warm-up, that counts as none: what the allocators keep.
MOST_GROWTH = 2 << 20

#: Calls that fill what is bounded, such as the ring of events and the queue of finished plans.
WARM_UP = 1_500_000


def resident() -> int:
    """Bytes of this process that are in memory."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096


class Stand:
    """An engine of so many blocks, with a manager that has twice as many in host memory."""

    def __init__(self, blocks: int) -> None:
        self.kv = np.zeros((blocks, PAGE, 128), dtype=np.float32)
        config = Config()
        config.set("host.capacity", str(2 * blocks))
        config.set("host.pinned", "false")
        config.set("policy.admission", "all")
        self.manager = KvBlockManager(
            config, layout_of([self.kv], page_size=PAGE), Namespace("stress", page_size=PAGE)
        )

    def settled(self) -> dict[str, int]:
        """What a run must not leave behind; all 0."""
        assert self.manager.wait_offloads(30)
        tickets, loads = self.manager.open_tickets
        tiers = self.manager.status()["tiers"].values()
        pins = sum(tier["transfer_pins"] + tier["active"] for tier in tiers)
        return {"tickets": tickets, "loads": loads, "pins": pins}


def many_calls(count: int, warm_up: int) -> dict[str, Any]:
    """At least `count` calls of every kind, errors among them, behind those of a warm-up."""
    stand = Stand(64)
    manager, made, first, turn = stand.manager, -warm_up, 0, 0
    events = manager.events()
    began = time.monotonic()
    with manager:
        while made < count:
            if first == 0 and made >= 0:
                first = resident()
            tokens = TokenSequence(manager.namespace, range(turn % 500, turn % 500 + 3 * PAGE))
            manager.offload([1, 2, 3], tokens)
            found = manager.look_up("a", tokens)
            manager.places(tokens)
            if found and found.blocks:
                load = manager.load("a", list(range(4, 4 + found.blocks)))
                load.wait(10)
            else:
                manager.abandon("a")
            manager.released([1, 2, 3])
            manager.busy([1])
            manager.before_reuse([1, 2, 3], 10)
            manager.branch_ends(tokens)
            manager.step()
            manager.status()
            manager.finished()
            manager.metrics_text()
            events.take(0)
            assert len(tokens.hashes) == 3
            for ids in ([1 << 30], [-1]):
                try:
                    manager.busy(ids)
                    raise AssertionError("an id out of range was taken")
                except InvalidArgument:
                    pass
            turn, made = turn + 1, made + 20
        left = stand.settled()
        last = resident()
    return {
        "calls": made,
        "seconds": round(time.monotonic() - began, 1),
        "warm_up": warm_up,
        "resident_before": first,
        "resident_after": last,
        "left": left,
    }


def many_threads(count: int, seconds: float) -> dict[str, Any]:
    """Threads that offload, load and verify on one manager, each with blocks of its own."""
    stand = Stand(4 * count)
    manager, end = stand.manager, time.monotonic() + seconds
    loads, wrong, refused = [0] * count, [0] * count, [0] * count
    failures: list[str] = []

    def run(thread: int) -> None:
        rng, base = random.Random(thread), 4 * thread
        while time.monotonic() < end:
            # Few prompts for all: threads find each other's blocks.
            start = rng.randrange(200) * 1000
            tokens = TokenSequence(manager.namespace, list(range(start, start + 2 * PAGE)))
            try:
                manager.before_reuse([base, base + 1], 10)
                stand.kv[base], stand.kv[base + 1] = start, start + 1
                manager.offload([base, base + 1], tokens)
                found = manager.look_up(f"{thread}", tokens)
                if found and found.blocks:
                    ids = [base + 2, base + 3][: found.blocks]
                    manager.before_reuse(ids, 10)
                    arrived = manager.load(f"{thread}", ids).wait(30).arrived
                    loads[thread] += 1
                    for at in range(arrived):
                        wrong[thread] += bool((stand.kv[ids[at]] != start + at).any())
                else:
                    manager.abandon(f"{thread}")
            except (NoRoomError, BusyError, LostError):
                refused[thread] += 1
                manager.abandon(f"{thread}")
            except Exception as error:
                failures.append(f"thread {thread}: {type(error).__name__}: {error}")
                return

    threads = [threading.Thread(target=run, args=(thread,)) for thread in range(count)]
    with manager:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(seconds + 120)
        hung = sum(thread.is_alive() for thread in threads)
        left = stand.settled()
    return {
        "threads": count,
        "seconds": seconds,
        "loads": sum(loads),
        "wrong_blocks": sum(wrong),
        "refused": sum(refused),
        "failures": failures[:5],
        "hung": hung,
        "left": left,
    }


def problems(report: dict[str, Any]) -> list[str]:
    """What is wrong in a report."""
    calls, threads = report["calls"], report["threads"]
    growth = calls["resident_after"] - calls["resident_before"]
    found = []
    if growth > MOST_GROWTH:
        found.append(f"memory grew by {growth} bytes")
    if threads["wrong_blocks"] or threads["failures"] or threads["hung"] or not threads["loads"]:
        found.append(f"threads: {threads}")
    for name, part in (("calls", calls), ("threads", threads)):
        if any(part["left"].values()):
            found.append(f"{name}: left behind: {part['left']}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--warm-up", type=int, default=WARM_UP)
    parser.add_argument("--threads", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report = {
        "calls": many_calls(options.calls, options.warm_up),
        "threads": many_threads(options.threads, options.seconds),
    }
    text = json.dumps(report, indent=1)
    print(text)
    if options.json is not None:
        options.json.write_text(text)
    found = problems(report)
    for problem in found:
        print(f"FAILED: {problem}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
