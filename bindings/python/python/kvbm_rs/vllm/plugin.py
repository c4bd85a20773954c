"""The entry point `vllm.general_plugins`: vLLM calls it in each of its processes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

__all__ = ["register"]

# Not by `_vllm_compat.logger`: what vLLM dropped may be its logger.
_logger = logging.getLogger("vllm.kvbm_rs.vllm.plugin")


def register() -> None:
    """Makes `KvbmConnector`, and `KvbmTier` as `kvbm`, known to vLLM; imports neither until it is
    used.

    Raises nothing: every vLLM of the environment calls it, also one that does not use kvbm, and an
    exception would end that.
    """
    try:
        from . import _vllm_compat as compat
    except Exception as error:
        _logger.warning("kvbm cannot be used: %s: %s", type(error).__name__, error)
        return

    def attempt(what: str, used: Any, instead: str, register_it: Callable[[], None]) -> None:
        try:
            register_it()
        except Exception as error:
            _logger.warning(
                "kvbm: %s is not known to vLLM by its name: %s; give %s, or leave kvbm out",
                what,
                compat.why_not(error, used),
                instead,
            )

    attempt(
        "'KvbmConnector'",
        compat.PLUGIN,
        '"kv_connector_module_path": "kvbm_rs.vllm"',
        lambda: compat.register_connector("KvbmConnector", "kvbm_rs.vllm", "KvbmConnector"),
    )
    attempt(
        "the tier 'kvbm'",
        compat.PLUGIN_TIER,
        '"type": "KvbmTier", "module_path": "kvbm_rs.vllm"',
        lambda: compat.register_tier("kvbm", "kvbm_rs.vllm", "KvbmTier"),
    )
