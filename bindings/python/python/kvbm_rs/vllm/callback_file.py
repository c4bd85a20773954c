"""The file of `callbacks`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import __version__
from ..recording import Recording
from .requests import TrackedRequest

__all__ = ["CallbackRecording"]


class CallbackRecording(Recording):
    """A file of callbacks. Its lines name several requests, each with the blocks that it has."""

    _OPTION = "record_callbacks"

    def __init__(self, path: str, limit: int, logger: Any) -> None:
        super().__init__(path, limit, logger)
        #: By request, the sequence and how many of its blocks were written down.
        self._written_chains: dict[int, tuple[Any, int]] = {}
        self._has_header = False

    def _shut(self) -> None:
        # Nothing is written behind this: no sequence has to be kept.
        self._written_chains.clear()
        super()._shut()

    def begin_callbacks(self, header: dict[str, Any]) -> None:
        """Writes the first line, once."""
        if not self._has_header:
            self._has_header = True
            self.write_header(header | {"kvbm": __version__})

    def callback(
        self,
        call: str,
        began: int,
        fields: Callable[[], dict[str, Any]],
        tracked: list[TrackedRequest],
    ) -> None:
        """A callback that is over. `tracked`: the requests that it was about."""
        if self.is_over:
            return
        with self._lock:
            self._guarded(lambda: self._callback(call, began, fields, tracked))

    def _callback(
        self,
        call: str,
        began: int,
        fields: Callable[[], dict[str, Any]],
        tracked: list[TrackedRequest],
    ) -> None:
        if self.is_over:
            return
        line = self._line(call, began)
        self._look(lambda: line.update(fields()))
        if self.is_over:
            return
        chains = []
        for request in tracked:
            number, sequence = self._request(request.view.id), request.sequence
            known, count = self._written_chains.get(number, (None, 0))
            if count == len(sequence) and (known is sequence or count == 0):
                continue
            hashes = sequence.hashes
            chain = self._chain(hashes, line)
            if chain is None:
                return
            self._written_chains[number] = (sequence, len(hashes))
            chains.append([number, chain])
        if chains:
            line["chains"] = chains
        self._put(line)
        self._calls += 1

    def guarded(self, look: Callable[[], None]) -> None:
        """What cannot be read of vLLM's objects ends the recording and nothing else."""
        with self._lock:
            if not self.is_over:
                self._look(look)

    def _look(self, look: Callable[[], None]) -> None:
        try:
            look()
        except Exception as error:
            self._logger.debug("kvbm: what vLLM gave cannot be recorded", exc_info=True)
            # The message may have a name or a token.
            why = f"what vLLM gave cannot be read: {type(error).__name__}"
            self._guarded(lambda: self._end(why))

    def requests_over(self, tracked: list[TrackedRequest]) -> None:
        """They are not named again."""
        with self._lock:
            for request in tracked:
                self._written_chains.pop(self._requests.get(request.view.id, -1), None)
