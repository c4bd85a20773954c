"""What kvbm reads of vLLM's objects, and the events that it makes of vLLM's; see `_vllm_compat`. A
name for each attribute that an upgrade may move.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ._vllm_groups import boundary_states

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ConfigView", "EventFactory", "RequestView", "StepView", "TierView"]


class ConfigView:
    """What the connector reads of `VllmConfig`."""

    def __init__(self, vllm_config: Any, sizes: tuple[int, int] | None = None) -> None:
        """`sizes`: tokens of a block and of a hash, where the cache groups say them."""
        self._config = vllm_config
        self._transfer = vllm_config.kv_transfer_config
        self._block_size = None if sizes is None else sizes[0]
        self._hash_size = None if sizes is None else sizes[1]

    @property
    def engine_id(self) -> str:
        return str(self._transfer.engine_id)

    @property
    def extra(self) -> dict[str, Any]:
        return dict(self._transfer.kv_connector_extra_config or {})

    @property
    def failure_policy(self) -> str:
        return str(self._transfer.kv_load_failure_policy)

    @property
    def role(self) -> str:
        return str(self._transfer.kv_role)

    @property
    def block_size(self) -> int:
        return self._block_size or int(self._config.cache_config.block_size)

    @property
    def cache_dtype(self) -> str:
        return str(self._config.cache_config.cache_dtype)

    @property
    def dtype(self) -> str:
        return str(self._config.model_config.dtype).removeprefix("torch.")

    @property
    def prefix_caching(self) -> bool:
        return bool(self._config.cache_config.enable_prefix_caching)

    @property
    def hash_algorithm(self) -> str:
        return str(self._config.cache_config.prefix_caching_hash_algo)

    @property
    def hash_block_size(self) -> int:
        size = self._hash_size or self._config.cache_config.hash_block_size
        return int(size) if size else self.block_size

    @property
    def model(self) -> str:
        return str(self._config.model_config.model)

    @property
    def revision(self) -> str | None:
        config = self._config.model_config
        commit = getattr(config.hf_config, "_commit_hash", None)
        revision = commit or config.revision
        return None if revision is None else str(revision)

    @property
    def model_settings(self) -> str:
        """The model's configuration as text, overrides included."""
        return str(self._config.model_config.hf_config.to_json_string(use_diff=False))

    @property
    def quantization(self) -> str:
        return str(self._config.model_config.quantization)

    @property
    def world_size(self) -> int:
        return int(self._config.parallel_config.world_size)

    @property
    def tensor_parallel(self) -> int:
        return int(self._config.parallel_config.tensor_parallel_size)

    @property
    def replicas(self) -> int:
        """Ranks that hold the same KV bytes, where all layers cache alike: all of them, or one.

        Layers of a draft model, and those of models with other heads in each layer, may have other
        numbers of heads, so only MLA and a single head count.
        """
        ranks = self.tensor_parallel
        if ranks == 1 or self.speculates:
            return 1
        model = self._config.model_config
        is_same = model.use_mla or int(model.get_total_num_kv_heads()) == 1
        return ranks if is_same else 1

    @property
    def decode_context_parallel(self) -> int:
        return int(self._config.parallel_config.decode_context_parallel_size)

    @property
    def executor(self) -> str:
        return str(self._config.parallel_config.distributed_executor_backend)

    @property
    def has_remote_workers(self) -> bool:
        """Whether workers are processes of their own."""
        return self.executor != "uni"

    @property
    def schedules_ahead(self) -> bool:
        """Whether a step is planned before the results of the one before are known."""
        return bool(self._config.scheduler_config.async_scheduling)

    @property
    def has_second_runner(self) -> bool:
        """Whether vLLM's second model runner computes the steps."""
        return bool(self._config.use_v2_model_runner)

    @property
    def speculates(self) -> bool:
        """Whether tokens are drafted."""
        return self._config.speculative_config is not None

    @property
    def has_microbatches(self) -> bool:
        """Whether a step computes its requests in parts, and each layer once for each part."""
        return bool(self._config.parallel_config.use_ubatching)

    @property
    def replays_steps(self) -> bool:
        """Whether a CUDA graph may replay a whole step."""
        return bool(self._config.compilation_config.cudagraph_mode.has_full_cudagraphs())

    @property
    def step_tokens(self) -> int:
        """Most tokens of a step."""
        return int(self._config.scheduler_config.max_num_batched_tokens)

    @property
    def request_tokens(self) -> int:
        """Most tokens of a request in a step."""
        longest = int(self._config.scheduler_config.long_prefill_token_threshold)
        return min(longest, self.step_tokens) if longest > 0 else self.step_tokens

    @property
    def nodes(self) -> int:
        return int(self._config.parallel_config.nnodes)

    @property
    def data_parallel(self) -> tuple[int, int]:
        """Rank and size."""
        parallel = self._config.parallel_config
        return int(parallel.data_parallel_index or 0), int(parallel.data_parallel_size)

    @property
    def publishes_events(self) -> bool:
        events = self._config.kv_events_config
        return bool(events is not None and events.enable_kv_cache_events)


