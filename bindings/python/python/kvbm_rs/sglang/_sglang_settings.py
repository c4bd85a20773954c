"""What of SGLang's settings decides the bytes of a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..model_identity import (
    adapter_version,
    digest,
    file_version,
    model_settings,
    plain,
    settings_of_files,
)

__all__ = ["FILES", "SETTINGS", "Settings", "running_settings", "settings_of"]

#: Fields of `ServerArgs` that change weights, activations or the form of a page.
SETTINGS = (
    "attention_backend",
    "custom_weight_loader",
    "decode_attention_backend",
    "deepep_dispatcher_output_dtype",
    "disable_fast_image_processor",
    "dllm_algorithm",
    "dtype",
    "enable_deterministic_inference",
    "enable_multimodal",
    "enable_quant_communications",
    "enable_w4a4_mxfp4_megamoe",
    "experts_shared_outer_loras",
    "flashinfer_mxfp4_moe_precision",
    "image_processor_backend",
    "is_embedding",
    "json_model_override_args",
    "kt_method",
    "kt_num_gpu_experts",
    "kv_cache_dtype",
    "language_model_only",
    "load_format",
    "lora_target_modules",
    "mm_process_config",
    "model_config_parser",
    "model_impl",
    "model_loader_extra_config",
    "modelopt_quant",
    "prefill_attention_backend",
    "prefill_kv_cache_dequant_dtype",
    "quantization",
    "quantize_and_serve",
    "revision",
    "rl_on_policy_target",
)

#: Fields of `ServerArgs` that name files whose contents count.
FILES = (
    "decrypted_config_file",
    "kt_weight_path",
    "modelopt_checkpoint_restore_path",
    "quantization_param_path",
    "rl_quant_profile",
)

#: What is not known where SGLang's settings cannot be read.
_ALL = (
    "quantization, dtype, KV cache dtype, model overrides, revision, attention backend and LoRA "
    "adapters"
)


@dataclass(frozen=True)
class Settings:
    """What SGLang was started with."""

    #: Path or name of the model; none where it is not known.
    model: str | None = None
    #: Where its weights lie, which may be another path.
    weights: str | None = None
    #: The commit of a model of a hub, or else what the operator calls its revision.
    revision: str | None = None
    #: What belongs to the identity of a page.
    meaning: dict[str, Any] = field(default_factory=dict)
    #: A digest of the model's configuration.
    model_settings: str | None = None
    #: What is not known, in words.
    unknown: tuple[str, ...] = ()


def running_settings() -> Settings:
    """Those of this process: SGLang hands a storage backend none of them. Raises nothing."""
    try:
        from sglang.srt.runtime_context import get_server_args

        server_args = get_server_args()
    except Exception:
        # An older or newer SGLang, or a process that SGLang did not start.
        return Settings(unknown=(_ALL,))
    return settings_of(server_args)


def settings_of(server_args: Any) -> Settings:
    """What is in effect of `ServerArgs`. Raises nothing: what cannot be read is named."""
    view = _in_effect(server_args)
    meaning: dict[str, Any] = {}
    unknown: list[str] = []
    for name in SETTINGS:
        try:
            meaning[name] = plain(getattr(view, name))
        except Exception:
            unknown.append(name)
    for name in FILES:
        try:
            path = getattr(view, name)
            meaning[name] = None if path is None else [str(path), file_version(str(path))]
        except Exception:
            unknown.append(name)
    try:
        meaning["lora"], adapters = _adapters(view.lora_paths)
        unknown += adapters
    except Exception:
        unknown.append("lora_paths")
    model = getattr(server_args, "model_path", None)
    weights = getattr(view, "model_path", None) or model
    config = _model_config(server_args)
    settings = None if config is None else _text_of(config)
    if settings is None and weights:
        settings = _text_of_files(str(weights))
    if settings is None:
        unknown.append("the model's configuration")
    commit = getattr(config, "_commit_hash", None) or getattr(view, "revision", None)
    return Settings(
        model=str(model) if model else None,
        weights=str(weights) if weights else None,
        revision=None if commit is None else str(commit),
        meaning=meaning,
        model_settings=None if settings is None else digest(settings),
        unknown=tuple(unknown),
    )


def _in_effect(server_args: Any) -> Any:
    """The settings with what SGLang decided by itself; as they were given where it does not say."""
    try:
        from sglang.srt.arg_groups.overrides import resolving_view

        return resolving_view(server_args)
    except Exception:
        return server_args


def _model_config(server_args: Any) -> Any:
    """The Hugging Face configuration that SGLang made, overrides included; none where there is
    none.
    """
    made = getattr(server_args, "_model_config", None)
    try:
        if made is None:
            from sglang.srt.configs.model_config import ModelConfig

            made = ModelConfig.from_server_args(server_args)
        return made.hf_config
    except Exception:
        return None


def _text_of(config: Any) -> str | None:
    try:
        return model_settings(config.to_json_string(use_diff=False))
    except Exception:
        return None


def _text_of_files(model: str) -> str | None:
    try:
        return settings_of_files(model)
    except (OSError, UnicodeDecodeError):
        return None


def _adapters(lora_paths: Any) -> tuple[dict[str, str], list[str]]:
    """The version of each adapter, and those of which only the path is known."""
    versions, unknown = {}, []
    for name, path in _named_paths(lora_paths):
        versions[name] = adapter_version(name, path)
        if not Path(path).is_dir():
            unknown.append(f"the version of the LoRA adapter {name}")
    return versions, unknown


def _named_paths(lora_paths: Any) -> Iterator[tuple[str, str]]:
    """Names and paths, in each form that `--lora-paths` has."""
    if not lora_paths:
        return
    if isinstance(lora_paths, Mapping):
        yield from ((str(name), str(path)) for name, path in lora_paths.items())
        return
    for adapter in lora_paths:
        if isinstance(adapter, Mapping):
            yield str(adapter["lora_name"]), str(adapter["lora_path"])
        elif isinstance(adapter, str):
            name, _, path = adapter.partition("=")
            yield name, path or name
        else:
            yield str(adapter.lora_name), str(adapter.lora_path)
