"""What an installed engine lacks of what a connector uses."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

__all__ = ["Used", "missing"]

#: A module, a class of it (or None), and names of the class or the module.
Used = tuple[str, "str | None", tuple[str, ...]]


def missing(used: Iterable[Used]) -> list[str]:
    """What is not there of `used`, each as `module.Class.name`."""
    lacks = []
    for module_name, class_name, names in used:
        try:
            owner: Any = importlib.import_module(module_name)
        except ImportError:
            lacks.append(module_name)
            continue
        where = module_name
        if class_name is not None:
            where = f"{module_name}.{class_name}"
            owner = getattr(owner, class_name, None)
            if owner is None:
                lacks.append(where)
                continue
        lacks += [f"{where}.{name}" for name in names if not _has(owner, name)]
    return lacks


def _has(owner: Any, name: str) -> bool:
    """Whether it is an attribute, or a declared field without a default."""
    if hasattr(owner, name):
        return True
    return any(
        name in vars(base).get("__annotations__", {}) for base in getattr(owner, "__mro__", ())
    )
