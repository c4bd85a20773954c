"""A vLLM engine in this process, with or without a connector, and what it counted."""

from __future__ import annotations

import os
from typing import Any

__all__ = ["Engine"]

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("OMP_NUM_THREADS", "2")


class Engine:
    """`transfer` is vLLM's `kv_transfer_config`; `None` for no connector."""

    def __init__(self, model: str, transfer: dict[str, Any] | None = None, **settings: Any) -> None:
        from vllm import LLM, SamplingParams
        from vllm.config import KVTransferConfig

        self._params = SamplingParams
        keywords: dict[str, Any] = {
            "model": model,
            "dtype": "float32",
            "enforce_eager": True,
            "block_size": 32,
            "max_model_len": 8448,
            "max_num_seqs": 8,
            "seed": 0,
            "enable_prefix_caching": True,
            "disable_log_stats": False,
        }
        keywords.update(settings)
        if transfer is not None:
            keywords["kv_transfer_config"] = KVTransferConfig(**transfer)
        self.llm = LLM(**keywords)

    @staticmethod
    def kvbm(**options: Any) -> dict[str, Any]:
        """The configuration of our connector."""
        return {
            "kv_connector": "KvbmConnector",
            "kv_connector_module_path": "kvbm_rs.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"policy.admission": "all", **options},
        }

    def generate(
        self,
        prompts: list[list[int]],
        tokens: int = 16,
        salt: str | None = None,
        adapter: str | None = None,
    ) -> list[Any]:
        """vLLM's output of each prompt. `adapter`: the folder of a LoRA adapter."""
        from vllm.lora.request import LoRARequest

        params = self._params(temperature=0, max_tokens=tokens, ignore_eos=True)
        extra = {} if salt is None else {"cache_salt": salt}
        return self.llm.generate(
            [{"prompt_token_ids": prompt, **extra} for prompt in prompts],
            params,
            use_tqdm=False,
            lora_request=None if adapter is None else LoRARequest("adapter", 1, adapter),
        )

    def tokens(self, prompts: list[list[int]], tokens: int = 16) -> list[list[int]]:
        """The output tokens of each prompt."""
        return [list(output.outputs[0].token_ids) for output in self.generate(prompts, tokens)]

    def forget_own_prefixes(self) -> None:
        """Empties vLLM's own prefix cache, so that hits are the connector's."""
        assert self.llm.reset_prefix_cache()

    def count(self, name: str) -> float:
        """A counter of vLLM's."""
        return sum(metric.value for metric in self.llm.get_metrics() if metric.name == name)

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def connector(self) -> Any:
        """The scheduler's connector."""
        return self.core.scheduler.connector

    @property
    def loader(self) -> Any:
        """The connector that starts loads and collects their results."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        remote = self.connector._has_remote_workers
        return self.connector if remote else get_kv_transfer_group()

    def free_blocks(self) -> int:
        """Blocks of vLLM's pool that nobody uses."""
        return int(self.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def close(self) -> None:
        """Ends the engine and its connector."""
        self.core.shutdown()
