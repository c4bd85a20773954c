"""The node daemon in place of a manager of this process."""

from __future__ import annotations

import logging
import time
from typing import Any

from .. import Layout, Namespace, NodeEngine
from . import _vllm_compat as compat

__all__ = ["attach", "describe", "engine_name"]

#: Seconds that the start of an engine waits for a daemon that is there. It attaches in
#: milliseconds; locking the pages of host memory for a device takes seconds.
_PATIENCE = 10.0

#: What `NodeEngine.status` says before the first try.
_NOT_TRIED = "not tried yet"


def engine_name(view: compat.ConfigView) -> str:
    """The name that all processes of this engine give, and no other engine."""
    return f"vllm-{view.engine_id}"


def attach(
    socket: str,
    layout: Layout,
    namespace: Namespace,
    view: compat.ConfigView,
    ranks: int,
    logger: logging.Logger | Any,
) -> NodeEngine:
    """The engine's line to the daemon. Where there is none, the engine computes everything until
    there is one.
    """
    engine = NodeEngine(socket, layout, namespace, engine=engine_name(view), ranks=ranks)
    deadline = time.monotonic() + _PATIENCE
    status = engine.status()
    while not status["ready"] and time.monotonic() < deadline:
        if not status["attached"] and status["reason"] != _NOT_TRIED:
            break
        time.sleep(0.005)
        status = engine.status()
    if not status["ready"]:
        logger.warning(
            "kvbm: %s; until it is there everything is computed. Its configuration needs, for this model:\n%s",
            _why(status),
            layout.daemon_model,
        )
    return engine


def describe(engine: NodeEngine, socket: str) -> str:
    """Where the blocks are, for the log."""
    status = engine.status()
    state = f"process {status['pid']}" if status["ready"] else _why(status)
    return f"blocks are kept by the node daemon at {socket} ({state})"


def _why(status: dict[str, Any]) -> str:
    if status["attached"]:
        return "the daemon waits for the movers of some ranks"
    return f"not attached: {status['reason']}"
