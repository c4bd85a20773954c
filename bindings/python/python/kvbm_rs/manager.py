"""The block manager."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import cast

from . import _core, logs
from ._core import Config, Layout, Namespace
from .loads import Loads, Onboarding
from .metrics import Metrics

__all__ = ["KvBlockManager", "Onboarding"]


class KvBlockManager(Loads, _core.KvBlockManager):
    """A block manager over blocks that the engine allocates and names; see `_core.KvBlockManager`
    for its calls.

    Close it, or use it in a `with` statement: what is not on disk by then is lost.
    """

    _logging: bool

    def __new__(
        cls,
        config: Config,
        layout: Layout,
        namespace: Namespace,
        *,
        shadow: bool = False,
        workers: Sequence[str | os.PathLike[str]] = (),
    ) -> KvBlockManager:
        manager = cast(
            "KvBlockManager",
            super().__new__(cls, config, layout, namespace, shadow=shadow, workers=workers),
        )
        manager._begin_loads(manager.finished_fd)
        manager._logging = True
        logs.start()
        return manager

    def _has_layer(self, request: str, layer: int) -> bool:
        return self.layer_ready(request, layer)

    @property
    def metrics(self) -> Metrics:
        """Counters and gauges."""
        return Metrics(self)

    def close(self, timeout: float = 10.0) -> str | None:
        """Saves what time allows and stops the threads. What could not be saved, as text; `None`
        where all was.
        """
        try:
            return super().close(timeout)
        finally:
            self._end_awaiting()
            if self._logging:
                self._logging = False
                logs.stop()

    def __exit__(self, *_raised: object) -> None:
        self.close()
