"""A stand-in for TensorRT-LLM's classes, and an engine that calls the connector in its order.

The engine itself was never run. Classes below have the names, fields and abstract methods that
version 1.2 publishes; `test_trtllm_interface` compares them with what is published.
"""

from __future__ import annotations

import abc
import functools
import pickle
import sys
import threading
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy_tensor import Tensor as Tensor

BLOCKS, SIZE = 32, 4

MODULE = "tensorrt_llm._torch.pyexecutor.kv_cache_connector"


@dataclass
class RequestData:
    request_id: int
    new_tokens: list[int]
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int


@dataclass
class SchedulerOutput:
    new_requests: list[RequestData] = field(default_factory=list)
    cached_requests: list[RequestData] = field(default_factory=list)


class KvCacheConnectorWorker(abc.ABC):
    def __init__(self, llm_args: Any) -> None:
        self._llm_args, self._metadata = llm_args, None

    def bind_connector_meta(self, metadata: Any) -> None:
        self._metadata = metadata

    def get_connector_meta(self) -> Any:
        return self._metadata

    def register_forward_pass_callable(self) -> Any:
        return None

    @abc.abstractmethod
    def register_kv_caches(self, kv_cache_tensor: Any) -> None: ...

    @abc.abstractmethod
    def start_load_kv(self, stream: Any) -> None: ...

    @abc.abstractmethod
    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None: ...

    @abc.abstractmethod
    def save_kv_layer(self, layer_idx: int, stream: Any) -> None: ...

    @abc.abstractmethod
    def wait_for_save(self, stream: Any) -> None: ...

    @abc.abstractmethod
    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> Any: ...


class KvCacheConnectorScheduler(abc.ABC):
    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args

    @abc.abstractmethod
    def build_connector_meta(self, scheduler_output: Any) -> Any: ...

    @abc.abstractmethod
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any: ...

    @abc.abstractmethod
    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool: ...

    @abc.abstractmethod
    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None: ...


@pytest.fixture(scope="module", autouse=True)
def trtllm() -> Iterator[types.ModuleType]:
    names = MODULE.split(".")
    for end in range(1, len(names)):
        sys.modules[".".join(names[:end])] = types.ModuleType(names[end - 1])
    sys.modules["tensorrt_llm"].__dict__["__version__"] = "1.2.1"
    module = types.ModuleType(MODULE)
    classes = (KvCacheConnectorScheduler, KvCacheConnectorWorker, RequestData, SchedulerOutput)
    module.__dict__.update({published.__name__: published for published in classes})
    sys.modules[MODULE] = module
    yield module


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "HOST_CAPACITY": "512",
        "HOST_PINNED": "false",
        "POLICY_ADMISSION": "all",
    }.items():
        monkeypatch.setenv(f"KVBM_{name}", value)


def arguments(**changes: Any) -> SimpleNamespace:
    """What TensorRT-LLM hands to both classes."""
    cache = SimpleNamespace(tokens_per_block=SIZE, enable_block_reuse=True)
    return SimpleNamespace(
        **({"model": "m", "kv_cache_config": cache, "tensor_parallel_size": 1} | changes)
    )


class Request:
    """An `LlmRequest`."""

    def __init__(self, number: int, tokens: list[int], **more: Any) -> None:
        self.request_id, self.tokens = number, tokens
        self.__dict__.update(more)

    def get_tokens(self, beam: int) -> list[int]:
        assert beam == 0
        return self.tokens


class Engine:
    """Calls both classes as TensorRT-LLM's executor does, with one block of bytes for each block
    of tokens.
    """

    def __init__(self, args: Any = None) -> None:
        from kvbm_rs.trtllm import KvbmScheduler, KvbmWorker

        args = args or arguments()
        made: dict[str, Any] = {}
        # As rank 0 does: one may depend on the other.
        threads = [
            threading.Thread(target=lambda: made.update(scheduler=KvbmScheduler(args))),
            threading.Thread(target=lambda: made.update(worker=KvbmWorker(args))),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        self.scheduler, self.worker = made["scheduler"], made["worker"]
        assert self.scheduler._process is self.worker._process
        self.memory = self.tensor()
        self.worker.register_kv_caches(self.memory)
        # Of tensors in host memory nobody asks for it.
        self.stream = object()

    def tensor(self) -> Any:
        """TensorRT-LLM's one tensor."""
        return np.zeros((BLOCKS, 2, 2, SIZE * 64), dtype=np.float32).view(Tensor)

    def run(self, request: Request, blocks: list[int], computed: int = 0, chunk: int = 0) -> int:
        """Prefill of a request in chunks. Tokens that were not computed."""
        matched, is_async = self.scheduler.get_num_new_matched_tokens(request, computed)
        assert not is_async
        self.scheduler.update_state_after_alloc(request, blocks)
        at, is_new = computed + matched, True
        while at < len(request.tokens):
            planned = min(chunk or len(request.tokens), len(request.tokens) - at)
            data = RequestData(
                request.request_id,
                request.tokens if is_new else [],
                blocks if is_new else [],
                # The first output does not count what the connector matched.
                at - matched if is_new else at,
                planned,
            )
            output = SchedulerOutput([data], []) if is_new else SchedulerOutput([], [data])
            self.step(output, functools.partial(self.compute, request, blocks, at, planned))
            at, is_new = at + planned, False
        return int(matched)

    def step(self, output: SchedulerOutput, forward: Any = lambda: None) -> None:
        # Metadata is broadcast, which may copy it.
        metadata = pickle.loads(pickle.dumps(self.scheduler.build_connector_meta(output)))
        self.worker.bind_connector_meta(metadata)
        self.worker.start_load_kv(self.stream)
        for layer in range(2):
            self.worker.wait_for_layer_load(layer, self.stream)
            self.worker.save_kv_layer(layer, self.stream)
        forward()
        self.worker.wait_for_save(self.stream)
        assert self.worker.get_finished([], []) == ([], [])

    def compute(self, request: Request, blocks: list[int], at: int, count: int) -> None:
        for position in range(at, at + count):
            block, token = blocks[position // SIZE], position % SIZE
            # What a token computes depends on all tokens before it.
            value = hash(tuple(request.tokens[: position + 1])) % 10_000
            self.memory[block, :, :, token * 64 : (token + 1) * 64] = value

    def finish(self, request: Request, blocks: list[int]) -> None:
        assert self.scheduler.request_finished(request, blocks) is False

    def settle(self) -> None:
        assert self.scheduler._process.manager.wait_offloads(10)


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.worker.shutdown()


PROMPT = list(range(100, 118))  # 4 blocks and two tokens
