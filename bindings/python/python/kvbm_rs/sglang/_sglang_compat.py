"""Every contact with SGLang: what an upgrade can break, in one place.

`missing` names what the installed SGLang lacks. Each class asks at its start, and a test does.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from .. import Layout, Namespace
from ..engine_names import Used
from ..engine_names import missing as _missing
from ..errors import ConfigInvalid, InvalidArgument
from ._sglang_settings import Settings, running_settings, settings_of

__all__ = [
    "CHECKED_VERSIONS",
    "HICACHE",
    "LINKER",
    "Rank",
    "check",
    "device_pool_layout",
    "host_pool_layout",
    "kv_transfer",
    "namespace_of",
    "pages_of",
    "rank_of_linker",
    "rank_of_storage",
    "sglang_version",
]

#: Versions of SGLang whose classes the project's tests run against.
CHECKED_VERSIONS = ("0.5.23",)

_STORAGE = "sglang.srt.mem_cache.hicache_storage"
_LINKER = "sglang.srt.mem_cache.unified_cache.unified_cache_linker"

#: What `KvbmHiCache` uses.
HICACHE: tuple[Used, ...] = (
    (_STORAGE, None, ("HiCacheStorage", "HiCacheStorageConfig", "HiCacheStorageExtraInfo")),
    (
        _STORAGE,
        "HiCacheStorage",
        (
            "batch_exists",
            "batch_get",
            "batch_get_v1",
            "batch_set",
            "batch_set_v1",
            "clear",
            "exists",
            "get",
            "get_stats",
            "register_mem_host_pool_v2",
            "register_mem_pool_host",
            "set",
        ),
    ),
    (
        _STORAGE,
        "HiCacheStorageConfig",
        (
            "attn_cp_rank",
            "attn_cp_size",
            "dcp_size",
            "dp_rank",
            "extra_config",
            "is_mla_model",
            "model_name",
            "pp_rank",
            "pp_size",
            "should_split_heads",
            "tp_rank",
            "tp_size",
        ),
    ),
    (_STORAGE, "PoolName", ("KV",)),
    ("sglang.srt.mem_cache.pool_host.mha", "MHATokenToKVPoolHost", ("get_page_buffer_meta",)),
    ("sglang.srt.mem_cache.pool_host.mla", "MLATokenToKVPoolHost", ("get_page_buffer_meta",)),
)

#: What `KvbmLinker` uses.
LINKER: tuple[Used, ...] = (
    (_LINKER, None, ("LayerWiseLoadCounter", "UnifiedCacheLinker")),
    (
        _LINKER,
        "UnifiedCacheLinker",
        (
            "cancel_queued_load",
            "close",
            "finish_layer_wise_loading",
            "load",
            "lookup",
            "num_completed_offloads",
            "offload",
            "pop_completed_offload",
            "record_offload_ready",
            "reset",
            "start_layer_wise_loading",
        ),
    ),
    (
        _LINKER,
        "LayerWiseLoadCounter",
        ("complete", "fail", "finish", "reset", "set_consumer", "update_producer", "wait_until"),
    ),
    (_STORAGE, "PoolName", ("KV",)),
    (_STORAGE, "PoolTransfer", ("device_indices", "keys", "name")),
    ("sglang.srt.mem_cache.unified_cache.component_type", "ComponentType", ("FULL",)),
    (
        "sglang.srt.mem_cache.unified_cache.linker_config",
        "UnifiedCacheLinkerConfig",
        ("linker_module_path",),
    ),
    (
        "sglang.srt.mem_cache.cache_init_params",
        "CacheInitParams",
        (
            "attn_cp_rank",
            "attn_cp_size",
            "attn_tp_cache_group",
            "page_size",
            "pp_rank",
            "pp_size",
            "token_to_kv_pool_allocator",
            "tp_cache_group",
        ),
    ),
)

#: Names in HiCache's extra configuration that are SGLang's own.
_ENGINE_OPTIONS = frozenset(
    {
        "backend_name",
        "class_name",
        "hicache_storage_pass_prefix_keys",
        "interface_v1",
        "module_path",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
    }
)

#: Layouts of the host pool whose pages lie at a fixed stride in each part.
_LAYOUTS = ("layer_first", "page_first", "page_first_direct")


def sglang_version() -> str:
    """The installed version."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("sglang")
    except PackageNotFoundError:
        return "unknown"


def check(used: tuple[Used, ...], what: str) -> None:
    """Refuses an SGLang that lacks something of `used`, by its names."""
    lacks = _missing(used)
    if lacks:
        raise ConfigInvalid(
            f"SGLang {sglang_version()} lacks what {what} uses: {', '.join(lacks)}; "
            f"versions that were tested: {', '.join(CHECKED_VERSIONS)}"
        )


