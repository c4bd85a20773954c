"""`KvbmConnector`: what vLLM calls."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from .. import Fence
from ..errors import ConfigInvalid, KvbmError
from . import _vllm_compat as compat
from . import _vllm_groups
from .events import CacheEvents
from .groups import CacheGroups, retained
from .process import EngineProcess, RankMemory, engine_process, logger
from .requests import TrackedRequest
from .stats import KvbmPromMetrics, KvbmStats

__all__ = ["KvbmConnector"]

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

#: How long a worker waits for a load while no request can run: about what vLLM itself would sleep.
_IDLE_WAIT = 0.001

#: How long the start of a load waits for a copy that still reads one of its blocks.
_REUSE_WAIT = 1.0


def _guarded(
    otherwise: Any,
) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """A callback whose error costs a hit or a copy: it is logged, and the result is `otherwise()`.

    An exception that leaves a callback of the scheduler ends the engine.
    """

    def decorate(callback: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        @functools.wraps(callback)
        def guarded(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            connector: Any = args[0]
            began = time.perf_counter_ns()
            try:
                return callback(*args, **kwargs)
            except Exception as error:
                connector._process.failed(callback.__name__, error)
                result: _Result = otherwise()
                return result
            finally:
                connector._process.spent(began)

        return guarded

    return decorate


@dataclass
class Save:
    """Blocks that are final when the step is over."""

    request: TrackedRequest
    first: int
    ids: list[int]
    #: The cache group.
    group: int = 0
    #: Whether it is offered again, with what follows it, where it was not taken.
    is_repeated: bool = True


@dataclass
class StepPlan(KVConnectorMetadata):  # type: ignore[misc]
    """What the worker does in a step.

    Where workers are in other processes, the scheduler starts loads and saves itself: `loads` and
    `saves` are empty, `reused` is too unless a node daemon has the blocks, and `ended` and `bad` say
    what workers report to vLLM.
    """

    #: Requests and the blocks to load into, by cache group.
    loads: list[tuple[str, list[list[int]]]] = field(default_factory=list)
    #: Blocks that the step overwrites.
    reused: list[int] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    #: Whether a request runs in the step.
    has_tokens: bool = False
    #: Counts steps.
    number: int = 0
    #: Whether copies wait for the points before and after the step's forward pass.
    waits: tuple[bool, bool] = (False, False)
    #: Requests whose loads are over.
    ended: set[str] = field(default_factory=set)
    #: Blocks that did not arrive.
    bad: set[int] = field(default_factory=set)
    #: Requests whose load failed in a model of several cache groups.
    failed: set[str] = field(default_factory=set)


@dataclass
class RankHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What a worker says to the scheduler before the first step."""

    memory: RankMemory


@dataclass
class _Loading:
    ids: list[list[int]]
    began: float


class KvbmConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Keeps vLLM's KV blocks in host memory, on disk and in blob stores. docs/vllm.md has the
    options.
    """

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        groups = _check(vllm_config, kv_cache_config)
        self._groups: CacheGroups | None = groups
        view = compat.ConfigView(vllm_config, None if groups is None else groups.sizes)
        self._rank: int | None = None
        if view.has_remote_workers and role == KVConnectorRole.WORKER:
            self._rank = compat.tensor_parallel_rank()
        self._process: EngineProcess = engine_process(view, self._rank, groups)
        self._block_size = view.block_size
        self._is_async = self._process.options.load == "async"
        self._has_remote_workers = view.has_remote_workers
        self._num_blocks = int(kv_cache_config.num_blocks)
        # Of the scheduler.
        self._requests: dict[str, TrackedRequest] = self._process.requests
        self._to_load: list[tuple[str, list[list[int]]]] = []
        self._events: CacheEvents | None = None
        self._step = 0
        # Of the worker; of the scheduler where workers are in other processes.
        self._loading: dict[str, _Loading] = {}
        self._bad: set[int] = set()
        #: Blocks that did not arrive and that a copy of this rank may still write.
        self._late_bad: set[int] = set()
        self._ended: set[str] = set()
        self._failed: set[str] = set()
        self._had_tokens = True
        self._attention_backends = functools.partial(compat.attention_backends, vllm_config)
        self._publishes_events = view.publishes_events
        if role == KVConnectorRole.SCHEDULER and not self._has_remote_workers:
            self._start([])

    def _start(self, ranks: list[RankMemory]) -> None:
        self._process.start(self._attention_backends(), ranks)
        if self._publishes_events and self._process.options.daemon is None:
            self._events = CacheEvents(self._process.own_manager, self._block_size, self._groups)
        elif self._publishes_events:
            logger.warning(
                "kvbm: events of blocks that a node daemon keeps are published by it (its events.url), not by vLLM"
            )

    # ------------------------------------------------------------------ class

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that does not happen is a miss later, and nothing else."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Nothing happens inside the forward pass."""
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvbmStats:
        return KvbmStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KvbmPromMetrics:
        return KvbmPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # -------------------------------------------------------------- scheduler

    @_guarded(lambda: None)
    def on_new_request(self, request: Any) -> None:
        tracked = self._track(request)
        if self._process.options.prefetch and self._process.shadow is None and tracked.hash():
            # While it waits for its turn.
            blocks = self._process.manager.prefetch(tracked.sequence)
            self._process.counters.add("prefetched_blocks", blocks)

    def _track(self, request: Any) -> TrackedRequest:
        view = compat.RequestView(request)
        tracked = self._requests.get(view.id)
        if tracked is None:
            namespace = self._process.namespace_for(view.adapter)
            tracked = self._requests[view.id] = TrackedRequest(
                view,
                namespace or self._process.manager.namespace,
                self._process.own_hashes,
                is_cacheable=namespace is not None,
            )
        return tracked

    @_guarded(lambda: (0, False))
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tracked = self._track(request)
        process, size = self._process, self._block_size
        # The last token is computed in any case: it gives the first output.
        most = min(tracked.hash(), (tracked.view.num_tokens - 1) // size)
        first = num_computed_tokens // size
        promised, tracked.promised, tracked.first = tracked.promised, 0, first
        if first >= most or tracked.view.skips_reading or tracked.gave_up:
            if promised:
                # vLLM computed the blocks for another request since it asked the last time.
                process.manager.abandon(tracked.view.id)
            return 0, False
        if self._groups is None:
            found = process.manager.look_up(tracked.view.id, tracked.sequence, first)
        else:
            # With several groups a prefix cannot be cut off where it is promised.
            found = process.own_manager.look_up(tracked.view.id, tracked.sequence, first, end=most)
        process.counters.add("look_ups")
        if found is None:
            process.counters.add("pending_look_ups")
            return None, False
        blocks = min(found.blocks, most - first)
        if blocks < process.options.min_blocks or process.shadow is not None:
            if found.blocks:
                process.manager.abandon(tracked.view.id)
            if process.shadow is not None and not tracked.was_counted:
                # Once for each request: vLLM asks again while the request waits.
                tracked.was_counted = True
                by_tier = _split(blocks, found.by_tier)
                process.count_shadow(tracked, first, by_tier)
            return 0, False
        if process.audit is not None and process.audit.takes(tracked, first, blocks):
            # vLLM computes them.
            process.manager.abandon(tracked.view.id)
            return 0, False
        tracked.promised, tracked.by_tier = blocks, _split(blocks, found.by_tier)
        tracked.groups = found.groups
        return blocks * size, self._is_async

    @_guarded(lambda: None)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        tracked = self._track(request)
        wanted = num_external_tokens // self._block_size
        promised, tracked.promised = tracked.promised, 0
        if wanted == 0:
            # The second call of an asynchronous load, or vLLM does not take what was promised.
            if promised:
                self._process.manager.abandon(tracked.view.id)
            return
        ranges = [(tracked.first, tracked.first + wanted)]
        if self._groups is not None:
            # All that was promised or nothing; an empty list of groups is a load that fails.
            ranges = tracked.groups if wanted == promised else []
        ids = [
            [int(block) for block in group[first:end]]
            for group, (first, end) in zip(blocks.get_block_ids(), ranges)
        ]
        # Appended in any case: a request that waits for a load has to hear of its end.
        self._to_load.append((tracked.view.id, ids))
        for tier, name in ((1, "hit_tokens_g2"), (2, "hit_tokens_g3"), (3, "hit_tokens_g4")):
            self._process.counters.add(name, tracked.by_tier[tier] * self._block_size)

    @_guarded(dict)
    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        if num_external_tokens == 0:
            return {}
        by_tier = self._track(request).by_tier
        host = min(num_external_tokens, by_tier[1] * self._block_size)
        sources = {CacheHitSource.HOST: host, CacheHitSource.DISK: num_external_tokens - host}
        return {source: tokens for source, tokens in sources.items() if tokens}

    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        self._process.step_over()
        plan = StepPlan(loads=self._to_load)
        self._to_load = []
        self._plan(plan, compat.StepView(scheduler_output))
        if self._has_remote_workers:
            self._start_transfers(plan)
        return plan

    @_guarded(lambda: None)
    def _plan(self, plan: StepPlan, step: compat.StepView) -> None:
        # First of all: no error below may hide that blocks are overwritten.
        for new, computed in step.new_blocks():
            for group in new:
                # 0 is vLLM's null block.
                plan.reused += [block for block in group[computed // self._block_size :] if block]
        plan.has_tokens = step.total > 0
        self._process.step_begins(step.total)
        for request_id, tokens in step.scheduled.items():
            tracked = self._requests.get(request_id)
            if tracked is None:
                continue
            # Blocks whose last token is computed by the end of this step.
            final = (tracked.view.num_computed_tokens + tokens) // self._block_size
            if final <= tracked.offered:
                continue
            # Hashes exist for known tokens only: rejected drafts never have one.
            final = min(final, tracked.hash())
            ids = step.block_ids(request_id)
            if ids is None or final <= tracked.offered:
                continue
            self._plan_saves(plan, tracked, final, ids)
        if self._groups is not None:
            self._plan_states(plan, step)
        for request_id in step.finished:
            self._requests.pop(request_id, None)
        self._process.manager.step()

    def _plan_saves(
        self, plan: StepPlan, tracked: TrackedRequest, final: int, ids: tuple[list[int], ...]
    ) -> None:
        """Blocks of a request up to `final` that were not offered yet."""
        if self._groups is None:
            final = min(final, len(ids[0]))
        first, tracked.offered = tracked.offered, final
        if self._groups is None:
            if 0 in ids[0][first:final]:
                return  # vLLM's null block
            runs = [(0, first, ids[0][first:final])]
        else:
            prompt = (tracked.view.num_prompt_tokens - 1) // self._block_size
            runs = [
                (number, start, blocks)
                for number, group in enumerate(self._groups)
                if not group.is_state
                for start, blocks in retained(
                    list(ids[number][first:final]),
                    first,
                    group.window_blocks,
                    None if group.is_full else self._groups.retention,
                    prompt,
                )
            ]
        for number, start, blocks in runs:
            save = Save(tracked, start, [int(block) for block in blocks], number)
            plan.saves.append(save)
        if self._events is not None:
            self._events.note(tracked, first, final)

    def _plan_states(self, plan: StepPlan, step: compat.StepView) -> None:
        """States that are complete when the step is over: of them vLLM names the blocks."""
        for request_id, number, block, tokens in step.boundary_states():
            tracked = self._requests.get(request_id)
            blocks, rest = divmod(tokens, self._block_size)
            if tracked is None or rest or not 0 < blocks <= tracked.hash() or not block:
                continue
            plan.saves.append(Save(tracked, blocks - 1, [block], number, is_repeated=False))

    def _start_transfers(self, plan: StepPlan) -> None:
        """Starts the loads and saves of the step; the workers are in other processes.

        A step has two points: 2n, before its forward pass, and 2n + 1, after it. Loads wait for the
        first, saves for the second, and every worker signals those that something waits for.
        """
        self._step += 1
        plan.number = self._step
        plan.waits = (bool(plan.loads), bool(plan.saves))
        if plan.reused or plan.loads:
            self._start_loads(plan, 2 * plan.number)
        if plan.saves:
            self._start_saves(plan.saves, 2 * plan.number + 1)
        if self._has_open:
            self._collect_for(plan)
        plan.loads, plan.saves = [], []
        if self._process.options.daemon is None:
            plan.reused = []
        plan.ended, self._ended = self._ended, set()
        plan.bad, self._bad = self._bad, set()
        plan.failed, self._failed = self._failed, set()

    @_guarded(lambda: None)
    def _start_saves(self, saves: list[Save], number: int) -> None:
        after = self._process.fence_at(number)
        for save in saves:
            self._save(save, after)

    @_guarded(lambda: None)
    def _collect_for(self, plan: StepPlan) -> None:
        self._collect()
        if self._loading and not self._ended and not plan.has_tokens:
            self._wait_idle()

    @_guarded(lambda: (False, None))
    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        request_id = compat.RequestView(request).id
        tracked = self._requests.pop(request_id, None)
        if tracked is not None and tracked.promised:
            self._process.manager.abandon(tracked.view.id)
        # Finished blocks keep their bytes until vLLM reuses them, and it says so then.
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids)

    @_guarded(tuple)
    def take_events(self) -> Iterable[Any]:
        return () if self._events is None else self._events.take()

    @_guarded(lambda: False)
    def reset_cache(self) -> bool | None:
        removed = self._process.forget_all()
        logger.info("kvbm: the cache was reset: %d blocks removed", removed)
        for tracked in self._requests.values():
            tracked.offered = 0
        return True

    # ----------------------------------------------------------------- worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._process.register(kv_caches, self._num_blocks)
        if self._rank is not None:
            self._process.serve(self._rank, self._attention_backends())

    def get_handshake_metadata(self) -> RankHandshake | None:
        memory = self._process.rank_memory
        return None if memory is None else RankHandshake(memory)

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """Every worker listens: builds the manager."""
        if self._has_remote_workers:
            self._start([metadata[rank].memory for rank in sorted(metadata)])

    @_guarded(lambda: None)
    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        plan: StepPlan = kv_connector_metadata
        self._had_tokens = plan.has_tokens
        if self._has_remote_workers:
            if plan.waits[0]:
                self._process.signal(2 * plan.number)
            if plan.reused:
                # A daemon that hangs does not know yet that they are overwritten.
                self._still_touched(set(plan.reused))
            return
        if not self._process.is_open:
            return
        self._start_loads(plan, None)

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
        except Exception as error:
            self._process.failed("start_loads", error)
            for request_id, ids in plan.loads:
                self._not_loaded(request_id, ids)
            return
        for request_id, ids in plan.loads:
            self._load(request_id, ids, after)

    def _load(self, request_id: str, ids: list[list[int]], after: Fence | None = None) -> None:
        try:
            manager, timeout = self._process.manager, self._process.options.load_timeout
            manager.before_reuse([block for group in ids for block in group], _REUSE_WAIT)
            if self._groups is None:
                manager.commit(request_id, ids[0], after, timeout=timeout)
            elif not ids or any(not group or 0 in group for group in ids):
                raise KvbmError("vLLM gave no blocks for what a cache group was promised")
            else:
                self._process.own_manager.commit_groups(request_id, ids, after, timeout=timeout)
            self._loading[request_id] = _Loading(ids, time.monotonic())
        except Exception as error:
            # The ticket is too old, the blocks are busy: nothing was loaded, and vLLM computes it.
            self._process.failed("load", error)
            self._not_loaded(request_id, ids)

    def _not_loaded(self, request_id: str, ids: list[list[int]]) -> None:
        self._process.counters.add("failed_blocks", max(map(len, ids), default=1))
        self._ended.add(request_id)
        self._report(request_id, ids, 0)

    def _report(self, request_id: str, ids: list[list[int]], arrived: int) -> None:
        """Tells vLLM what of a load did not arrive: blocks, or, with several cache groups, the
        request, all of which is computed then.
        """
        if self._groups is None:
            self._bad.update(ids[0][arrived:])
            return
        self._failed.add(request_id)
        self._give_up(request_id)
        self._process.manager.abandon(request_id)

    def _give_up(self, request_id: str) -> None:
        """The request is promised nothing again. One that was aborted meanwhile is not known."""
        tracked = self._requests.get(request_id)
        if tracked is not None:
            tracked.gave_up = True

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        # Loads began in `handle_preemptions`, before the forward pass. A synchronous one ends
        # before it, too.
        if not self._is_async:
            self._wait_for_loads()
            self._ended.clear()

    def _wait_for_loads(self) -> None:
        """Waits for the synchronous loads of the step. Each that did not arrive is reported, also
        where kvbm cannot say how it ended.
        """
        began = time.perf_counter_ns()
        try:
            while self._loading:
                self._collect()
                if self._loading:
                    self._process.manager.wait_finished(0.01)
        except Exception as error:
            self._process.failed("start_load_kv", error)
            loading, self._loading = self._loading, {}
            for request_id, load in loading.items():
                self._not_loaded(request_id, load.ids)
        finally:
            self._process.spent(began)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are whole when their request runs."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Blocks are copied when the step is over."""

    @_guarded(lambda: None)
    def wait_for_save(self) -> None:
        plan: StepPlan = self._get_connector_metadata()
        if self._has_remote_workers and plan.waits[1]:
            self._process.signal(2 * plan.number + 1)
        if (self._bad or self._failed) and not self._is_async:
            # The step computed on blocks that did not arrive, and requests may share those. vLLM
            # computes all of it again. Nothing of this step is stored before.
            for save in plan.saves:
                if save.is_repeated:
                    save.request.offered = min(save.request.offered, save.first)
            return
        if plan.saves:
            after = self._process.fence()
            for save in plan.saves:
                self._save(save, after)

    def _save(self, save: Save, after: Fence | None = None) -> None:
        counters, manager = self._process.counters, self._process.manager
        self._audit(save, after)
        try:
            if self._groups is None:
                begun = manager.offload(save.ids, save.request.sequence, save.first, after)
            else:
                begun = self._process.own_manager.offload(
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

    @_guarded(lambda: (None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._has_remote_workers:
            plan: StepPlan = self._get_connector_metadata()
            self._late_bad |= plan.bad
            self._ended |= plan.ended
            self._failed |= plan.failed
            if self._late_bad and self._still_touched(self._late_bad):
                # Reported with a later step: vLLM would compute under a copy.
                return None, None
            self._bad, self._late_bad = self._late_bad, set()
            ended, self._ended = self._ended, set()
            return None, ended or None
        if self._has_open:
            self._collect()
            if self._loading and not self._ended and not self._had_tokens:
                self._wait_idle()
        ended, self._ended = self._ended, set()
        return None, ended or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """What vLLM asks: `get_finished`, and which loads failed in a model of several groups."""
        if self._groups is None:
            return super().get_transfer_results(finished_req_ids)
        _, received = self.get_finished(finished_req_ids)
        failed, self._failed = self._failed, set()
        return _vllm_groups.transfer_results(received, failed)

    def _still_touched(self, ids: set[int]) -> bool:
        """Whether a copy of this rank may touch these blocks, which is waited for. Where a node daemon
        went or hangs, only this process knows.
        """
        try:
            return bool(self._process.worker.wait_idle(sorted(ids), _REUSE_WAIT))
        except Exception as error:
            # A worker that was closed writes nothing.
            self._process.failed("wait_idle", error)
            return False

    def _wait_idle(self) -> None:
        """While no request can run, the end of a load is waited for here, without the GIL."""
        began = time.perf_counter_ns()
        if _IDLE_WAIT > 0:
            self._process.manager.wait_finished(_IDLE_WAIT)
            self._collect()
        self._process.waited(began)

    def _collect(self) -> None:
        counters, audit = self._process.counters, self._process.audit
        for done in self._process.manager.finished():
            if audit is not None and audit.take(done):
                continue
            loading = self._loading.pop(done.request, None)
            if loading is None:
                continue
            counters.add("loads")
            counters.add("loaded_blocks", done.arrived)
            counters.add("failed_blocks", done.wanted - done.arrived)
            counters.add("load_seconds", time.monotonic() - loading.began)
            self._ended.add(done.request)
            if done.arrived < done.wanted:
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
                self._report(done.request, loading.ids, done.arrived)

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad, self._bad = self._bad, set()
        return bad

    # ------------------------------------------------------------------- both

    def get_kv_connector_stats(self) -> KvbmStats | None:
        if self.role != KVConnectorRole.SCHEDULER:
            return None
        counts = self._process.counters.take()
        return KvbmStats(data=counts) if counts else None

    def shutdown(self) -> None:
        try:
            self._process.close()
        except Exception as error:
            self._process.failed("shutdown", error)


def _split(blocks: int, by_tier: list[int]) -> list[int]:
    """The first `blocks` of a promise by tier, the nearest tiers first."""
    split = [0, 0, 0, 0]
    for tier, count in enumerate(by_tier):
        split[tier] = min(count, blocks)
        blocks -= split[tier]
    return split


def _check(vllm_config: Any, kv_cache_config: Any) -> CacheGroups | None:
    """Refuses what would not work, with the way out. The cache groups, where there are several."""
    missing = compat.missing()
    if missing:
        raise KvbmError(
            f"vLLM {compat.vllm_version()} lacks what KvbmConnector uses: {', '.join(missing)}; "
            f"versions that were tested: {', '.join(compat.CHECKED_VERSIONS)}"
        )
    view = compat.ConfigView(vllm_config)
    if view.failure_policy != "recompute":
        raise ConfigInvalid(
            f"kv_load_failure_policy is {view.failure_policy!r}: a block that fails its checksum would fail its request; "
            'add "kv_load_failure_policy": "recompute" to --kv-transfer-config'
        )
    if view.role != "kv_both":
        raise ConfigInvalid(
            f'kv_role is {view.role!r}: kvbm is a cache that is read and written; set "kv_role": "kv_both"'
        )
    if view.extra.get("load") == "sync" and view.schedules_ahead:
        raise ConfigInvalid(
            "option 'load' is 'sync' and vLLM schedules ahead of the results: it would plan a step before it knows that a "
            "load failed; leave the option out, or start vLLM with --no-async-scheduling"
        )
    if view.has_remote_workers:
        _check_ranks(view)
    groups = CacheGroups.read(kv_cache_config)
    names = compat.cache_groups(kv_cache_config)
    if groups is None and (
        len(names) != 1 or not names[0].startswith(("FullAttention", "MLAAttention"))
    ):
        raise ConfigInvalid(
            f"the model has the cache group {', '.join(names) or 'none'}: kvbm supports full attention, alone or beside windows and "
            "states; leave --kv-transfer-config out"
        )
    return groups


def _check_ranks(view: compat.ConfigView) -> None:
    """Refuses workers in other processes that kvbm cannot serve."""
    if view.executor != "mp" or view.nodes > 1:
        raise ConfigInvalid(
            f"the executor is {view.executor!r} on {view.nodes} nodes: KvbmConnector supports the executors 'uni' and 'mp' on "
            "one node; set --distributed-executor-backend mp"
        )
    if view.world_size != view.tensor_parallel or view.decode_context_parallel > 1:
        raise ConfigInvalid(
            f"{view.world_size} ranks, {view.tensor_parallel} of them tensor parallel, context parallel over "
            f"{view.decode_context_parallel}: KvbmConnector supports tensor parallel ranks only; use --tensor-parallel-size or "
            "data parallelism"
        )
    if view.extra.get("load", "async") != "async":
        raise ConfigInvalid(
            "option 'load' is 'sync': workers in other processes load asynchronously only; leave the option out"
        )
