"""Replays what a real vLLM called on the connector (`record_callbacks`), without vLLM.

The connector is the real one, over the stand-in's classes and tensors, with room for all blocks.
Each block that a request computes gets content that follows from its hash. So every block that vLLM
took for computed can be compared.
"""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from vllm_stand_in import Engine

__all__ = ["Recorded", "ReplayError", "replay"]

#: Seconds after which a load or a copy counts as lost.
_PATIENCE = 20.0


class ReplayError(AssertionError):
    """What the connector did otherwise than it was recorded, and the line."""


class Recorded:
    """The lines of a recording."""

    def __init__(self, text: str) -> None:
        lines = text.splitlines()
        if not lines or not text.endswith("\n"):
            raise ReplayError(f"line {max(1, len(lines))}: it is cut off: remove the line")
        self.header = json.loads(lines[0])
        if self.header.get("format") != "kvbm-vllm-callbacks" or self.header.get("version") != 1:
            raise ReplayError("line 1: this is no recording of vLLM's callbacks in version 1")
        if self.header["executor"] != "uni":
            raise ReplayError(
                "line 1: scheduler and worker were other processes: recordings of one process are replayed"
            )
        self.calls = [json.loads(line) for line in lines[1:]]
        for number, call in enumerate(self.calls):
            if call["n"] != number:
                raise ReplayError(
                    f"line {number + 2}: call {call['n']} stands here, lines are missing"
                )


class Request:
    """What the connector reads of vLLM's request."""

    lora_request = cache_salt = mm_features = prompt_embeds = None
    skip_reading_prefix_cache = False

    def __init__(self, number: int) -> None:
        self.request_id, self.number = f"r{number}", number
        self.num_tokens = self.num_computed_tokens = self.num_prompt_tokens = 0
        #: Numbers of its blocks.
        self.chain: list[int] = []
        self.block_hashes: list[bytes] = []


def replay(vllm: Any, recorded: Recorded) -> Counter[str]:
    """Does the same calls. How often each was called, and what was loaded and saved.

    Raises `ReplayError` with the first line whose result is wrong.
    """
    run = _Replay(vllm, recorded.header)
    try:
        for number, call in enumerate(recorded.calls):
            try:
                run.call(call)
            except AssertionError as error:
                raise ReplayError(f"line {number + 2}, {call['call']}: {error}") from error
        run.end()
        return run.counts
    finally:
        run.engine.close()


