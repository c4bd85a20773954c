"""TensorRT-LLM's published interface, beside the stand-ins for its classes and the connector.

`data/trtllm-connector.json` has its names alone: classes, fields, methods and their parameters, of
two commits. The file moved between them.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import types
from pathlib import Path
from typing import Any

import pytest
import trtllm_stand_in as stand_ins
from trtllm_stand_in import trtllm as trtllm  # a fixture

PUBLISHED = json.loads((Path(__file__).parent / "data/trtllm-connector.json").read_text())
INTERFACES: list[dict[str, Any]] = PUBLISHED["interfaces"]
EACH = pytest.mark.parametrize("published", INTERFACES, ids=lambda one: str(one["commit"])[:8])


def methods_of(owner: type) -> dict[str, list[str]]:
    """Public methods that a class has itself, and their parameters."""
    found = {}
    for name, value in vars(owner).items():
        if inspect.isfunction(value) and (name == "__init__" or not name.startswith("_")):
            found[name] = list(inspect.signature(value).parameters)[1:]
    return found


def module_of(published: dict[str, Any]) -> str:
    return str(published["file"]).removesuffix(".py").replace("/", ".")


def test_the_stand_ins_have_the_published_shape() -> None:
    published = INTERFACES[0]
    assert stand_ins.MODULE == module_of(published)
    for name, fields in published["fields"].items():
        assert [field.name for field in dataclasses.fields(getattr(stand_ins, name))] == fields
    for name, methods in published["methods"].items():
        owner = getattr(stand_ins, name)
        assert methods_of(owner) == methods, name
        assert owner.__abstractmethods__ == set(published["abstract"][name]), name


@EACH
def test_the_connector_takes_what_is_published(
    trtllm: types.ModuleType, published: dict[str, Any]
) -> None:
    from kvbm_rs.trtllm import KvbmScheduler, KvbmWorker

    for name, ours in {
        "KvCacheConnectorScheduler": KvbmScheduler,
        "KvCacheConnectorWorker": KvbmWorker,
    }.items():
        taken = methods_of(ours)
        assert set(published["abstract"][name]) <= taken.keys(), "each is implemented"
        for method, parameters in published["methods"][name].items():
            # TensorRT-LLM may call by position or by name.
            assert taken.get(method, parameters) == parameters, (name, method)


@EACH
def test_what_the_connector_uses_is_published(published: dict[str, Any]) -> None:
    from kvbm_rs.trtllm import _trtllm_compat as compat

    module = module_of(published)
    assert module in compat._MODULES
    known = published["fields"] | published["methods"]
    for _, owner, names in compat._used(module):
        there = known.keys() if owner is None else set(known[owner])
        assert set(names) <= there, (owner, set(names) - there)


def test_a_newer_interface_keeps_what_the_older_one_had() -> None:
    older, newer = INTERFACES
    for name, fields in older["fields"].items():
        assert newer["fields"][name][: len(fields)] == fields
    for name, methods in older["methods"].items():
        assert methods.items() <= newer["methods"][name].items()
        assert newer["abstract"][name] == older["abstract"][name], "nothing more is required"
