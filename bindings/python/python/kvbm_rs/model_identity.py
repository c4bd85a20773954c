"""What decides the bytes of a block beside its tokens: weights, adapters, settings of an engine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

__all__ = [
    "adapter_stamp",
    "adapter_version",
    "digest",
    "file_version",
    "has_operator_version",
    "model_settings",
    "plain",
    "settings_of_files",
    "weights_version",
]

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")

#: Files of a local model that say how its weights are used.
_SETTINGS = ("config.json", "hf_quant_config.json", "quantize_config.json", "params.json")

#: Most bytes of a file that is read as a whole.
_WHOLE = 16 << 20

#: Scale and kind of an adapter.
_ADAPTER_SETTINGS = "adapter_config.json"


def model_settings(text: str) -> str:
    """A model's configuration without what says where it came from."""
    try:
        settings = json.loads(text)
    except ValueError:
        return text
    if not isinstance(settings, dict):
        return text
    for name in ("_name_or_path", "transformers_version", "_commit_hash"):
        settings.pop(name, None)
    return json.dumps(settings, sort_keys=True)


def settings_of_files(model: str) -> str | None:
    """The configuration of a local model as its files say it; none where there is no such file."""
    folder = Path(model)
    files = [folder / name for name in _SETTINGS]
    texts = [
        f"{file.name} {model_settings(file.read_text(encoding='utf-8'))}"
        for file in files
        if file.is_file()
    ]
    return "\n".join(texts) if texts else None


def weights_version(model: str, revision: str | None) -> str:
    """The revision of a model of a hub, or a digest of the files of a local one; empty where
    neither is known.

    Of each local file the size and 64 samples of 4 KiB count: an update of the weights changes them
    all over.
    """
    path = Path(model)
    if path.is_dir() or path.is_file():
        return f"{revision or ''}+{_digest_of(_weights(path))}"
    return revision or ""


def file_version(path: str) -> str:
    """The contents of a file of settings, or of a folder of weights; the path itself where neither
    is there.
    """
    file = Path(path)
    if file.is_file() and file.stat().st_size <= _WHOLE:
        return hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
    return weights_version(path, None) or path


def adapter_version(name: str, path: str) -> str:
    """A LoRA adapter by its name and contents: one that was trained anew keeps its name."""
    folder = Path(path)
    return f"{name}+{_digest_of(_adapter(folder)) if folder.is_dir() else path}"


def adapter_stamp(path: str) -> int:
    """Changes with names, sizes, numbers and times of an adapter's files; 0 for one of a hub."""
    folder = Path(path)
    if not folder.is_dir():
        return 0
    stats = [(file.name, file.stat()) for file in _adapter(folder)]
    return hash(tuple((name, st.st_size, st.st_ino, st.st_mtime_ns) for name, st in stats))


def digest(text: str) -> str:
    """A short text that stands for a long one."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def plain(value: Any) -> Any:
    """A setting of an engine as JSON has it, the same in every process. Of an object that has no
    fields, its class counts.
    """
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(part) for part in value), key=str)
    dump = getattr(value, "model_dump", None)
    if callable(dump) and not isinstance(value, type):
        return plain(dump())
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    kind = value if isinstance(value, type) else type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def has_operator_version(toml: str) -> bool:
    """Whether `namespace.weights` is set in the settings of a manager."""
    section = ""
    for line in toml.splitlines():
        if line.startswith("["):
            section = line.strip()
        elif section == "[namespace]" and line.split("=")[0].strip() == "weights":
            return line.split("=", 1)[1].strip() not in ('""', "''")
    return False


def _weights(path: Path) -> list[Path]:
    """The files of weights in a folder, or the one file."""
    if path.is_file():
        return [path]
    return sorted(file for file in path.iterdir() if file.suffix in _WEIGHTS and file.is_file())


def _adapter(folder: Path) -> list[Path]:
    """The files of an adapter that decide what it computes."""
    settings = folder / _ADAPTER_SETTINGS
    return [*_weights(folder), *([settings] if settings.is_file() else [])]


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
