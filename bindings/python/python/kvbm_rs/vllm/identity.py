"""The namespace: everything beside the tokens that decides what the bytes of a block are."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any

from .. import Namespace
from ..model_identity import digest, model_settings, weights_version
from ._vllm_compat import ConfigView, hash_roots, vllm_version

__all__ = [
    "namespace_of",
    "process_root_is_random",
    "root_is_fixed",
    "tensor_shapes",
]


def namespace_of(
    view: ConfigView,
    weights: str | None,
    shapes: list[Any],
    backends: Iterable[str],
    own_hashes: bool,
    replicas: int = 1,
) -> Namespace:
    """The namespace of a model as vLLM serves it.

    The bytes of a block are copied as they are, so what decides their order belongs to the
    identity: the version of vLLM, the attention backend, the shapes and strides of its tensors
    (`tensor_shapes`), the number of ranks, and how many of them hold the same bytes
    (`Layout.replicas`).
    """
    meaning: dict[str, Any] = {
        "vllm": vllm_version(),
        "backends": list(backends),
        "tensors": shapes,
        "dtype": view.dtype,
        "cache_dtype": view.cache_dtype,
        "quantization": view.quantization,
        "hashes": "own" if own_hashes else view.hash_algorithm,
    }
    if view.tensor_parallel > 1:
        meaning["ranks"] = view.tensor_parallel
    if replicas > 1:
        # Volumes have blocks of these ranks once, under the name of the first.
        meaning["replicas"] = replicas
    return Namespace(
        view.model,
        weights=weights if weights is not None else weights_version(view.model, view.revision),
        dtype=view.dtype,
        page_size=view.block_size,
        rope_scaling=digest(model_settings(view.model_settings)),
        kv_quantization=json.dumps(meaning, sort_keys=True),
    )


def tensor_shapes(tensors: Iterable[Any]) -> list[Any]:
    """Shape of a block, strides and dtype of each tensor."""
    return [
        (list(tensor.shape[1:]), list(tensor.stride()), str(tensor.dtype)) for tensor in tensors
    ]


def process_root_is_random(algorithm: str) -> bool:
    """Whether vLLM's block hashes will begin with a root that changes with each process, as far as
    its documentation says. vLLM has no root yet when the connector starts: `root_is_fixed` looks.
    """
    cryptographic = algorithm.startswith("sha256")
    return not cryptographic and os.environ.get("PYTHONHASHSEED") is None


def root_is_fixed(algorithm: str) -> bool:
    """Whether the root of vLLM's block hashes is what each process with this environment has.
    Raises where vLLM has no root that can be read.
    """
    root, fixed = hash_roots(algorithm)
    return root == fixed
