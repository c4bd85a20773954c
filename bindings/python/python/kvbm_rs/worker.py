"""The worker of a rank whose manager is in another process."""

from __future__ import annotations

import os
from typing import cast

from . import _core, logs
from ._core import Config, Layout

__all__ = ["Worker"]


class Worker(_core.Worker):
    """The worker of a rank; see `_core.Worker` for its calls.

    Close it, or use it in a `with` statement: the engine's tensors may go away then.
    """

    _logging: bool

    def __new__(
        cls,
        config: Config,
        layout: Layout,
        *,
        model: str,
        rank: int,
        ranks: int,
        socket: str | os.PathLike[str],
    ) -> Worker:
        worker = cast(
            "Worker",
            super().__new__(
                cls, config, layout, model=model, rank=rank, ranks=ranks, socket=socket
            ),
        )
        worker._logging = True
        logs.start()
        return worker

    def close(self, timeout: float = 0.0) -> bool:
        """Stops when no copy touches the engine's tensors any more. With a `timeout`, the manager
        is told before, and saves what only this worker holds: that is waited for, so many seconds
        at most. Whether the manager let it go, or there is none; the manager's log says what it
        could not save. A second call does nothing.
        """
        try:
            return super().close(timeout)
        finally:
            if self._logging:
                self._logging = False
                logs.stop()

    def __exit__(self, *_raised: object) -> None:
        self.close()
