"""`KvbmScheduler` and `KvbmWorker`: what TensorRT-LLM calls.

TensorRT-LLM has no way to learn that a load failed. So only blocks are promised whose verified
bytes lie pinned in host memory, and a load that fails all the same is an exception: the engine
stops rather than answer from wrong bytes. Any other error costs a hit or a copy and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .. import Fence, TokenSequence
from ..errors import KvbmError
from . import _trtllm_compat as compat
from .process import EngineProcess, join_process
from .step_times import StepTimes

__all__ = ["KvbmScheduler", "KvbmWorker"]

_Scheduler, _Worker = compat.base_classes()

#: Seconds that a look-up waits for blocks from disk. All requests wait meanwhile.
STAGE_WAIT = 0.05

#: Seconds that a step waits for its loads, which are copies inside host memory.
_LOAD_WAIT = 60.0

#: Seconds that a step waits for copies that still read a block which it overwrites.
_REUSE_WAIT = 10.0

#: Requests that are followed at most; the oldest one is forgotten when another comes.
_MOST_REQUESTS = 65_536


@dataclass
class _Followed:
    """A request whose blocks are saved."""

    sequence: TokenSequence
    #: The first block that TensorRT-LLM lacked, and how many from there were promised.
    first: int = 0
    promised: int = 0
    blocks: list[int] = field(default_factory=list)
    #: Blocks that were offered for a copy.
    offered: int = 0


@dataclass
class _Save:
    """Blocks that are final when the step is over."""

    request: _Followed
    first: int
    blocks: list[int]


@dataclass
class _Plan:
    """What the worker does in a step."""

    #: Requests and the blocks to load into.
    loads: list[tuple[str, list[int]]] = field(default_factory=list)
    #: Blocks that the step may overwrite; `None`: any.
    reused: list[int] | None = field(default_factory=list)
    saves: list[_Save] = field(default_factory=list)
    #: Tokens of prompts that the step computes.
    prompt_tokens: int = 0


@dataclass(frozen=True)
class StepNumber:
    """The metadata of a step: TensorRT-LLM may copy it, so the plan itself stays in the process."""

    number: int


class KvbmScheduler(_Scheduler):  # type: ignore[misc, valid-type]
    """Promises what is in host memory, and plans loads and saves. docs/trtllm.md has the settings."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        compat.check_arguments(llm_args)
        self._process: EngineProcess = join_process("scheduler", llm_args)
        self._size = int(llm_args.kv_cache_config.tokens_per_block)
        self._requests: dict[int, _Followed] = {}
        self._to_load: list[tuple[str, list[int]]] = []

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Tokens behind the first `num_computed_tokens` whose blocks are loaded before the next
        step, and that the step waits for them.
        """
        try:
            return self._match(compat.RequestView(request), num_computed_tokens), False
        except Exception as error:
            self._process.failures.add("get_num_new_matched_tokens", error)
            return 0, False

    def _match(self, view: compat.RequestView, computed: int) -> int:
        self._drop(view.id)
        if not view.is_plain:
            return 0
        process, tokens = self._process, view.tokens
        sequence = TokenSequence(process.manager.namespace, tokens)
        followed = _Followed(sequence)
        if len(self._requests) >= _MOST_REQUESTS:
            self._drop(next(iter(self._requests)))
        self._requests[view.id] = followed
        # The last token is computed in any case: it gives the first output.
        first, most = computed // self._size, (len(tokens) - 1) // self._size
        # Tickets that pin more than a quarter of host memory end the oldest ones, and a promise
        # that was given must not end.
        open_promises = sum(other.promised for other in self._requests.values())
        most = min(most, first + self._process.manager.capacity[1] // 4 - open_promises)
        if computed % self._size or first >= most:
            return 0
        prefix = TokenSequence(process.manager.namespace, tokens[: most * self._size])
        promised = process.manager.stage(str(view.id), prefix, first, timeout=STAGE_WAIT)
        followed.first, followed.promised = first, promised
        process.counts.add(promised_blocks=promised)
        return promised * self._size

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        """The blocks of a request: what was promised is loaded into those behind the computed ones."""
        number = compat.RequestView(request).id
        followed = self._requests.get(number)
        if followed is None or followed.promised == 0:
            return
        end = followed.first + followed.promised
        blocks = [int(block) for block in block_ids[followed.first : end]]
        if len(blocks) != followed.promised:
            raise KvbmError(
                f"request {number} was promised {followed.promised} blocks and has {len(blocks)} for them: TensorRT-LLM "
                f"{compat.trtllm_version()} does not behave as {', '.join(compat.CHECKED_VERSIONS)} does"
            )
        self._to_load.append((str(number), blocks))

    def build_connector_meta(self, scheduler_output: Any) -> StepNumber:
        """What the worker does in the next step."""
        plan = _Plan(loads=self._to_load)
        self._to_load = []
        try:
            self._plan(plan, scheduler_output)
        except Exception as error:
            # It is not known which blocks the step overwrites: no copy may read any of them.
            plan.reused, plan.saves, plan.prompt_tokens = None, [], 0
            self._process.failures.add("build_connector_meta", error)
        return StepNumber(self._process.keep_plan(plan))

    def _plan(self, plan: _Plan, output: Any) -> None:
        size, reused = self._size, []
        for request in compat.scheduled(output):
            followed = self._requests.get(request.id)
            known = request.computed // size if request.is_new else 0
            reused += request.new_blocks[known:]
            # A request that generates is planned one token.
            plan.prompt_tokens += request.planned if request.planned > 1 else 0
            if followed is None:
                continue
            brought = 0
            if request.is_new:
                brought, followed.promised = followed.promised * size, 0
                followed.blocks = list(request.new_blocks)
                # The look-up knew all tokens of the prompt.
                missing = request.new_tokens[len(followed.sequence) :]
            else:
                followed.blocks += request.new_blocks
                missing = request.new_tokens
            followed.sequence.add_tokens(missing)
            # Blocks whose last token is computed by the end of this step.
            final = (request.computed + brought + request.planned) // size
            final = min(final, followed.sequence.num_blocks, len(followed.blocks))
            first = followed.offered
            if final > first:
                followed.offered = final
                plan.saves.append(_Save(followed, first, followed.blocks[first:final]))
        plan.reused = reused
        self._process.manager.step()

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        """Nothing to wait for: finished blocks keep their bytes until they are reused, and a step
        says so.
        """
        try:
            self._drop(compat.RequestView(request).id)
        except Exception as error:
            self._process.failures.add("request_finished", error)
        return False

    def _drop(self, number: int) -> None:
        followed = self._requests.pop(number, None)
        if followed is not None and followed.promised:
            self._process.manager.abandon(str(number))


class KvbmWorker(_Worker):  # type: ignore[misc, valid-type]
    """Loads and saves what `KvbmScheduler` planned."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        compat.check_arguments(llm_args)
        self._process: EngineProcess = join_process("worker", llm_args)
        self._times = StepTimes(self._process.moment)

    def register_kv_caches(self, kv_cache_tensor: Any) -> None:
        """Opens the manager over TensorRT-LLM's blocks. An error fails the start."""
        self._process.open(kv_cache_tensor)

    def _step_plan(self) -> _Plan | None:
        """The plan of the step; `None` for a step of which the scheduler was not asked."""
        step = self.get_connector_meta()
        if not isinstance(step, StepNumber):
            return None
        plan: _Plan = self._process.plan(step.number)
        return plan

    def start_load_kv(self, stream: Any) -> None:
        """Loads what was promised to requests of this step, before its forward pass."""
        plan = self._step_plan()
        if plan is None:
            self._times.begins(0, stream)
            return
        manager = self._process.manager
        reused = plan.reused
        if reused is None:
            reused = list(range(self._process.num_blocks))
        busy = manager.before_reuse(reused, _REUSE_WAIT) if reused else []
        if busy:
            raise KvbmError(
                f"copies of the blocks {busy[:8]} are not over after {_REUSE_WAIT} s: the step would overwrite them"
            )
        # What was submitted before may still use the blocks.
        after = self._process.submitted(stream) if plan.loads else None
        loads = [(manager.load(request, blocks, after), blocks) for request, blocks in plan.loads]
        deadline = time.monotonic() + _LOAD_WAIT
        for load, blocks in loads:
            done = load.wait(max(0.0, deadline - time.monotonic()))
            self._process.counts.add(loaded_blocks=done.arrived)
            if done.arrived < len(blocks):
                why = done.failures[0] if done.failures else "no reason was given"
                raise KvbmError(
                    f"request {load.request}: {done.arrived} of {len(blocks)} promised blocks arrived, and TensorRT-LLM cannot "
                    f"compute the others: {why}"
                )
        self._measure(lambda: self._times.begins(plan.prompt_tokens, stream))

    def _measure(self, call: Callable[[], None]) -> None:
        """A step begins or ends. What steps took that are over tells kvbm what computing costs."""
        try:
            call()
            for tokens, seconds in self._times.over():
                self._process.manager.prefilled(tokens, seconds)
        except Exception as error:
            self._process.failures.add("prefilled", error)

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Loads are whole before the forward pass."""

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Blocks are copied when the step is over."""

    def wait_for_save(self, stream: Any) -> None:
        """The step was submitted: its final blocks are copied to host memory in the background,
        when `stream` has computed them.
        """
        self._measure(lambda: self._times.ends(stream))
        try:
            plan = self._step_plan()
            if plan is None or not plan.saves:
                return
            after = self._process.submitted(stream)
            saves, plan.saves = plan.saves, []
            for save in saves:
                self._save(save, after)
        except Exception as error:
            self._process.failures.add("wait_for_save", error)

    def _save(self, save: _Save, after: Fence | None) -> None:
        request = save.request
        try:
            begun = self._process.manager.offload(save.blocks, request.sequence, save.first, after)
        except KvbmError as error:
            # No room, or a copy writes one of them: offered again with the request's next block.
            request.offered = min(request.offered, save.first)
            self._process.failures.add("save", error)
            return
        if begun.refused:
            # A block before them left host memory: all are offered again.
            request.offered = 0
        self._process.counts.add(
            saved_blocks=begun.started,
            present_blocks=begun.present,
            refused_blocks=len(begun.refused),
        )

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """Nothing is asynchronous: no request waits for a load or a save across steps."""
        return [], []

    def shutdown(self) -> None:
        """Saves what is not on disk yet and stops the manager."""
        self._process.close()