@dataclass(frozen=True)
class Rank:
    """Which part of which model this process has."""

    model: str
    tp: tuple[int, int]
    pp: tuple[int, int]
    cp: tuple[int, int]
    dp: int
    #: Options of the operator.
    extra: dict[str, Any]
    #: What SGLang was started with.
    settings: Settings = field(default_factory=Settings)
    #: What SGLang calls the model's pages, where that is not the model.
    name: str | None = None

    @property
    def folder(self) -> str:
        """The directory of this rank's disk tier below the operator's."""
        return f"tp{self.tp[0]}-pp{self.pp[0]}-cp{self.cp[0]}-dp{self.dp}"


def rank_of_storage(config: Any) -> Rank:
    """The rank of a HiCache storage; what cannot work is refused with the reason."""
    extra = dict(config.extra_config or {})
    if not extra.get("interface_v1"):
        raise ConfigInvalid(
            '--hicache-storage-backend-extra-config lacks "interface_v1": 1: without it SGLang copies each page twice, '
            "through an interface that KvbmHiCache does not have"
        )
    if config.is_mla_model and config.tp_size > 1:
        raise ConfigInvalid(
            f"an MLA model on {config.tp_size} tensor parallel ranks: SGLang stores its pages on rank 0 only, and kvbm keeps "
            "one store for each rank, so the others would find nothing; use one rank, or data parallel attention"
        )
    if config.dcp_size > 1 or config.should_split_heads:
        raise ConfigInvalid(
            "decode context parallelism and 'tp_lcm_size' are not supported: pages are stored as each rank holds them"
        )
    own = {name: value for name, value in extra.items() if name not in _ENGINE_OPTIONS}
    settings = running_settings()
    return Rank(
        model=settings.model or config.model_name or "",
        tp=(config.tp_rank, config.tp_size),
        pp=(config.pp_rank, config.pp_size),
        cp=(config.attn_cp_rank, config.attn_cp_size),
        dp=config.dp_rank,
        extra=own,
        settings=settings,
        name=config.model_name,
    )


def rank_of_linker(
    server_args: Any, params: Any, components: Any, extra: dict[str, Any] | None
) -> Rank:
    """The rank of a linker; what cannot work is refused with the reason."""
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    others = sorted(str(part.name) for part in set(components) - {ComponentType.FULL})
    if others:
        raise ConfigInvalid(
            f"the model has {', '.join(others)} beside full attention: KvbmLinker supports full attention only"
        )
    tp = (0, max(1, int(getattr(server_args, "tp_size", 1) or 1)))
    import torch.distributed as distributed

    if distributed.is_available() and distributed.is_initialized():
        group = params.attn_tp_cache_group or params.tp_cache_group
        tp = (distributed.get_rank(group=group), distributed.get_world_size(group=group))
    return Rank(
        model=str(server_args.model_path),
        tp=tp,
        pp=(params.pp_rank, params.pp_size),
        cp=(params.attn_cp_rank, params.attn_cp_size),
        dp=_data_parallel_rank(),
        extra=dict(extra or {}),
        settings=settings_of(server_args),
    )


def _data_parallel_rank() -> int:
    """The rank of data parallel attention; 0 where there is none."""
    from sglang.srt.runtime_context import get_parallel

    try:
        return int(get_parallel().attn_dp_rank)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return 0


def namespace_of(rank: Rank, weights: str, page_size: int, meaning: dict[str, Any]) -> Namespace:
    """The namespace of this rank's pages: bytes are stored as they are, so what decides their
    order belongs to the identity, as does what SGLang was started with.
    """
    meaning = {
        "sglang": sglang_version(),
        "tp": rank.tp,
        "pp": rank.pp,
        "cp": rank.cp,
        "name": rank.name,
        "settings": rank.settings.meaning,
        **meaning,
    }
    return Namespace(
        rank.model,
        weights=weights,
        page_size=page_size,
        rope_scaling=rank.settings.model_settings,
        kv_quantization=json.dumps(meaning, sort_keys=True),
        flat=True,
    )


