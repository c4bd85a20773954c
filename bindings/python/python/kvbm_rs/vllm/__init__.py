"""The connector for vLLM: docs/vllm.md says how to use it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .connector import KvbmConnector

__all__ = ["KvbmConnector"]


def __getattr__(name: str) -> Any:
    # The plugin is loaded in processes that never use the connector: these import nothing else.
    if name == "KvbmConnector":
        from .connector import KvbmConnector

        return KvbmConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
