"""vLLM's own offloading on the CPU platform, for comparison.

Its manager, policies and tiers are vLLM's. Only the worker that copies between the KV tensors and
the CPU tier has no form for the CPU in
vLLM: here it copies with torch, on one thread.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class HostCopies(OffloadingWorker):  # type: ignore[misc]
    """Copies blocks between the KV tensors and the CPU tier, in the order of the jobs."""

    def __init__(self, caches: Any, blocks_per_chunk: int, num_chunks: int, region: Any) -> None:
        import torch

        self._per_chunk, self._region = blocks_per_chunk, region
        self._groups = caches.group_data_refs
        self._kv = [tensor.tensor for tensor in caches.tensors]
        self._host = []
        for tensor in caches.tensors:
            chunk = tensor.page_size_bytes * blocks_per_chunk
            view = (
                torch.zeros((num_chunks, chunk), dtype=torch.int8)
                if region is None
                else region.create_next_worker_view(chunk)
            )
            self._host.append(view)
        self._thread = ThreadPoolExecutor(1, "host-copies")
        self._jobs: dict[int, Future[tuple[int, float]]] = {}

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._jobs[job_id] = self._thread.submit(self._copy, src_spec, dst_spec, True)
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._jobs[job_id] = self._thread.submit(self._copy, dst_spec, src_spec, False)
        return True

    def _copy(self, blocks: Any, chunks: Any, to_host: bool) -> tuple[int, float]:
        began, copied = time.perf_counter(), 0
        ids, places = blocks.block_ids.tolist(), chunks.block_ids.tolist()
        at, chunk_at = 0, 0
        for group, count in enumerate(blocks.group_sizes):
            if not count:
                continue
            first = blocks.block_indices[group] % self._per_chunk
            for index in range(count):
                chunk, within = divmod(first + index, self._per_chunk)
                for ref in self._groups[group]:
                    kv, host = self._kv[ref.tensor_idx], self._host[ref.tensor_idx]
                    size = kv.shape[1]
                    part = host[places[chunk_at + chunk], within * size : (within + 1) * size]
                    block = kv[ids[at + index]]
                    if to_host:
                        part.copy_(block)
                    else:
                        block.copy_(part)
                    copied += size
            at, chunk_at = at + count, chunk_at + (first + count - 1) // self._per_chunk + 1
        return copied, time.perf_counter() - began

    def get_finished(self) -> list[TransferResult]:
        done = [job for job, future in self._jobs.items() if future.done()]
        return [TransferResult(job, True, *self._jobs.pop(job).result()) for job in done]

    def wait(self, job_ids: set[int]) -> None:
        for job in job_ids & self._jobs.keys():
            self._jobs[job].result()

    def shutdown(self) -> None:
        self._thread.shutdown(wait=True)
        if self._region is not None:
            self._host.clear()
            self._region.cleanup()
            self._region = None


class HostSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """The CPU tier alone."""

    def get_worker(self, kv_caches: Any) -> Any:
        if not self._worker:
            self._worker = HostCopies(kv_caches, self.blocks_per_chunk, self.num_chunks, None)
        return self._worker


class HostTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """The CPU tier with tiers below it."""

    def get_worker(self, kv_caches: Any) -> Any:
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = HostCopies(kv_caches, self.blocks_per_chunk, self.num_chunks, region)
        return self._worker
