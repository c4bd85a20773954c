"""The part `equality`: the same tokens as without a connector; and not so where a loaded block is
wrong.

python equality.py NAME '{"model": FOLDER, ...}'
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine import Engine
from scenarios import in_batches, left_over, main, prompts_of, scenario, settle
from workload import conversations

__all__ = ["judge"]


def _of_a_volume(found: dict[str, Any]) -> dict[str, bool]:
    """What must hold of a run with a volume."""
    return {
        "volumes had hits": found["hit_tokens_g4"] > 0,
        "vLLM was asked to wait for a volume's answer": found["pending_look_ups"] > 0,
    }


def judge(suite: Any) -> None:
    """Runs the scenarios and says what must hold of them."""
    length, right = suite.sizes["twice"]["max_model_len"], suite.right["twice"]
    unequal, disagree, control = 0, 0.0, {}
    for label, (options, settings) in _kinds(suite.quick, length).items():
        options = {"host": "1GiB", **options}
        prompts = "preempted" if label == "equal preempted" else "twice"
        size = suite.sizes[prompts]
        longest = size["longest"]
        if "disk_capacity" in options:
            options["disk"] = suite.fresh("disk-equality")
        if "volume" in options:
            options["volume"] += suite.fresh("volume-equality")
        found = suite.run(
            label,
            "equality",
            program="equality.py",
            model=suite.tiny,
            reference=suite.right[prompts],
            options=options,
            control=label == "equal async",
            **size,
            **settings,
        )
        if not found:
            unequal += size["count"]
            continue
        control = found.get("control", control)
        unequal += found["unequal"]
        for what, holds in {
            f"prompts of 1 to {longest} tokens": found["lengths"] == [1, longest],
            "blocks were loaded": found["loaded_blocks"] > 0,
            "nothing is left behind": not any(found["left"].values()),
            "no error inside the connector": found["errors"] == 0,
            "Prometheus has kvbm's counters": found["prometheus_loaded_blocks"]
            == found["loaded_blocks"],
            "requests were preempted 20 times": prompts == "twice" or found["preemptions"] >= 20,
            **(_of_a_volume(found) if "volume" in options else {}),
        }.items():
            suite.check(f"{label}: {what}", holds, found)
        if prompts == "preempted":
            suite.row("preemptions", found["preemptions"])
        disagree += abs(found["vllm_hits"] - found["kvbm_hits"])
    suite.row("unequal_prompts", unequal)
    suite.check("tokens are those without a connector", unequal == 0, unequal)
    suite.row("hits_agree", float(disagree == 0))
    suite.check("vLLM's external hits are ours", disagree == 0, disagree)
    differs = control.get("unequal", 0) > 0 and control.get("flipped", 0) > 0
    suite.row("control_differs", float(differs))
    suite.check("one wrong bit in a loaded block changes tokens", differs, control)
    _judge_shadow(suite, right, suite.sizes["twice"] | _small_g1(length))


def _small_g1(length: int) -> dict[str, Any]:
    return {"num_gpu_blocks_override": (length // 32) * 3 // 2}


def _kinds(quick: bool, length: int) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Options of the connector and settings of vLLM, by name."""
    small_g1 = _small_g1(length)
    tight = {"num_gpu_blocks_override": length // 32 + 4, "max_num_seqs": 16, "batch": 16}
    chunked = {"enable_chunked_prefill": True, "max_num_batched_tokens": 256}
    whole = {"enable_chunked_prefill": False, "max_num_batched_tokens": length}
    sync = {"async_scheduling": False}
    # What the default admission takes to a disk, under a G2 that is too small.
    default = {"policy.admission": "cost", "host": "24MiB", "disk_capacity": "2GiB"}
    # A look-up asks the volume, and vLLM is told to ask again. No disk is between.
    volume = {"host": "8MiB" if quick else "24MiB", "volume": "dir://"}
    if quick:
        # Each choice once.
        return {
            "equal async": ({}, small_g1 | whole),
            "equal sync": ({"load": "sync", "hashes": "own"}, small_g1 | chunked | sync),
            "equal preempted": (default, tight),
            "equal on a volume": (volume, small_g1),
        }
    return {
        "equal async": ({}, small_g1),
        "equal sync": ({"load": "sync"}, small_g1 | sync),
        "equal chunked": ({}, small_g1 | chunked),
        "equal not chunked": ({}, small_g1 | whole),
        "equal preempted": ({}, tight),
        "equal own hashes": ({"hashes": "own"}, small_g1),
        "equal random root": ({}, small_g1 | {"prefix_caching_hash_algo": "xxhash"}),
        "equal on disk": (
            {"host": "24MiB", "disk_capacity": "2GiB", "offload.g2_g3.write_through": True},
            small_g1,
        ),
        "equal default admission": (default, small_g1),
        "equal on a volume": (volume, small_g1),
    }


def _judge_shadow(suite: Any, right: str, settings: dict[str, Any]) -> None:
    found = suite.run(
        "shadow",
        "shadow",
        program="equality.py",
        model=suite.tiny,
        reference=right,
        **settings,
    )
    for what, holds in {
        "changes no token": found.get("unequal") == 0,
        "counts hits": found.get("shadow_hit_tokens", 0) > 0,
        "loads nothing": found.get("loaded_blocks") == found.get("vllm_hits") == 0,
    }.items():
        suite.check(f"shadow mode {what}", holds, found)


# --------------------------------------------------------------- the scenarios


@scenario
def references(
    model: str, wanted: dict[str, dict[str, Any]], own_prefixes: bool = False, **settings: Any
) -> dict[str, Any]:
    """No connector, no prefix cache: what is right of lists of prompts, by the file that gets it.
    `twice`: each prompt comes twice. Each different prompt is computed once. With `own_prefixes`
    all are computed, with vLLM's own prefix cache.
    """
    engine = Engine(model, None, **(settings | {"enable_prefix_caching": own_prefixes}))
    different = {}
    for out, what in wanted.items():
        count, longest, twice = what["count"], what["longest"], what["twice"]
        prompts = prompts_of(count, longest, 1) if twice else conversations(count, longest, 5)
        batch, tokens = (what.get("batch", 4), what.get("tokens", 8)) if twice else (1, 4)
        once = (
            prompts if own_prefixes else [list(one) for one in dict.fromkeys(map(tuple, prompts))]
        )
        right = in_batches(engine, once, batch, tokens)
        if not own_prefixes:
            by_prompt = dict(zip(map(tuple, once), right, strict=True))
            right = [by_prompt[tuple(prompt)] for prompt in prompts]
        Path(out).write_text(json.dumps(right))
        different[Path(out).stem] = len(once)
    return different


@scenario
def equality(
    model: str,
    reference: str,
    count: int,
    longest: int,
    options: dict[str, Any],
    batch: int = 4,
    tokens: int = 8,
    control: bool = False,
    forget: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """The same requests through kvbm, with a G1 that is too small; prompts whose tokens differ.
    With `forget` vLLM has no prefix of its own. The control: the same requests again, while one bit
    of each load is wrong.
    """
    engine = Engine(model, Engine.kvbm(**options), **settings)
    free = engine.free_blocks()
    again = hits_of_preempted(engine)
    prompts = prompts_of(count, longest, 1)
    right = json.loads(Path(reference).read_text())

    def before_each() -> None:
        if forget:
            settle(engine)
            engine.forget_own_prefixes()

    def unequal() -> int:
        got = in_batches(engine, prompts, batch, tokens, before_each)
        return sum(one != two for one, two in zip(got, right, strict=True))

    different = unequal()
    totals = engine.connector._process.counters.totals
    result = {
        "unequal": different,
        "prompts": len(prompts),
        "lengths": [min(map(len, prompts)), max(map(len, prompts))],
        "loaded_blocks": totals["loaded_blocks"],
        "prometheus_loaded_blocks": engine.count("vllm:kvbm_loaded_blocks"),
        "failed_blocks": totals["failed_blocks"],
        "errors": totals["errors"],
        "preemptions": engine.count("vllm:num_preemptions"),
        "vllm_hits": engine.count("vllm:external_prefix_cache_hits") + sum(again),
        "hits_of_preempted": sum(again),
        "pending_look_ups": totals["pending_look_ups"],
        "hit_tokens_g4": totals["hit_tokens_g4"],
        "kvbm_hits": totals["hit_tokens_g2"] + totals["hit_tokens_g3"] + totals["hit_tokens_g4"],
        "left": left_over(engine, free),
    }
    if control:
        engine.forget_own_prefixes()
        flipped = flip_loaded_bits(engine)
        result["control"] = {"unequal": unequal(), "flipped": len(flipped)}
    return result


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
                block = tensor[loading.load.ids[0][0]].view(torch.int32).flatten()
                block[7] ^= 1 << 30
                flipped.append(loading.load.ids[0][0])

    worker._collect = collect_and_flip
    return flipped


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


if __name__ == "__main__":
    main()
