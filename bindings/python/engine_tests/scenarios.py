"""Scenarios run with a real vLLM, each in a process of its own. Other modules have most of them,
and say what must hold of them.

python MODULE.py NAME '{"model": FOLDER, ...}'
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

from engine import Engine
from workload import conversations

SCENARIOS: dict[str, Callable[..., dict[str, Any]]] = {}


def scenario(run: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    SCENARIOS[run.__name__] = run
    return run


def in_batches(
    engine: Engine,
    prompts: list[list[int]],
    batch: int,
    tokens: int,
    before_each: Callable[[], None] = lambda: None,
) -> list[list[int]]:
    out: list[list[int]] = []
    for at in range(0, len(prompts), batch):
        before_each()
        out += engine.tokens(prompts[at : at + batch], tokens)
    return out


def settle(engine: Engine) -> None:
    """Until everything that was saved has arrived."""
    assert engine.connector._process.manager.wait_offloads(60)


def left_over(engine: Engine, free: int) -> dict[str, int]:
    """What a run must not leave behind; all 0."""
    manager = engine.connector._process.manager
    settle(engine)
    missing = free - engine.free_blocks()
    busy = len(manager.busy(list(range(engine.connector._num_blocks))))
    return left_in(manager) | {"busy_blocks": busy, "missing_blocks": missing}


def left_in(manager: Any) -> dict[str, int]:
    """What a manager must not have when nothing runs; all 0."""
    tickets, loads = manager.open_tickets
    pins = sum(
        tier["transfer_pins"] + tier["active"] for tier in manager.status()["tiers"].values()
    )
    return {"tickets": tickets, "loads": loads, "pins": pins}


def is_clean(found: dict[str, Any]) -> bool:
    """Whether a scenario said that it left nothing behind."""
    return "left" in found and not any(found["left"].values())


def prompts_of(count: int, longest: int, seed: int) -> list[list[int]]:
    """Each prompt twice: the second time vLLM's own cache has lost it."""
    first = conversations(count // 2, longest, seed)
    again = list(first)
    random.Random(seed + 1).shuffle(again)
    return first + again[: count - len(first)]


def first_token(engine: Engine, prompt: list[int]) -> float:
    began = time.perf_counter()
    engine.tokens([prompt], 1)
    return time.perf_counter() - began


@scenario
def record(
    model: str,
    count: int,
    longest: int,
    options: dict[str, Any],
    seed: int = 1,
    batch: int = 4,
    tokens: int = 16,
    **settings: Any,
) -> dict[str, Any]:
    """A short run whose calls are recorded: `options` has `record`. The recordings are in
    crates/kvbm/tests/data/recordings. A run of `failures` is recorded by the same option. With
    `record_callbacks`, what vLLM calls is recorded: tests/data.
    """
    engine = Engine(model, Engine.kvbm(**options), **settings)
    free = engine.free_blocks()
    in_batches(engine, prompts_of(count, longest, seed), batch, tokens)
    totals = engine.connector._process.counters.totals
    result = {
        "preemptions": engine.count("vllm:num_preemptions"),
        "hits": [totals["hit_tokens_g2"], totals["hit_tokens_g3"]],
        "errors": totals["errors"],
        "left": left_over(engine, free),
    }
    engine.close()
    return result


@scenario
def attributes() -> dict[str, Any]:
    """What the installed vLLM lacks of what connector and tier use; and that a lack has a name."""
    from kvbm_rs.vllm import _vllm_compat as compat
    from kvbm_rs.vllm._vllm_groups import GROUPS

    compat.USED += (*GROUPS, *compat.TIER)
    lacks = compat.missing()
    compat.USED += (
        ("vllm.v1.request", "Request", ("a_dropped_attribute",)),
        ("vllm.v1.dropped", None, ("x",)),
        ("vllm.v1.request", "DroppedClass", ("x",)),
    )
    return {
        "version": compat.vllm_version(),
        "missing": lacks,
        "named": compat.missing()[len(lacks) :],
    }


def main() -> None:
    name, arguments = sys.argv[1], json.loads(sys.argv[2])
    print("RESULT " + json.dumps(SCENARIOS[name](**arguments)), flush=True)
    # Threads of vLLM that linger must not turn a result into a failure.
    os._exit(0)


if __name__ == "__main__":
    main()
