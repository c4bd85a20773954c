"""What of TensorRT-LLM's settings decides the bytes of a block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..model_identity import digest, plain, settings_of_files, weights_version

__all__ = ["OPTIONAL", "SETTINGS", "Settings", "settings_of"]

#: Fields of `TorchLlmArgs` that change weights, activations or the form of a block.
SETTINGS = (
    "attn_backend",
    "dtype",
    "kv_cache_config.dtype",
    "load_format",
    "lora_config",
    "quant_config",
    "revision",
)

#: Fields of the same kind that not every version has.
OPTIONAL = (
    "backend",
    "checkpoint_format",
    "checkpoint_loader",
    "enable_mla_skip_correction",
    "force_dynamic_quantization",
    "kv_cache_compression_config",
    "kv_cache_config.max_attention_window",
    "kv_cache_config.sink_token_length",
    "mla_skip_correction_threshold",
    "model_kwargs",
    "sparse_attention_config",
)


@dataclass(frozen=True)
class Settings:
    """What TensorRT-LLM was started with."""

    #: The version of the weights; empty where it is not known.
    weights: str
    #: What belongs to the identity of a block.
    meaning: dict[str, Any]
    #: A digest of the model's configuration.
    model_settings: str | None
    #: What is not known, in words.
    unknown: tuple[str, ...]


def settings_of(llm_args: Any) -> Settings:
    """What is in effect of `TorchLlmArgs`. Raises nothing: what cannot be read is named."""
    meaning: dict[str, Any] = {}
    unknown: list[str] = []
    for name in (*SETTINGS, *OPTIONAL):
        try:
            meaning[name] = plain(_field(llm_args, name))
        except Exception:
            if name in SETTINGS:
                unknown.append(name)
    model = str(llm_args.model)
    try:
        text = settings_of_files(model)
    except (OSError, UnicodeDecodeError):
        text = None
    if text is None:
        unknown.append("the model's configuration")
    revision = meaning.get("revision")
    try:
        weights = weights_version(model, None if revision is None else str(revision))
    except OSError:
        weights = ""
    return Settings(
        weights=weights,
        meaning=meaning,
        model_settings=None if text is None else digest(text),
        unknown=tuple(unknown),
    )


def _field(owner: Any, path: str) -> Any:
    for name in path.split("."):
        owner = getattr(owner, name)
    return owner
