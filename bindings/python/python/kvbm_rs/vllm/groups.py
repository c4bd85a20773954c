"""Models of several cache groups: what each keeps, where its blocks lie, which of them are saved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .. import Layout
from ..errors import ConfigInvalid
from . import _vllm_compat as compat
from ._vllm_groups import GROUPS, GroupView, group_views, hash_size, retention

__all__ = ["CacheGroup", "CacheGroups", "layout_of_groups", "retained"]

_WAY_OUT = "start vLLM with --disable-hybrid-kv-cache-manager, where the model allows it"


@dataclass(frozen=True)
class CacheGroup:
    """Layers that cache alike."""

    #: As `Layout.begin_group` takes it.
    kind: str
    #: As vLLM's events name it.
    spec_kind: str
    layers: tuple[str, ...]
    #: Of a window, its tokens; else `None`.
    sliding_window: int | None
    #: Blocks at the end of a prefix that a window needs; 0 for the other kinds.
    window_blocks: int

    @property
    def is_full(self) -> bool:
        return self.kind == "full"

    @property
    def is_state(self) -> bool:
        return self.kind == "state"


@dataclass(frozen=True)
class CacheGroups:
    """The groups of a model that has several."""

    groups: tuple[CacheGroup, ...]
    #: Tokens of a block, in every group.
    block_size: int
    #: Tokens of each of vLLM's hashes.
    hash_size: int
    #: Blocks between the places for which windows are saved; `None`: all are. 0: only the end of
    #: the prompt.
    retention: int | None

    @classmethod
    def read(cls, kv_cache_config: Any) -> CacheGroups | None:
        """The groups; `None` where there is one. What kvbm cannot serve is an error with the way
        out.
        """
        views = group_views(kv_cache_config)
        if len(views) <= 1:
            return None
        missing = compat.missing(GROUPS)
        if missing:
            raise ConfigInvalid(
                f"vLLM {compat.vllm_version()} lacks what kvbm uses for models of several cache groups: "
                f"{', '.join(missing)}; {_WAY_OUT}"
            )
        names = ", ".join(view.name for view in views)
        sizes = sorted({view.block_size for view in views})
        if len(sizes) > 1:
            raise ConfigInvalid(
                f"the cache groups {names} have blocks of {' and '.join(map(str, sizes))} tokens: kvbm supports groups whose blocks "
                f"have the same tokens; {_WAY_OUT}"
            )
        groups = tuple(_group(view, names) for view in views)
        if all(group.is_state for group in groups):
            raise ConfigInvalid(
                f"the model has the cache groups {names}: states alone share no prefix; {_WAY_OUT}"
            )
        interval = retention(kv_cache_config)
        places = None if interval is None else interval // sizes[0]
        return cls(groups, sizes[0], hash_size(kv_cache_config) or sizes[0], places)

    @property
    def sizes(self) -> tuple[int, int]:
        """Tokens of a block and of a hash."""
        return self.block_size, self.hash_size

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[CacheGroup]:
        return iter(self.groups)


def _group(view: GroupView, names: str) -> CacheGroup:
    """A group as kvbm knows it."""
    layers, size = tuple(view.layers), view.block_size
    if view.is_elsewhere:
        raise ConfigInvalid(
            f"the model has the cache groups {names}: blocks of {view.name} are in another memory, which kvbm does not reach; "
            f"{_WAY_OUT}"
        )
    if view.is_speculative:
        raise ConfigInvalid(
            f"the model has the cache groups {names} and a draft model: kvbm supports speculative decoding with one group; leave "
            "--speculative-config out"
        )
    if view.name in ("FullAttentionSpec", "MLAAttentionSpec"):
        kind = "full_attention" if view.name == "FullAttentionSpec" else "mla_attention"
        return CacheGroup("full", kind, layers, None, 0)
    if view.name == "SlidingWindowSpec":
        needed = -(-view.window // size)
        return CacheGroup(
            f"window={view.window}", "sliding_window", layers, view.sliding_window, needed
        )
    if view.name == "MambaSpec":
        if view.state_mode != "align":
            raise ConfigInvalid(
                f"vLLM keeps the states of {names} in mode {view.state_mode!r}, in which none can be found again: add "
                "--enable-prefix-caching, which selects mode 'align'"
            )
        return CacheGroup("state", "mamba", layers, None, 0)
    raise ConfigInvalid(
        f"the model has the cache groups {names}: kvbm knows FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec and MambaSpec "
        f"beside one another; {_WAY_OUT}"
    )


def layout_of_groups(groups: CacheGroups, kv_caches: dict[str, Any], num_blocks: int) -> Layout:
    """Where the blocks of each group lie. Layers that share a tensor count once."""
    layout = Layout(num_blocks, groups.block_size)
    for number, group in enumerate(groups):
        layout.begin_group(group.kind)
        seen = set()
        for name in group.layers:
            tensor = kv_caches.get(name)
            if tensor is None:
                raise ConfigInvalid(
                    f"layer {name} of cache group {number} has no KV tensor: report it with the model and the version of vLLM"
                )
            if tensor.data_ptr() in seen:
                continue
            seen.add(tensor.data_ptr())
            for view in compat.block_views(name, tensor, num_blocks):
                layout.add_tensor(view)
    return layout


def retained(
    ids: list[int], first: int, needed: int, retention: int | None, prompt_blocks: int
) -> list[tuple[int, list[int]]]:
    """Runs of a window's blocks that are worth a copy, each with the position of its first block.
    `ids` are those from position `first` on; 0 is a block that vLLM no longer has.

    A window serves a prefix that ends where it ends. vLLM says how far such ends are apart
    (`retention`, in blocks); the end of the prompt is one of them.
    """

    def is_kept(position: int) -> bool:
        if retention is None or position < prompt_blocks <= position + needed:
            return True
        if retention == 0:
            return False
        return position // retention * retention + retention <= position + needed

    runs: list[tuple[int, list[int]]] = []
    for position, block in enumerate(ids, first):
        if block == 0 or not is_kept(position):
            continue
        if runs and runs[-1][0] + len(runs[-1][1]) == position:
            runs[-1][1].append(block)
        else:
            runs.append((position, [block]))
    return runs
