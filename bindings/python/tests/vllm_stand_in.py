"""A stand-in for vLLM's classes, and an engine that calls the connector in vLLM's order."""

from __future__ import annotations

import enum
import functools
import os
import pickle
import sys
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy_tensor import Tensor as Tensor

BLOCKS, SIZE = 64, 4
LAYERS = range(2)
PROMPT = list(range(1, 18))  # 4 blocks and a token


def tensor(blocks: int = BLOCKS, size: int = SIZE) -> Any:
    return np.zeros((blocks, 2, size, 64), dtype=np.float32).view(Tensor)


@functools.cache
def stand_in() -> Any:
    """The modules of vLLM that the connector imports. They stay: the connector's own modules keep
    what they imported.
    """

    class Base:
        def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
            self.role, self._metadata = role, None

        def bind_connector_metadata(self, metadata: Any) -> None:
            self._metadata = metadata

        def _get_connector_metadata(self) -> Any:
            return self._metadata

    class Stats:
        def __init__(self, data: dict[str, Any]) -> None:
            self.data = data

    def module(name: str, **names: Any) -> None:
        made = types.ModuleType(name)
        made.__dict__.update(names)
        sys.modules[name] = made

    base = "vllm.distributed.kv_transfer.kv_connector.v1"
    for name in (
        "vllm.distributed",
        "vllm.distributed.kv_transfer",
        "vllm.distributed.kv_transfer.kv_connector",
        base,
        "vllm.utils",
        "vllm.v1",
        "vllm.v1.core",
        "vllm.v1.metrics",
    ):
        module(name)
    module("vllm", __version__="0.0")
    module("vllm.logger", init_logger=lambda name: None)
    module("vllm.envs", VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS=5)
    module(
        "vllm.utils.hashing",
        get_hash_fn_by_name=lambda name: lambda seed: f"{name} of {seed}".encode(),
    )
    seed = os.environ.get("PYTHONHASHSEED", "fixed")
    module(
        "vllm.v1.core.kv_cache_utils",
        DEFAULT_NONE_HASH_SEED="fixed",
        NONE_HASH=f"sha256 of {seed}".encode(),
    )
    KVConnectorRole = enum.Enum("KVConnectorRole", ["SCHEDULER", "WORKER"])
    module(
        f"{base}.base",
        KVConnectorBase_V1=Base,
        KVConnectorHandshakeMetadata=type("KVConnectorHandshakeMetadata", (), {}),
        KVConnectorMetadata=type("KVConnectorMetadata", (), {}),
        KVConnectorRole=KVConnectorRole,
        KVConnectorTransferResults=SimpleNamespace,
        SupportsHMA=type("SupportsHMA", (), {}),
    )
    module(
        f"{base}.metrics",
        KVConnectorPromMetrics=type("KVConnectorPromMetrics", (), {}),
        KVConnectorStats=Stats,
    )
    module(
        "vllm.v1.metrics.cache_hit_source",
        CacheHitSource=enum.Enum("CacheHitSource", ["HOST", "DISK"]),
    )
    from kvbm_rs.vllm import _vllm_compat as compat

    return SimpleNamespace(role=KVConnectorRole, compat=compat)


@pytest.fixture(scope="module")
def vllm() -> Iterator[Any]:
    vllm = stand_in()
    missing, vllm.compat.missing = vllm.compat.missing, lambda used=None: []
    yield vllm
    vllm.compat.missing = missing


class Block:
    """A block of vLLM's pool."""

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        #: While vLLM's cache has it.
        self.block_hash: bytes | None = None


class BlockPool:
    """vLLM's blocks and its own cache, as far as the connector calls it."""

    def __init__(self, blocks: int) -> None:
        self.blocks = [Block(number) for number in range(blocks)]

    @property
    def cached(self) -> set[int]:
        return {block.block_id for block in self.blocks if block.block_hash is not None}

    def evict_blocks(self, block_ids: set[int]) -> None:
        for number in block_ids:
            self.blocks[number].block_hash = None

    def cache_full_blocks(
        self,
        request: Request,
        blocks: list[Block],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
    ) -> None:
        assert (block_size, kv_cache_group_id) == (SIZE, 0)
        for at in range(num_cached_blocks, num_full_blocks):
            assert blocks[at].block_hash is None
            blocks[at].block_hash = request.block_hashes[at]


