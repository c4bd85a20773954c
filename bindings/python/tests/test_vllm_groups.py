"""The connector with a model of several cache groups, over a stand-in for vLLM's classes: tensors
of all groups in one memory, ids of one pool, a list of ids for each group.
"""

from __future__ import annotations

import functools
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kvbm_rs import Config, NodeEngine, NodeServer
from vllm_stand_in import BLOCKS, PROMPT, SIZE, Request, Tensor, tensor
from vllm_stand_in import vllm as vllm  # a fixture

WINDOW, FULL, STATE = range(3)
#: Bytes of a state, less than a page.
STATE_BYTES = 300


def spec(name: str, size: int = SIZE, **fields: Any) -> Any:
    return type(name, (), {"block_size": size, **fields})()


def window(size: int = SIZE, tokens: int = 6) -> Any:
    return spec("SlidingWindowSpec", size, sliding_window=tokens, extra_retained_tokens=0)


def state(mode: str = "align", drafts: int = 0) -> Any:
    return spec("MambaSpec", mamba_cache_mode=mode, num_speculative_blocks=drafts)


def group(spec: Any, layers: list[str], **changes: Any) -> Any:
    fields = {"is_eagle_group": False, "host_resident": False, "enable_kv_transfer": True}
    return SimpleNamespace(kv_cache_spec=spec, layer_names=layers, **(fields | changes))


def three_groups() -> list[Any]:
    return [
        group(window(), ["w0", "w1"]),
        group(spec("FullAttentionSpec"), ["f0", "f1"]),
        group(state(), ["s0"]),
    ]


class Rank:
    """The KV memory of a worker: two tensors, which the groups share."""

    def __init__(self) -> None:
        self.pages = [tensor(), tensor()]
        self.states = self.pages[0].reshape(BLOCKS, -1).view(np.int8)[:, :STATE_BYTES].view(Tensor)

    @property
    def layers(self) -> dict[str, Any]:
        one, two = self.pages
        return {"w0": one, "w1": two, "f0": one, "f1": two, "s0": self.states}

    def write(self, number: int, block: int, position: int, token: int) -> None:
        for layer, page in enumerate(self.pages):
            page[block, :, position % SIZE] = 1000 * number + token + layer

    def holds(self, number: int, block: int, tokens: list[int]) -> bool:
        return all(
            bool((page[block, :, at] == 1000 * number + token + layer).all())
            for layer, page in enumerate(self.pages)
            for at, token in enumerate(tokens)
        )


