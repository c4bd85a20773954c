"""How long TensorRT-LLM's steps take that compute prompts: what computing costs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from ..prefill_speed import LEAST_TOKENS

__all__ = ["HostMoment", "Moment", "StepTimes"]


class Moment(Protocol):
    """A point of the engine's work, as `torch.cuda.Event` has it."""

    def query(self) -> bool:
        """Whether the work has passed it."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from here to `end`; the work has passed both."""


class HostMoment:
    """Now, where what was called is done."""

    def __init__(self) -> None:
        self._time = time.monotonic()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        milliseconds: float = (end._time - self._time) * 1e3
        return milliseconds


class StepTimes:
    """Times of steps from the end of their loads to the end of their forward pass. On a device it
    is the time of the stream, so neither loads nor pauses between steps count.
    """

    #: Steps that the device has not ended; more are not measured.
    MOST_OPEN = 16

    def __init__(self, moment: Callable[[Any], Moment]) -> None:
        #: Makes a moment behind what was submitted to a stream.
        self._moment = moment
        self._begun: tuple[int, Any, Moment] | None = None
        self._open: deque[tuple[int, Moment, Moment]] = deque()

    def begins(self, tokens: int, stream: Any) -> None:
        """A step that computes so many tokens of prompts is submitted to `stream` from now on."""
        self._begun = None
        if tokens >= LEAST_TOKENS and len(self._open) < self.MOST_OPEN:
            self._begun = tokens, stream, self._moment(stream)

    def ends(self, stream: Any) -> None:
        """The step was submitted. With another stream than it began on, it has no time: the streams
        do not wait for each other.
        """
        begun, self._begun = self._begun, None
        if begun is not None and begun[1] == stream:
            self._open.append((begun[0], begun[2], self._moment(stream)))

    def over(self) -> list[tuple[int, float]]:
        """Tokens and seconds of steps that are over, each once."""
        found = []
        while self._open and self._open[0][2].query():
            tokens, begin, end = self._open.popleft()
            found.append((tokens, begin.elapsed_time(end) / 1e3))
        return found
