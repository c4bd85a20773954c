"""The part `layers`: loads and saves that go layer by layer while their step runs, and loads that
fail meanwhile.

python layers.py NAME '{"model": FOLDER, ...}'
"""

from __future__ import annotations

import json
import time
from typing import Any

from engine import Engine
from kvbm_rs.vllm import _vllm_compat as compat
from scenarios import in_batches, left_over, main, prompts_of, scenario

__all__ = ["judge"]


def judge(suite: Any) -> None:
    """Runs the scenario and says what must hold of it."""
    size, right = suite.sizes["twice"], suite.right["twice"]
    length = size["max_model_len"]
    settings = {
        # vLLM's own cache loses what comes again.
        "num_gpu_blocks_override": (length // 32) * 3 // 2,
        "async_scheduling": False,
    }
    chunked = {"enable_chunked_prefill": True, "max_num_batched_tokens": 256}
    for label, more in {
        "layers": {},
        "layers chunked": chunked,
        "layers that fail": {"fails_each": 2},
        "layers chunked that fail": chunked | {"fails_each": 3},
        # Others run while a request computes its failed load again, in several steps.
        "layers of equal prompts that fail": chunked
        | {"fails_each": 2, "equal": 3, "long_prefill_token_threshold": 128},
        "layers without vLLM's cache": {"enable_prefix_caching": False},
        "layers by themselves": {"layers": "auto"},
    }.items():
        found = suite.run(
            label,
            "layers",
            program="layers.py",
            model=suite.tiny,
            reference=right,
            **size,
            **(settings | more),
        )
        is_on, fails = more.get("layers", "on") == "on", "fails_each" in more
        for what, holds in {
            "tokens are those without a connector": found.get("unequal") == 0,
            "vLLM's external hits are ours": found.get("vllm_hits") == found.get("kvbm_hits"),
            "blocks were loaded": found.get("loaded_blocks", 0) > 0,
            "saves went by layer": (found.get("saved_by_layer_blocks", 0) > 0) == is_on,
            "loads failed as they were made to": found.get("failed", -1) > 0
            if fails
            else found.get("failed_blocks") == 0,
            "blocks that did not arrive were computed": not fails
            or found.get("failed_blocks", 0) >= found.get("failed", 0),
            "no error inside the connector": found.get("errors") == 0,
            "nothing is left behind": not any(found.get("left", {"": 1}).values()),
        }.items():
            suite.check(f"{label}: {what}", holds, found)
        if is_on:
            all_loads = found.get("loads_by_layer") == found.get("loads", -1)
            suite.check(f"{label}: each load went by layer", all_loads, found)
        else:
            suite.row("loads_by_layer_of_auto", found.get("loads_by_layer", 0))


# --------------------------------------------------------------- the scenarios


@scenario
def layers(
    model: str,
    reference: str,
    count: int,
    longest: int,
    layers: str = "on",
    fails_each: int = 0,
    equal: int = 0,
    **settings: Any,
) -> dict[str, Any]:
    """Each prompt twice, with a G1 that is too small, and then some of them `equal` times at once.
    One in `fails_each` loads fails while its step runs.
    """
    engine = Engine(model, Engine.kvbm(host="1GiB", layers=layers), **settings)
    free, totals = engine.free_blocks(), engine.connector._process.counters.totals
    failed = fail_loads(engine, fails_each) if fails_each else []
    prompts = prompts_of(count, longest, 1)
    with open(reference, encoding="utf-8") as file:
        right = json.load(file)
    got = in_batches(engine, prompts, 4, 8)
    if equal:
        several = [at for at in range(0, count, count // 8) for _ in range(equal)]
        got += in_batches(engine, [prompts[at] for at in several], equal, 8)
        right += [right[at] for at in several]
    names = (
        "loads",
        "loads_by_layer",
        "loaded_blocks",
        "failed_blocks",
        "saved_blocks",
        "saved_by_layer_blocks",
        "errors",
    )
    return {
        "unequal": sum(one != two for one, two in zip(got, right, strict=True)),
        "vllm_hits": engine.count("vllm:external_prefix_cache_hits"),
        "kvbm_hits": totals["hit_tokens_g2"],
        "failed": len(failed),
        "left": left_over(engine, free),
        **{name: totals[name] for name in names},
    }


def fail_loads(engine: Engine, each: int) -> list[str]:
    """From now on one in `each` loads fails: it is given up before its last layer is waited for, or
    a layer comes later than its step waits for it. What its blocks hold then is wrong.
    """
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    worker = get_kv_transfer_group()
    process, num_blocks = engine.connector._process, engine.connector._num_blocks
    kind, wait = type(process.manager), type(process.manager).wait_layer
    failed, loads = list[str](), list[str]()

    def spoil(ids: list[int]) -> None:
        while process.manager.busy(ids):
            time.sleep(0.001)
        for name, tensor in process._tensors.items():
            for view in compat.block_views(name, tensor, num_blocks):
                view[ids] = 9.0

    def wait_or_fail(self: Any, request: str, layer: int, timeout: float) -> bool:
        if layer == 0:
            loads.append(request)
        if len(loads) % each == 0 and request == loads[-1] and layer == len(loads) // each % 4:
            failed.append(request)
            if len(failed) % 2:
                # What has arrived is not enough.
                ids = worker._loading[request].load.ids[0]
                self.abandon(request)
                spoil(ids)
            return False
        there: bool = wait(self, request, layer, timeout)
        return there

    kind.wait_layer = wait_or_fail
    return failed


if __name__ == "__main__":
    main()
