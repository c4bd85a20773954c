"""The namespace: everything beside the tokens that decides what the bytes of a block are."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .. import Namespace
from ._vllm_compat import ConfigView, hash_roots, vllm_version

__all__ = [
    "adapter_stamp",
    "adapter_version",
    "namespace_of",
    "process_root_is_random",
    "root_is_fixed",
    "tensor_shapes",
    "weights_version",
]

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")


def namespace_of(
    view: ConfigView,
    weights: str | None,
    shapes: list[Any],
    backends: Iterable[str],
    own_hashes: bool,
) -> Namespace:
    """The namespace of a model as vLLM serves it.

    The bytes of a block are copied as they are, so what decides their order belongs to the
    identity: the version of vLLM, the attention backend, the shapes and strides of its tensors
    (`tensor_shapes`), the number of ranks.
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
    return Namespace(
        view.model,
        weights=weights if weights is not None else weights_version(view.model, view.revision),
        dtype=view.dtype,
        page_size=view.block_size,
        rope_scaling=_digest(_settings(view.model_settings)),
        kv_quantization=json.dumps(meaning, sort_keys=True),
    )


def tensor_shapes(tensors: Iterable[Any]) -> list[Any]:
    """Shape of a block, strides and dtype of each tensor."""
    return [
        (list(tensor.shape[1:]), list(tensor.stride()), str(tensor.dtype)) for tensor in tensors
    ]


def _settings(text: str) -> str:
    """The model's configuration without what says where it came from."""
    try:
        settings = json.loads(text)
    except ValueError:
        return text
    for name in ("_name_or_path", "transformers_version", "_commit_hash"):
        settings.pop(name, None)
    return json.dumps(settings, sort_keys=True)


def weights_version(model: str, revision: str | None) -> str:
    """The revision of a model of a hub, or a digest of the files of a local one; empty where neither
    is known.

    Of each local file the size and 64 samples of 4 KiB count: an update of the weights changes them
    all over.
    """
    path = Path(model)
    if path.is_dir() or path.is_file():
        return f"{revision or ''}+{_digest_of(_weights(path))}"
    return revision or ""


def adapter_version(name: str, path: str) -> str:
    """A LoRA adapter by its name and contents: one that was trained anew keeps its name."""
    folder = Path(path)
    return f"{name}+{_digest_of(_weights(folder)) if folder.is_dir() else path}"


def adapter_stamp(path: str) -> int:
    """Changes with names, sizes, numbers and times of an adapter's files; 0 for one of a hub."""
    folder = Path(path)
    if not folder.is_dir():
        return 0
    stats = [(file.name, file.stat()) for file in _weights(folder)]
    return hash(tuple((name, st.st_size, st.st_ino, st.st_mtime_ns) for name, st in stats))


def _weights(path: Path) -> list[Path]:
    """The files of weights in a folder, or the one file."""
    if path.is_file():
        return [path]
    return sorted(file for file in path.iterdir() if file.suffix in _WEIGHTS and file.is_file())


def _digest_of(files: list[Path]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with open(path, "rb", buffering=0) as file:
            for sample in range(64):
                file.seek(max(0, size - 4096) * sample // 63)
                digest.update(file.read(4096))
    return digest.hexdigest()


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def process_root_is_random(algorithm: str) -> bool:
    """Whether vLLM's block hashes will begin with a root that changes with each process, as far as
    its documentation says. vLLM has no root yet when the connector starts: `root_is_fixed` looks.
    """
    cryptographic = algorithm.startswith("sha256")
    return not cryptographic and os.environ.get("PYTHONHASHSEED") is None


def root_is_fixed(algorithm: str) -> bool:
    """Whether the root of vLLM's block hashes is what each process with this environment has. Raises
    where vLLM has no root that can be read.
    """
    root, fixed = hash_roots(algorithm)
    return root == fixed
