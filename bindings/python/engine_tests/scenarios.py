"""What is run with a real vLLM; each scenario is a process of its own that prints a JSON object as
its last line.

python scenarios.py NAME '{"model": FOLDER, ...}'
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine import Engine
from faults import FAULTS, abort_while_loading
from tiering import files_tier, native, tiering
from workload import conversations, unrelated

SCENARIOS: dict[str, Callable[..., dict[str, Any]]] = {}


def scenario(run: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    SCENARIOS[run.__name__] = run
    return run


scenario(tiering)


def in_batches(
    engine: Engine, prompts: list[list[int]], batch: int, tokens: int
) -> list[list[int]]:
    out: list[list[int]] = []
    for at in range(0, len(prompts), batch):
        out += engine.tokens(prompts[at : at + batch], tokens)
    return out


def settle(engine: Engine) -> None:
    """Until everything that was saved has arrived."""
    assert engine.connector._process.manager.wait_offloads(60)


def left_over(engine: Engine, free: int) -> dict[str, int]:
    """What a run must not leave behind; all 0."""
    manager = engine.connector._process.manager
    settle(engine)
    tickets, loads = manager.open_tickets
    pins = sum(
        tier["transfer_pins"] + tier["active"] for tier in manager.status()["tiers"].values()
    )
    missing = free - engine.free_blocks()
    busy = len(manager.busy(list(range(engine.connector._num_blocks))))
    return {
        "tickets": tickets,
        "loads": loads,
        "pins": pins,
        "busy_blocks": busy,
        "missing_blocks": missing,
    }


def prompts_of(count: int, longest: int, seed: int) -> list[list[int]]:
    """Each prompt twice: the second time vLLM's own cache has lost it."""
    first = conversations(count // 2, longest, seed)
    again = list(first)
    random.Random(seed + 1).shuffle(again)
    return first + again[: count - len(first)]


@scenario
def reference(
    model: str,
    out: str,
    count: int,
    longest: int,
    seed: int = 1,
    tokens: int = 8,
    batch: int = 4,
    own_prefixes: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """No connector, no prefix cache: what is right. Each different prompt is computed once. With
    `own_prefixes` all prompts are computed, with vLLM's own prefix cache.
    """
    engine = Engine(model, None, **(settings | {"enable_prefix_caching": own_prefixes}))
    prompts = prompts_of(count, longest, seed)
    if own_prefixes:
        right_ones = in_batches(engine, prompts, batch, tokens)
        Path(out).write_text(json.dumps(right_ones))
        return {"different": len(prompts)}
    different = list(dict.fromkeys(map(tuple, prompts)))
    got = in_batches(engine, [list(prompt) for prompt in different], batch, tokens)
    right = dict(zip(different, got, strict=True))
    Path(out).write_text(json.dumps([right[tuple(prompt)] for prompt in prompts]))
    return {"different": len(different)}


@scenario
def equality(
    model: str,
    reference: str,
    count: int,
    longest: int,
    options: dict[str, Any],
    seed: int = 1,
    tokens: int = 8,
    batch: int = 4,
    flip: bool = False,
    forget: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """The same requests through kvbm, with a G1 that is too small; prompts whose tokens differ. With
    `forget` vLLM has no prefix of its own.
    """
    engine = Engine(model, Engine.kvbm(**options), **settings)
    free = engine.free_blocks()
    flipped = flip_loaded_bits(engine) if flip else []
    again = hits_of_preempted(engine)
    prompts = prompts_of(count, longest, seed)
    right = json.loads(Path(reference).read_text())
    got = []
    for at in range(0, len(prompts), batch):
        if flip or forget:
            settle(engine)
        if forget:
            engine.forget_own_prefixes()
        got += engine.tokens(prompts[at : at + batch], tokens)
    unequal = [at for at, (one, two) in enumerate(zip(got, right, strict=True)) if one != two]
    totals = engine.connector._process.counters.totals
    return {
        "unequal": len(unequal),
        "prompts": len(prompts),
        "lengths": [min(map(len, prompts)), max(map(len, prompts))],
        "flipped": len(flipped),
        "loaded_blocks": totals["loaded_blocks"],
        "failed_blocks": totals["failed_blocks"],
        "errors": totals["errors"],
        "preemptions": engine.count("vllm:num_preemptions"),
        "vllm_hits": engine.count("vllm:external_prefix_cache_hits") + sum(again),
        "hits_of_preempted": sum(again),
        "kvbm_hits": totals["hit_tokens_g2"] + totals["hit_tokens_g3"] + totals["hit_tokens_g4"],
        "left": left_over(engine, free),
    }


def hits_of_preempted(engine: Engine) -> list[int]:
    """From now on what vLLM notes of external hits of requests that it preempted before: its
    counter leaves them out.
    """
    from vllm.v1.metrics.stats import PrefixCacheStats

    record, hits = PrefixCacheStats.record, []

    def record_and_keep(stats: Any, *args: Any, **arguments: Any) -> None:
        is_external = stats is engine.core.scheduler.connector_prefix_cache_stats
        if is_external and arguments["preempted"]:
            hits.append(arguments["num_hits"])
        record(stats, *args, **arguments)

    PrefixCacheStats.record = record_and_keep
    return hits


def flip_loaded_bits(engine: Engine) -> list[int]:
    """From now on one bit of the first block of each load is wrong, behind every checksum."""
    import torch
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    worker = get_kv_transfer_group()
    process, flipped = worker._process, []
    collect = worker._collect

    def collect_and_flip() -> None:
        before = dict(worker._loading)
        collect()
        for request, loading in before.items():
            if request not in worker._loading:
                tensor = next(iter(process._tensors.values()))
                block = tensor[loading.ids[0][0]].view(torch.int32).flatten()
                block[7] ^= 1 << 30
                flipped.append(loading.ids[0][0])

    worker._collect = collect_and_flip
    return flipped


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


@scenario
def restart_reference(
    model: str, out: str, count: int, longest: int, **settings: Any
) -> dict[str, Any]:
    engine = Engine(model, None, **(settings | {"enable_prefix_caching": False}))
    Path(out).write_text(
        json.dumps([engine.tokens([prompt], 4)[0] for prompt in conversations(count, longest, 5)])
    )
    return {}


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
        undo = FAULTS[kind](engine, Path(disk), rng)
        if kind == "aborted":
            abort_while_loading(engine, prompt)
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
    crates/kvbm/tests/data/recordings. A run of `failures` is recorded by the same option.
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
    """What the installed vLLM lacks of what the connector uses; and that a lack has a name."""
    from kvbm_rs.vllm import _vllm_compat as compat

    lacks = compat.missing()
    compat._USED += (
        ("vllm.v1.request", "Request", ("a_dropped_attribute",)),
        ("vllm.v1.dropped", None, ("x",)),
        ("vllm.v1.request", "DroppedClass", ("x",)),
    )
    return {
        "version": compat.vllm_version(),
        "missing": lacks,
        "named": compat.missing()[len(lacks) :],
    }


@scenario
def shadow(model: str, reference: str, count: int, longest: int, **settings: Any) -> dict[str, Any]:
    """Shadow mode: hits are counted, nothing is moved, tokens are right."""
    engine = Engine(model, Engine.kvbm(host="1GiB", shadow=True), **settings)
    prompts = prompts_of(count, longest, 1)
    got = in_batches(engine, prompts, 4, 8)
    right = json.loads(Path(reference).read_text())
    totals = engine.connector._process.counters.totals
    return {
        "unequal": sum(one != two for one, two in zip(got, right, strict=True)),
        "shadow_hit_tokens": totals["shadow_hit_tokens"],
        "loaded_blocks": totals["loaded_blocks"],
        "vllm_hits": engine.count("vllm:external_prefix_cache_hits"),
        "errors": totals["errors"],
    }


def median_of(times: list[float]) -> float:
    return statistics.median(times)


def first_token(engine: Engine, prompt: list[int]) -> float:
    began = time.perf_counter()
    engine.tokens([prompt], 1)
    return time.perf_counter() - began


@scenario
def latency(
    model: str,
    kind: str,
    prompts: int,
    length: int,
    rounds: int,
    options: dict[str, Any],
    files: str | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Time to the first token: computed, from vLLM's own cache, and from the connector, by turns."""
    reuse = bool(options.pop("reuse_disk", False))
    transfer = {
        "none": lambda: None,
        "kvbm": lambda: Engine.kvbm(**options),
        "native": lambda: native(512 << 20, None),
        "native_file": lambda: native(160 << 20, files_tier(str(files))),
    }[kind]()
    engine = Engine(model, transfer, **settings)
    texts = unrelated(prompts, length, 77)
    engine.tokens(unrelated(1, length, 5), 2)
    computed, own, loaded, empty = [], [], [], []
    for text in [] if reuse else texts:
        engine.forget_own_prefixes()
        computed.append(first_token(engine, text))
        if kind == "kvbm":
            # Copies of this prompt are no part of the next figure.
            settle(engine)
            engine.connector._process.manager.flush(60)
        own.append(first_token(engine, text))
        engine.tokens([[5] * 40], 1)
    if kind == "kvbm":
        settle(engine)
        engine.connector._process.manager.flush(60)
    if kind != "none":
        time.sleep(1)
        engine.tokens([[6] * 40], 1)
        for turn in range(rounds):
            engine.forget_own_prefixes()
            loaded.append(first_token(engine, texts[turn % len(texts)]))
    if kind == "kvbm":
        empty = steps_while_loading(engine, texts[0])
    block = torch_bytes(engine)
    result: dict[str, Any] = {"copy_s": copy_time(block * (length // 32))}
    for name, times in (("computed_s", computed), ("own_hit_s", own), ("loaded_s", loaded)):
        if times:
            result[name] = median_of(times)
    if kind == "kvbm":
        totals = engine.connector._process.counters.totals
        result["loaded_blocks"] = totals["loaded_blocks"]
        result["load_s"] = totals["load_seconds"] / max(1, totals["loads"])
        result["empty_step_s"] = median_of(empty)
        result["step_p50_us"] = median_of(
            [sample / 1e3 for sample in engine.connector._process.step_ns]
        )
    return result


def steps_while_loading(engine: Engine, prompt: list[int]) -> list[float]:
    """Times of steps in which the only request waits for its load."""
    from kvbm_rs.vllm import connector
    from vllm import SamplingParams
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    worker, llm_engine = get_kv_transfer_group(), engine.llm.llm_engine
    collect, worker._collect = worker._collect, lambda: None
    wait, connector._IDLE_WAIT = connector._IDLE_WAIT, 0.0
    engine.forget_own_prefixes()
    llm_engine.add_request(
        "empty",
        {"prompt_token_ids": prompt},
        SamplingParams(temperature=0, max_tokens=1, ignore_eos=True),
    )
    times = []
    for _ in range(20):
        began = time.perf_counter()
        llm_engine.step()
        times.append(time.perf_counter() - began)
    worker._collect, connector._IDLE_WAIT = collect, wait
    while llm_engine.has_unfinished_requests():
        llm_engine.step()
    return times[1:]


def torch_bytes(engine: Engine) -> int:
    """Bytes of a block in all layers."""
    model = engine.llm.llm_engine.vllm_config.model_config.hf_config
    return int(model.num_hidden_layers * 2 * model.num_key_value_heads * model.head_dim * 32 * 4)


def copy_time(count: int) -> float:
    """What copying that many bytes takes, the fastest of ten."""
    import torch

    source, target = torch.ones(count, dtype=torch.uint8), torch.empty(count, dtype=torch.uint8)
    times = []
    for _ in range(10):
        began = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - began)
    return min(times)


@scenario
def throughput(
    model: str,
    use_kvbm: bool,
    prompts: int,
    length: int,
    rounds: int,
    options: dict[str, Any],
    **settings: Any,
) -> dict[str, Any]:
    """Tokens a second of prompts that share nothing."""
    engine = Engine(model, Engine.kvbm(**options) if use_kvbm else None, **settings)
    engine.tokens(unrelated(4, length, 1), 8)
    rates, steps = [], []
    for turn in range(rounds):
        texts = unrelated(prompts, length, 10 + turn)
        began = time.perf_counter()
        engine.tokens(texts, 16)
        rates.append(prompts * (length + 16) / (time.perf_counter() - began))
    result: dict[str, Any] = {"tokens_per_s": max(rates), "all": rates}
    if use_kvbm:
        steps = sorted(engine.connector._process.step_ns)
        result["step_p50_us"] = steps[len(steps) // 2] / 1e3
        result["step_p99_us"] = steps[len(steps) * 99 // 100] / 1e3
    return result


def main() -> None:
    name, arguments = sys.argv[1], json.loads(sys.argv[2])
    print("RESULT " + json.dumps(SCENARIOS[name](**arguments)), flush=True)
    # Threads of vLLM that linger must not turn a result into a failure.
    os._exit(0)


if __name__ == "__main__":
    main()
