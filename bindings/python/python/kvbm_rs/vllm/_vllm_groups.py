"""Every contact with vLLM's cache groups: models of layers that cache differently.

vLLM gives each group block ids of one pool, and lays the tensors of all groups over one another.
"""

from __future__ import annotations

from typing import Any

from ..engine_names import Used

__all__ = [
    "GROUPS",
    "GroupView",
    "boundary_states",
    "group_views",
    "hash_size",
    "retention",
    "transfer_results",
]

_SPECS = "vllm.v1.kv_cache_interface"

#: What the connector uses for models of several cache groups, as in `_vllm_compat`.
GROUPS: tuple[Used, ...] = (
    (
        _SPECS,
        "KVCacheGroupSpec",
        ("layer_names", "is_eagle_group", "host_resident", "enable_kv_transfer"),
    ),
    (_SPECS, "KVCacheConfig", ("hash_block_size", "prefix_cache_retention_interval")),
    (_SPECS, "SlidingWindowSpec", ("sliding_window", "extra_retained_tokens")),
    (_SPECS, "MambaSpec", ("mamba_cache_mode", "num_speculative_blocks")),
    ("vllm.v1.core.sched.output", "KVConnectorBlockState", ("boundary_state_offloads",)),
)


class GroupView:
    """What the connector reads of a `KVCacheGroupSpec`."""

    __slots__ = ("_group",)

    def __init__(self, group: Any) -> None:
        self._group = group

    @property
    def name(self) -> str:
        """Of its kind, such as `SlidingWindowSpec`."""
        return type(self._group.kv_cache_spec).__name__

    @property
    def layers(self) -> list[str]:
        return list(self._group.layer_names)

    @property
    def block_size(self) -> int:
        return int(self._group.kv_cache_spec.block_size)

    @property
    def window(self) -> int:
        """Tokens before the next one that vLLM keeps for it."""
        spec = self._group.kv_cache_spec
        return max(1, int(spec.sliding_window) - 1 + int(spec.extra_retained_tokens))

    @property
    def sliding_window(self) -> int | None:
        window = getattr(self._group.kv_cache_spec, "sliding_window", None)
        return None if window is None else int(window)

    @property
    def state_mode(self) -> str:
        """How vLLM keeps states: `"align"` where it keeps those at the ends of blocks."""
        return str(self._group.kv_cache_spec.mamba_cache_mode)

    @property
    def is_speculative(self) -> bool:
        """Whether a draft model writes to its blocks, or drafts are kept beside states."""
        drafts = getattr(self._group.kv_cache_spec, "num_speculative_blocks", 0)
        return bool(self._group.is_eagle_group) or int(drafts) > 0

    @property
    def is_elsewhere(self) -> bool:
        """Whether its blocks are not in the memory, or not of the ids, of the other groups."""
        return bool(self._group.host_resident) or not bool(self._group.enable_kv_transfer)


def group_views(kv_cache_config: Any) -> list[GroupView]:
    """The cache groups, by their numbers."""
    return [GroupView(group) for group in kv_cache_config.kv_cache_groups]


def retention(kv_cache_config: Any) -> int | None:
    """Tokens between the places for which vLLM keeps windows; `None`: each block is one. 0: only
    the end of the prompt.
    """
    interval = kv_cache_config.prefix_cache_retention_interval
    return None if interval is None else int(interval)


def hash_size(kv_cache_config: Any) -> int | None:
    """Tokens of each of vLLM's hashes; `None` where they are those of a block."""
    size = kv_cache_config.hash_block_size
    return None if size is None else int(size)


def boundary_states(output: Any) -> list[tuple[str, int, int, int]]:
    """States that are complete when the step is over: request, group, block, and the tokens that
    the state covers. A state's place in the list of a request's blocks does not say that.
    """
    state = output.kv_connector_block_state
    offers = {} if state is None else state.boundary_state_offloads
    return [
        (request_id, int(group), int(block), int(tokens))
        for request_id, states in offers.items()
        for group, block, tokens in states
    ]


def transfer_results(received: set[str] | None, failed: set[str]) -> Any:
    """Requests whose loads are over, and those of them that did not arrive."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

    return KVConnectorTransferResults(finished_recving=set(received or ()), failed_recving=failed)
