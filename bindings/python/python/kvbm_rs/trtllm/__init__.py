"""kvbm for TensorRT-LLM: docs/trtllm.md says how to use it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .connector import KvbmScheduler, KvbmWorker

__all__ = ["KvbmScheduler", "KvbmWorker"]


def __getattr__(name: str) -> Any:
    # What needs TensorRT-LLM is imported where TensorRT-LLM asks for it.
    if name in __all__:
        from . import connector

        return getattr(connector, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
