"""What vLLM's workers call, each of one rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from . import _vllm_groups
from .layers import LAYER_WAIT, LoadHangs
from .step_plan import Load, RankHandshake, StepPlan, guarded
from .transfers import REUSE_WAIT, Transfers

__all__ = ["RankSide"]


class RankSide(Transfers):
    """Callbacks of a worker."""

    _rank: int | None
    _num_blocks: int
    _has_remote_workers: bool
    _attention_backends: Callable[[], list[str]]
    #: Blocks that did not arrive and that a copy of this rank may still write.
    _late_bad: set[int]
    #: Whether a request runs in the step.
    _had_tokens: bool
    #: Of vLLM's base class.
    _get_connector_metadata: Callable[[], Any]

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._process.register(kv_caches, self._num_blocks)
        if self._rank is not None:
            self._process.serve(self._rank, self._attention_backends())

    def get_handshake_metadata(self) -> RankHandshake | None:
        memory = self._process.rank_memory
        return None if memory is None else RankHandshake(memory)

    @guarded(lambda: None)
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
        self._layers.begin()
        self._start_loads(plan, None)
        if self._process.saves_by_layer and plan.has_tokens:
            self._save_by_layer(plan)

    def _save_by_layer(self, plan: StepPlan) -> None:
        """Starts saves that copy each layer while the step computes the next. Those of requests
        that are being loaded wait for the end of the step: a copy writes some of their blocks.
        """
        loading = {load.request for load in plan.loads if load.is_in_step}
        for save in plan.saves:
            if save.request.view.id not in loading and not self._layers.is_void:
                save.is_by_layer = True
                self._layers.saves.append(save)
                self._save(save)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        # Loads began in `handle_preemptions`, before the forward pass. A synchronous one ends
        # before it, too, unless it goes by layer.
        self._wait_for_loads(is_by_layer=False)

    def _wait_for_loads(self, is_by_layer: bool) -> None:
        """Waits for loads whose requests run in the step. Each that did not arrive is reported,
        also where kvbm cannot say how it ended.
        """

        def awaited() -> list[Load]:
            loads = (loading.load for loading in self._loading.values())
            return [load for load in loads if load.is_in_step and load.is_by_layer == is_by_layer]

        began = time.perf_counter_ns()
        until = time.monotonic() + (self._process.options.load_timeout or LAYER_WAIT) + REUSE_WAIT
        try:
            while awaited():
                self._collect()
                if awaited():
                    if time.monotonic() > until:
                        raise LoadHangs(awaited())
                    self._process.manager.wait_finished(0.01)
        except LoadHangs:
            raise
        except Exception as error:
            self._process.failed("start_load_kv", error)
            for load in awaited():
                del self._loading[load.request]
                self._not_loaded(load)
        finally:
            self._process.spent(began)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Waits for what the step loads by layer; other loads are whole when their request runs."""
        if self._layers.loads:
            self._wait_for_layer(layer_name)

    def _wait_for_layer(self, layer_name: str) -> None:
        began = time.perf_counter_ns()
        try:
            self._layers.wait(layer_name)
        except Exception as error:
            self._process.failed("wait_for_layer_load", error)
            self._layers.fail()
        finally:
            self._process.spent(began)

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Opens the way for saves by layer; other blocks are copied when the step is over."""
        if self._layers.saves:
            self._layer_written(layer_name)

    @guarded(lambda: None)
    def _layer_written(self, layer_name: str) -> None:
        self._layers.written(layer_name)

    def wait_for_save(self) -> None:
        self._wait_for_loads(is_by_layer=True)
        self._save_step()

    @guarded(lambda: None)
    def _save_step(self) -> None:
        plan: StepPlan = self._get_connector_metadata()
        if self._has_remote_workers and plan.waits[1]:
            self._process.signal(2 * plan.number + 1)
        for load in self._layers.computed_without():
            self._computed_without(load)
        if self._layers.is_void:
            # The step computed on blocks that did not arrive, and requests may share those. vLLM
            # computes all of it again. Nothing of this step is stored before.
            self._layers.discard(REUSE_WAIT)
            for save in plan.saves:
                if save.is_repeated:
                    save.request.offered = min(save.request.offered, save.first)
            return
        self._layers.end()
        saves = [save for save in plan.saves if not save.is_by_layer]
        if saves:
            after = self._process.fence()
            for save in saves:
                self._save(save, after)

    @guarded(lambda: (None, None))
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
        """What vLLM asks: `get_finished`, and which loads failed as a whole."""
        _, received = self.get_finished(finished_req_ids)
        failed, self._failed = self._failed, set()
        return _vllm_groups.transfer_results(received, failed)

    def _still_touched(self, ids: set[int]) -> bool:
        """Whether a copy of this rank may touch these blocks, which is waited for. Where a node
        daemon went or hangs, only this process knows.
        """
        try:
            return bool(self._process.worker.wait_idle(sorted(ids), REUSE_WAIT))
        except Exception as error:
            # A worker that was closed writes nothing.
            self._process.failed("wait_idle", error)
            return False

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad, self._bad = self._bad, set()
        self._end_withholding(bad)
        return bad

    @guarded(lambda: None)
    def _end_withholding(self, bad: set[int]) -> None:
        # Here, and not when the scheduler learns of `bad`: it has freed requests by then.
        self._process.prefix_cache.step_over(bad)
