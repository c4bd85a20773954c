"""Recordings: what an engine asked of its manager, in a file that a test can replay.

A recording has no bytes of blocks, no tokens and no ids of requests. Requests are numbered. Blocks
are numbered too, and each has the hash that kvbm knows it by. docs/operate.md says how to replay
one.
"""

from __future__ import annotations

import io
import json
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, cast

from ._core import (
    Config,
    ExternalSequence,
    Fence,
    FinishedLoad,
    Layout,
    Namespace,
    OffloadStarted,
    Ticket,
    TokenSequence,
    __version__,
)
from .errors import ConfigInvalid
from .manager import KvBlockManager

__all__ = ["RECORD_LIMIT", "RecordedManager", "Recording", "build_manager", "runs"]

_Sequence = TokenSequence | ExternalSequence

#: The format; the replayer refuses another one.
_VERSION = 1

#: Most bytes of a recording, unless the operator says otherwise.
RECORD_LIMIT = 1 << 30

#: A limit below this holds no useful recording.
_LEAST_LIMIT = 4096

#: Room for the line that says why a recording ended.
_LAST_LINE = 256

#: Most blocks that get a number: about 150 MiB of memory.
_MOST_BLOCKS = 1_000_000

#: Most requests whose number is kept. One that is named again later gets another number.
_MOST_REQUESTS = 65_536

#: Most files with the same name: a restart writes into the next one.
_MOST_FILES = 1000

#: Seconds between two writes to the file system.
_FLUSH_INTERVAL = 1.0


