"""What `kvbm doctor --engine` learns from this package, over engines of the published names."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from kvbm_rs import ConfigInvalid, doctor
from trtllm_stand_in import trtllm as trtllm  # a fixture
from vllm_stand_in import vllm as vllm  # a fixture

GOOD = {
    "kv_connector": "KvbmConnector",
    "kv_connector_module_path": "kvbm_rs.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"host": "1GiB"},
}


@pytest.fixture
def checked(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM in a version that was tested; its module lacks what the connector does not use here."""
    monkeypatch.setattr(vllm.compat, "vllm_version", lambda: "0.32.1+cpu")
    monkeypatch.setattr(vllm.compat, "missing", lambda *_used: [])
    return vllm


def registered(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    point = metadata.EntryPoint
    points = [point(name, "m:register", "vllm.general_plugins") for name in names]
    monkeypatch.setattr(metadata, "entry_points", lambda **_group: points)


def found(name: str, **answer: Any) -> list[tuple[str, str]]:
    """Status and text of the findings of a name."""
    findings = answer["findings"]
    for finding in findings:
        is_short = finding["status"] != "ok"
        assert (("effect" in finding), ("fix" in finding)) == (is_short, is_short), finding
    return [(one["status"], one["found"]) for one in findings if one["name"] == name]


def test_a_vllm_that_has_everything(checked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    registered(monkeypatch, "other", "kvbm_rs")
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    answer = doctor.examine("vllm")
    assert [one["status"] for one in answer["findings"]] == ["ok", "ok"]
    assert answer["settings"] is None and json.dumps(answer)
    monkeypatch.setattr(checked.compat, "vllm_version", lambda: "0.320.0")
    assert found("vLLM", **doctor.examine("vllm"))[0][0] == "limited"
    monkeypatch.setattr(checked.compat, "missing", lambda *_used: ["vllm.x.Y"])
    status, text = found("vLLM", **doctor.examine("vllm"))[0]
    assert status == "missing" and "lacks vllm.x.Y" in text


def test_a_plugin_that_vllm_does_not_load(checked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    registered(monkeypatch, "other")
    named = json.dumps({key: value for key, value in GOOD.items() if "path" not in key})
    status, text = found("vLLM plugin", **doctor.examine("vllm"))[0]
    assert status == "limited" and "not registered" in text
    registered(monkeypatch, "kvbm_rs")
    for value, expected in (("", "limited"), ("a,b", "limited"), ("a,kvbm_rs", "ok")):
        monkeypatch.setenv("VLLM_PLUGINS", value)
        answer = doctor.examine("vllm", named)
        assert found("vLLM plugin", **answer)[0][0] == expected, value
        status, text = found("vLLM configuration", **answer)[0]
        assert status == ("ok" if expected == "ok" else "missing"), text


def test_a_configuration_is_read_as_the_connector_reads_it(
    checked: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    registered(monkeypatch, "kvbm_rs")
    extra = {"host": "1GiB", "disk": str(tmp_path), "disk_capacity": "2GiB"}
    good = doctor.examine("vllm", json.dumps(GOOD | {"kv_connector_extra_config": extra}))
    assert found("vLLM configuration", **good) == [("ok", "KvbmConnector takes it")]
    assert str(tmp_path) in good["settings"] and list(tmp_path.iterdir()) == []
    for change, text in (
        ({"kv_load_failure_policy": "fail"}, '"kv_load_failure_policy": "recompute"'),
        ({"kv_role": "kv_producer"}, '"kv_role": "kv_both"'),
        ({"kv_connector": "Other"}, "kv_connector is 'Other'"),
        ({"kv_connector_module_path": "other"}, "kv_connector_module_path is 'other'"),
        ({"kv_connector_extra_config": {}}, "option 'host' is missing"),
        ({"kv_connector_extra_config": {"host": "lots"}}, "lots"),
        ({"kv_connector_extra_config": {"host": "1GiB", "hots": 1}}, "'hots', which is no option"),
        ({"kv_connector_extra_config": {"host": "1GiB", "config": "/no/file"}}, "/no/file"),
        ({"kv_connector_extra_config": 7}, "int"),
    ):
        answer = doctor.examine("vllm", json.dumps(GOOD | change))
        statuses = found("vLLM configuration", **answer)
        assert len(statuses) == 1 and statuses[0][0] == "missing" and text in statuses[0][1], change
    without = {key: value for key, value in GOOD.items() if key != "kv_load_failure_policy"}
    assert (
        "recompute"
        in found("vLLM configuration", **doctor.examine("vllm", json.dumps(without)))[0][1]
    ), "vLLM fails requests unless it is told otherwise"
    for text in ("{", "[]", "7"):
        status, _ = found("vLLM configuration", **doctor.examine("vllm", text))[0]
        assert status == "missing", text


def test_an_engine_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for engine, module, name in (
        ("vllm", "vllm", "vLLM"),
        ("sglang", "sglang", "SGLang"),
        ("trtllm", "tensorrt_llm", "TensorRT-LLM"),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        status, text = found(name, **doctor.examine(engine))[0]
        assert status == "missing" and "cannot be imported" in text, engine
    with pytest.raises(ConfigInvalid, match="give one of vllm, sglang, trtllm"):
        doctor.examine("other")
    with pytest.raises(ConfigInvalid, match="is an option of vLLM"):
        doctor.examine("sglang", "{}")


def test_the_settings_of_tensorrt_llm_are_read(
    trtllm: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("KVBM_HOST_CAPACITY", raising=False)
    answer = doctor.examine("trtllm")
    assert found("TensorRT-LLM", **answer)[0][0] == "ok"
    status, text = found("TensorRT-LLM settings", **answer)[0]
    assert status == "missing" and "KVBM_HOST_CAPACITY is not set" in text
    for key, value in {
        "HOST_CAPACITY": "1GiB",
        "DISK_DIR": str(tmp_path),
        "DISK_CAPACITY": "2GiB",
    }.items():
        monkeypatch.setenv(f"KVBM_{key}", value)
    answer = doctor.examine("trtllm")
    assert found("TensorRT-LLM settings", **answer)[0][0] == "ok"
    assert str(tmp_path) in answer["settings"]
