"""The contact with vLLM: what an upgrade can break.

`_vllm_used` and `_vllm_groups` list every name of vLLM's that kvbm uses. The modules `_vllm_*` read
vLLM's objects. Only modules that derive classes from vLLM's, or return its enums, import it too:
`connector`, `scheduler`, `stats`, `step_plan` and `tier`.

`missing` names what the installed vLLM lacks. The connector asks at its start, and tests do.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
from collections.abc import Callable
from typing import Any

from ..engine_names import Used
from ..errors import KvbmError
from ._vllm_used import CHECKED_VERSIONS, PLUGIN, PLUGIN_TIER, TIER, USED
from ._vllm_views import ConfigView, EventFactory, RequestView, StepView, TierView

__all__ = [
    "CHECKED_VERSIONS",
    "ConfigView",
    "EventFactory",
    "PLUGIN",
    "PLUGIN_TIER",
    "RequestView",
    "StepView",
    "TIER",
    "TierView",
    "USED",
    "attention_backends",
    "block_views",
    "cache_groups",
    "hash_roots",
    "log_level",
    "logger",
    "missing",
    "recorded_event",
    "register_connector",
    "register_tier",
    "require",
    "vllm_version",
    "why_not",
    "worker_shutdown_seconds",
]


def vllm_version() -> str:
    """The installed version."""
    return str(importlib.import_module("vllm").__version__)


def missing(used: tuple[Used, ...] | None = None) -> list[str]:
    """What the installed vLLM lacks of `used` (what the connector uses), each as
    `module.Class.name`.
    """
    lacks = []
    for module_name, class_name, names in USED if used is None else used:
        try:
            owner: Any = importlib.import_module(module_name)
        except ImportError:
            lacks.append(module_name)
            continue
        if class_name is not None:
            owner = getattr(owner, class_name, None)
            if owner is None:
                lacks.append(f"{module_name}.{class_name}")
                continue
        where = f"{module_name}.{class_name}" if class_name else module_name
        lacks += [f"{where}.{name}" for name in names if not _has(owner, name)]
    return lacks


def require(user: str, used: tuple[Used, ...] | None = None) -> None:
    """Refuses a vLLM that lacks something of `used` (what the connector uses), by its names."""
    lacks = missing(used)
    if lacks:
        raise KvbmError(
            f"vLLM {vllm_version()} lacks what {user} uses: {', '.join(lacks)}; "
            f"versions that were tested: {', '.join(CHECKED_VERSIONS)}"
        )


def why_not(error: Exception, used: tuple[Used, ...]) -> str:
    """What the installed vLLM lacks of `used`, or else the error. Raises nothing."""
    try:
        lacks = ", ".join(missing(used))
        if lacks:
            return f"vLLM {vllm_version()} lacks {lacks}"
    except Exception:
        # There is no vLLM, or a module of it that an upgrade broke: the first error says more.
        pass
    return f"{type(error).__name__}: {error}"


def _has(owner: Any, name: str) -> bool:
    if hasattr(owner, name) or name in getattr(owner, "__struct_fields__", ()):
        return True
    if inspect.ismodule(owner):
        # A name that gets its value later.
        return name in getattr(owner, "__annotations__", {})
    for base in getattr(owner, "__mro__", ()):
        if name in vars(base).get("__annotations__", {}):
            return True
        init = vars(base).get("__init__")
        if init is not None:
            try:
                source = inspect.getsource(init)
            except (OSError, TypeError):
                continue
            if re.search(rf"\bself\.{re.escape(name)}\b", source):
                return True
    return False


def register_connector(name: str, module_path: str, class_name: str) -> None:
    """Makes a connector known by its name; a second call does nothing."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    _register(KVConnectorFactory.register_connector, name, module_path, class_name)


def register_tier(name: str, module_path: str, class_name: str) -> None:
    """Makes a tier of vLLM's offloading known by its name; a second call does nothing. A vLLM
    without such tiers stays as it is.
    """
    try:
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
    except ModuleNotFoundError:
        return
    _register(SecondaryTierFactory.register_tier, name, module_path, class_name)


def _register(register: Callable[[str, str, str], None], *names: str) -> None:
    try:
        register(*names)
    except ValueError as error:
        if "already registered" not in str(error):
            raise


def hash_roots(algorithm: str) -> tuple[bytes, bytes]:
    """The root of vLLM's block hashes in this process, and what it is in each process that has the
    same environment, unless it is random. vLLM sets it after it has built the connectors.
    """
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    seed = os.environ.get("PYTHONHASHSEED", kv_cache_utils.DEFAULT_NONE_HASH_SEED)
    return bytes(kv_cache_utils.NONE_HASH), bytes(get_hash_fn_by_name(algorithm)(seed))


def cache_groups(kv_cache_config: Any) -> list[str]:
    """The kinds of the cache groups, such as `FullAttentionSpec`."""
    return [type(group.kv_cache_spec).__name__ for group in kv_cache_config.kv_cache_groups]


def tensor_parallel_rank() -> int:
    """The rank of the worker in this process."""
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def recorded_event() -> Any:
    """An event behind what this worker has submitted to its CUDA stream so far."""
    import torch

    event = torch.cuda.Event()
    event.record()
    return event


def attention_backends(vllm_config: Any) -> list[str]:
    """Names of the attention backends, which decide what the bytes of a block mean; empty where
    vLLM does not say.
    """
    context = vllm_config.compilation_config.static_forward_context
    names = set()
    for layer in context.values():
        backend = getattr(layer, "attn_backend", None)
        if backend is not None:
            name = getattr(backend, "get_name", None)
            names.add(str(backend.__name__ if name is None else name()))
    return sorted(names)


def logger(name: str) -> Any:
    """A logger whose records appear where vLLM's do; kvbm's own go there too."""
    import logging

    from vllm.logger import init_logger

    init_logger(name)
    ours, theirs = logging.getLogger("kvbm"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        ours.handlers, ours.propagate = list(theirs.handlers), False
        ours.setLevel(theirs.level)
    return logging.getLogger(f"vllm.{name}")


def log_level(name: str) -> int:
    """A level's number."""
    import logging

    level = logging.getLevelName(name)
    return level if isinstance(level, int) else logging.INFO


def worker_shutdown_seconds() -> float:
    """How long vLLM waits for its worker processes to end before it kills them."""
    envs = importlib.import_module("vllm.envs")
    return float(envs.VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS)


def block_views(name: str, tensor: Any, num_blocks: int) -> list[Any]:
    """A layer's tensor as tensors whose first axis counts vLLM's blocks.

    Backends lay keys and values side by side in a block, or as two halves of the tensor; some split
    a block into several of the kernel's.
    """
    shape = list(tensor.shape)
    if shape and shape[0] % num_blocks == 0:
        return [tensor if shape[0] == num_blocks else tensor.unflatten(0, (num_blocks, -1))]
    if len(shape) > 1 and shape[0] == 2 and shape[1] % num_blocks == 0:
        return [view for half in tensor for view in block_views(name, half, num_blocks)]
    raise ValueError(
        f"layer {name}: a KV tensor of shape {shape} for {num_blocks} blocks; kvbm knows tensors whose first or second axis counts blocks"
    )
