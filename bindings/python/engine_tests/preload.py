"""What scenarios import of vLLM, once, before they are forked."""

import engine  # noqa: F401 what vLLM reads of the environment
import vllm  # noqa: F401
import vllm.distributed.kv_transfer.kv_connector.factory  # noqa: F401
import vllm.entrypoints.llm  # noqa: F401
import vllm.model_executor.models.gemma3  # noqa: F401
import vllm.model_executor.models.lfm2  # noqa: F401
import vllm.model_executor.models.llama  # noqa: F401
import vllm.v1.core.sched.async_scheduler  # noqa: F401
import vllm.v1.engine.core  # noqa: F401
import vllm.v1.worker.cpu_worker  # noqa: F401
