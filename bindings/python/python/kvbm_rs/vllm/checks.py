"""What the connector refuses at its start, or does otherwise, with the way out."""

from __future__ import annotations

from typing import Any

from ..errors import ConfigInvalid
from . import _vllm_compat as compat
from .groups import CacheGroups
from .options import Options

__all__ = ["check", "check_transfer", "why_whole"]


def check(vllm_config: Any, kv_cache_config: Any) -> CacheGroups | None:
    """Refuses what would not work, with the way out. The cache groups, where there are several."""
    compat.require("KvbmConnector")
    view = compat.ConfigView(vllm_config)
    check_transfer(view.failure_policy, view.role)
    if view.extra.get("load") == "sync" and view.schedules_ahead:
        raise ConfigInvalid(
            "option 'load' is 'sync' and vLLM schedules ahead of the results: it would plan a step before it knows that a "
            "load failed; leave the option out, or start vLLM with --no-async-scheduling"
        )
    if view.extra.get("load") == "sync" and view.has_second_runner:
        raise ConfigInvalid(
            "option 'load' is 'sync' and vLLM's second model runner computes wrong tokens after a load in a step failed "
            "(vllm#49250); leave the option out, or set VLLM_USE_V2_MODEL_RUNNER=0"
        )
    if view.has_remote_workers:
        _check_ranks(view)
    groups = CacheGroups.read(kv_cache_config)
    names = compat.cache_groups(kv_cache_config)
    if groups is None and (
        len(names) != 1 or not names[0].startswith(("FullAttention", "MLAAttention"))
    ):
        raise ConfigInvalid(
            f"the model has the cache group {', '.join(names) or 'none'}: kvbm supports full attention, alone or beside windows and "
            "states; leave --kv-transfer-config out"
        )
    return groups


def check_transfer(failure_policy: Any, role: Any) -> None:
    """Refuses what `--kv-transfer-config` says beside the connector's own options."""
    if failure_policy != "recompute":
        raise ConfigInvalid(
            f"kv_load_failure_policy is {failure_policy!r}: a block that fails its checksum would fail its request; "
            'add "kv_load_failure_policy": "recompute" to --kv-transfer-config'
        )
    if role != "kv_both":
        raise ConfigInvalid(
            f'kv_role is {role!r}: kvbm is a cache that is read and written; set "kv_role": "kv_both"'
        )


def _check_ranks(view: compat.ConfigView) -> None:
    """Refuses workers in other processes that kvbm cannot serve."""
    if view.executor != "mp" or view.nodes > 1:
        raise ConfigInvalid(
            f"the executor is {view.executor!r} on {view.nodes} nodes: KvbmConnector supports the executors 'uni' and 'mp' on "
            "one node; set --distributed-executor-backend mp"
        )
    if view.world_size != view.tensor_parallel or view.decode_context_parallel > 1:
        raise ConfigInvalid(
            f"{view.world_size} ranks, {view.tensor_parallel} of them tensor parallel, context parallel over "
            f"{view.decode_context_parallel}: KvbmConnector supports tensor parallel ranks only; use --tensor-parallel-size or "
            "data parallelism"
        )
    if view.extra.get("load", "async") != "async":
        raise ConfigInvalid(
            "option 'load' is 'sync': workers in other processes load asynchronously only; leave the option out"
        )


def why_whole(
    view: compat.ConfigView, options: Options, groups: CacheGroups | None, tensors: int
) -> str | None:
    """Why loads and saves do not go layer by layer, with the way out; `None` where they can.
    `tensors`: how many the layers have.
    """
    kept = [
        name
        for name in ("daemon", "shadow", "audit", "record", "record_callbacks")
        if getattr(options, name)
    ]
    for is_so, why in (
        (groups is not None, "the model has several cache groups"),
        (view.has_remote_workers, "workers are processes of their own"),
        (bool(kept), f"option {', '.join(map(repr, kept))} is set"),
        (
            view.schedules_ahead,
            "vLLM plans a step before it knows that a load failed; start it with --no-async-scheduling",
        ),
        (
            view.has_second_runner,
            "vLLM's second model runner computes wrong tokens after a load in a step failed; set "
            "VLLM_USE_V2_MODEL_RUNNER=0",
        ),
        (view.speculates, "drafts of tokens are computed after the step"),
        (view.has_microbatches, "a step computes each layer several times (microbatches)"),
        (
            view.replays_steps,
            "CUDA graphs replay whole steps and call no layer hooks; set the option 'layers' to 'on', or vLLM's "
            "cudagraph_mode to PIECEWISE",
        ),
        (tensors < 2, "all layers are in one tensor"),
    ):
        if is_so:
            return why
    return None