class Recording:
    """A file that takes one line for each call.

    An error while it is written ends the recording, is logged once, and reaches nobody else.
    """

    #: The operator's option, for errors.
    _OPTION = "record"

    def __init__(
        self, path: str, limit: int = RECORD_LIMIT, logger: logging.Logger | None = None
    ) -> None:
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < _LEAST_LIMIT:
            raise ConfigInvalid(
                f"option 'record_limit' is {limit!r}: give a number of bytes, {_LEAST_LIMIT} or more"
            )
        self._logger = logger or logging.getLogger("kvbm_rs.recording")
        self._limit = limit - _LAST_LINE
        self.path, descriptor = _create(path, self._OPTION)
        self._file = io.BufferedWriter(io.FileIO(descriptor, "wb"), 1 << 16)
        self._lock = threading.Lock()
        self._began = time.monotonic_ns()
        self._written = self._calls = 0
        self._is_over = False
        self._blocks: dict[bytes, int] = {}
        self._requests: OrderedDict[str, int] = OrderedDict()
        self._next_request = 0
        self._wake = threading.Event()
        threading.Thread(target=self._flush_often, name="kvbm-recording", daemon=True).start()

    @property
    def is_over(self) -> bool:
        """Whether nothing is written any more."""
        return self._is_over

    def begin(self, manager: KvBlockManager, layout: Layout, shadow: bool) -> None:
        """Writes the first line."""
        namespace = manager.namespace
        header = {
            "format": "kvbm-recording",
            "version": _VERSION,
            "kvbm": __version__,
            "page_size": layout.page_size,
            "blocks": layout.num_blocks,
            "block_bytes": layout.block_bytes,
            "capacity": manager.capacity,
            "flat": namespace.flat,
            "shadow": shadow,
        }
        self.write_header(header)

    def write_header(self, header: dict[str, Any]) -> None:
        with self._lock:
            self._guarded(lambda: self._put(header))

    def add(
        self,
        call: str,
        began: int,
        *,
        request: str | None = None,
        sequence: _Sequence | None = None,
        end: int | None = None,
        **fields: Any,
    ) -> None:
        """A call that began at `began` nanoseconds of the monotonic clock and is over."""
        if self._is_over:
            return
        with self._lock:
            self._guarded(lambda: self._add(call, began, request, sequence, end, fields))

    def _add(
        self,
        call: str,
        began: int,
        request: str | None,
        sequence: _Sequence | None,
        end: int | None,
        fields: dict[str, Any],
    ) -> None:
        if self._is_over:
            return
        line = self._line(call, began)
        if request is not None:
            line["request"] = self._request(request)
        if sequence is not None:
            chain = self._chain(sequence.hashes[:end], line)
            if chain is None:
                return
            line["chain"] = chain
        self._put(line | fields)
        self._calls += 1

    def _line(self, call: str, began: int) -> dict[str, Any]:
        return {
            "n": self._calls,
            "us": (began - self._began) // 1000,
            "took": (time.monotonic_ns() - began) // 1000,
            "call": call,
        }

    def _chain(self, hashes: list[bytes], line: dict[str, Any]) -> list[list[int]] | None:
        """The numbers of blocks, as runs. `line` gets the hashes of those that had none. `None`
        where there are too many: the recording is over.
        """
        fresh = [hash for hash in hashes if hash not in self._blocks]
        if len(self._blocks) + len(fresh) > _MOST_BLOCKS:
            self._end(f"more than {_MOST_BLOCKS} different blocks")
            return None
        for hash in fresh:
            self._blocks.setdefault(hash, len(self._blocks))
        if fresh:
            line.setdefault("new", []).extend(hash.hex() for hash in dict.fromkeys(fresh))
        return runs([self._blocks[hash] for hash in hashes])

    def _request(self, request: str) -> int:
        number = self._requests.get(request)
        if number is None:
            number = self._requests[request] = self._next_request
            self._next_request += 1
            if len(self._requests) > _MOST_REQUESTS:
                self._requests.popitem(last=False)
        return number

    def _put(self, line: dict[str, Any]) -> None:
        text = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        if self._written + len(text) > self._limit:
            self._end("record_limit is reached")
            return
        self._file.write(text)
        self._written += len(text)

    def _end(self, why: str) -> None:
        """The last line of a recording that ends before its manager."""
        self._is_over = True
        last = {"n": self._calls, "call": "stopped", "why": why}
        self._file.write(json.dumps(last, separators=(",", ":")).encode() + b"\n")
        self._shut()
        self._logger.warning(
            "kvbm: the recording %s ends after %d calls: %s", self.path, self._calls, why
        )

    def _shut(self) -> None:
        self._is_over = True
        self._wake.set()
        self._file.close()
        self._blocks, self._requests = {}, OrderedDict()

    def _guarded(self, write: Any) -> None:
        try:
            write()
        except Exception as error:
            self._is_over = True
            self._wake.set()
            self._logger.error(
                "kvbm: the recording %s ends after %d calls: %s: %s",
                self.path,
                self._calls,
                type(error).__name__,
                error,
            )
            # What a buffer still holds cannot be written either: only the descriptor is freed.
            try:
                self._file.raw.close()
            except Exception:
                self._logger.debug("kvbm: the recording cannot be closed", exc_info=True)

    def _flush_often(self) -> None:
        while not self._wake.wait(_FLUSH_INTERVAL):
            with self._lock:
                if not self._is_over:
                    self._guarded(self._file.flush)

    def close(self) -> None:
        """Writes what is left."""
        with self._lock:
            if not self._is_over:
                self._guarded(self._shut)


