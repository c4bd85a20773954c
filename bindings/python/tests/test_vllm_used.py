"""What kvbm uses of vLLM is listed, so that a start names what an upgrade dropped."""

from __future__ import annotations

import ast
import builtins
import logging
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import kvbm_rs
from kvbm_rs.engine_names import Used
from kvbm_rs.vllm._vllm_groups import GROUPS
from kvbm_rs.vllm._vllm_used import PLUGIN, PLUGIN_TIER, TIER, USED

PACKAGE = Path(str(kvbm_rs.__file__)).parent

#: Modules that read vLLM's objects, and those that may import it beside them.
READERS = ("_vllm_compat", "_vllm_groups", "_vllm_views")
IMPORTERS = (*READERS, "connector", "scheduler", "stats", "step_plan", "tier")

#: Names of torch, prometheus_client, transformers and msgpack: vLLM hands their objects over.
OTHERS = {
    *("cuda", "current_stream", "data_ptr", "device", "dtype", "element_size", "is_cuda", "shape"),
    *("storage_offset", "stride", "unflatten", "untyped_storage", "inc", "labels"),
    *("Event", "__struct_fields__", "_commit_hash", "record", "synchronize", "to_json_string"),
}

#: Of the standard library's objects.
PYTHON = {"Random", "bind", "is_dir", "kwargs", "move_to_end", "random"}

#: vLLM calls it, and `_get_connector_metadata` returns what it was given.
CALLED_BY_VLLM = {"bind_connector_metadata"}


@cache
def trees() -> dict[str, ast.Module]:
    return {file.stem: ast.parse(file.read_text()) for file in (PACKAGE / "vllm").glob("*.py")}


def listed() -> set[Used]:
    return {*USED, *GROUPS, *PLUGIN, *TIER, *PLUGIN_TIER}


@cache
def own_names() -> set[str]:
    """Names that kvbm defines itself, its extension's among them."""
    own: set[str] = set()
    for file in (*PACKAGE.rglob("*.py"), *PACKAGE.glob("*.pyi")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                own.add(node.attr)
    return own


@cache
def python_names() -> set[str]:
    """Names of the built-in types, and of loggers."""
    types = [value for value in vars(builtins).values() if isinstance(value, type)]
    return {name for owner in types for name in dir(owner)} | set(dir(logging.getLogger("kvbm")))


def modules_of(tree: ast.Module) -> set[str]:
    """Names by which a module knows other modules and classes, not those of vLLM."""
    known = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known |= {(name.asname or name.name).split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and not is_of_vllm(node):
            known |= {name.asname or name.name for name in node.names}
    return known


def is_of_vllm(node: ast.ImportFrom) -> bool:
    return node.level == 0 and (node.module or "").split(".")[0] == "vllm"


def reads(tree: ast.Module) -> Iterator[tuple[ast.expr, str]]:
    """Each attribute that is read, and of what; also those that `getattr` reads."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield node.value, node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id == "getattr" and isinstance(node.args[1], ast.Constant):
                yield node.args[0], str(node.args[1].value)


def names_read(module: str) -> set[str]:
    """What a module reads of objects that are not its own."""
    tree, own = trees()[module], own_names()
    known = modules_of(tree)
    found = set()
    for owner, name in reads(tree):
        is_self = isinstance(owner, ast.Name) and owner.id in ("self", "cls")
        if isinstance(owner, ast.Name) and owner.id in known:
            continue
        # A reader has objects of vLLM's in its hands, whose names may also be names of kvbm's.
        if name in own and (is_self or module not in READERS):
            continue
        found.add(name)
    return found - python_names() - OTHERS - PYTHON


def test_every_name_that_is_read_is_listed() -> None:
    names = {name for _, _, names in listed() for name in names}
    unlisted = {module: names_read(module) - names for module in trees()}
    assert {module: found for module, found in unlisted.items() if found} == {}


def test_everything_that_is_imported_is_listed() -> None:
    known = {(module, name) for module, owner, names in listed() if not owner for name in names}
    known |= {(module, owner) for module, owner, _ in listed() if owner}
    modules = {module for module, _, _ in listed()}
    for module, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and is_of_vllm(node):
                assert module in IMPORTERS, f"{module} imports {node.module}"
                for name in node.names:
                    is_module = f"{node.module}.{name.name}" in modules
                    assert is_module or (node.module, name.name) in known, (module, name.name)
            elif isinstance(node, ast.Constant) and str(node.value).startswith("vllm."):
                # By `import_module`; in lists, and as names of loggers.
                assert module.startswith("_vllm_") or module == "plugin", (module, node.value)


def test_arguments_of_vllms_classes_are_listed() -> None:
    classes: dict[str, set[str]] = {}
    for _, owner, names in listed():
        if owner:
            classes.setdefault(owner, set()).update(names)
    checked = 0
    for module, tree in trees().items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            called = node.func.id if isinstance(node.func, ast.Name) else called
            if called in classes and called not in own_names():
                given = {argument.arg for argument in node.keywords if argument.arg}
                assert given <= classes[called], (module, called, given - classes[called])
                checked += bool(given)
    assert checked >= 3, "BlockStored, BlockRemoved and KVConnectorTransferResults"


def test_nothing_is_listed_twice_or_in_vain() -> None:
    """Each name of the lists stands somewhere else in the package."""
    used = set(CALLED_BY_VLLM)
    for tree in (tree for module, tree in trees().items() if module != "_vllm_used"):
        for node in ast.walk(tree):
            for field in ("attr", "id", "name", "arg"):
                used.add(str(getattr(node, field, "")))
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                used.add(node.value)
    seen: set[tuple[str, str | None, str]] = set()
    for module, owner, names in (*USED, *GROUPS, *TIER):
        for name in names:
            place = (module, owner, name)
            assert name in used, f"{'.'.join(filter(None, place))} is not used"
            assert place not in seen, place
            seen.add(place)


def test_a_name_that_is_not_listed_is_found() -> None:
    tree = ast.parse("def read(request):\n    return request.a_new_name, getattr(request, 'other')")
    trees()["_vllm_views"], before = tree, trees()["_vllm_views"]
    try:
        assert names_read("_vllm_views") == {"a_new_name", "other"}
    finally:
        trees()["_vllm_views"] = before
