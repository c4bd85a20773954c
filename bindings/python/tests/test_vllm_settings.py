"""The connector's options and identities, without vLLM."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvbm_rs import Config, ConfigInvalid, Namespace
from kvbm_rs.model_identity import adapter_stamp, adapter_version, weights_version
from kvbm_rs.vllm import _vllm_compat as compat
from kvbm_rs.vllm.identity import namespace_of, process_root_is_random, tensor_shapes
from kvbm_rs.vllm.options import Options

ALONE = (0, 1)


def test_short_names_are_settings() -> None:
    options = Options.read(
        {
            "host": "64GiB",
            "disk": "/cache",
            "disk_capacity": "1TiB",
            "transfer.deadline": "5s",
            "host.pinned": False,
        },
        ALONE,
    )
    text = options.config.to_toml()
    for line in (
        'capacity = "64GiB"',
        'dir = "/cache"',
        'capacity = "1TiB"',
        'deadline = "5s"',
        "pinned = false",
    ):
        assert line in text, line
    assert (options.load, options.hashes, options.min_blocks, options.shadow) == (
        "async",
        "auto",
        1,
        False,
    )


def test_each_data_parallel_rank_has_its_own_directory() -> None:
    for data_parallel, directory in (
        ((0, 1), "/cache"),
        ((0, 8), "/cache/dp0"),
        ((3, 8), "/cache/dp3"),
        # Dense models: vLLM leaves each rank its index and says that there is one rank.
        ((3, 1), "/cache/dp3"),
    ):
        options = Options.read(
            {"host": "1GiB", "disk": "/cache", "disk_capacity": "1GiB"}, data_parallel
        )
        assert f'dir = "{directory}"' in options.config.to_toml()


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({}, "'host' is missing"),
        (
            {"host": "1GiB", "hots": 1},
            "'hots', which is no option: known are audit, audit_tolerance, config, daemon, disk",
        ),
        ({"host": "1GiB", "disk": "/cache"}, "'disk' without 'disk_capacity'"),
        ({"host": "1GiB", "load": "lazy"}, "'load' is 'lazy': give one of async, sync"),
        ({"host": "1GiB", "hashes": "md5"}, "'hashes' is 'md5'"),
        ({"host": "1GiB", "min_blocks": 0}, "'min_blocks' is 0"),
        ({"host": "1GiB", "shadow": "yes"}, "'shadow' is 'yes'"),
        ({"host": "much"}, "much"),
        ({"host": "1GiB", "model.num_layers": 3}, "'model.num_layers': vLLM defines"),
        ({"host": "1GiB", "host.capcity": 1}, "host.capacity"),
    ],
)
def test_options_that_make_no_sense(extra: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigInvalid, match=text):
        Options.read(extra, ALONE)


@pytest.mark.parametrize("where", [{"host": "1GiB"}, {"daemon": "/run/node.sock"}])
def test_what_an_operator_adds_to_the_namespace(where: dict[str, Any]) -> None:
    namespace = Namespace("m", page_size=16)
    added = ("namespace.weights", "namespace.tenant_salt", "namespace.deployment_secret")
    tags = {
        namespace.with_config(Options.read(where | {name: "x"}, ALONE).config).tag for name in added
    }
    assert len(tags | {namespace.tag}) == 4
    assert namespace.with_config(Options.read(where, ALONE).config).tag == namespace.tag
    config = Config()
    config.set("namespace.flat", "true")
    with pytest.raises(ConfigInvalid, match="only weights, tenant_salt and deployment_secret"):
        namespace.with_config(config)


def test_a_file_and_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "kvbm.toml"
    file.write_text('[host]\ncapacity = "2GiB"\n[transfer]\nthreads = 3\n')
    monkeypatch.setenv("KVBM_TRANSFER_THREADS", "5")
    text = Options.read({"config": str(file), "host": "4GiB"}, ALONE).config.to_toml()
    assert "threads = 5" in text and 'capacity = "4GiB"' in text, (
        "options beat variables, variables beat the file"
    )


def test_weights_are_distinguished(tmp_path: Path) -> None:
    assert weights_version("org/model", "abc") == "abc"
    first = tmp_path / "one"
    first.mkdir()
    (first / "model.safetensors").write_bytes(bytes(100_000))
    versions = {weights_version(str(first), None)}
    (first / "config.json").write_text("{}")
    assert weights_version(str(first), None) in versions, "only files with weights count"
    (first / "model.safetensors").write_bytes(bytes(50_000) + b"\x01" + bytes(49_999))
    versions.add(weights_version(str(first), None))
    (first / "model.safetensors").write_bytes(bytes(100_001))
    versions.add(weights_version(str(first), None))
    versions.add(weights_version(str(first), "revision"))
    assert len(versions) == 4
    assert weights_version("org/model", None) == "", "nothing is known of it"
    file = tmp_path / "model.gguf"
    file.write_bytes(b"1")
    one = weights_version(str(file), None)
    file.write_bytes(b"2")
    assert weights_version(str(file), None) != one, "a file is a model too"
    assert adapter_stamp("org/adapter") == 0
    stamp = adapter_stamp(str(first))
    assert adapter_stamp(str(first)) == stamp
    os.utime(first / "model.safetensors", ns=(1, 1))
    assert adapter_stamp(str(first)) != stamp, "an adapter that was trained anew"
    assert adapter_version("a", str(first)) != adapter_version("b", str(first))


def view(**changes: Any) -> compat.ConfigView:
    settings: dict[str, Any] = {
        "hidden_size": 8,
        "_commit_hash": None,
        **changes.pop("settings", {}),
    }
    values: dict[str, Any] = {
        "model": "org/model",
        "revision": "r1",
        "dtype": "torch.float32",
        "cache_dtype": "auto",
        "block_size": 32,
        "algorithm": "sha256",
        "quantization": None,
        "ranks": 1,
        "heads": 8,
        "mla": False,
        "draft": None,
        **changes,
    }
    hf = SimpleNamespace(_commit_hash=None, to_json_string=lambda use_diff: json.dumps(settings))
    return compat.ConfigView(
        SimpleNamespace(
            kv_transfer_config=None,
            kv_events_config=None,
            speculative_config=values["draft"],
            parallel_config=SimpleNamespace(tensor_parallel_size=values["ranks"]),
            cache_config=SimpleNamespace(
                block_size=values["block_size"],
                cache_dtype=values["cache_dtype"],
                prefix_caching_hash_algo=values["algorithm"],
                hash_block_size=None,
            ),
            model_config=SimpleNamespace(
                model=values["model"],
                revision=values["revision"],
                dtype=values["dtype"],
                quantization=values["quantization"],
                hf_config=hf,
                use_mla=values["mla"],
                get_total_num_kv_heads=lambda: values["heads"],
            ),
        )
    )


class Tensor(SimpleNamespace):
    """Shape, strides and element type of a KV tensor."""

    def stride(self) -> tuple[int, ...]:
        return tuple(self.strides)


def test_ranks_that_hold_the_same_kv_are_counted() -> None:
    found = [
        view(ranks=ranks, heads=heads, mla=mla).replicas
        for ranks, heads, mla in [
            (1, 1, True),
            (4, 8, False),
            (4, 4, False),
            (8, 2, False),
            (8, 1, False),
            (8, 16, True),
        ]
    ]
    assert found == [1, 1, 1, 1, 8, 8]
    assert view(ranks=8, mla=True, draft="a draft model").replicas == 1


def test_what_decides_the_bytes_decides_the_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbm_rs.vllm.identity.vllm_version", lambda: "0.32.0")
    tensor = Tensor(shape=(100, 2, 32, 128), strides=(8192, 4096, 128, 1), dtype="torch.float32")

    def tag(
        config: compat.ConfigView,
        weights: str | None = None,
        kv: Any = tensor,
        backend: str = "A",
        own: bool = False,
        replicas: int = 1,
    ) -> bytes:
        return namespace_of(config, weights, tensor_shapes([kv]), [backend], own, replicas).tag

    tags = {tag(view())}
    assert tag(view()) in tags
    more_blocks = Tensor(
        shape=(200, 2, 32, 128), strides=(8192, 4096, 128, 1), dtype="torch.float32"
    )
    assert tag(view(), kv=more_blocks) in tags, "how many blocks there are is no matter"
    assert tag(view(settings={"transformers_version": "5", "_name_or_path": "x"})) in tags
    other_order = Tensor(
        shape=(100, 32, 2, 128), strides=(8192, 256, 128, 1), dtype="torch.float32"
    )
    others = [
        tag(view(model="other")),
        tag(view(revision="r2")),
        tag(view(), weights="2"),
        tag(view(dtype="torch.bfloat16")),
        tag(view(cache_dtype="fp8")),
        tag(view(block_size=16)),
        tag(view(algorithm="sha256_cbor")),
        tag(view(quantization="awq")),
        tag(view(settings={"rope_theta": 5})),
        tag(view(), kv=other_order),
        tag(view(), backend="B"),
        tag(view(), own=True),
        tag(view(ranks=2)),
        tag(view(ranks=2), replicas=2),
    ]
    monkeypatch.setattr("kvbm_rs.vllm.identity.vllm_version", lambda: "0.33.0")
    others.append(tag(view()))
    assert len(set(others) - tags) == len(others)


def test_which_roots_are_random(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert process_root_is_random("xxhash") and not process_root_is_random("sha256_cbor")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert not process_root_is_random("xxhash")


def test_kv_tensors_of_several_backends() -> None:
    import numpy as np

    assert [part.shape for part in compat.block_views("l", np.zeros((10, 2, 8)), 10)] == [
        (10, 2, 8)
    ]
    assert [part.shape for part in compat.block_views("l", np.zeros((2, 10, 8)), 10)] == [
        (10, 8),
        (10, 8),
    ]
    with pytest.raises(ValueError, match=r"layer l: a KV tensor of shape \[7, 9\] for 10 blocks"):
        compat.block_views("l", np.zeros((7, 9)), 10)
