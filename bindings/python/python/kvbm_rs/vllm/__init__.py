"""The connector for vLLM, and the tier behind vLLM's own offloading: docs/vllm.md says how to use
them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .connector import KvbmConnector
    from .tier import KvbmTier

__all__ = ["KvbmConnector", "KvbmTier"]


def __getattr__(name: str) -> Any:
    # The plugin is loaded in processes that never use the connector: these import nothing else.
    if name == "KvbmConnector":
        from .connector import KvbmConnector

        return KvbmConnector
    if name == "KvbmTier":
        from .tier import KvbmTier

        return KvbmTier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
