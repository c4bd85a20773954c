"""Every contact with TensorRT-LLM: what an upgrade can break, in one place.

`missing` names what the installed TensorRT-LLM lacks. Each class asks at its start.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from typing import Any

from .. import Layout, Namespace, layout_of
from ..engine_names import Used
from ..engine_names import missing as _missing
from ..errors import ConfigInvalid
from ._trtllm_settings import Settings, settings_of

__all__ = [
    "CHECKED_VERSIONS",
    "RequestView",
    "ScheduledRequest",
    "base_classes",
    "check_arguments",
    "layout_and_namespace",
    "missing",
    "recorded_event",
    "scheduled",
    "settings_of",
    "timed_event",
    "trtllm_version",
]

#: Versions of TensorRT-LLM whose published interface this was written for. None was run.
CHECKED_VERSIONS = ("1.2",)

#: Where the interface is; newer versions moved it.
_MODULES = (
    "tensorrt_llm._torch.pyexecutor.kv_cache_connector",
    "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector",
)

#: What makes the bytes of a block depend on more than its tokens.
_BEYOND_TOKENS = (
    "cache_salt",
    "cache_salt_id",
    "lora_task_id",
    "multimodal_embedding",
    "multimodal_hashes",
    "prompt_embedding_table",
)


def _module() -> Any:
    for name in _MODULES:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise ConfigInvalid(
        f"TensorRT-LLM {trtllm_version()} has no KV cache connector: looked for {' and '.join(_MODULES)}"
    )


def _used(module: str) -> tuple[Used, ...]:
    return (
        (module, None, ("KvCacheConnectorScheduler", "KvCacheConnectorWorker", "SchedulerOutput")),
        (
            module,
            "KvCacheConnectorScheduler",
            (
                "build_connector_meta",
                "get_num_new_matched_tokens",
                "request_finished",
                "update_state_after_alloc",
            ),
        ),
        (
            module,
            "KvCacheConnectorWorker",
            (
                "bind_connector_meta",
                "get_connector_meta",
                "get_finished",
                "register_kv_caches",
                "save_kv_layer",
                "start_load_kv",
                "wait_for_layer_load",
                "wait_for_save",
            ),
        ),
        (module, "SchedulerOutput", ("cached_requests", "new_requests")),
        (
            module,
            "RequestData",
            (
                "computed_position",
                "new_block_ids",
                "new_tokens",
                "num_scheduled_tokens",
                "request_id",
            ),
        ),
    )


def missing() -> list[str]:
    """What the installed TensorRT-LLM lacks of what the connector uses."""
    return _missing(_used(_module().__name__))


def base_classes() -> tuple[Any, Any]:
    """The abstract classes of the scheduler and of the worker."""
    module = _module()
    return module.KvCacheConnectorScheduler, module.KvCacheConnectorWorker


def trtllm_version() -> str:
    """The installed version."""
    try:
        return str(importlib.import_module("tensorrt_llm").__version__)
    except (ImportError, AttributeError):
        return "unknown"


def check_arguments(llm_args: Any) -> None:
    """Refuses what would not work, with the way out."""
    lacks = missing()
    if lacks:
        raise ConfigInvalid(
            f"TensorRT-LLM {trtllm_version()} lacks what the connector of kvbm uses: {', '.join(lacks)}; "
            f"it was written for {', '.join(CHECKED_VERSIONS)}"
        )
    ranks = 1
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"):
        ranks *= max(1, int(getattr(llm_args, name, 1) or 1))
    if ranks > 1:
        raise ConfigInvalid(
            f"{ranks} ranks (tensor, pipeline or context parallel): scheduler and worker of the connector share the memory of one "
            "process, and TensorRT-LLM runs each rank in its own; use one GPU"
        )
    if getattr(llm_args, "enable_attention_dp", False):
        raise ConfigInvalid("enable_attention_dp: the connector of kvbm supports one rank")
    if getattr(llm_args, "speculative_config", None) is not None:
        raise ConfigInvalid(
            "speculative_config: TensorRT-LLM does not report to connectors which draft tokens were rejected"
        )
    if not getattr(llm_args.kv_cache_config, "enable_block_reuse", True):
        raise ConfigInvalid("kv_cache_config.enable_block_reuse is off: kvbm loads reused blocks")


def layout_and_namespace(
    llm_args: Any, tensor: Any, settings: Settings
) -> tuple[Layout, Namespace]:
    """Where the blocks lie: the first axis of TensorRT-LLM's one tensor counts them."""
    size = int(llm_args.kv_cache_config.tokens_per_block)
    layout = layout_of([tensor], page_size=size)
    meaning = {
        "trtllm": trtllm_version(),
        "shape": list(tensor.shape[1:]),
        "dtype": str(tensor.dtype),
        "settings": settings.meaning,
    }
    namespace = Namespace(
        str(llm_args.model),
        weights=settings.weights,
        page_size=size,
        rope_scaling=settings.model_settings,
        kv_quantization=json.dumps(meaning, sort_keys=True),
    )
    return layout, namespace


def recorded_event(stream: Any) -> Any:
    """An event behind what was submitted to a CUDA stream so far."""
    import torch

    event = torch.cuda.Event()
    event.record(stream)
    return event


def timed_event(stream: Any) -> Any:
    """The same, which knows when it was passed."""
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


class RequestView:
    """What the connector reads of an `LlmRequest`."""

    def __init__(self, request: Any) -> None:
        self._request = request

    @property
    def id(self) -> int:
        return int(self._request.request_id)

    @property
    def tokens(self) -> list[int]:
        return list(self._request.get_tokens(0))

    @property
    def is_plain(self) -> bool:
        """Whether its tokens alone decide what is in its blocks. TensorRT-LLM hands no hashes: an
        adapter, an image or a salt would go unnoticed.
        """
        request = self._request
        if any(getattr(request, name, None) is not None for name in _BEYOND_TOKENS):
            return False
        sampling = getattr(request, "sampling_config", None)
        return int(getattr(sampling, "beam_width", 1) or 1) == 1


@dataclass(frozen=True)
class ScheduledRequest:
    """A request of a step."""

    id: int
    is_new: bool
    new_tokens: list[int]
    new_blocks: list[int]
    #: Tokens that were computed before the step, without those that the connector brings in it.
    computed: int
    #: Tokens that the step computes.
    planned: int


def scheduled(output: Any) -> list[ScheduledRequest]:
    """The requests of a `SchedulerOutput`."""
    return [
        ScheduledRequest(
            id=int(data.request_id),
            is_new=is_new,
            new_tokens=list(data.new_tokens),
            new_blocks=[int(block) for block in data.new_block_ids],
            computed=int(data.computed_position),
            planned=int(data.num_scheduled_tokens),
        )
        for is_new, requests in ((True, output.new_requests), (False, output.cached_requests))
        for data in requests
    ]
