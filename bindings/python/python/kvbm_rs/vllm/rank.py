"""What vLLM's workers call, each of one rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from . import _vllm_groups
from .step_plan import RankHandshake, StepPlan, guarded
from .transfers import REUSE_WAIT, Transfers

__all__ = ["RankSide"]


class RankSide(Transfers):
    """Callbacks of a worker."""

    _rank: int | None
    _num_blocks: int
    _is_async: bool
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
        self._start_loads(plan, None)

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

    @guarded(lambda: None)
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
        return bad
