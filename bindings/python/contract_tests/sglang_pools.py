"""SGLang's own pools on CPU tensors, and its storage factory."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.device_pool_info import (
    KVBufferLayout,
    KVBuffers,
    MHABufferInfo,
    MLABufferInfo,
)
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

LAYERS, HEADS, DIM, PAGE = 3, 2, 16, 4
PAGES = 32


def host_pool(layout: str) -> Any:
    """SGLang's host pool of 33 pages."""

    def tensors() -> tuple[torch.Tensor, ...]:
        return tuple(
            torch.zeros(PAGES * PAGE, HEADS, DIM, dtype=torch.float16) for _ in range(LAYERS)
        )

    def pointers(buffers: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.uint64)

    k, v = tensors(), tensors()
    info = MHABufferInfo(
        buffers=KVBuffers(
            k=k,
            v=v,
            k_data_ptrs=pointers(k),
            v_data_ptrs=pointers(v),
            layout=KVBufferLayout.NHD,
        ),
        page_size=PAGE,
        head_num=HEADS,
        head_dim=DIM,
        v_head_dim=DIM,
        dtype=torch.float16,
        device=torch.device("cpu"),
    )
    return MHATokenToKVPoolHost(
        info,
        1.0,
        0,
        PAGE,
        layout,
        pin_memory=False,
        device="cpu",
        device_capacity_tokens=PAGES * PAGE,
        start_layer=0,
        end_layer=LAYERS,
    )


def mla_host_pool(layout: str) -> Any:
    """SGLang's host pool of a model with multi-head latent attention."""
    rank, rope = 24, 8
    buffers = tuple(
        torch.zeros(PAGES * PAGE, 1, rank + rope, dtype=torch.bfloat16) for _ in range(LAYERS)
    )
    info = MLABufferInfo(
        buffers=buffers,
        data_ptrs=torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.uint64),
        layer_indices=tuple(range(LAYERS)),
        device_layer_num=LAYERS,
        page_size=PAGE,
        kv_lora_rank=rank,
        qk_rope_head_dim=rope,
        kv_cache_dim=rank + rope,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    return MLATokenToKVPoolHost(
        info,
        1.0,
        0,
        PAGE,
        layout,
        pin_memory=False,
        device="cpu",
        device_capacity_tokens=PAGES * PAGE,
        start_layer=0,
        end_layer=LAYERS,
        target_layer_num=LAYERS,
    )


def storage_config(extra: dict[str, Any] | None = None, **changes: Any) -> HiCacheStorageConfig:
    """What SGLang hands to a storage backend."""
    fields: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": False,
        "model_name": "test/model",
    } | changes
    return HiCacheStorageConfig(extra_config=extra, **fields)


def options(disk: Path | None = None, host: str = "64", **more: Any) -> dict[str, Any]:
    """An operator's extra configuration."""
    extra: dict[str, Any] = {
        "backend_name": "kvbm",
        "module_path": "kvbm_rs.sglang",
        "class_name": "KvbmHiCache",
        "interface_v1": 1,
        "host": host,
        "host.pinned": False,
        "policy.admission": "all",
    }
    if disk is not None:
        extra |= {"disk": str(disk), "disk_capacity": "256", "disk.drive_writes_per_day": 0}
    return extra | more


def local_model(folder: Path) -> str:
    """A model that lies in a folder, as far as SGLang's `ModelConfig` asks."""
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "vocab_size": 100,
    }
    (folder / "config.json").write_text(json.dumps(settings))
    return str(folder)


def backend(pool: Any, extra: dict[str, Any], **changes: Any) -> Any:
    """A backend as SGLang's controller makes it."""
    made = StorageBackendFactory.create_backend("dynamic", storage_config(extra, **changes), pool)
    try:
        made.register_mem_pool_host(pool)
        made.on_host_pools_registered()
    except BaseException:
        made.close()
        raise
    return made


def fill(pool: Any, page: int, seed: int) -> torch.Tensor:
    """Random bytes in one page of a host pool; the page as SGLang's own copying path reads it."""
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randn(pool.get_dummy_flat_data_page().shape, generator=generator)
    pool.set_from_flat_data_page(page * PAGE, flat.to(pool.dtype))
    return read(pool, page)


def read(pool: Any, page: int) -> torch.Tensor:
    """A copy of one page."""
    data: torch.Tensor = pool.get_data_page(page * PAGE, flat=True)
    return data.clone()


def indices(pages: list[int]) -> torch.Tensor:
    """The token indices of pages."""
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def page_hashes(tokens: list[int]) -> list[str]:
    """A hash for each page, which covers all tokens before it, of the form that SGLang's have."""
    ends = range(PAGE, len(tokens) + 1, PAGE)
    return [hashlib.sha256(repr(tokens[:end]).encode()).hexdigest() for end in ends]