class RequestView:
    """What the connector reads of a `Request`; a name for each attribute that an upgrade may move."""

    __slots__ = ("_request",)

    def __init__(self, request: Any) -> None:
        self._request = request

    @property
    def id(self) -> str:
        return str(self._request.request_id)

    @property
    def num_tokens(self) -> int:
        return int(self._request.num_tokens)

    @property
    def num_computed_tokens(self) -> int:
        return int(self._request.num_computed_tokens)

    @property
    def num_prompt_tokens(self) -> int:
        return int(self._request.num_prompt_tokens)

    @property
    def block_hashes(self) -> list[bytes]:
        """vLLM's own hash of each complete block of known tokens."""
        hashes: list[bytes] = self._request.block_hashes
        return hashes

    def tokens(self, first: int, end: int) -> list[int]:
        return list(self._request.all_token_ids[first:end])

    @property
    def skips_reading(self) -> bool:
        return bool(self._request.skip_reading_prefix_cache)

    @property
    def adapter(self) -> tuple[str, str] | None:
        """Name and path of the LoRA adapter."""
        lora = self._request.lora_request
        return None if lora is None else (str(lora.lora_name), str(lora.lora_path))

    def extra_keys(self, first: int, end: int, image: int) -> tuple[bytes | None, int]:
        """What else goes into the hash of the block of these tokens (images, salt, adapter), and
        the next image.
        """
        from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

        keys, image = generate_block_hash_extra_keys(self._request, first, end, image)
        return (None if keys is None else repr(keys).encode()), image

    @property
    def has_extra_keys(self) -> bool:
        request = self._request
        return bool(
            request.mm_features
            or request.cache_salt
            or request.lora_request is not None
            or request.prompt_embeds is not None
        )


class StepView:
    """What the connector reads of a `SchedulerOutput`."""

    __slots__ = ("_output",)

    def __init__(self, output: Any) -> None:
        self._output = output

    @property
    def scheduled(self) -> Mapping[str, int]:
        """Tokens of each request in this step."""
        scheduled: dict[str, int] = self._output.num_scheduled_tokens
        return scheduled

    @property
    def total(self) -> int:
        return int(self._output.total_num_scheduled_tokens)

    @property
    def finished(self) -> Iterable[str]:
        """Requests that ended since the last step."""
        ended: set[str] = self._output.finished_req_ids
        return ended

    def block_ids(self, request_id: str) -> tuple[list[int], ...] | None:
        """All blocks of a scheduled request, by cache group."""
        state = self._output.kv_connector_block_state
        ids: tuple[list[int], ...] | None
        ids = None if state is None else state.get_block_ids(request_id)
        return ids

    def boundary_states(self) -> list[tuple[str, int, int, int]]:
        """See `_vllm_groups.boundary_states`."""
        return boundary_states(self._output)

    def new_blocks(self) -> Iterable[tuple[tuple[list[int], ...], int]]:
        """Blocks that requests got since the last step, by cache group, and how many tokens from
        their front are computed already.
        """
        for new in self._output.scheduled_new_reqs:
            yield new.block_ids, int(new.num_computed_tokens)
        cached = self._output.scheduled_cached_reqs
        for request_id, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens
        ):
            if blocks is not None:
                # A resumed request gets all its blocks anew; a running one only what follows.
                yield blocks, int(computed) if request_id in cached.resumed_req_ids else 0


class EventFactory:
    """Makes vLLM's event objects."""

    def __init__(self) -> None:
        from vllm.distributed import kv_events
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

        self._events = kv_events
        self._external: Callable[[Any], Any] = maybe_convert_block_hash

    def stored(
        self,
        block: bytes,
        parent: bytes | None,
        tokens: list[int],
        block_size: int,
        adapter: str | None,
        medium: str,
        group: tuple[int, str, int | None] | None = None,
    ) -> Any:
        """`group`: number, kind and window of the cache group, where there are several."""
        number, kind, window = (None, None, None) if group is None else group
        return self._events.BlockStored(
            block_hashes=[self._external(block)],
            parent_block_hash=None if parent is None else self._external(parent),
            token_ids=tokens,
            block_size=block_size,
            lora_id=None,
            medium=medium,
            lora_name=adapter,
            group_idx=number,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
        )

    def removed(self, block: bytes, medium: str, group: int | None = None) -> Any:
        return self._events.BlockRemoved(
            block_hashes=[self._external(block)], medium=medium, group_idx=group
        )

    def cleared(self) -> Any:
        return self._events.AllBlocksCleared()


class TierView:
    """What `KvbmTier` reads of vLLM's `OffloadingSpec`."""

    def __init__(self, offloading_spec: Any) -> None:
        self._spec, self._config = offloading_spec, offloading_spec.config

    @property
    def model(self) -> str:
        return str(self._config.model.name)

    @property
    def dtype(self) -> str:
        return str(self._config.model.dtype)

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk, in the first cache group."""
        return int(self._config.groups[0].tokens_per_block) * int(self._spec.blocks_per_chunk)

    @property
    def data_parallel(self) -> tuple[int, int]:
        """Rank and size."""
        parallel = self._config.parallel
        return int(parallel.data_parallel_index), int(parallel.data_parallel_size)

    @property
    def meaning(self) -> dict[str, Any]:
        """What decides what the bytes of a chunk are, beside the model and its weights."""
        config, parallel = self._config, self._config.parallel
        names = ("tp_size", "pp_size", "pcp_size", "dcp_size", "world_size")
        return {
            "vllm": str(importlib.import_module("vllm").__version__),
            "layout": config.kv_cache_layout,
            "canonical": bool(config.canonical_layout),
            "replicated": bool(config.replicated_layout),
            "block_bytes": int(config.worker_kv_bytes_per_block),
            "tokens_per_hash": int(config.cache.tokens_per_hash),
            "blocks_per_chunk": int(self._spec.blocks_per_chunk),
            "groups": [
                [group.tokens_per_block, list(group.layer_names)] for group in config.groups
            ],
            "parallel": {name: int(getattr(parallel, name)) for name in names},
        }
