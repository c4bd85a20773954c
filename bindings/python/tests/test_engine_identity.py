"""What of the settings of SGLang and TensorRT-LLM decides the namespace, without either."""

from __future__ import annotations

import enum
import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kvbm_rs import Config, Namespace
from kvbm_rs.model_identity import (
    adapter_version,
    file_version,
    has_operator_version,
    model_settings,
    plain,
    settings_of_files,
)
from kvbm_rs.sglang import _sglang_compat as sglang
from kvbm_rs.sglang import _sglang_settings as sglang_settings
from kvbm_rs.sglang.options import Options
from kvbm_rs.trtllm import _trtllm_compat as trtllm
from kvbm_rs.trtllm import _trtllm_settings as trtllm_settings


def local_model(folder: Path, **settings: Any) -> Path:
    """A model that lies in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    config = {"hidden_size": 8, "rope_theta": 1.0} | settings
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# ----------------------------------------------------------------------- shared


class Kind(enum.Enum):
    FAST = 1


class Text(str, enum.Enum):
    FP8 = "fp8"


@dataclass
class Nested:
    name: str
    kind: Any = None


class Dumped:
    def model_dump(self) -> dict[str, Any]:
        return {"algorithm": Text.FP8, "path": Path("/a")}


def test_settings_are_the_same_text_in_every_process() -> None:
    assert plain({"a": Kind.FAST, 2: (Text.FP8, {3, 1})}) == {"a": "FAST", "2": ["FP8", [1, 3]]}
    assert plain(Nested("x", Dumped())) == {
        "name": "x",
        "kind": {"algorithm": "FP8", "path": "/a"},
    }
    assert plain(object()) == "builtins.object" == plain(object), "no address"
    assert model_settings("[1]") == "[1]" and model_settings("{") == "{"
    assert model_settings('{"a": 1, "_commit_hash": "x"}') == '{"a": 1}'


def test_files_count_by_their_contents(tmp_path: Path) -> None:
    model = local_model(tmp_path / "m")
    first = settings_of_files(str(model))
    local_model(tmp_path / "m", rope_theta=2.0)
    assert first != settings_of_files(str(model)) and settings_of_files("org/model") is None
    scales = tmp_path / "scales.json"
    scales.write_text("1" * 1_000_000)
    one = file_version(str(scales))
    scales.write_text("1" * 300_000 + "2" + "1" * 699_999)
    assert file_version(str(scales)) != one, "every byte counts"
    assert file_version("/no/such/file") == "/no/such/file"


def test_the_scale_of_an_adapter_counts(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"1")
    versions = set()
    for alpha in (8, 16):
        (tmp_path / "adapter_config.json").write_text(json.dumps({"lora_alpha": alpha}))
        versions.add(adapter_version("a", str(tmp_path)))
    assert len(versions) == 2


def test_an_operator_may_version_everything() -> None:
    config = Config()
    config.set("namespace.tenant_salt", "weights = 1")
    assert not has_operator_version(config.to_toml())
    config.set("namespace.weights", "7")
    assert has_operator_version(config.to_toml())
    assert not has_operator_version('[volume]\nweights = "1"\n')


# ----------------------------------------------------------------------- SGLang


def server_args(**changes: Any) -> SimpleNamespace:
    """What SGLang's `ServerArgs` has, as far as it counts."""
    names = (*sglang_settings.SETTINGS, *sglang_settings.FILES)
    values = dict.fromkeys(names) | {"model_path": "org/model", "lora_paths": None}
    return SimpleNamespace(**(values | changes))


def sglang_tag(args: Any) -> bytes:
    settings = sglang_settings.settings_of(args)
    assert settings.unknown in ((), ("the model's configuration",)), settings.unknown
    rank = sglang.Rank("org/model", (0, 1), (0, 1), (0, 1), 0, {}, settings)
    return sglang.namespace_of(rank, "1", 64, {"layout": "page_first"}).tag


def test_every_setting_of_sglang_that_changes_pages_changes_the_namespace() -> None:
    tags = {sglang_tag(server_args())}
    assert sglang_tag(server_args()) in tags
    changes = [{name: "other"} for name in sglang_settings.SETTINGS + sglang_settings.FILES]
    for change in changes:
        tags.add(sglang_tag(server_args(**change)))
    assert len(tags) == 1 + len(changes)
    for must in (
        "quantization",
        "kv_cache_dtype",
        "json_model_override_args",
        "revision",
        "dtype",
        "attention_backend",
    ):
        assert must in sglang_settings.SETTINGS


def test_the_configuration_of_a_model_changes_sglangs_namespace(tmp_path: Path) -> None:
    tags = set()
    for rope in (1.0, 2.0):
        model = local_model(tmp_path / "m", rope_theta=rope)
        tags.add(sglang_tag(server_args(model_path=str(model))))
    # SGLang's own has what overrides changed.
    for theta in (1.0, 3.0):
        text = json.dumps({"rope_theta": theta})
        hf = SimpleNamespace(_commit_hash="c0ffee", to_json_string=lambda use_diff, text=text: text)
        args = server_args(model_path=str(model), _model_config=SimpleNamespace(hf_config=hf))
        settings = sglang_settings.settings_of(args)
        assert settings.revision == "c0ffee" and settings.unknown == ()
        tags.add(sglang_tag(args))
    assert len(tags) == 4


