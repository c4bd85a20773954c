"""The options of the connector: `kv_connector_extra_config`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .. import Config
from ..errors import ConfigInvalid
from ..recording import RECORD_LIMIT

__all__ = ["Options", "own_folder"]

#: Options that are settings of kvbm under a short name.
_SHORT = {
    "host": "host.capacity",
    "disk": "disk.dir",
    "disk_capacity": "disk.capacity",
    "volume": "volume.uri",
    "volume_capacity": "volume.capacity",
    "events": "events.url",
    "prefill_tokens_per_s": "policy.prefill_tokens_per_s",
}

_OWN = (
    "audit",
    "audit_tolerance",
    "config",
    "daemon",
    "load",
    "layers",
    "hashes",
    "min_blocks",
    "load_timeout",
    "prefetch",
    "weights",
    "shadow",
    "log_level",
    "record",
    "record_callbacks",
    "record_limit",
)


#: What may be said beside `daemon`; the rest is the daemon's to say.
_WITH_DAEMON = frozenset(
    ("daemon", "load", "hashes", "min_blocks", "load_timeout", "prefetch", "weights", "log_level")
)


#: What an operator adds to the namespace, which is the engine's also where a daemon has the blocks.
_OF_NAMESPACE = frozenset(
    ("namespace.weights", "namespace.tenant_salt", "namespace.deployment_secret")
)


@dataclass(frozen=True)
class Options:
    """What an operator set."""

    #: Settings of kvbm.
    config: Config
    #: The socket of the node daemon that keeps the blocks; `None`: this engine keeps its own.
    daemon: str | None = None
    #: `"async"`: a request waits for its load while others run. `"sync"`: the step waits.
    load: str = "async"
    #: `"on"`: loads from host memory and saves go layer by layer, while their step runs. `"auto"`:
    #: loads do where that is faster. `"off"`: neither does.
    layers: str = "auto"
    #: `"engine"`: vLLM's block hashes. `"own"`: kvbm hashes tokens. `"auto"`: vLLM's where they
    #: mean the same in each process.
    hashes: str = "auto"
    #: A hit of fewer blocks is not loaded.
    min_blocks: int = 1
    #: Seconds after which a load ends with what has arrived; `None` leaves it to kvbm.
    load_timeout: float | None = None
    #: Copy what only the disk has to host memory while its request waits for its turn.
    prefetch: bool = False
    #: The version of the weights, in place of what the connector finds out.
    weights: str | None = None
    #: Match and count, and move nothing.
    shadow: bool = False
    #: The share of requests with hits that vLLM computes again, for a comparison.
    audit: float = 0.0
    #: How far numbers may be apart then; `None`: by their type.
    audit_tolerance: float | None = None
    #: How fast the engine computes prompts, where the operator says so.
    prefill_tokens_per_s: float | None = None
    #: The lowest level of kvbm's log records.
    log_level: str = "INFO"
    #: A file that takes a line for each call to the manager.
    record: str | None = None
    #: A file that takes a line for each callback of vLLM.
    record_callbacks: str | None = None
    #: Most bytes of each of these files.
    record_limit: int = RECORD_LIMIT

    @classmethod
    def read(cls, extra: dict[str, Any], data_parallel: tuple[int, int]) -> Options:
        """From `kv_connector_extra_config`; a name that there is not is an error that lists those
        that there are.
        """
        if extra.get("daemon") is not None:
            return cls._with_daemon(extra)
        path = extra.get("config")
        config = _from_file(None if path is None else str(path))
        own: dict[str, Any] = {}
        has_disk = False
        for name, value in extra.items():
            if name in _SHORT or "." in name:
                key = _SHORT.get(name, name)
                has_disk |= key == "disk.dir"
                if key == "disk.dir" and (folder := own_folder(data_parallel)) is not None:
                    value = f"{value}/{folder}"
                if key.startswith("model."):
                    raise ConfigInvalid(
                        f"option {name!r}: vLLM defines the model's blocks; leave it out"
                    )
                config.set(key, _text(value))
            elif name in _OWN:
                own[name] = value
            else:
                known = ", ".join(sorted((*_SHORT, *_OWN)))
                raise ConfigInvalid(
                    f"kv_connector_extra_config has {name!r}, which is no option: known are {known}, and every setting of "
                    "docs/config.md by its full name, such as 'transfer.deadline'"
                )
        if (
            has_disk
            and not any(name in extra for name in ("disk_capacity", "disk.capacity"))
            and path is None
        ):
            raise ConfigInvalid(
                "option 'disk' without 'disk_capacity': say how much of it kvbm may use, such as '100GiB'"
            )
        if not any(name in extra for name in ("host", "host.capacity")) and path is None:
            raise ConfigInvalid(
                "option 'host' is missing: say how much host memory kvbm may use, such as '16GiB'"
            )
        if has_disk and path is None and "offload.g2_g3.write_through" not in extra:
            # A cache that survives `kill -9` has its blocks on disk before they leave host memory.
            config.set("offload.g2_g3.write_through", "true")
        own.pop("config", None)
        speed = extra.get("prefill_tokens_per_s")
        options = cls(
            config=config, prefill_tokens_per_s=None if speed is None else float(speed), **own
        )
        options._check()
        return options

    @classmethod
    def _with_daemon(cls, extra: dict[str, Any]) -> Options:
        """Of an engine whose blocks a node daemon keeps."""
        daemon = extra["daemon"]
        if not isinstance(daemon, str) or not daemon:
            raise ConfigInvalid(
                f"option 'daemon' is {daemon!r}: give the path of the socket of `kvbm serve`, such as '/run/kvbm/node.sock'"
            )
        config = _from_file(None)
        for name, value in extra.items():
            if name in _WITH_DAEMON:
                continue
            if name in _OF_NAMESPACE:
                config.set(name, _text(value))
                continue
            if name in _OWN:
                raise ConfigInvalid(
                    f"option {name!r} beside 'daemon': it is for an engine that keeps its own blocks; leave one out"
                )
            if name in _SHORT or "." in name:
                raise ConfigInvalid(
                    f"option {name!r} beside 'daemon': the daemon's own configuration sets it (docs/node.md); leave one out"
                )
            raise ConfigInvalid(
                f"kv_connector_extra_config has {name!r}, which is no option: beside 'daemon' known are "
                f"{', '.join(sorted((*_WITH_DAEMON, *_OF_NAMESPACE)))}"
            )
        own = {name: value for name, value in extra.items() if name in _WITH_DAEMON}
        options = cls(config=config, **own)
        options._check()
        return options

    def _check(self) -> None:
        for name, value, choices in (
            ("load", self.load, ("async", "sync")),
            ("layers", self.layers, ("auto", "on", "off")),
            ("hashes", self.hashes, ("auto", "engine", "own")),
            ("log_level", self.log_level, ("DEBUG", "INFO", "WARNING", "ERROR")),
        ):
            if value not in choices:
                raise ConfigInvalid(
                    f"option {name!r} is {value!r}: give one of {', '.join(choices)}"
                )
        if not isinstance(self.min_blocks, int) or self.min_blocks < 1:
            raise ConfigInvalid(f"option 'min_blocks' is {self.min_blocks!r}: give 1 or more")
        for name, path in (("record", self.record), ("record_callbacks", self.record_callbacks)):
            if path is not None and not isinstance(path, str):
                raise ConfigInvalid(f"option {name!r} is {path!r}: give the path of a file")
        for name, switch in (("shadow", self.shadow), ("prefetch", self.prefetch)):
            if not isinstance(switch, bool):
                raise ConfigInvalid(f"option {name!r} is {switch!r}: give true or false")
        timeout = self.load_timeout
        if timeout is not None and (
            isinstance(timeout, bool)
            or not isinstance(timeout, (int, float))
            or not 0 < timeout <= 3600
        ):
            raise ConfigInvalid(
                f"option 'load_timeout' is {timeout!r}: give seconds, above 0 and at most 3600"
            )
        if not _is_number(self.audit) or not 0 <= self.audit <= 1:
            raise ConfigInvalid(
                f"option 'audit' is {self.audit!r}: give a share of requests from 0 to 1, such as 0.001"
            )
        tolerance = self.audit_tolerance
        if tolerance is not None and (not _is_number(tolerance) or not 0 <= tolerance <= 1):
            raise ConfigInvalid(
                f"option 'audit_tolerance' is {tolerance!r}: give a number from 0 (equal bytes) to 1"
            )
        if self.audit and self.shadow:
            raise ConfigInvalid(
                "options 'audit' and 'shadow': shadow mode stores nothing that could be compared; leave one out"
            )

    def check_groups(self, groups: int) -> None:
        """Refuses what a model of several cache groups does not have."""
        for name, is_set, way_out in (
            ("load", self.load != "async", "leave it out: loads are asynchronous"),
            ("audit", self.audit > 0, "leave it out"),
            ("record", self.record is not None, "leave it out"),
            ("record_callbacks", self.record_callbacks is not None, "leave it out"),
        ):
            if is_set:
                raise ConfigInvalid(
                    f"option {name!r} is {getattr(self, name)!r}, and the model has {groups} cache groups: it knows models with one; "
                    f"{way_out}"
                )


def own_folder(data_parallel: tuple[int, int]) -> str | None:
    """The folder of a data parallel rank below the operator's: a directory has one writer, and each
    rank is an engine of its own. Of a dense model vLLM tells its ranks that they are one of one,
    and leaves them their index.
    """
    rank, ranks = data_parallel
    return f"dp{rank}" if rank > 0 or ranks > 1 else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _from_file(path: str | None) -> Config:
    """The settings of a file, then those of `KVBM_*` variables."""
    config = Config()
    if path is not None:
        with open(path, encoding="utf-8") as file:
            config = Config.from_toml(file.read(), path)
    config.apply_environment()
    return config


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)
