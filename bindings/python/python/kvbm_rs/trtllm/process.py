"""What the scheduler and the worker share: with one rank they are two objects of one process."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from typing import Any

from .. import Config, Fence, KvBlockManager
from ..counts import Counts
from ..errors import BuildFailed, ConfigInvalid, KvbmError
from ..failures import Failures
from ..model_identity import has_operator_version
from ..recording import RECORD_LIMIT, build_manager
from . import _trtllm_compat as compat
from .step_times import HostMoment, Moment

__all__ = ["EngineProcess", "join_process", "settings"]

logger = logging.getLogger("kvbm_rs.trtllm")

_LOCK = threading.Lock()
#: Steps that TensorRT-LLM may plan before their work is done.
_MOST_PLANS = 16
#: Has one of its two roles.
_HALF: EngineProcess | None = None


def join_process(role: str, llm_args: Any) -> EngineProcess:
    """The one that scheduler and worker of an engine share; they may be made in any order, and at
    the same time.
    """
    global _HALF
    with _LOCK:
        half = _HALF
        if half is None or role in half.roles:
            half = _HALF = EngineProcess(llm_args)
        else:
            _HALF = None
        half.roles.add(role)
        return half


def settings() -> Config:
    """TensorRT-LLM hands a connector no options: settings come from `KVBM_*` variables."""
    if not os.environ.get("KVBM_HOST_CAPACITY"):
        raise ConfigInvalid(
            "KVBM_HOST_CAPACITY is not set: say how much host memory kvbm may use, such as KVBM_HOST_CAPACITY=16GiB"
        )
    config = Config()
    if os.environ.get("KVBM_DISK_DIR"):
        # A cache that survives `kill -9` has its blocks on disk before they leave host memory.
        config.set("offload.g2_g3.write_through", "true")
    config.apply_environment()
    return config


def _record() -> tuple[str | None, int]:
    """Where the calls of the engine are recorded, and how many bytes at most."""
    text = os.environ.get("KVBM_RECORD_LIMIT", str(RECORD_LIMIT))
    try:
        limit = int(text)
    except ValueError:
        raise ConfigInvalid(f"KVBM_RECORD_LIMIT is {text!r}: give a number of bytes") from None
    return os.environ.get("KVBM_RECORD"), limit


class EngineProcess:
    """The manager of an engine, and what it counts."""

    def __init__(self, llm_args: Any) -> None:
        self.roles: set[str] = set()
        self.failures = Failures(logger)
        self.counts = Counts(logger)
        self.num_blocks = 0
        self._is_on_device = False
        self._llm_args = llm_args
        self._config = settings()
        self._record, self._record_limit = _record()
        self._manager: KvBlockManager | None = None
        self._lock = threading.Lock()
        self._plans: dict[int, Any] = {}
        self._steps = 0

    def open(self, tensor: Any) -> None:
        """Builds the manager over TensorRT-LLM's tensor."""
        if self._manager is not None:
            raise ConfigInvalid("register_kv_caches was called twice: one tensor is supported")
        known = compat.settings_of(self._llm_args)
        self._warn(known.weights, known.unknown)
        layout, namespace = compat.layout_and_namespace(self._llm_args, tensor, known)
        manager = self._manager = build_manager(
            self._config,
            layout,
            namespace,
            record=self._record,
            record_limit=self._record_limit,
            logger=logger,
        )
        self.num_blocks, self._is_on_device = layout.num_blocks, layout.device != "cpu"
        atexit.register(self.close)
        _, host, disk, _ = manager.capacity
        size = layout.page_size
        logger.info(
            "kvbm: host memory for %d tokens%s; blocks of %d tokens, %.0f KiB",
            host * size,
            f", disk for {disk * size}" if disk else "",
            size,
            layout.block_bytes / 1024,
        )

    def _warn(self, weights: str, unknown: tuple[str, ...]) -> None:
        """Names what of the engine is not known, unless the operator sets a version of it all."""
        if has_operator_version(self._config.to_toml()):
            return
        way_out = "set KVBM_NAMESPACE_WEIGHTS to a text, and change it with them"
        if not weights:
            logger.warning(
                "kvbm: the version of the weights of %s is not known. Blocks of earlier weights of that name are "
                "found: %s",
                self._llm_args.model,
                way_out,
            )
        if unknown:
            logger.warning(
                "kvbm: it is not known what TensorRT-LLM was started with: %s. Blocks that were computed with other "
                "values are found: %s",
                ", ".join(unknown),
                way_out,
            )

    @property
    def manager(self) -> KvBlockManager:
        if self._manager is None:
            raise BuildFailed("the manager is not open: KvbmWorker.register_kv_caches opens it")
        return self._manager

    def submitted(self, stream: Any) -> Fence | None:
        """A point behind what was submitted to `stream`; none where the blocks are in host memory,
        where what was called is done.
        """
        if not self._is_on_device:
            return None
        return self.manager.fence_after(compat.recorded_event(stream))

    def moment(self, stream: Any) -> Moment:
        """The same point, with its time."""
        moment: Moment = compat.timed_event(stream) if self._is_on_device else HostMoment()
        return moment

    def keep_plan(self, plan: Any) -> int:
        """Keeps the plan of a step for the worker. Its number."""
        with self._lock:
            self._steps += 1
            self._plans[self._steps] = plan
            self._plans.pop(self._steps - _MOST_PLANS, None)
            return self._steps

    def plan(self, number: int) -> Any:
        """The plan of step `number`."""
        with self._lock:
            plan = self._plans.get(number)
        if plan is None:
            raise KvbmError(
                f"step {number} has no plan here: {_MOST_PLANS} later steps were planned, or the scheduler is in another process"
            )
        return plan

    @property
    def counters(self) -> dict[str, int]:
        """What was counted, and `errors`."""
        return self.counts.read() | {"errors": sum(self.failures.counts.values())}

    def close(self) -> None:
        """Ends the manager, once."""
        manager, self._manager = self._manager, None
        atexit.unregister(self.close)
        if manager is not None:
            not_saved = manager.close()
            if not_saved is not None:
                logger.warning("kvbm: %s", not_saved)