class Engine:
    """Scheduler and workers of a model with three groups."""

    def __init__(self, vllm: Any, executor: str = "uni", ranks: int = 1, **changes: Any) -> None:
        from kvbm_rs.vllm import KvbmConnector

        extra = {"host": "96", "host.pinned": False, "policy.admission": "all"}
        daemon = changes.pop("daemon", None)
        if daemon is not None:
            extra = {"daemon": str(daemon)}
        self.config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(
                kv_connector_extra_config=extra | changes.pop("extra", {}),
                engine_id=f"groups-{executor}",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
            ),
            kv_events_config=None,
            use_v2_model_runner=False,
            compilation_config=SimpleNamespace(
                static_forward_context={},
                cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: False),
            ),
            scheduler_config=SimpleNamespace(
                async_scheduling=False, max_num_batched_tokens=2048, long_prefill_token_threshold=0
            ),
            speculative_config=None,
            cache_config=SimpleNamespace(
                # vLLM's workers may still have what it was before.
                block_size=1,
                cache_dtype="auto",
                enable_prefix_caching=True,
                prefix_caching_hash_algo="sha256",
                hash_block_size=None,
            ),
            parallel_config=SimpleNamespace(
                world_size=ranks,
                tensor_parallel_size=ranks,
                decode_context_parallel_size=1,
                distributed_executor_backend=executor,
                nnodes=1,
                data_parallel_index=0,
                data_parallel_size=1,
                use_ubatching=False,
            ),
            model_config=SimpleNamespace(
                model="m",
                revision="r",
                dtype="float32",
                quantization=None,
                hf_config=SimpleNamespace(to_json_string=lambda use_diff: "{}"),
            ),
        )
        cache = SimpleNamespace(
            num_blocks=BLOCKS,
            kv_cache_groups=changes.pop("groups", three_groups()),
            hash_block_size=changes.pop("hash_size", SIZE),
            prefix_cache_retention_interval=changes.pop("retention", None),
        )
        self.ranks = [Rank() for _ in range(ranks)]
        self.workers = []
        for number, rank in enumerate(self.ranks):
            vllm.compat.tensor_parallel_rank = functools.partial(int, number)
            worker = KvbmConnector(self.config, vllm.role.WORKER, cache)
            worker.register_kv_caches(rank.layers)
            self.workers.append(worker)
        self.scheduler = KvbmConnector(self.config, vllm.role.SCHEDULER, cache)
        if executor == "mp":
            handshakes = [worker.get_handshake_metadata() for worker in self.workers]
            sent = {at: pickle.loads(pickle.dumps(one)) for at, one in enumerate(handshakes)}
            self.scheduler.set_xfer_handshake_metadata(sent)
        self.is_remote = executor == "mp"
        self.manager = self.scheduler._process.manager

    @property
    def totals(self) -> dict[str, float]:
        totals: dict[str, float] = self.scheduler._process.counters.totals
        return totals

    def step(
        self,
        running: tuple[Request, list[list[int]], int] | None = None,
        states: list[tuple[int, int, int]] | None = None,
    ) -> tuple[set[str], set[str]]:
        """A request with its blocks by group and the tokens that are computed now; complete states
        as vLLM offers them. What was received, and what of it failed.
        """
        new: list[Any] = []
        ids: list[list[int]] = [[], [], []]
        scheduled: dict[str, int] = {}
        offers: dict[str, list[tuple[int, int, int]]] = {}
        if running is not None:
            request, ids, tokens = running
            done = request.num_computed_tokens
            new = [SimpleNamespace(block_ids=tuple(ids), num_computed_tokens=done)]
            scheduled = {request.request_id: tokens}
            offers = {request.request_id: states or []}
        output = SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
            ),
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            finished_req_ids=set(),
            kv_connector_block_state=SimpleNamespace(
                get_block_ids=lambda name: tuple(ids), boundary_state_offloads=offers
            ),
        )
        plan = self.scheduler.build_connector_meta(output)
        if self.is_remote:
            plan = pickle.loads(pickle.dumps(plan))
        for worker in self.workers:
            worker.handle_preemptions(plan)
            worker.bind_connector_metadata(plan)
        if running is not None:
            self.forward(*running, states or [])
        for worker in self.workers:
            worker.start_load_kv(None)
            worker.wait_for_save()
        results = [worker.get_transfer_results(set()) for worker in self.workers]
        assert all(result == results[0] for result in results)
        assert not any(worker.get_block_ids_with_load_errors() for worker in self.workers)
        return results[0].finished_recving, results[0].failed_recving

    def forward(
        self,
        request: Request,
        ids: list[list[int]],
        tokens: int,
        states: list[tuple[int, int, int]],
    ) -> None:
        done = request.num_computed_tokens
        for rank in self.ranks:
            for position in range(done, done + tokens):
                for number in (WINDOW, FULL):
                    block = ids[number][position // SIZE]
                    rank.write(number, block, position, request.all_token_ids[position])
            for _, block, covered in states:
                rank.states[block] = covered
        request.num_computed_tokens += tokens

    def compute(self, name: str = "a", prompt: list[int] | None = None) -> Request:
        """Computes a request that nothing is known of, and waits for its copies."""
        request = Request(name, prompt or PROMPT)
        self.scheduler.on_new_request(request)
        assert self.match(request) == (0, False)
        ids = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [0, 0, 0, 11, 12]]
        self.step((request, ids, request.num_tokens), [(STATE, 11, 16)])
        self.scheduler.request_finished_all_groups(request, tuple(ids))
        assert self.manager.wait_offloads(10)
        return request

    def match(self, request: Request, computed: int = 0) -> tuple[int | None, bool]:
        found: tuple[int | None, bool] = self.scheduler.get_num_new_matched_tokens(
            request, computed
        )
        return found

    def allocated(self, request: Request, ids: list[list[int]], tokens: int) -> None:
        self.scheduler.update_state_after_alloc(
            request, SimpleNamespace(get_block_ids=lambda: tuple(ids)), tokens
        )

    def until_received(self, name: str) -> set[str]:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            received, failed = self.step()
            if received:
                assert received == {name}
                return failed
        raise AssertionError("the load did not end")

    def close(self) -> None:
        self.scheduler.shutdown()
        for worker in self.workers:
            worker.shutdown()