class _Replay:
    def __init__(self, vllm: Any, header: dict[str, Any]) -> None:
        self._size = int(header["block_size"])
        extra = {"host": "8192", "transfer.deadline": "60s"}
        own = {"engine_id": "replayed"}
        self.engine = Engine(
            vllm, blocks=header["blocks"], size=self._size, extra=extra, transfer=own
        )
        self._requests: dict[int, Request] = {}
        self._hashes: list[bytes] = []
        #: Steps that are planned and that the worker has not begun.
        self._planned: deque[tuple[Any, list[dict[str, Any]]]] = deque()
        self._scheduled: list[dict[str, Any]] = []
        self._received: set[str] = set()
        #: Blocks that were saved: request and place.
        self._saved: set[tuple[int, int]] = set()
        self.counts: Counter[str] = Counter()

    def call(self, call: dict[str, Any]) -> None:
        name = call["call"]
        self._hashes += [bytes.fromhex(hash) for hash in call.get("new", ())]
        for number, chain in call.get("chains", ()):
            request = self._request(number)
            request.chain = _flat(chain)
            request.block_hashes = [self._hashes[block] for block in request.chain]
        if "error" in call or name == "stopped":
            return
        self.counts[name] += 1
        getattr(self, f"_{name}", self._ignored)(call)

    def _ignored(self, call: dict[str, Any]) -> None:
        known = {"register_kv_caches", "set_xfer_handshake_metadata", "shutdown"}
        assert call["call"] in known, "there is no such callback"

    def _request(self, number: int) -> Request:
        return self._requests.setdefault(number, Request(number))

    def _named(self, call: dict[str, Any]) -> Request:
        request = self._request(call["request"])
        request.num_tokens, request.num_prompt_tokens = call["tokens"], call["prompt"]
        request.num_computed_tokens = call["computed"]
        return request

    # ---------------------------------------------------------- the scheduler

    def _on_new_request(self, call: dict[str, Any]) -> None:
        self.engine.scheduler.on_new_request(self._named(call))

    def _get_num_new_matched_tokens(self, call: dict[str, Any]) -> None:
        # What was being copied in the recording is there, at least.
        assert self.engine.manager.wait_offloads(_PATIENCE), "the copies do not end"
        found, is_async = self.engine.match(self._named(call), call["at"])
        assert found is not None, "a look-up is pending, and there is no volume"
        wanted = call["matched"] or 0
        assert found >= wanted, f"{found} tokens are promised, and {wanted} were"
        assert found == 0 or wanted == 0 or is_async == call["is_async"], "it loads in another way"
        self.counts["promised_tokens"] += found

    def _update_state_after_alloc(self, call: dict[str, Any]) -> None:
        ids = [_flat(group) for group in call["ids"]]
        self.engine.allocated(self._named(call), ids[0], call["external"])

    def _build_connector_meta(self, call: dict[str, Any]) -> None:
        ids: dict[str, list[int] | None] = {}
        tokens = {}
        for entry in call["scheduled"]:
            request = self._request(entry["request"])
            request.num_tokens = entry.get("known", request.num_tokens)
            request.num_computed_tokens = entry.get("computed", request.num_computed_tokens)
            tokens[request.request_id] = entry["tokens"]
            ids[request.request_id] = None if entry["ids"] is None else _flat(entry["ids"][0])
            entry["chain"] = list(request.chain)
        given = [
            SimpleNamespace(block_ids=([*map(_flat, groups)]), num_computed_tokens=computed)
            for groups, computed in call["given"]
        ]
        output = SimpleNamespace(
            scheduled_new_reqs=given,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
            ),
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=call["total"],
            finished_req_ids={self._request(number).request_id for number in call["finished"]},
            kv_connector_block_state=SimpleNamespace(
                get_block_ids=lambda name: None if ids[name] is None else (ids[name],)
            ),
        )
        plan = self.engine.scheduler.build_connector_meta(output)
        self._compare(plan, call["plan"])
        self._planned.append((plan, call["scheduled"]))

    def _compare(self, plan: Any, recorded: dict[str, Any]) -> None:
        loads = [[self._number(load.request), load.ids] for load in plan.loads]
        assert loads == recorded["loads"], f"loads {loads}, and loaded {recorded['loads']}"
        reused, before = list(plan.reused), _flat(recorded["reused"])
        assert reused == before, f"{reused} are overwritten, and {before} were"
        now = {
            (self._number(save.request.view.id), save.first + at): block
            for save in plan.saves
            for at, block in enumerate(save.ids)
        }
        then = {
            (number, first + at): block
            for number, first, ids in recorded["saves"]
            for at, block in enumerate(_flat(ids))
        }
        # What found no room, or was refused, is offered again: that differs.
        assert now.items() <= then.items(), f"saves {now}, and saved {then}"
        missing = then.keys() - now.keys() - self._saved
        assert not missing, f"blocks {sorted(missing)} are not saved"
        self._saved |= now.keys()
        self.counts["loads"] += len(loads)
        self.counts["saved_blocks"] += len(now)

    def _number(self, name: str) -> int:
        return int(name.removeprefix("r"))

    def _request_finished(self, call: dict[str, Any]) -> None:
        request = self._named(call)
        self.engine.scheduler.request_finished_all_groups(request, ([],))
        self._requests.pop(request.number)

    _request_finished_all_groups = _request_finished

    def _take_events(self, call: dict[str, Any]) -> None:
        list(self.engine.scheduler.take_events())

    def _reset_cache(self, call: dict[str, Any]) -> None:
        assert self.engine.scheduler.reset_cache() is True, "the cache is not reset"
        self._saved.clear()

    # ------------------------------------------------------------- the worker

    def _handle_preemptions(self, call: dict[str, Any]) -> None:
        assert self._planned, "the worker begins a step that was not planned"
        plan, self._scheduled = self._planned.popleft()
        self.engine.worker.handle_preemptions(plan)
        self.engine.worker.bind_connector_metadata(plan)

    def _start_load_kv(self, call: dict[str, Any]) -> None:
        self.engine.worker.start_load_kv(None)

    def _wait_for_save(self, call: dict[str, Any]) -> None:
        for entry in self._scheduled:
            self._compute(entry)
        self._scheduled = []
        self.engine.worker.wait_for_save()

    def _compute(self, entry: dict[str, Any]) -> None:
        """The forward pass of a request: what it takes for computed has to be right."""
        if entry["ids"] is None or "computed" not in entry:
            return
        ids, chain = _flat(entry["ids"][0]), entry["chain"]
        before, after = entry["computed"], entry["computed"] + entry["tokens"]
        for at in range(min(before // self._size, len(chain), len(ids))):
            assert self._holds(ids[at], chain[at]), (
                f"block {ids[at]} is taken for computed, and does not hold block {at} of request "
                f"{entry['request']}"
            )
        for at in range(before // self._size, min(-(-after // self._size), len(ids))):
            is_whole = at < min(after // self._size, len(chain))
            # A block that is not whole holds what no block holds.
            self._write(ids[at], chain[at] if is_whole else -1 - entry["request"])
        self.counts["computed_tokens"] += entry["tokens"]

    def _write(self, block: int, number: int) -> None:
        for layer, kv in enumerate(self.engine.kv):
            kv[block] = number + layer / 2

    def _holds(self, block: int, number: int) -> bool:
        return all(
            bool((kv[block] == number + layer / 2).all()) for layer, kv in enumerate(self.engine.kv)
        )

    def _get_transfer_results(self, call: dict[str, Any]) -> None:
        wanted = {f"r{number}" for number in call["received"]}
        end = time.monotonic() + _PATIENCE
        while True:
            results = self.engine.worker.get_transfer_results(set())
            for name in results.finished_recving or ():
                assert name not in self._received, f"{name} is received twice"
                self._received.add(name)
            assert not results.failed_recving, f"{results.failed_recving} failed"
            if wanted <= self._received:
                self._received -= wanted
                return
            assert time.monotonic() < end, f"{wanted - self._received} are not received"

    def _get_block_ids_with_load_errors(self, call: dict[str, Any]) -> None:
        bad = self.engine.worker.get_block_ids_with_load_errors()
        assert not bad, f"blocks {sorted(bad)} did not arrive"

    def end(self) -> None:
        """Nothing may be left behind."""
        for request in list(self._requests.values()):
            self.engine.scheduler.request_finished_all_groups(request, ([],))
        end = time.monotonic() + _PATIENCE
        while self.engine.manager.open_tickets != (0, 0) and time.monotonic() < end:
            self.engine.worker.get_transfer_results(set())
        assert self.engine.manager.open_tickets == (0, 0), "tickets or loads are open"
        assert self.engine.totals["errors"] == 0, "the connector had errors, see the log"
        self.counts["loaded_blocks"] = int(self.engine.totals["loaded_blocks"])


def _flat(runs: Iterable[list[int]]) -> list[int]:
    return [first + at for first, count in runs for at in range(count)]
