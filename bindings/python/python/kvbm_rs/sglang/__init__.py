"""kvbm for SGLang: docs/sglang.md says how to use it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .hicache import KvbmHiCache
    from .linker import KvbmLinker

__all__ = ["KvbmHiCache", "KvbmLinker"]


def __getattr__(name: str) -> Any:
    # Each class is imported where SGLang asks for it: it may lack what the other needs.
    if name == "KvbmHiCache":
        from .hicache import KvbmHiCache

        return KvbmHiCache
    if name == "KvbmLinker":
        from .linker import KvbmLinker

        return KvbmLinker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
