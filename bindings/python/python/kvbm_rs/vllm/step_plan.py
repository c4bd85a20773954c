"""What scheduler and workers tell each other, and how their callbacks fail."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)

from .process import RankMemory
from .requests import TrackedRequest

__all__ = ["Load", "RankHandshake", "Save", "StepPlan", "guarded"]

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def guarded(
    otherwise: Any,
) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """A callback whose error costs a hit or a copy: it is logged, and the result is `otherwise()`.

    An exception that leaves a callback of the scheduler ends the engine.
    """

    def decorate(callback: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        @functools.wraps(callback)
        def without_errors(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
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

        return without_errors

    return decorate


@dataclass
class Load:
    """A load of what a request was promised."""

    request: str
    #: The blocks to load into, by cache group; empty where they are not known.
    ids: list[list[int]]
    #: Whether its request runs in the same step; else it waits for the load.
    is_in_step: bool = False
    #: Whether the step begins before all of it is there.
    is_by_layer: bool = False


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
    #: Whether each layer is copied while the step computes the next.
    is_by_layer: bool = False


@dataclass
class StepPlan(KVConnectorMetadata):  # type: ignore[misc]
    """What the worker does in a step.

    Where workers are in other processes, the scheduler starts loads and saves itself: `loads` and
    `saves` are empty, `reused` is too unless a node daemon has the blocks, and `ended` and `bad`
    say what workers report to vLLM.
    """

    loads: list[Load] = field(default_factory=list)
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
    #: Requests whose load failed as a whole.
    failed: set[str] = field(default_factory=set)


@dataclass
class RankHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What a worker says to the scheduler before the first step."""

    memory: RankMemory
