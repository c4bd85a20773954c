"""The entry point `vllm.general_plugins`: vLLM calls it in each of its processes."""

from __future__ import annotations

import logging

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
    try:
        compat.register_connector("KvbmConnector", "kvbm_rs.vllm", "KvbmConnector")
    except Exception as error:
        _logger.warning(
            "kvbm: 'KvbmConnector' is not known to vLLM by its name: %s; give \"kv_connector_module_path\": "
            '"kvbm_rs.vllm", or leave kvbm out',
            compat.why_not(error, compat.PLUGIN),
        )
    try:
        compat.register_tier("kvbm", "kvbm_rs.vllm", "KvbmTier")
    except Exception as error:
        _logger.warning(
            'kvbm: the tier \'kvbm\' is not known to vLLM by its name: %s; give "type": "KvbmTier", '
            '"module_path": "kvbm_rs.vllm", or leave kvbm out',
            compat.why_not(error, compat.PLUGIN_TIER),
        )