class Request:
    """A request as the scheduler has it."""

    def __init__(self, name: str, tokens: list[int]) -> None:
        self.request_id, self.all_token_ids = name, tokens
        self.num_computed_tokens, self.num_prompt_tokens = 0, len(tokens)
        self.lora_request: Any = None
        self.prompt_embeds: Any = None
        self.cache_salt = self.mm_features = None
        self.skip_reading_prefix_cache = False

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def block_hashes(self) -> list[bytes]:
        return [
            repr(self.all_token_ids[: end * SIZE]).encode()
            for end in range(1, self.num_tokens // SIZE + 1)
        ]


class Engine:
    """Scheduler and workers: calls the connector as vLLM does.

    `executor="mp"` gives each of `ranks` a worker that the scheduler reaches only through what it
    sends.
    """

    def __init__(self, vllm: Any, **changes: Any) -> None:
        from kvbm_rs.vllm import KvbmConnector

        transfer = {
            "engine_id": "e",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
        } | changes.pop("transfer", {})
        extra = changes.pop("extra", {})
        if "daemon" not in extra:
            extra = {"host": "64", "host.pinned": False, "policy.admission": "all"} | extra
        ranks, executor = changes.pop("ranks", 1), changes.pop("executor", "uni")
        blocks, size = changes.pop("blocks", BLOCKS), changes.pop("size", SIZE)
        parallel = {
            "world_size": ranks,
            "tensor_parallel_size": ranks,
            "decode_context_parallel_size": 1,
            "distributed_executor_backend": executor,
            "nnodes": 1,
            "use_ubatching": False,
            "data_parallel_index": 0,
            "data_parallel_size": 1,
        } | changes.pop("parallel", {})
        groups = changes.pop("groups", ["FullAttentionSpec"])
        self.config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra, **transfer),
            kv_events_config=None,
            use_v2_model_runner=changes.pop("second_runner", False),
            compilation_config=SimpleNamespace(
                static_forward_context={},
                cudagraph_mode=SimpleNamespace(
                    has_full_cudagraphs=functools.partial(bool, changes.pop("full_graphs", False))
                ),
            ),
            scheduler_config=SimpleNamespace(
                async_scheduling=changes.pop("async_scheduling", False),
                max_num_batched_tokens=2048,
                long_prefill_token_threshold=changes.pop("longest_chunk", 0),
            ),
            speculative_config=changes.pop("speculative_config", None),
            cache_config=SimpleNamespace(
                block_size=size,
                cache_dtype="auto",
                enable_prefix_caching=changes.pop("caches_prefixes", True),
                prefix_caching_hash_algo="sha256",
                hash_block_size=None,
            ),
            parallel_config=SimpleNamespace(**parallel),
            model_config=SimpleNamespace(
                model="m",
                revision="r",
                dtype="float32",
                quantization=None,
                hf_config=SimpleNamespace(to_json_string=lambda use_diff: "{}"),
                use_mla=False,
                get_total_num_kv_heads=functools.partial(int, changes.pop("heads", 8)),
            ),
        )
        spec = [SimpleNamespace(kv_cache_spec=type(name, (), {})()) for name in groups]
        cache = SimpleNamespace(num_blocks=blocks, kv_cache_groups=spec)
        self.kv = [tensor(blocks, size) for _ in range(2 * ranks)]
        self.workers = []
        for rank in range(ranks):
            vllm.compat.tensor_parallel_rank = functools.partial(int, rank)
            worker = KvbmConnector(self.config, vllm.role.WORKER, cache)
            worker.register_kv_caches(
                {"layer.0": self.kv[2 * rank], "layer.1": self.kv[2 * rank + 1]}
            )
            self.workers.append(worker)
        self.worker = self.workers[0]
        self.scheduler = KvbmConnector(self.config, vllm.role.SCHEDULER, cache)
        handshakes = {
            rank: pickle.loads(pickle.dumps(worker.get_handshake_metadata()))
            for rank, worker in enumerate(self.workers)
        }
        if executor == "mp":
            self.scheduler.set_xfer_handshake_metadata(handshakes)
        self.is_remote = executor == "mp"
        #: vLLM's own cache, where it has one.
        self.pool = BlockPool(blocks)
        self.scheduler.bind_gpu_block_pool(self.pool)
        #: Requests whose loads failed as a whole.
        self.failed: set[str] = set()
        self._is_asynchronous: dict[str, bool] = {}
        #: Whether the next step has a load that its request does not wait for.
        self.has_loads_in_step = False
        #: What a test looks at when a step has waited for a layer.
        self.after_wait: Callable[[int], None] = lambda layer: None
        #: A manager, or a `NodeEngine`.
        self.manager: Any = self.scheduler._process.manager

    @property
    def totals(self) -> dict[str, float]:
        totals: dict[str, float] = self.scheduler._process.counters.totals
        return totals

    def step(
        self, running: dict[str, tuple[Request, list[int], int]] | None = None
    ) -> tuple[set[str], set[int]]:
        """Requests with all their blocks and the tokens that are computed now. What was received,
        and bad blocks.
        """
        running = running or {}
        new = [
            SimpleNamespace(block_ids=(ids,), num_computed_tokens=request.num_computed_tokens)
            for request, ids, _ in running.values()
        ]
        output = SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
            ),
            num_scheduled_tokens={name: tokens for name, (_, _, tokens) in running.items()},
            total_num_scheduled_tokens=sum(tokens for _, _, tokens in running.values()),
            finished_req_ids=set(),
            kv_connector_block_state=SimpleNamespace(
                get_block_ids=lambda name: (running[name][1],)
            ),
        )
        plan = self.scheduler.build_connector_meta(output)
        if self.is_remote:
            plan = pickle.loads(pickle.dumps(plan))
        for worker in self.workers:
            worker.handle_preemptions(plan)
            worker.bind_connector_metadata(plan)
        has_loads_in_step, self.has_loads_in_step = self.has_loads_in_step, False
        if has_loads_in_step:
            self.worker.start_load_kv(None)
        for layer in LAYERS:
            self._forward(layer, running)
        for request, _, tokens in running.values():
            request.num_computed_tokens += tokens
        if not has_loads_in_step:
            self.worker.start_load_kv(None)
        for worker in self.workers:
            worker.wait_for_save()
        results = [worker.get_transfer_results(set()) for worker in self.workers]
        assert all(result == results[0] for result in results)
        self.failed |= results[0].failed_recving
        return results[0].finished_recving, set().union(
            *(worker.get_block_ids_with_load_errors() for worker in self.workers)
        )

    def _forward(self, layer: int, running: dict[str, tuple[Request, list[int], int]]) -> None:
        """Computes a layer of all requests, on all ranks."""
        if not running:
            return
        for worker in self.workers:
            worker.wait_for_layer_load(f"layer.{layer}")
        self.after_wait(layer)
        for at in range(layer, len(self.kv), len(LAYERS)):
            for request, ids, tokens in running.values():
                first = request.num_computed_tokens
                for position in range(first, first + tokens):
                    # Behind the known tokens are drafts.
                    known = request.all_token_ids[position : position + 1] or [-999]
                    self.kv[at][ids[position // SIZE], :, position % SIZE] = known[0] + at
        for worker in self.workers:
            worker.save_kv_layer(f"layer.{layer}", None, None)

    def compute(self, request: Request, ids: list[int]) -> None:
        """Computes a request that nothing is known of, and waits for its copies."""
        self.scheduler.on_new_request(request)
        assert self.match(request) == (0, False)
        self.step({request.request_id: (request, ids, request.num_tokens)})
        self.scheduler.request_finished_all_groups(request, (ids,))
        assert self.manager.wait_offloads(10)

    def match(self, request: Any, computed: int = 0) -> tuple[int | None, bool]:
        found: tuple[int | None, bool] = self.scheduler.get_num_new_matched_tokens(
            request, computed
        )
        self._is_asynchronous[request.request_id] = found[1]
        return found

    def allocated(self, request: Any, ids: list[int], tokens: int) -> None:
        is_in_step = tokens > 0 and not self._is_asynchronous[request.request_id]
        own = [self.pool.blocks[number] for number in ids]
        if is_in_step and self.config.cache_config.enable_prefix_caching:
            # vLLM caches full blocks at once where the request runs in the step.
            for block, name in zip(own, request.block_hashes):
                block.block_hash = name
        blocks = SimpleNamespace(get_block_ids=lambda: (ids,), blocks=(own,))
        self.scheduler.update_state_after_alloc(request, blocks, tokens)
        self.has_loads_in_step |= is_in_step

    def until_received(self, name: str) -> set[int]:
        bad: set[int] = set()
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            received, more = self.step()
            bad |= more
            if received:
                assert received == {name}
                return bad
        raise AssertionError("the load did not end")

    def holds(self, request: Request, ids: list[int], first: int, end: int) -> bool:
        return all(
            bool((kv[ids[at // SIZE], :, at % SIZE] == request.all_token_ids[at] + layer).all())
            for layer, kv in enumerate(self.kv)
            for at in range(first, end)
        )

    def close(self) -> None:
        """In vLLM's order: the executor ends all workers, then the scheduler ends."""
        with ThreadPoolExecutor(len(self.workers)) as threads:
            list(threads.map(lambda worker: worker.shutdown(), self.workers))
        self.scheduler.shutdown()