@pytest.fixture(params=["uni", "mp", "uni over a daemon", "mp over a daemon"])
def engine(vllm: Any, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    executor, _, keeper = request.param.partition(" ")
    ranks = 1 if executor == "uni" else 2
    if not keeper:
        engine = Engine(vllm, executor, ranks)
        yield engine
        engine.close()
        return
    socket = tmp_path / "run" / "node.sock"
    engine = Engine(vllm, executor, ranks, daemon=socket)
    with server(engine, socket, ranks):
        assert isinstance(engine.manager, NodeEngine) and engine.manager.wait_ready(30.0)
        yield engine
        engine.close()


def server(engine: Engine, socket: Path, ranks: int) -> NodeServer:
    """A daemon of the model that the engine says it needs."""
    layout = engine.scheduler._process.layout
    assert layout is not None
    more = '[namespace]\nmodel = "daemon"\n[host]\ncapacity = 96\npinned = false\n[policy]\nadmission = "all"\n'
    return NodeServer(
        Config.from_toml(f"{layout.daemon_model}{more}[parallelism]\ntensor_parallel = {ranks}\n"),
        socket,
    )


#: As vLLM allocates for 16 computed tokens and one more: nothing before a window or a state.
PLACES = [[0, 0, 21, 22, 23], [24, 25, 26, 27, 28], [0, 0, 0, 29, 30]]


def test_a_prompt_comes_back_in_every_group(engine: Engine) -> None:
    engine.compute()
    again = Request("b", PROMPT)
    assert engine.match(again) == (16, True)
    assert engine.match(again) == (16, True), "a second question has the same answer"
    engine.allocated(again, PLACES, 16)
    assert engine.until_received("b") == set()
    engine.allocated(again, PLACES, 0)
    for rank in engine.ranks:
        for block in range(4):
            tokens = PROMPT[block * SIZE : (block + 1) * SIZE]
            assert rank.holds(FULL, PLACES[FULL][block], tokens)
            assert block < 2 or rank.holds(WINDOW, PLACES[WINDOW][block], tokens)
        assert (rank.states[29] == 16).all()
        assert not rank.pages[0][0].any(), "vLLM's null block is not written"
    assert engine.manager.open_tickets == (0, 0)
    assert engine.totals["hit_tokens_g2"] == 16 and engine.totals["errors"] == 0


def test_a_prefix_ends_where_there_is_a_state(engine: Engine) -> None:
    request = Request("a", PROMPT)
    engine.scheduler.on_new_request(request)
    ids = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [0, 11, 0, 0, 12]]
    # A state within a block, and one at the end of the second.
    engine.step((request, ids, 17), [(STATE, 12, 17), (STATE, 11, 8)])
    assert engine.manager.wait_offloads(10)
    again = Request("b", PROMPT)
    assert engine.match(again) == (8, True)
    assert engine.scheduler._requests["b"].groups == [(0, 2), (0, 2), (1, 2)]
    assert engine.match(again, 8) == (0, False), "vLLM has found them itself"
    assert engine.manager.open_tickets == (0, 0)


def test_what_vllm_has_is_not_loaded(engine: Engine) -> None:
    engine.compute()
    again = Request("b", PROMPT)
    assert engine.match(again, 12) == (4, True)
    places = [[0, 0, 21, 22, 23], [24, 25, 26, 27, 28], [0, 0, 20, 29, 30]]
    for rank in engine.ranks:
        rank.pages[0][[21, 24, 25, 26, 20]] = 7
    engine.allocated(again, places, 4)
    assert engine.until_received("b") == set()
    for rank in engine.ranks:
        assert rank.holds(WINDOW, 22, PROMPT[12:16]) and rank.holds(FULL, 27, PROMPT[12:16])
        assert (rank.states[29] == 16).all()
        assert (rank.pages[0][[21, 24, 25, 26, 20]] == 7).all()


