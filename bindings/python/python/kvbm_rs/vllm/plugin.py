"""The entry point `vllm.general_plugins`: vLLM calls it in each of its processes."""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Makes `KvbmConnector`, and `KvbmTier` as `kvbm`, known to vLLM; imports neither until it is
    used.
    """
    from ._vllm_compat import register_connector, register_tier

    register_connector("KvbmConnector", "kvbm_rs.vllm", "KvbmConnector")
    register_tier("kvbm", "kvbm_rs.vllm", "KvbmTier")