def host_pool_layout(pool: Any) -> tuple[Layout, dict[str, Any]]:
    """Where the pages of SGLang's host pool lie, and what decides the order of their bytes."""
    if pool.layout not in _LAYOUTS:
        raise ConfigInvalid(
            f"--hicache-mem-layout is {pool.layout!r}: KvbmHiCache supports {', '.join(_LAYOUTS)}"
        )
    import torch

    size, pages = int(pool.page_size), int(pool.page_num)
    buffers = [
        buffer
        for buffer in (getattr(pool, name, None) for name in ("kv_buffer", "k_buffer", "v_buffer"))
        if isinstance(buffer, torch.Tensor)
    ]

    def page(number: int) -> tuple[list[int], list[int]]:
        first = number * size
        pointers, sizes = pool.get_page_buffer_meta(torch.arange(first, first + size))
        return list(pointers), list(sizes)

    (first, sizes), (last, _) = page(0), page(pages - 1)
    second = page(min(1, pages - 1))[0]
    layout = Layout(pages, size)
    for part, (address, length) in enumerate(zip(first, sizes)):
        stride = second[part] - address if pages > 1 else length
        if last[part] != address + (pages - 1) * stride:
            raise InvalidArgument(
                f"part {part} of the host pool's pages has no fixed stride (layout {pool.layout!r}): it is not supported"
            )
        total = (pages - 1) * stride + length
        _add(layout, buffers, address, total, stride, length)
    return layout, {"layout": pool.layout, "dtype": str(pool.dtype), "parts": sizes}


def device_pool_layout(pool: Any, page_size: int) -> tuple[Layout, int, dict[str, Any]]:
    """Where the pages of SGLang's own pool lie: in each buffer of a layer, `page_size` rows. The
    buffers are in the order of the layers; each layer has so many.
    """
    layers = int(pool.layer_num)
    parts_of_layer = [
        list(part)
        for part in (getattr(pool, name, None) for name in ("k_buffer", "v_buffer"))
        if part
    ] or [list(getattr(pool, "kv_buffer", None) or ())]
    if any(len(part) != layers for part in parts_of_layer) or not layers:
        raise InvalidArgument(
            f"{type(pool).__name__} has {layers} layers, and {[len(part) for part in parts_of_layer]} buffers in k_buffer and "
            "v_buffer or kv_buffer: KvbmLinker supports pools with one of each for each layer"
        )
    buffers = [buffer for layer in zip(*parts_of_layer) for buffer in layer]
    for name in ("k_scale_buffer", "native_k_scale_buffer"):
        if getattr(pool, name, None) is not None:
            raise ConfigInvalid(f"the pool has {name}: KV caches with scales are not supported")
    if getattr(pool, "kv_cache_layout", "nhd") != "nhd":
        raise ConfigInvalid(f"the pool's layout is {pool.kv_cache_layout!r}: 'nhd' is supported")
    rows = min(int(buffer.shape[0]) for buffer in buffers)
    lengths = [buffer.stride(0) * buffer.element_size() * page_size for buffer in buffers]
    layout, parts = Layout(rows // page_size, page_size), []
    for at, (buffer, length) in enumerate(zip(buffers, lengths)):
        if not buffer.is_contiguous():
            raise InvalidArgument(f"buffer {at} of the pool is not contiguous")
        total = layout.num_blocks * length
        _add(layout, [buffer], buffer.data_ptr(), total, length, length)
        parts.append([list(buffer.shape[1:]), str(buffer.dtype)])
    return layout, len(parts_of_layer), {"pool": type(pool).__name__, "by_layer": parts}


def kv_transfer(transfers: Any) -> Any:
    """The one transfer of the KV pool."""
    from sglang.srt.mem_cache.hicache_storage import PoolName

    if len(transfers) != 1 or transfers[0].name != PoolName.KV:
        names = ", ".join(str(transfer.name) for transfer in transfers)
        raise InvalidArgument(f"transfers of the pools {names}: only that of the KV pool is known")
    return transfers[0]


def _add(
    layout: Layout, buffers: list[Any], address: int, total: int, stride: int, length: int
) -> None:
    """Adds one part of all pages, which must lie inside one of `buffers`."""
    for buffer in buffers:
        begin = buffer.data_ptr()
        if begin <= address and address + total <= begin + buffer.nbytes:
            layout.add(
                address,
                total,
                block_stride=stride,
                block_bytes=length,
                owner=buffer,
                device=str(buffer.device),
            )
            return
    raise InvalidArgument(f"{total} bytes at {address:#x} are in no buffer of the pool")


def pages_of(token_indices: Any, page_size: int) -> list[int]:
    """Page numbers of token indices, which must be whole pages. Waits for the indices where they
    lie on a device.
    """
    indices = token_indices.tolist()
    if len(indices) % page_size:
        raise InvalidArgument(
            f"{len(indices)} token indices are no multiple of the page size {page_size}"
        )
    firsts = indices[::page_size]
    if any(first % page_size for first in firsts):
        raise InvalidArgument("a page does not begin at a multiple of the page size")
    return [first // page_size for first in firsts]
