"""A recording of what vLLM calls on the connector: the option `record_callbacks`.

Each callback is a line: numbers of requests, ids of vLLM's blocks, hashes and counts, and what the
connector returned. There are no tokens, no bytes of blocks and no names of requests. A test replays
such a file without vLLM (docs/operate.md).
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Iterable
from typing import Any

from ..recording import runs
from . import _vllm_compat as compat
from .callback_file import CallbackRecording
from .requests import TrackedRequest
from .step_plan import StepPlan

__all__ = ["record"]

#: The format; the replayer refuses another one.
_VERSION = 1

_Fields = dict[str, Any]

#: By callback: what is read of its arguments before it runs, and of its result.
_Reader = Callable[["_Recorder", tuple[Any, ...]], _Fields]
_Result = Callable[["_Recorder", Any], _Fields]


class _Recorder:
    """Wraps the callbacks of a connector."""

    def __init__(self, connector: Any, recording: CallbackRecording) -> None:
        self._connector, self._recording = connector, recording
        self._is_inside = False

    def number(self, request: str) -> int:
        return self._recording._request(request)

    def numbers(self, requests: Iterable[str] | None) -> list[int]:
        return sorted(self.number(request) for request in requests or ())

    def known(self, requests: Iterable[str]) -> list[TrackedRequest]:
        found = (self._connector._requests.get(request) for request in requests)
        return [tracked for tracked in found if tracked is not None]

    def wrap(self, name: str, read: _Reader, result: _Result) -> None:
        callback = getattr(self._connector, name)
        signature = inspect.signature(callback)

        @functools.wraps(callback)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside or self._recording.is_over:
                return callback(*args, **kwargs)
            self._is_inside = True
            began = time.monotonic_ns()
            # Before the call: what it is about may be gone afterwards.
            asked: _Fields = {}
            requests: list[TrackedRequest] = []
            plain: tuple[Any, ...] = args

            def look() -> None:
                nonlocal plain
                plain = signature.bind(*args, **kwargs).args
                asked.update(read(self, plain))
                requests.extend(self.known(_requests_of(name, plain)))

            self._recording.guarded(look)
            try:
                if name == "shutdown":
                    # It closes the file.
                    self._recording.callback(name, began, lambda: asked, [])
                    return callback(*args, **kwargs)
                try:
                    returned = callback(*args, **kwargs)
                except Exception as error:
                    failed = {"error": type(error).__name__}
                    self._recording.callback(name, began, lambda: asked | failed, [])
                    raise
                if not requests:
                    # A new one.
                    self._recording.guarded(
                        lambda: requests.extend(self.known(_requests_of(name, plain)))
                    )
                self._recording.callback(
                    name, began, lambda: asked | result(self, returned), requests
                )
                if name.startswith("request_finished"):
                    self._recording.requests_over(requests)
                return returned
            finally:
                self._is_inside = False

        setattr(self._connector, name, recorded)


def _requests_of(name: str, args: tuple[Any, ...]) -> list[str]:
    if name == "build_connector_meta":
        return list(compat.StepView(args[0]).scheduled)
    return [compat.RequestView(args[0]).id] if name in _OF_REQUESTS else []


def _request(recorder: _Recorder, args: tuple[Any, ...]) -> _Fields:
    view = compat.RequestView(args[0])
    return {
        "request": recorder.number(view.id),
        "tokens": view.num_tokens,
        "prompt": view.num_prompt_tokens,
        "computed": view.num_computed_tokens,
    }


def _match(recorder: _Recorder, args: tuple[Any, ...]) -> _Fields:
    return _request(recorder, args) | {"at": args[1]}


def _allocated(recorder: _Recorder, args: tuple[Any, ...]) -> _Fields:
    ids = [runs(map(int, group)) for group in args[1].get_block_ids()]
    return _request(recorder, args) | {"ids": ids, "external": args[2]}


def _step(recorder: _Recorder, args: tuple[Any, ...]) -> _Fields:
    step = compat.StepView(args[0])
    scheduled = []
    for request, tokens in step.scheduled.items():
        entry: _Fields = {"request": recorder.number(request), "tokens": tokens}
        for tracked in recorder.known([request]):
            entry["known"] = tracked.view.num_tokens
            entry["computed"] = tracked.view.num_computed_tokens
        ids = step.block_ids(request)
        entry["ids"] = None if ids is None else [runs(map(int, group)) for group in ids]
        scheduled.append(entry)
    given = [
        [[runs(map(int, group)) for group in groups], computed]
        for groups, computed in step.new_blocks()
    ]
    return {
        "scheduled": scheduled,
        "given": given,
        "finished": recorder.numbers(step.finished),
        "total": step.total,
    }


def _plan(recorder: _Recorder, plan: StepPlan) -> _Fields:
    number = recorder.number
    return {
        "plan": {
            "loads": [[number(load.request), load.ids] for load in plan.loads],
            "reused": runs(plan.reused),
            "saves": [
                [number(save.request.view.id), save.first, runs(save.ids)] for save in plan.saves
            ],
            "ended": recorder.numbers(plan.ended),
            "bad": runs(sorted(plan.bad)),
            "failed": recorder.numbers(plan.failed),
        }
    }


def _finished(recorder: _Recorder, args: tuple[Any, ...]) -> _Fields:
    return {"finished": recorder.numbers(args[0])}


def _results(recorder: _Recorder, results: Any) -> _Fields:
    received, failed = results.finished_recving, results.failed_recving
    return {"received": recorder.numbers(received), "failed": recorder.numbers(failed)}


def _tensors(recorder: _Recorder, args: tuple[Any, ...]) -> _Fields:
    each = [
        [name, list(map(int, tensor.shape)), str(tensor.dtype)] for name, tensor in args[0].items()
    ]
    return {"tensors": each}


def _nothing(recorder: _Recorder, _: Any) -> _Fields:
    return {}


def _plain(recorder: _Recorder, result: Any) -> _Fields:
    return {"result": result if result is None else bool(result)}


#: Callbacks whose first argument is a request.
_OF_REQUESTS = {
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "request_finished",
    "request_finished_all_groups",
}

#: Not `wait_for_layer_load` and `save_kv_layer`: vLLM calls them for every layer, and with
#: `record_callbacks` they do nothing.
_CALLBACKS: dict[str, tuple[_Reader, _Result]] = {
    "on_new_request": (_request, _nothing),
    "get_num_new_matched_tokens": (
        _match,
        lambda _, result: {"matched": result[0], "is_async": result[1]},
    ),
    "update_state_after_alloc": (_allocated, _nothing),
    "build_connector_meta": (_step, _plan),
    "request_finished": (_request, _nothing),
    "request_finished_all_groups": (_request, _nothing),
    "take_events": (_nothing, lambda _, events: {"events": len(events)}),
    "reset_cache": (_nothing, _plain),
    "set_xfer_handshake_metadata": (lambda _, args: {"ranks": len(args[0])}, _nothing),
    "register_kv_caches": (_tensors, _nothing),
    "handle_preemptions": (lambda _, args: {"step": args[0].number}, _nothing),
    "start_load_kv": (_nothing, _nothing),
    "wait_for_save": (_nothing, _nothing),
    "get_transfer_results": (_finished, _results),
    "get_block_ids_with_load_errors": (
        _nothing,
        lambda _, bad: {"bad": runs(sorted(map(int, bad)))},
    ),
    "shutdown": (_nothing, _nothing),
}


def record(
    connector: Any,
    recording: CallbackRecording,
    role: str,
    view: compat.ConfigView,
    num_blocks: int,
) -> None:
    """Records the callbacks of a connector from now on. The first connector of the process writes
    the first line.
    """
    recording.begin_callbacks(
        {
            "format": "kvbm-vllm-callbacks",
            "version": _VERSION,
            "vllm": compat.vllm_version(),
            "role": role,
            "block_size": view.block_size,
            "blocks": num_blocks,
            "executor": view.executor,
            "ranks": view.tensor_parallel,
        }
    )
    recorder = _Recorder(connector, recording)
    for name, (read, result) in _CALLBACKS.items():
        recorder.wrap(name, read, result)
