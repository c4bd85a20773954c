"""The part `restart`: what a killed engine had flushed is found by the next one, and nothing by
another one.

python restarts.py NAME '{"model": FOLDER, ...}'
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import model as models
from engine import Engine
from scenarios import is_clean, left_over, main, scenario, settle
from workload import conversations, unrelated

__all__ = ["judge"]


_OPTIONS = {
    "host": "256MiB",
    "disk_capacity": "2GiB",
    "offload.g2_g3.write_through": True,
    "disk.drive_writes_per_day": 0,
}


def judge(suite: Any) -> None:
    """Runs the scenarios and says what must hold of them."""
    kinds: list[tuple[str, dict[str, str], dict[str, Any]]] = [
        # The root of these hashes is random in each process.
        ("random root", {}, {"prefix_caching_hash_algo": "xxhash"}),
        ("hash seed unset", {}, {}),
        ("hash seed set", {"PYTHONHASHSEED": "7"}, {}),
    ]
    for label, environment, settings in kinds:
        disk = suite.fresh("disk-restart")
        # An interpreter reads its hash seed when it starts.
        how = {"environment": environment, "fresh": True, "program": "restarts.py"}
        where = {"model": suite.tiny, "disk": disk, "options": _OPTIONS, **suite.sizes["restart"]}
        where |= settings
        with suite.running(f"fill, {label}", "fill_and_wait", **how, **where) as engine:
            if not suite.quick or label == "hash seed unset":
                _judge_second(suite, label, disk, environment, engine.pid)
        found = suite.run(
            f"restart {label}", "after_restart", reference=suite.right["restart"], **how, **where
        )
        share = found.get("found", 0) / max(1, found.get("wanted", 1))
        suite.row(f"restart_hits {label}", share)
        for what, holds in {
            "95 % of what was flushed is found": share >= 0.95,
            "tokens are right": found.get("unequal") == 0,
            "no hit with another salt": found.get("found_with_salt") == 0,
            "nothing is left behind": is_clean(found),
        }.items():
            suite.check(f"restart, {label}: {what}", holds, found)
    others: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("other weights", {"weights": "2"}, {}),
        ("other block size", {}, {"block_size": 64}),
        ("other dtype", {}, {"dtype": "bfloat16"}),
        ("other revision", {}, {"revision": "another"}),
    ]
    # The same hash seed as the last engine that filled the directory.
    for label, more, settings in others if not suite.quick else others[:1]:
        mine = where | {"options": _OPTIONS | more} | settings
        found = suite.run(f"restart {label}", "after_restart", **how, **mine)
        suite.check(f"{label}: no hit", found.get("found") == 0, found)
        suite.check(f"{label}: nothing is left behind", is_clean(found), found)
    if not suite.quick:
        _judge_adapter(suite, how | where)


def _judge_adapter(suite: Any, arguments: dict[str, Any]) -> None:
    """Blocks of the model itself are found, blocks of an adapter are others."""
    adapter = suite.work / "adapter"
    models.write_adapter(adapter, "tiny")
    found = suite.run("restart adapter", "after_restart", adapter=str(adapter), **arguments)
    share = found.get("found", 0) / max(1, found.get("wanted", 1))
    for what, holds in {
        "the model's own blocks are found": share >= 0.95,
        "its tokens are others": found.get("adapter_differs", False),
        "no hit": found.get("found_with_adapter") == 0,
        "nothing is left behind": is_clean(found),
    }.items():
        suite.check(f"adapter: {what}", holds, found)


def _judge_second(
    suite: Any, label: str, disk: str, environment: dict[str, str], holder: int
) -> None:
    """One on a directory that another process uses."""
    second = suite.run(
        f"second engine, {label}",
        "second_engine",
        environment,
        "restarts.py",
        model=suite.tiny,
        disk=disk,
        options=_OPTIONS,
        max_model_len=suite.sizes["restart"]["max_model_len"],
    )
    suite.check(
        f"second engine, {label}: it is told who holds the directory",
        f"process {holder}" in second.get("error", ""),
        second,
    )


# --------------------------------------------------------------- the scenarios


@scenario
def fill_and_wait(
    model: str,
    disk: str,
    count: int,
    longest: int,
    options: dict[str, Any],
    ready: str,
    **settings: Any,
) -> dict[str, Any]:
    """Fills a disk, says so, and goes on until it is killed."""
    engine = Engine(model, Engine.kvbm(disk=disk, **options), **settings)
    prompts = conversations(count, longest, 5)
    engine.tokens(prompts, 1)
    settle(engine)
    manager = engine.connector._process.manager
    durable = manager.flush(60)
    print(
        "FILLED", durable, engine.connector._process.counters.totals, manager.status(), flush=True
    )
    Path(ready).write_text(json.dumps({"durable": durable}))
    seed = 100
    while True:
        engine.tokens(unrelated(4, 200, seed), 4)
        seed += 1


@scenario
def after_restart(
    model: str,
    disk: str,
    count: int,
    longest: int,
    options: dict[str, Any],
    reference: str | None = None,
    adapter: str | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """What of the prompts that a killed engine had flushed is found, and whether the tokens are
    right. Nothing is saved meanwhile. Then the same prompts with a salt, and with an adapter.
    """
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    if adapter is not None:
        settings |= {"enable_lora": True, "max_lora_rank": 8}
    engine = Engine(model, Engine.kvbm(disk=disk, **options), **settings)
    free = engine.free_blocks()
    get_kv_transfer_group()._save = lambda save, after=None: None
    prompts = conversations(count, longest, 5)
    wanted = sum((len(prompt) - 1) // 32 * 32 for prompt in prompts)

    def find(**changes: str) -> tuple[int, list[list[int]]]:
        found, got = 0, []
        for prompt in prompts:
            engine.forget_own_prefixes()
            (output,) = engine.generate([prompt], 4, **changes)
            found += output.num_cached_tokens
            got.append(list(output.outputs[0].token_ids))
        return found, got

    found, got = find()
    right = None if reference is None else json.loads(Path(reference).read_text())
    result = {
        "wanted": wanted,
        "found": found,
        "found_with_salt": find(salt="another tenant")[0],
        "unequal": -1 if right is None else sum(a != b for a, b in zip(got, right, strict=True)),
    }
    if adapter is not None:
        result["found_with_adapter"], other = find(adapter=adapter)
        result["adapter_differs"] = other != got
    result["left"] = left_over(engine, free)
    return result


@scenario
def second_engine(
    model: str, disk: str, options: dict[str, Any], **settings: Any
) -> dict[str, Any]:
    """What an engine says that is started on a directory which another one uses."""
    try:
        Engine(model, Engine.kvbm(disk=disk, **options), **settings)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": ""}


if __name__ == "__main__":
    main()
