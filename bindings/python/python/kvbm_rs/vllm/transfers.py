"""Loads and saves of the connector: of the worker, or of the scheduler where workers are in other
processes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from .. import Fence, FinishedLoad
from ..errors import KvbmError
from .audit import Audit
from .groups import CacheGroups
from .layers import StepLayers
from .process import EngineProcess, logger
from .requests import TrackedRequest
from .step_plan import Load, Save, StepPlan

__all__ = ["Transfers"]

#: How long a worker waits for a load while no request can run: about what vLLM itself would sleep.
IDLE_WAIT = 0.001

#: How long the loads of a step wait for copies that still read one of their blocks.
REUSE_WAIT = 1.0


@dataclass
class Loading:
    load: Load
    began: float


class Transfers:
    """The part of the connector that starts them and collects how they ended."""

    _process: EngineProcess
    _groups: CacheGroups | None
    #: By request.
    _requests: dict[str, TrackedRequest]
    #: Loads that are not over.
    _loading: dict[str, Loading]
    #: Blocks that did not arrive.
    _bad: set[int]
    #: Requests whose loads are over.
    _ended: set[str]
    #: Requests whose load failed as a whole.
    _failed: set[str]
    _num_blocks: int
    #: Of the step that runs, where the worker is in this process.
    _layers: StepLayers

    def _start_loads(self, plan: StepPlan, number: int | None) -> None:
        """Starts the loads of the step, behind the point `number` of the engine's work. Each load
        that does not start is reported: its request waits for it.
        """
        after = None
        try:
            if plan.reused:
                # A copy that still reads one of these is discarded, whatever it read.
                self._process.manager.released(plan.reused)
            if plan.loads:
                # What is submitted before it may still use the blocks.
                process = self._process
                after = process.fence() if number is None else process.fence_at(number)
                # Once for all: the engine's thread waits. A block that is busy still is refused
                # with its load.
                into = {block for load in plan.loads for group in load.ids for block in group}
                process.manager.before_reuse(sorted(into), REUSE_WAIT)
        except Exception as error:
            self._process.failed("start_loads", error)
            for load in plan.loads:
                self._not_loaded(load)
            return
        for load in plan.loads:
            self._load(load, after)

    def _load(self, load: Load, after: Fence | None = None) -> None:
        request_id, ids = load.request, load.ids
        try:
            manager, timeout = self._process.manager, self._process.options.load_timeout
            if not ids or any(not group or 0 in group for group in ids):
                raise KvbmError("there are no blocks of vLLM for what was promised")
            if load.is_by_layer:
                self._process.own_manager.commit(
                    request_id, ids[0], after, timeout=timeout, by_layer=True
                )
                self._layers.loads.append(request_id)
            elif self._groups is None:
                manager.commit(request_id, ids[0], after, timeout=timeout)
            else:
                manager.commit_groups(request_id, ids, after, timeout=timeout)
            self._loading[request_id] = Loading(load, time.monotonic())
        except Exception as error:
            # The ticket is too old, the blocks are busy: nothing was loaded, and vLLM computes it.
            self._process.failed("load", error)
            self._not_loaded(load)

    def _not_loaded(self, load: Load) -> None:
        self._process.counters.add("failed_blocks", max(map(len, load.ids), default=1))
        self._over(load)
        # Promised again, vLLM would not find room for it where blocks are scarce: it still reserves
        # those of the load that failed.
        self._give_up(load.request)
        self._report(load, 0)

    def _over(self, load: Load) -> None:
        """vLLM asks only for the ends of loads that their requests wait for."""
        if not load.is_in_step:
            self._ended.add(load.request)

    def _report(self, load: Load, arrived: int) -> None:
        """Tells vLLM what of a load did not arrive: blocks, or the request, all of which is
        computed then. The request with several cache groups, and where its blocks are not known.
        """
        self._layers.is_void |= load.is_in_step
        if self._groups is None and load.ids:
            self._bad.update(load.ids[0][arrived:])
            return
        self._give_up(load.request)
        if load.is_in_step:
            # vLLM learns of requests only where they wait: all blocks are computed again.
            self._bad.update(range(self._num_blocks))
        else:
            self._failed.add(load.request)
        try:
            self._process.manager.abandon(load.request)
        except Exception as error:
            # Its ticket ends by its age.
            self._process.failed("abandon", error)

    def _give_up(self, request_id: str) -> None:
        """The request is promised nothing again. One that was aborted meanwhile is not known."""
        tracked = self._requests.get(request_id)
        if tracked is not None:
            tracked.gave_up = True

    def _save(self, save: Save, after: Fence | None = None) -> None:
        counters, manager = self._process.counters, self._process.manager
        self._audit(save, after)
        try:
            if save.is_by_layer:
                begun = self._process.own_manager.offload_by_layer(
                    save.ids, save.request.sequence, save.first
                )
            else:
                begun = manager.offload(
                    save.ids, save.request.sequence, save.first, after, group=save.group
                )
        except KvbmError as error:
            # No room, or a load writes one of them: offered again with the next block of the
            # request.
            if save.is_repeated:
                save.request.offered = min(save.request.offered, save.first)
            counters.add("no_room_blocks", len(save.ids))
            logger.debug("kvbm: %d blocks were not saved: %s", len(save.ids), error)
            return
        counters.add("saved_blocks", begun.started)
        counters.add("saved_by_layer_blocks", begun.started if save.is_by_layer else 0)
        counters.add("present_blocks", begun.present)
        counters.add("refused_blocks", len(begun.refused))
        if begun.refused and save.is_repeated:
            # A block before them left host memory: the whole chain is offered again.
            save.request.offered = 0

    def _audit(self, save: Save, after: Fence | None) -> None:
        audit = self._process.audit
        if audit is None or not save.request.is_audited:
            return
        try:
            audit.compare(self._process.own_manager, save.request, save.first, save.ids, after)
        except Exception as error:
            self._process.failed("audit", error)

    @property
    def _has_open(self) -> bool:
        """Whether a load or a comparison is not over."""
        audit = self._process.audit
        return bool(self._loading) or (audit is not None and audit.is_open)

    def _wait_idle(self) -> None:
        """While no request can run, the end of a load is waited for here, without the GIL."""
        began = time.perf_counter_ns()
        if IDLE_WAIT > 0:
            self._process.manager.wait_finished(IDLE_WAIT)
            self._collect()
        self._process.waited(began)

    def _is_comparison(self, audit: Audit, done: FinishedLoad) -> bool:
        """Whether it is no load. An error of the audit does not hide the loads behind it."""
        try:
            return audit.take(done)
        except Exception as error:
            self._process.failed("audit", error)
            return done.request not in self._loading

    def _collect(self) -> None:
        counters, audit = self._process.counters, self._process.audit
        for done in self._process.manager.finished():
            if audit is not None and self._is_comparison(audit, done):
                continue
            loading = self._loading.pop(done.request, None)
            if loading is None:
                continue
            counters.add("loads")
            counters.add("loaded_blocks", done.arrived)
            counters.add("failed_blocks", done.wanted - done.arrived)
            counters.add("load_seconds", time.monotonic() - loading.began)
            load = loading.load
            counters.add("loads_by_layer", load.is_by_layer)
            self._over(load)
            if load.is_by_layer and done.arrived == done.wanted:
                self._layers.arrived[done.request] = load
            elif done.arrived < done.wanted:
                why = done.failures[0] if done.failures else "no reason was given"
                logger.warning(
                    "kvbm: %d of %d blocks did not arrive and are computed: %s",
                    done.wanted - done.arrived,
                    done.wanted,
                    why,
                )
                if done.arrived == 0:
                    # Promised again, it might be late again: the request is computed.
                    self._give_up(done.request)
                # The step went on without waiting for the layers of the others.
                self._report(load, 0 if load.is_by_layer else done.arrived)

    def _computed_without(self, load: Load) -> None:
        """All blocks arrived, and vLLM did not wait for each layer, or not long enough."""
        if self._layers.waited_for_all:
            why = "a layer came late"
        else:
            why = "vLLM did not wait for each layer, so nothing goes layer by layer any more"
            self._process.lacks_hooks()
        logger.warning(
            "kvbm: the step of a request did not wait for its %d blocks, which are computed: %s",
            len(load.ids[0]),
            why,
        )
        self._process.counters.add("failed_blocks", len(load.ids[0]))
        self._give_up(load.request)
        self._report(load, 0)
