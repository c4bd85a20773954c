"""The entry point `vllm.general_plugins`: vLLM calls it in each of its processes."""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Makes `KvbmConnector` known to vLLM by its name; imports nothing of kvbm until it is used."""
    from ._vllm_compat import register_connector

    register_connector("KvbmConnector", "kvbm_rs.vllm", "KvbmConnector")
