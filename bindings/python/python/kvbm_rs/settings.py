"""From an engine's options to the settings of a manager."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ._core import Config
from .errors import ConfigInvalid

__all__ = ["SHORT_NAMES", "read_settings"]

#: Settings of kvbm under a short name.
SHORT_NAMES = {
    "host": "host.capacity",
    "disk": "disk.dir",
    "disk_capacity": "disk.capacity",
    "volume": "volume.uri",
    "volume_capacity": "volume.capacity",
    "events": "events.url",
    "prefill_tokens_per_s": "policy.prefill_tokens_per_s",
}


def read_settings(
    extra: Mapping[str, Any],
    *,
    where: str,
    own: Iterable[str],
    folder: str | None,
    defaults: Mapping[str, str] | None = None,
) -> tuple[Config, dict[str, Any]]:
    """The settings in `extra`, and the options of it that are called in `own`.

    `where` names `extra` in errors. `folder` is the directory of this rank below `disk`: a
    directory has one writer; `None` where there is only one. Any other name must be a short one or
    that of a setting. The option `config` is a TOML file, which the other options override; it
    replaces `defaults`.
    """
    path = extra.get("config")
    config = _from_file(None if path is None else str(path), {} if defaults is None else defaults)
    options: dict[str, Any] = {}
    own = tuple(own)
    names = set()
    for name, value in extra.items():
        if name in own:
            options[name] = value
        elif name in SHORT_NAMES or "." in name:
            key = SHORT_NAMES.get(name, name)
            names.add(key)
            is_folder = key == "disk.dir" and folder is not None
            config.set(key, f"{value}/{folder}" if is_folder else _text(value))
        elif name != "config":
            known = ", ".join(sorted((*SHORT_NAMES, *own, "config")))
            raise ConfigInvalid(
                f"{where} has {name!r}, which is no option: known are {known}, and every setting of "
                "docs/config.md by its full name, such as 'transfer.deadline'"
            )
    if path is None:
        if "host.capacity" not in names and "host.capacity" not in (defaults or {}):
            raise ConfigInvalid(
                f"{where}: option 'host' is missing: say how much host memory each rank may use, such as '16GiB'"
            )
        if "disk.dir" in names and "disk.capacity" not in names:
            raise ConfigInvalid(
                f"{where}: option 'disk' without 'disk_capacity': say how much of it each rank may use, such as '100GiB'"
            )
    if "disk.dir" in names and "offload.g2_g3.write_through" not in names:
        # A cache that survives `kill -9` has its blocks on disk before they leave host memory.
        config.set("offload.g2_g3.write_through", "true")
    return config, options


def _from_file(path: str | None, defaults: Mapping[str, str]) -> Config:
    """The settings of a file, or `defaults`; then those of `KVBM_*` variables."""
    config = Config()
    if path is not None:
        with open(path, encoding="utf-8") as file:
            config = Config.from_toml(file.read(), path)
    else:
        for name, value in defaults.items():
            config.set(name, value)
    config.apply_environment()
    return config


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)
