"""Callbacks that raise nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

__all__ = ["guarded"]

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def guarded(
    otherwise: Callable[..., Any],
) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """A callback whose error is a miss: it is counted in `failures` and logged, and the result is
    `otherwise` of the same arguments.

    An exception in a callback of an engine's scheduler ends the engine. SGLang does not start a
    storage thread again that an exception ended.
    """

    def decorate(callback: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        @functools.wraps(callback)
        def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            try:
                return callback(*args, **kwargs)
            except Exception as error:
                owner: Any = args[0]
                owner.failures.add(callback.__name__, error)
                result: _Result = otherwise(*args[1:], **kwargs)
                return result

        return call

    return decorate
