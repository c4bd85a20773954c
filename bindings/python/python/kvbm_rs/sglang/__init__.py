"""kvbm for SGLang: docs/sglang.md says how to use it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .hicache import KvbmHiCache

__all__ = ["KvbmHiCache"]


def __getattr__(name: str) -> Any:
    # What needs SGLang is imported where SGLang asks for it.
    if name == "KvbmHiCache":
        from .hicache import KvbmHiCache

        return KvbmHiCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