def test_a_load_that_fails_is_computed_whole_and_not_promised_again(engine: Engine) -> None:
    engine.compute()
    again = Request("b", PROMPT)
    assert engine.match(again) == (16, True)
    engine.manager.abandon("b")  # as if it were too old
    engine.allocated(again, PLACES, 16)
    assert engine.until_received("b") == {"b"}
    assert engine.match(again) == (0, False), "vLLM asks again for what failed"
    engine.scheduler.request_finished_all_groups(again, tuple(PLACES))
    assert engine.match(Request("c", PROMPT)) == (16, True), "another request may have it"
    assert engine.totals["failed_blocks"] == 4


def test_blocks_that_vllm_did_not_give_are_a_failed_load(engine: Engine) -> None:
    engine.compute()
    again = Request("b", PROMPT)
    assert engine.match(again) == (16, True)
    engine.allocated(again, [[0] * 5, PLACES[FULL], PLACES[STATE]], 16)
    assert engine.until_received("b") == {"b"}
    assert engine.manager.open_tickets == (0, 0)
    assert not any(rank.pages[0][0].any() for rank in engine.ranks)


def test_windows_are_saved_as_far_apart_as_vllm_keeps_them(vllm: Any) -> None:
    from kvbm_rs.vllm.groups import retained

    ids = [0, 0, 3, 4, 5, 6, 7, 8, 9, 10]
    assert retained(ids, 0, 2, None, 9) == [(2, [3, 4, 5, 6, 7, 8, 9, 10])]
    assert retained(ids, 0, 2, 0, 9) == [(7, [8, 9])], "the end of the prompt alone"
    assert retained(ids, 0, 2, 4, 9) == [(2, [3, 4]), (6, [7, 8, 9])], "and every fourth block"
    assert retained([11, 12], 4, 2, 0, 1) == []
    engine = Engine(vllm, retention=0)
    engine.compute()
    assert engine.totals["saved_blocks"] == 2 + 4 + 1
    assert engine.match(Request("b", PROMPT)) == (16, True)
    engine.close()


def test_finer_hashes_of_vllm_are_not_taken_for_those_of_blocks(vllm: Any) -> None:
    engine = Engine(vllm, hash_size=2)
    assert engine.scheduler._process.own_hashes
    engine.compute()
    assert engine.match(Request("b", PROMPT)) == (16, True)
    engine.close()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"groups": [group(window(8), ["w0"]), group(spec("FullAttentionSpec"), ["f0"])]},
            "4 and 8 tokens",
        ),
        (
            {"groups": [group(spec("ChunkedLocalAttentionSpec"), ["w0"]), group(window(), ["f0"])]},
            "kvbm knows",
        ),
        (
            {"groups": [group(state("none"), ["s0"]), group(window(), ["f0"])]},
            "enable-prefix-caching",
        ),
        ({"groups": [group(state(drafts=1), ["s0"]), group(window(), ["f0"])]}, "draft model"),
        (
            {"groups": [group(window(), ["w0"], is_eagle_group=True), group(window(), ["f0"])]},
            "draft model",
        ),
        (
            {"groups": [group(window(), ["w0"], host_resident=True), group(window(), ["f0"])]},
            "another memory",
        ),
        ({"groups": [group(state(), ["s0"]), group(state(), ["w0"])]}, "states alone"),
        (
            {"groups": [group(window(), ["nothing"]), group(window(), ["f0"])]},
            "nothing of cache group 0",
        ),
        ({"extra": {"load": "sync"}}, "'load' is 'sync'"),
        ({"extra": {"audit": 0.5}}, "'audit' is 0.5"),
        ({"extra": {"record": "file"}}, "'record' is 'file'"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    vllm: Any, changes: dict[str, Any], text: str
) -> None:
    from kvbm_rs import KvbmError
    from kvbm_rs.vllm.process import _PROCESSES

    with pytest.raises(KvbmError, match=text):
        Engine(vllm, **changes)
    for process in list(_PROCESSES.values()):
        process.close()