class RecordedManager(KvBlockManager):
    """A manager whose calls are written to a recording."""

    _recording: Recording

    def __new__(
        cls,
        config: Config,
        layout: Layout,
        namespace: Namespace,
        *,
        shadow: bool = False,
        workers: Sequence[str | os.PathLike[str]] = (),
        recording: Recording | None = None,
    ) -> RecordedManager:
        if len(layout.groups) > 1:
            raise ConfigInvalid(
                f"option 'record': the model has {len(layout.groups)} cache groups, and recordings know one; leave it out"
            )
        manager = cast(
            "RecordedManager",
            super().__new__(cls, config, layout, namespace, shadow=shadow, workers=workers),
        )
        if recording is None:
            raise ConfigInvalid("a RecordedManager needs a recording: give `recording`")
        manager._recording = recording
        recording.begin(manager, layout, shadow)
        return manager

    def _note(self, call: str, run: Any, result: Any, **fields: Any) -> Any:
        """Runs a call. `result` makes fields of what it returns."""
        began = time.monotonic_ns()
        try:
            returned = run()
        except Exception as error:
            # The message may name the request.
            self._recording.add(call, began, **fields, error=type(error).__name__)
            raise
        if not self._recording.is_over:
            self._recording.add(call, began, **fields, **result(returned))
        return returned

    def look_up(
        self, request: str, sequence: _Sequence, first: int = 0, *, end: int | None = None
    ) -> Ticket | None:
        def result(found: Ticket | None) -> dict[str, Any]:
            if found is None:
                return {"pending": True}
            return {"blocks": found.blocks, "by_tier": list(found.by_tier)}

        run = super().look_up
        found: Ticket | None = self._note(
            "look_up",
            lambda: run(request, sequence, first, end=end),
            result,
            request=request,
            sequence=sequence,
            end=end,
            first=first,
        )
        return found

    def stage(self, request: str, sequence: _Sequence, first: int = 0, *, timeout: float) -> int:
        run = super().stage
        blocks: int = self._note(
            "stage",
            lambda: run(request, sequence, first, timeout=timeout),
            lambda blocks: {"blocks": blocks},
            request=request,
            sequence=sequence,
            first=first,
            timeout=timeout,
        )
        return blocks

    def commit(
        self,
        request: str,
        ids: Any,
        after: Fence | None = None,
        *,
        timeout: float | None = None,
        by_layer: bool = False,
    ) -> None:
        run = super().commit
        self._note(
            "commit",
            lambda: run(request, ids, after, timeout=timeout, by_layer=by_layer),
            _nothing,
            request=request,
            ids=_numbers(ids),
        )

    def audit(
        self,
        request: str,
        ids: Any,
        after: Fence | None = None,
        *,
        elements: str = "bytes",
        tolerance: float = 0.0,
    ) -> None:
        run = super().audit
        self._note(
            "audit",
            lambda: run(request, ids, after, elements=elements, tolerance=tolerance),
            _nothing,
            request=request,
            ids=_numbers(ids),
        )

    def abandon(self, request: str) -> bool:
        run = super().abandon
        had: bool = self._note(
            "abandon", lambda: run(request), lambda had: {"had": had}, request=request
        )
        return had

    def _over(self) -> list[FinishedLoad]:
        began = time.monotonic_ns()
        over = super()._over()
        for load in over:
            self._recording.add(
                "finished",
                began,
                request=load.request,
                arrived=load.arrived,
                wanted=load.wanted,
                failures=len(load.failures),
            )
        return over

    def offload(
        self,
        ids: Any,
        sequence: _Sequence,
        first: int = 0,
        after: Fence | None = None,
        *,
        group: int = 0,
        priority: int = 0,
    ) -> OffloadStarted:
        def result(begun: OffloadStarted) -> dict[str, Any]:
            refused = [block for block, _ in begun.refused]
            return {"started": begun.started, "present": begun.present, "refused": refused}

        run = super().offload
        begun: OffloadStarted = self._note(
            "offload",
            lambda: run(ids, sequence, first, after, group=group, priority=priority),
            result,
            sequence=sequence,
            first=first,
            ids=_numbers(ids),
        )
        return begun

    def released(self, ids: Any) -> list[int]:
        run = super().released
        busy: list[int] = self._note(
            "released", lambda: run(ids), lambda busy: {"busy": busy}, ids=_numbers(ids)
        )
        return busy

    def before_reuse(self, ids: Any, timeout: float) -> list[int]:
        run = super().before_reuse
        busy: list[int] = self._note(
            "before_reuse",
            lambda: run(ids, timeout),
            lambda busy: {"busy": busy},
            ids=_numbers(ids),
        )
        return busy

    def step(self) -> int:
        number: int = self._note("step", super().step, _nothing)
        return number

    def branch_ends(self, sequence: _Sequence) -> None:
        run = super().branch_ends
        self._note("branch_ends", lambda: run(sequence), _nothing, sequence=sequence)

    def prefilled(self, tokens: int, elapsed: float) -> bool:
        run = super().prefilled
        counts: bool = self._note(
            "prefilled",
            lambda: run(tokens, elapsed),
            lambda counts: {"counts": counts},
            tokens=tokens,
            elapsed_us=int(elapsed * 1e6),
        )
        return counts

    def prefetch(self, sequence: _Sequence) -> int:
        run = super().prefetch
        return self._ahead("prefetch", sequence, lambda: run(sequence))

    def session_resumes(self, sequence: _Sequence) -> int:
        run = super().session_resumes
        return self._ahead("session_resumes", sequence, lambda: run(sequence))

    def _ahead(self, call: str, sequence: _Sequence, run: Any) -> int:
        started: int = self._note(call, run, lambda blocks: {"blocks": blocks}, sequence=sequence)
        return started

    def wait_offloads(self, timeout: float) -> bool:
        run = super().wait_offloads
        reached: bool = self._note(
            "wait_offloads", lambda: run(timeout), lambda reached: {"reached": reached}
        )
        return reached

    def flush(self, timeout: float) -> int:
        run = super().flush
        blocks: int = self._note("flush", lambda: run(timeout), lambda blocks: {"blocks": blocks})
        return blocks

    def clear(self, tier: str, *, wait: bool = True) -> int:
        run = super().clear
        blocks: int = self._note(
            "clear",
            lambda: run(tier, wait=wait),
            lambda blocks: {"blocks": blocks},
            tier=tier,
            wait=wait,
        )
        return blocks

    def forget(self, namespace: Namespace, *, wait: bool = True) -> int:
        run = super().forget
        blocks: int = self._note(
            "forget",
            lambda: run(namespace, wait=wait),
            lambda blocks: {"blocks": blocks},
            own=namespace.tag == self.namespace.tag,
            wait=wait,
        )
        return blocks

    def close(self, timeout: float = 10.0) -> str | None:
        run = super().close
        try:
            not_saved: str | None = self._note(
                "close", lambda: run(timeout), lambda not_saved: {"complete": not_saved is None}
            )
            return not_saved
        finally:
            self._recording.close()