def test_adapters_of_sglang_count_by_their_contents(tmp_path: Path) -> None:
    adapter = tmp_path / "a"
    adapter.mkdir()
    tags = {sglang_tag(server_args())}
    for weights in (b"1", b"2"):
        (adapter / "adapter_model.safetensors").write_bytes(weights)
        forms: list[Any] = [
            {"x": str(adapter)},
            [{"lora_name": "x", "lora_path": str(adapter)}],
            [f"x={adapter}"],
            [SimpleNamespace(lora_name="x", lora_path=str(adapter))],
        ]
        of_form = {sglang_tag(server_args(lora_paths=form)) for form in forms}
        assert len(of_form) == 1
        tags |= of_form
    assert len(tags) == 3
    settings = sglang_settings.settings_of(server_args(lora_paths=["x=org/adapter"]))
    assert "the version of the LoRA adapter x" in settings.unknown


def test_what_sglang_does_not_say_is_named(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    args = server_args(model_path=str(local_model(tmp_path)), lora_paths=[3])
    del args.quantization, args.quantization_param_path
    settings = sglang_settings.settings_of(args)
    assert settings.unknown == ("quantization", "quantization_param_path", "lora_paths")
    nothing = sglang_settings.running_settings()
    assert nothing.model is None and "KV cache dtype" in nothing.unknown[0]
    extra = {"host": "16", "weights": "1"}
    rank = sglang.Rank("m", (0, 1), (0, 1), (0, 1), 0, extra, settings)
    with caplog.at_level(logging.WARNING):
        Options.read(rank, "X")
        (record,) = caplog.records
        for part in ("quantization, quantization_param_path, lora_paths", "'namespace.weights'"):
            assert part in record.getMessage()
        caplog.clear()
        Options.read(replace(rank, extra=extra | {"namespace.weights": "7"}), "X")
        assert not caplog.records, "the operator says what changes"
        rank = replace(rank, extra={"host": "16"}, settings=sglang_settings.Settings())
        Options.read(rank, "X")
        (record,) = caplog.records
        assert "the version of the weights of m is not known" in record.getMessage()


# ----------------------------------------------------------------- TensorRT-LLM


def llm_args(**changes: Any) -> SimpleNamespace:
    """What TensorRT-LLM's `TorchLlmArgs` has, as far as it counts."""
    cache = SimpleNamespace(tokens_per_block=4, dtype="auto")
    values: dict[str, Any] = {
        "attn_backend": "TRTLLM",
        "dtype": "auto",
        "kv_cache_config": cache,
        "load_format": Kind.FAST,
        "lora_config": None,
        "model": "org/model",
        "model_kwargs": None,
        "quant_config": Nested("none"),
        "revision": "r1",
    }
    return SimpleNamespace(**(values | changes))


def trtllm_tag(args: Any, monkeypatch: pytest.MonkeyPatch) -> bytes:
    monkeypatch.setattr(trtllm, "trtllm_version", lambda: "1.2.1")
    monkeypatch.setattr(trtllm, "layout_of", lambda tensors, page_size: None)
    tensor: Any = np.zeros((8, 2, 2, 16), dtype=np.float32)
    namespace: Namespace = trtllm.layout_and_namespace(args, tensor, trtllm.settings_of(args))[1]
    return namespace.tag


def test_every_setting_of_tensorrt_llm_that_changes_blocks_changes_the_namespace(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tags = {trtllm_tag(llm_args(), monkeypatch)}
    assert trtllm_tag(llm_args(), monkeypatch) in tags
    models = [
        local_model(tmp_path / name, rope_theta=theta) for name, theta in (("a", 1), ("b", 2))
    ]
    changes: list[dict[str, Any]] = [
        {"attn_backend": "FLASHINFER"},
        {"dtype": "float16"},
        {"kv_cache_config": SimpleNamespace(tokens_per_block=4, dtype="fp8")},
        {"kv_cache_config": SimpleNamespace(tokens_per_block=4, dtype="auto", sink_token_length=1)},
        {"load_format": "DUMMY"},
        {"lora_config": Nested("adapter")},
        {"quant_config": Nested("none", Text.FP8)},
        {"revision": "r2"},
        {"model_kwargs": {"rope_theta": 5}},
        {"sparse_attention_config": Dumped()},
        {"force_dynamic_quantization": True},
        {"model": models[0]},
        {"model": models[1]},
    ]
    for change in changes:
        tags.add(trtllm_tag(llm_args(**change), monkeypatch))
    assert len(tags) == 1 + len(changes)
    for model in models:
        local_model(model, rope_theta=9)
        tags.add(trtllm_tag(llm_args(model=model), monkeypatch))
    assert len(tags) == 3 + len(changes)


def test_what_tensorrt_llm_does_not_say_is_named(tmp_path: Path) -> None:
    known = trtllm_settings.settings_of(llm_args(model=local_model(tmp_path)))
    assert known.unknown == () and known.weights
    args = llm_args(revision=None)
    del args.quant_config
    settings = trtllm_settings.settings_of(args)
    assert settings.unknown == ("quant_config", "the model's configuration")
    assert settings.weights == ""
