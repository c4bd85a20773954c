"""An engine whose cache a node daemon keeps, and the daemon itself."""

from __future__ import annotations

import os
from typing import Any, cast

from . import _core, logs
from ._core import Config, Layout, Namespace
from .loads import Loads

__all__ = ["NodeEngine", "NodeMover", "NodeServer"]


class _Logged:
    """What writes log records while it is open."""

    _logging: bool

    def _begin_logs(self) -> None:
        self._logging = True
        logs.start()

    def _end_logs(self) -> None:
        if self._logging:
            self._logging = False
            logs.stop()


class NodeEngine(Loads, _Logged, _core.NodeEngine):
    """The scheduler of an engine whose cache a node daemon keeps; see `_core.NodeEngine` for its
    calls, which are those of `KvBlockManager`.

    Close it, or use it in a `with` statement.
    """

    def __new__(
        cls,
        socket: str | os.PathLike[str],
        layout: Layout,
        namespace: Namespace,
        *,
        engine: str,
        ranks: int = 1,
    ) -> NodeEngine:
        made = cast(
            "NodeEngine",
            super().__new__(cls, socket, layout, namespace, engine=engine, ranks=ranks),
        )
        made._begin_loads(made.finished_fd)
        made._begin_logs()
        return made

    def close(self, timeout: float = 10.0) -> str | None:
        """Detaches; returns when nothing is copied any more. A second call does nothing."""
        try:
            return super().close(timeout)
        finally:
            self._end_awaiting()
            self._end_logs()

    def __exit__(self, *_raised: object) -> None:
        self.close()


class NodeMover(_Logged, _core.NodeMover):
    """The mover of a rank, in a process of its own; see `_core.NodeMover` for its calls.

    Close it, or use it in a `with` statement: the engine's tensors may go away then.
    """

    def __new__(
        cls, socket: str | os.PathLike[str], layout: Layout, *, engine: str, rank: int, ranks: int
    ) -> NodeMover:
        made = cast(
            "NodeMover",
            super().__new__(cls, socket, layout, engine=engine, rank=rank, ranks=ranks),
        )
        made._begin_logs()
        return made

    def close(self) -> None:
        """Detaches; returns when nothing is copied any more. A second call does nothing."""
        try:
            super().close()
        finally:
            self._end_logs()

    def __exit__(self, *_raised: object) -> None:
        self.close()


class NodeServer(_Logged, _core.NodeServer):
    """A node daemon in this process; see `_core.NodeServer` for its calls.

    `python -m kvbm_rs.serve CONFIG` is one as a program of its own.
    """

    def __new__(cls, config: Config, socket: str | os.PathLike[str] | None = None) -> NodeServer:
        made = cast("NodeServer", super().__new__(cls, config, socket))
        made._begin_logs()
        return made

    def close(self, timeout: float = 30.0) -> str | None:
        """Closes the lines of engines, saves what time allows and stops. What could not be saved,
        as text; `None` where all was.
        """
        try:
            return super().close(timeout)
        finally:
            self._end_logs()

    def __exit__(self, *_raised: Any) -> None:
        self.close()
