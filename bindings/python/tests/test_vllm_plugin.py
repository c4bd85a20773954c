"""vLLM's plugin entry point, over stand-ins for the factories that it registers at."""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
from kvbm_rs.vllm import plugin

CONNECTORS = "vllm.distributed.kv_transfer.kv_connector.factory"
TIERS = "vllm.v1.kv_offload.tiering.factory"


class Factory:
    """Keeps what is registered, and takes a name once, as vLLM's factories do."""

    def __init__(self) -> None:
        self.known: dict[str, tuple[str, str]] = {}

    def register(self, name: str, module_path: str, class_name: str) -> None:
        if name in self.known:
            raise ValueError(f"Connector '{name}' is already registered.")
        self.known[name] = (module_path, class_name)


@pytest.fixture
def factories(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    for name in [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]:
        monkeypatch.delitem(sys.modules, name)
    modules: dict[str, Any] = {}
    for leaf in (CONNECTORS, TIERS):
        parts = leaf.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            if name not in modules:
                modules[name] = types.ModuleType(name)
                monkeypatch.setitem(sys.modules, name, modules[name])
    modules["vllm"].__version__ = "9.9"
    connectors, tiers = Factory(), Factory()
    modules[CONNECTORS].KVConnectorFactory = types.SimpleNamespace(
        register_connector=connectors.register, known=connectors.known
    )
    modules[TIERS].SecondaryTierFactory = types.SimpleNamespace(
        register_tier=tiers.register, known=tiers.known
    )
    yield modules[CONNECTORS], modules[TIERS]


def test_names_are_registered_once(
    factories: tuple[Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    plugin.register()
    plugin.register()
    connectors, tiers = factories
    assert connectors.KVConnectorFactory.known == {
        "KvbmConnector": ("kvbm_rs.vllm", "KvbmConnector")
    }
    assert tiers.SecondaryTierFactory.known == {"kvbm": ("kvbm_rs.vllm", "KvbmTier")}
    assert not caplog.records


def test_what_an_upgrade_dropped_is_a_warning_that_names_it(
    factories: tuple[Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM calls a plugin without `try`: an exception would end it, whether or not it uses kvbm."""
    connectors, tiers = factories
    del connectors.KVConnectorFactory.register_connector
    plugin.register()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"vLLM 9.9 lacks {CONNECTORS}.KVConnectorFactory.register_connector" in caplog.text
    assert "kv_connector_module_path" in caplog.text
    assert "kvbm" in tiers.SecondaryTierFactory.known, "one failure does not stop the other name"
    caplog.clear()
    del connectors.KVConnectorFactory, tiers.SecondaryTierFactory
    plugin.register()
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.WARNING]
    assert f"lacks {CONNECTORS}.KVConnectorFactory" in caplog.text
    assert f"lacks {TIERS}.SecondaryTierFactory" in caplog.text


def test_a_factory_that_refuses_is_a_warning(
    factories: tuple[Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(name: str) -> None:
        raise AssertionError("unreachable")

    factories[0].KVConnectorFactory.register_connector = refuse
    plugin.register()
    assert "TypeError" in caplog.text and "kvbm_rs.vllm" in caplog.text


def test_a_vllm_without_tiers_stays_as_it_is(
    factories: tuple[Any, Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("vllm.v1.kv_offload.tiering", TIERS):
        monkeypatch.delitem(sys.modules, name)
    plugin.register()
    assert "KvbmConnector" in factories[0].KVConnectorFactory.known and not caplog.records


def test_an_environment_without_vllm_raises_nothing(
    factories: tuple[Any, Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]:
        monkeypatch.delitem(sys.modules, name)
    plugin.register()
    (record,) = caplog.records
    assert "No module named 'vllm" in record.getMessage()
