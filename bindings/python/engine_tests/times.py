"""The parts `latency` and `throughput`: times beside those of vLLM's own offloading.

python times.py NAME '{"model": FOLDER, ...}'
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from engine import Engine
from scenarios import first_token, is_clean, left_over, main, scenario, settle
from tiering import files_tier, native
from workload import unrelated

__all__ = ["judge_latency", "judge_throughput"]


#: Bytes of host memory that hold all prompts.
_HOST = 768 << 20


def judge_latency(suite: Any) -> None:
    """Time to the first token. In the full form each is a median of 20."""
    prompts, rounds = (4, 12) if suite.quick else (20, 20)
    base = {
        "prompts": prompts,
        "rounds": rounds,
        "length": 2048,
        "model": suite.small,
        "max_model_len": 4096,
    }
    disk = {
        "host": f"{_HOST >> 20}MiB",
        "disk": suite.fresh("disk-latency"),
        "disk_capacity": "1GiB",
        "offload.g2_g3.write_through": True,
        "disk.drive_writes_per_day": 0,
    }
    # Fills the disk, too.
    kvbm = suite.run(
        "ttft kvbm G2", "latency", program="times.py", kind="kvbm", options=disk, **base
    )
    native = suite.run(
        "ttft native", "latency", program="times.py", kind="native", options={}, **base
    )
    cold = {**base, "rounds": prompts, "prompts": prompts}
    suite.drop_page_cache()
    from_disk = suite.run(
        "ttft kvbm G3",
        "latency",
        program="times.py",
        kind="kvbm",
        options=disk | {"reuse_disk": True},
        **cold,
    )
    files = suite.fresh("files")
    suite.run(
        "ttft native file fill",
        "latency",
        program="times.py",
        kind="native_file",
        options={},
        files=files,
        **base,
    )
    suite.drop_page_cache()
    native_file = suite.run(
        "ttft native file",
        "latency",
        program="times.py",
        kind="native_file",
        options={"reuse_disk": True},
        files=files,
        **cold,
    )
    for label, found in (("G2", kvbm), ("G3", from_disk)):
        suite.check(f"ttft kvbm {label}: nothing is left behind", is_clean(found), found)
    if kvbm and native:
        floor = kvbm["own_hit_s"] + kvbm["copy_s"] + 2 * kvbm["empty_step_s"]
        suite.row("ttft_computed_s", kvbm["computed_s"])
        suite.row("ttft_own_hit_s", kvbm["own_hit_s"])
        suite.row("ttft_g2_s", kvbm["loaded_s"])
        suite.row("ttft_native_s", native["loaded_s"])
        suite.row("ttft_floor_s", floor)
        suite.row("ttft_g2_over_native", kvbm["loaded_s"] / native["loaded_s"])
        suite.row("ttft_g2_over_floor", kvbm["loaded_s"] / floor)
        suite.target(
            "G2 is not slower than native offloading",
            kvbm["loaded_s"] <= native["loaded_s"],
            suite.rows[-2],
        )
        suite.target(
            "G2 within 1.25 of the floor", kvbm["loaded_s"] <= 1.25 * floor, suite.rows[-1]
        )
    if from_disk and native_file:
        suite.row("ttft_g3_s", from_disk["loaded_s"])
        suite.row("ttft_native_file_s", native_file["loaded_s"])
        ratio = from_disk["loaded_s"] / native_file["loaded_s"]
        suite.row("ttft_g3_over_native_file", ratio)
        suite.target("G3 is not slower than the native file tier", ratio <= 1, ratio)


def judge_throughput(suite: Any) -> None:
    """Tokens a second of prompts that share nothing, with kvbm and without."""
    rounds = 3 if suite.quick else 8
    base = {
        "model": suite.small,
        "prompts": 8,
        "length": 512,
        "rounds": rounds,
        "max_model_len": 2048,
    }
    rates: dict[bool, list[float]] = {False: [], True: []}
    steps = 0.0
    # By turns, so that a machine that grows slower does so for both.
    for turn in range(1 if suite.quick else 3):
        for with_kvbm in (False, True):
            label = f"throughput {'kvbm' if with_kvbm else 'none'} {turn}"
            found = suite.run(
                label,
                "throughput",
                program="times.py",
                use_kvbm=with_kvbm,
                options={"host": "512MiB"},
                **base,
            )
            rates[with_kvbm].append(found.get("tokens_per_s", 0.0))
            if with_kvbm:
                suite.check(f"{label}: nothing is left behind", is_clean(found), found)
            steps = max(steps, found.get("step_p50_us", 0.0))
    ratio = max(rates[True]) / max(max(rates[False]), 1e-9)
    suite.row("no_reuse_throughput", ratio)
    suite.row("step_p50_us", steps)
    suite.target("without reuse 98 % of the throughput", ratio >= 0.98, ratio)
    suite.target("200 us of a step at most", steps <= 200, steps)


# --------------------------------------------------------------- the scenarios


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
        "native": lambda: native(_HOST, None),
        "native_file": lambda: native(160 << 20, files_tier(str(files))),
    }[kind]()
    engine = Engine(model, transfer, **settings)
    free = engine.free_blocks()
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
            result[name] = statistics.median(times)
    if kind == "kvbm":
        totals = engine.connector._process.counters.totals
        result["loaded_blocks"] = totals["loaded_blocks"]
        result["load_s"] = totals["load_seconds"] / max(1, totals["loads"])
        result["empty_step_s"] = statistics.median(empty)
        result["step_p50_us"] = statistics.median(
            [sample / 1e3 for sample in engine.connector._process.step_ns]
        )
        result["left"] = left_over(engine, free)
    return result


def steps_while_loading(engine: Engine, prompt: list[int]) -> list[float]:
    """Times of steps in which the only request waits for its load."""
    from kvbm_rs.vllm import transfers
    from vllm import SamplingParams
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    worker, llm_engine = get_kv_transfer_group(), engine.llm.llm_engine
    collect, worker._collect = worker._collect, lambda: None
    wait, transfers.IDLE_WAIT = transfers.IDLE_WAIT, 0.0
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
    worker._collect, transfers.IDLE_WAIT = collect, wait
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
    free = engine.free_blocks()
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
        result["left"] = left_over(engine, free)
    return result


if __name__ == "__main__":
    main()