def build_manager(
    config: Config,
    layout: Layout,
    namespace: Namespace,
    *,
    shadow: bool = False,
    workers: Sequence[str | os.PathLike[str]] = (),
    record: str | None = None,
    record_limit: int = RECORD_LIMIT,
    logger: logging.Logger | None = None,
) -> KvBlockManager:
    """A manager; one whose calls are recorded where there is a path."""
    if record is None:
        return KvBlockManager(config, layout, namespace, shadow=shadow, workers=workers)
    recording = Recording(record, record_limit, logger)
    try:
        manager = RecordedManager(
            config, layout, namespace, shadow=shadow, workers=workers, recording=recording
        )
    except BaseException:
        recording.close()
        raise
    (logger or logging.getLogger("kvbm_rs.recording")).info(
        "kvbm: the calls of this engine are recorded in %s", recording.path
    )
    return manager


def _create(path: str, option: str) -> tuple[str, int]:
    """A file that nobody else can read. A file that is there stays: a restart takes the next name."""
    if not isinstance(path, str) or not path:
        raise ConfigInvalid(f"option {option!r} is {path!r}: give the path of a file")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    for number in range(_MOST_FILES):
        name = path if number == 0 else f"{path}.{number}"
        try:
            return name, os.open(name, flags, 0o600)
        except FileExistsError:
            continue
        except (OSError, ValueError) as error:
            raise ConfigInvalid(
                f"option {option!r}: {name!r} cannot be made: {error}; give a path in a directory that this process may write"
            ) from error
    raise ConfigInvalid(
        f"option {option!r}: {path!r} and {_MOST_FILES - 1} names behind it exist: remove old recordings"
    )


def runs(numbers: Iterable[int]) -> list[list[int]]:
    """Numbers as runs of a first one and a count."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][0] + found[-1][1] == number:
            found[-1][1] += 1
        else:
            found.append([number, 1])
    return found


def _numbers(ids: Any) -> list[int]:
    try:
        return [int(block) for block in ids]
    except Exception:
        # The call itself says what is wrong with them.
        return []


def _nothing(_: Any) -> dict[str, Any]:
    return {}
