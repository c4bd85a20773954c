"""What vLLM's scheduler calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.v1.metrics.cache_hit_source import CacheHitSource

from . import _vllm_compat as compat
from .events import CacheEvents
from .groups import retained
from .process import logger
from .requests import TrackedRequest
from .step_plan import Load, Save, StepPlan, guarded
from .transfers import Transfers

__all__ = ["SchedulerSide"]


class SchedulerSide(Transfers):
    """Callbacks of the scheduler."""

    _block_size: int
    _is_async: bool
    _has_remote_workers: bool
    #: For the next step.
    _to_load: list[Load]
    #: Tokens that the requests of its loads by layer compute in it.
    _tokens_to_compute: int
    _events: CacheEvents | None
    #: Counts steps.
    _step: int

    @guarded(lambda: None)
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
            self._process.read_root()
            namespace = self._process.namespace_for(view.adapter)
            tracked = self._requests[view.id] = TrackedRequest(
                view,
                namespace or self._process.manager.namespace,
                self._process.own_hashes,
                is_cacheable=namespace is not None,
            )
        return tracked

    @guarded(lambda: (0, False))
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tracked = self._track(request)
        process, size = self._process, self._block_size
        # The last token is computed in any case: it gives the first output.
        most = min(tracked.hash(), (tracked.view.num_tokens - 1) // size)
        first = num_computed_tokens // size
        tracked.promised, tracked.first = 0, first
        if first >= most or tracked.view.skips_reading or tracked.gave_up:
            # vLLM computed the blocks for another request since it asked the last time.
            self._end_ticket(tracked)
            return 0, False
        if self._groups is None:
            found = process.manager.look_up(tracked.view.id, tracked.sequence, first)
        else:
            # With several groups a prefix cannot be cut off where it is promised.
            found = process.manager.look_up(tracked.view.id, tracked.sequence, first, end=most)
        process.counters.add("look_ups")
        # An answer of volumes is a ticket although it has no blocks: vLLM may ask again.
        tracked.has_ticket |= found is None or found.blocks > 0
        if found is None:
            process.counters.add("pending_look_ups")
            return None, False
        blocks = min(found.blocks, most - first)
        if blocks < process.options.min_blocks or process.shadow is not None:
            if found.blocks:
                self._end_ticket(tracked)
            if process.shadow is not None and not tracked.was_counted:
                # Once for each request: vLLM asks again while the request waits.
                tracked.was_counted = True
                by_tier = _split(blocks, found.by_tier)
                process.count_shadow(tracked, first, by_tier)
            return 0, False
        if process.audit is not None and process.audit.takes(tracked, first, blocks):
            # vLLM computes them.
            self._end_ticket(tracked)
            return 0, False
        tracked.promised, tracked.by_tier = blocks, _split(blocks, found.by_tier)
        tracked.groups = found.groups
        tracked.is_by_layer = self._goes_by_layer(tracked)
        return blocks * size, self._is_async and not tracked.is_by_layer

    def _goes_by_layer(self, tracked: TrackedRequest) -> bool:
        """Whether the step of the request begins before its blocks are there: they come from host
        memory, and the load hides behind what the step computes. Else other requests would wait.
        """
        process, blocks = self._process, tracked.promised
        if not process.loads_by_layer or tracked.by_tier[1] != blocks:
            return False
        if process.options.layers == "on":
            return True
        loads = [len(load.ids[0]) for load in self._to_load if load.is_by_layer and load.ids]
        tokens = self._tokens_to_compute + self._tokens_left(tracked)
        return process.own_manager.hides_load(
            sum(loads) + blocks, min(tokens, process.view.step_tokens)
        )

    def _tokens_left(self, tracked: TrackedRequest) -> int:
        """Tokens of a request that are computed when its promise is loaded."""
        found = tracked.first + sum(tracked.by_tier)
        left = max(0, tracked.view.num_tokens - found * self._block_size)
        return min(left, self._process.view.request_tokens)

    def _end_ticket(self, tracked: TrackedRequest) -> None:
        """Ends what the request was promised, and the question to volumes."""
        if tracked.has_ticket:
            tracked.promised, tracked.has_ticket = 0, False
            self._process.manager.abandon(tracked.view.id)

    @guarded(lambda: None)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens < self._block_size:
            # The second call of an asynchronous load, or vLLM does not take what was promised.
            tracked = self._requests.get(compat.RequestView(request).id)
            if tracked is not None:
                self._end_ticket(tracked)
            return
        load = Load(compat.RequestView(request).id, [], is_in_step=not self._is_async)
        try:
            tracked = self._track(request)
            load.is_by_layer = tracked.is_by_layer
            load.is_in_step |= load.is_by_layer
            if load.is_in_step:
                # Before its blocks are known: where this fails, nothing is loaded.
                self._process.prefix_cache.withhold(request, blocks, tracked.first)
            load.ids = self._blocks_to_load(
                tracked, blocks, num_external_tokens // self._block_size
            )
            if load.is_by_layer:
                self._tokens_to_compute += self._tokens_left(tracked)
            for tier, name in ((1, "hit_tokens_g2"), (2, "hit_tokens_g3"), (3, "hit_tokens_g4")):
                self._process.counters.add(name, tracked.by_tier[tier] * self._block_size)
        finally:
            # In any case: a request that waits for a load has to learn of its end. A load without
            # blocks fails.
            self._to_load.append(load)

    def _blocks_to_load(self, tracked: TrackedRequest, blocks: Any, wanted: int) -> list[list[int]]:
        """vLLM's blocks for the first `wanted` blocks of what was promised, by cache group; empty
        where several groups do not get all of it.
        """
        promised, tracked.promised = tracked.promised, 0
        # A load has its own end.
        tracked.has_ticket = False
        ranges = [(tracked.first, tracked.first + wanted)]
        if self._groups is not None:
            ranges = tracked.groups if wanted == promised else []
        return [
            [int(block) for block in group[first:end]]
            for group, (first, end) in zip(blocks.get_block_ids(), ranges)
        ]

    @guarded(dict)
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
        self._process.prefix_cache.step_begins()
        plan = StepPlan(loads=self._to_load)
        self._to_load, self._tokens_to_compute = [], 0
        self._plan(plan, compat.StepView(scheduler_output))
        if self._has_remote_workers:
            self._start_transfers(plan)
        return plan

    @guarded(lambda: None)
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
        self._process.end_step()

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

    @guarded(lambda: None)
    def _start_saves(self, saves: list[Save], number: int) -> None:
        after = self._process.fence_at(number)
        for save in saves:
            self._save(save, after)

    @guarded(lambda: None)
    def _collect_for(self, plan: StepPlan) -> None:
        self._collect()
        if self._loading and not self._ended and not plan.has_tokens:
            self._wait_idle()

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """vLLM has built its own cache."""
        self._process.prefix_cache.bind(gpu_block_pool)

    @guarded(lambda: (False, None))
    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        request_id = compat.RequestView(request).id
        tracked = self._requests.pop(request_id, None)
        if tracked is not None:
            self._end_ticket(tracked)
        # Finished blocks keep their bytes until vLLM reuses them, and it says so then.
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids)

    @guarded(tuple)
    def take_events(self) -> Iterable[Any]:
        return () if self._events is None else self._events.take()

    @guarded(lambda: False)
    def reset_cache(self) -> bool | None:
        removed = self._process.forget_all()
        logger.info("kvbm: the cache was reset: %d blocks removed", removed)
        for tracked in self._requests.values():
            tracked.offered = 0
        return True


def _split(blocks: int, by_tier: list[int]) -> list[int]:
    """The first `blocks` of a promise by tier, the nearest tiers first."""
    split = [0, 0, 0, 0]
    for tier, count in enumerate(by_tier):
        split[tier] = min(count, blocks)
        blocks -= split[tier]
    return split
