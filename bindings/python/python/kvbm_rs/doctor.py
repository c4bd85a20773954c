"""What `kvbm doctor --engine` asks the environment of an engine. Nothing is started or changed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

from .errors import ConfigInvalid

__all__ = ["ENGINES", "examine"]

#: How vLLM finds plugins, and what ours is called.
_GROUP, _PLUGIN = "vllm.general_plugins", "kvbm_rs"

#: What a finding has.
Finding = dict[str, str]


def examine(engine: str, kv_transfer_config: str | None = None) -> dict[str, Any]:
    """`findings` about `engine`, a key of `ENGINES`, and the `settings` of kvbm as TOML where it is
    known what they will be. `kv_transfer_config` is the option of vLLM of that name.
    """
    if engine not in ENGINES:
        raise ConfigInvalid(f"engine {engine!r}: give one of {', '.join(ENGINES)}")
    if kv_transfer_config is not None and engine != "vllm":
        raise ConfigInvalid(
            f"--kv-transfer-config is an option of vLLM, and the engine is {engine}"
        )
    findings: list[Finding] = []
    settings = ENGINES[engine](findings, kv_transfer_config)
    return {"findings": findings, "settings": settings}


def _ok(name: str, found: str) -> Finding:
    return {"name": name, "status": "ok", "found": found}


def _short(name: str, status: str, found: str, effect: str, fix: str) -> Finding:
    return {"name": name, "status": status, "found": found, "effect": effect, "fix": fix}


def _interface(
    name: str, version: str, checked: Sequence[str], missing: Callable[[], list[str]], user: str
) -> Finding:
    """Whether an engine has what a class of ours uses."""
    try:
        lacks = missing()
    except ConfigInvalid as error:
        lacks = [str(error)]
    wanted = f"use a version that was tested: {', '.join(checked)}"
    if lacks:
        effect = f"{user} does not start"
        return _short(name, "missing", f"{version} lacks {', '.join(lacks)}", effect, wanted)
    if not any(f"{version.split('+')[0]}.".startswith(f"{release}.") for release in checked):
        effect = f"{user} finds what it uses, and was not tested with this version"
        return _short(name, "limited", version, effect, wanted)
    return _ok(name, f"{version}: {user} finds what it uses")


# ------------------------------------------------------------------------- vLLM


def _vllm(findings: list[Finding], kv_transfer_config: str | None) -> str | None:
    from .vllm import _vllm_compat as compat

    try:
        version = compat.vllm_version()
    except Exception as error:
        findings.append(_not_imported("vLLM", "vllm", error))
        return None
    findings.append(
        _interface("vLLM", version, compat.CHECKED_VERSIONS, compat.missing, "KvbmConnector")
    )
    plugin = _plugin()
    findings.append(plugin)
    if kv_transfer_config is None:
        return None
    return _transfer_config(findings, kv_transfer_config, plugin["status"] == "ok")


def _not_imported(name: str, package: str, error: Exception) -> Finding:
    try:
        found = f"{metadata.version(package)} cannot be imported: {type(error).__name__}: {error}"
    except metadata.PackageNotFoundError:
        found = f"cannot be imported: {type(error).__name__}: {error}"
    return _short(
        name,
        "missing",
        found,
        "the connector has no engine to work for",
        "install the engine there, or give the interpreter of its environment with --python",
    )


def _plugin() -> Finding:
    """Whether vLLM finds the connector by its name."""
    name = "vLLM plugin"
    effect = "vLLM does not know KvbmConnector by its name"
    way_out = 'add "kv_connector_module_path": "kvbm_rs.vllm" to --kv-transfer-config'
    if not any(point.name == _PLUGIN for point in metadata.entry_points(group=_GROUP)):
        found = f"the entry point {_PLUGIN} of {_GROUP} is not registered"
        return _short(name, "limited", found, effect, f"install kvbm-rs with pip, or {way_out}")
    allowed = os.environ.get("VLLM_PLUGINS")
    # vLLM loads all plugins where the variable is not set, and none where it is empty.
    if allowed is not None and _PLUGIN not in allowed.split(","):
        found = f"VLLM_PLUGINS is {allowed!r}, which leaves {_PLUGIN} out"
        return _short(
            name, "limited", found, effect, f"add {_PLUGIN} to VLLM_PLUGINS, or {way_out}"
        )
    return _ok(name, f"{_PLUGIN} is registered: the name KvbmConnector is enough")


def _transfer_config(findings: list[Finding], text: str, has_plugin: bool) -> str | None:
    """What the connector would say of the option. Its settings as TOML."""
    name, settings = "vLLM configuration", None
    errors: list[str] = []

    def checked(check: Callable[[], Any]) -> Any:
        try:
            return check()
        except Exception as error:
            errors.append(str(error) or type(error).__name__)
            return None

    given = checked(lambda: _object(text))
    if given is not None:
        from .vllm.checks import check_transfer
        from .vllm.options import Options

        checked(lambda: _known_connector(given, has_plugin))
        # What is left out is what vLLM takes then, and the connector refuses it.
        policy, role = given.get("kv_load_failure_policy", "fail"), given.get("kv_role")
        checked(lambda: check_transfer(policy, role))
        extra = given.get("kv_connector_extra_config", {})
        options = checked(lambda: Options.read(dict(extra), (0, 1)))
        if options is not None and options.daemon is None:
            settings = str(options.config.to_toml())
    if not errors:
        findings.append(_ok(name, "KvbmConnector takes it"))
    effect = "vLLM does not start with it, or not with KvbmConnector"
    fix = "mend what is named; docs/vllm.md has the options"
    findings.extend(_short(name, "missing", error, effect, fix) for error in errors)
    return settings


def _object(text: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConfigInvalid(f"--kv-transfer-config is no JSON: {error}") from None
    if not isinstance(given, dict):
        raise ConfigInvalid(f"--kv-transfer-config is {type(given).__name__}: give a JSON object")
    return given


def _known_connector(given: dict[str, Any], has_plugin: bool) -> None:
    connector, path = given.get("kv_connector"), given.get("kv_connector_module_path")
    if connector != "KvbmConnector":
        raise ConfigInvalid(f'kv_connector is {connector!r}: give "KvbmConnector"')
    if path is None and not has_plugin:
        raise ConfigInvalid(
            "there is no kv_connector_module_path, and vLLM does not load the plugin: "
            'add "kv_connector_module_path": "kvbm_rs.vllm"'
        )
    if path not in (None, "kvbm_rs.vllm"):
        raise ConfigInvalid(f'kv_connector_module_path is {path!r}: give "kvbm_rs.vllm"')


# ------------------------------------------------------- SGLang and TensorRT-LLM


def _sglang(findings: list[Finding], _option: str | None) -> None:
    from .sglang import _sglang_compat as compat

    try:
        __import__("sglang")
    except Exception as error:
        findings.append(_not_imported("SGLang", "sglang", error))
        return
    version = compat.sglang_version()
    for user, used in (("KvbmHiCache", compat.HICACHE), ("KvbmLinker", compat.LINKER)):
        missing = _lacks(used)
        findings.append(
            _interface(f"SGLang {user}", version, compat.CHECKED_VERSIONS, missing, user)
        )


def _lacks(used: Any) -> Callable[[], list[str]]:
    from .engine_names import missing

    return lambda: missing(used)


def _trtllm(findings: list[Finding], _option: str | None) -> str | None:
    from .trtllm import _trtllm_compat as compat
    from .trtllm.process import settings

    name = "TensorRT-LLM"
    try:
        version = compat.trtllm_version()
        __import__("tensorrt_llm")
    except Exception as error:
        findings.append(_not_imported(name, "tensorrt_llm", error))
    else:
        users = "the connector of kvbm"
        findings.append(_interface(name, version, compat.CHECKED_VERSIONS, compat.missing, users))
    name = f"{name} settings"
    try:
        config = settings()
    except ConfigInvalid as error:
        effect, fix = "TensorRT-LLM does not start with the connector", "set what is named"
        findings.append(_short(name, "missing", str(error), effect, fix))
        return None
    findings.append(_ok(name, "the connector takes the KVBM_* variables of this environment"))
    return str(config.to_toml())


#: What is examined.
ENGINES: dict[str, Callable[[list[Finding], str | None], str | None]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "trtllm": _trtllm,
}
