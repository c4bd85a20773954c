"""vLLM's own offloading on the CPU platform, for comparison.

Its manager, policies and tiers are vLLM's. vLLM has no worker for the CPU that copies between the
KV tensors and the CPU tier. The worker here copies with torch, at once, on the engine's thread: a
Python thread beside the engine's loop would wait for the GIL far longer than a copy takes.
"""

from __future__ import annotations

import time
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
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._done.append(TransferResult(job_id, True, *self._copy(src_spec, dst_spec, True)))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._done.append(TransferResult(job_id, True, *self._copy(dst_spec, src_spec, False)))
        return True

    def _copy(self, blocks: Any, chunks: Any, to_host: bool) -> tuple[int, float]:
        """One call of torch for each tensor."""
        import torch

        began, copied = time.perf_counter(), 0
        ids, places = torch.from_numpy(blocks.block_ids), torch.from_numpy(chunks.block_ids)
        at, chunk_at = 0, 0
        for group, count in enumerate(blocks.group_sizes):
            if not count:
                continue
            first = blocks.block_indices[group] % self._per_chunk
            within = torch.arange(first, first + count)
            source = ids[at : at + count].long()
            chunk = places[chunk_at + within // self._per_chunk].long()
            within %= self._per_chunk
            for ref in self._groups[group]:
                kv = self._kv[ref.tensor_idx]
                host = self._host[ref.tensor_idx].unflatten(1, (self._per_chunk, kv.shape[1]))
                if to_host:
                    host[chunk, within] = kv[source]
                else:
                    kv[source] = host[chunk, within]
                copied += count * kv.shape[1]
            at, chunk_at = at + count, chunk_at + (first + count - 1) // self._per_chunk + 1
        return copied, time.perf_counter() - began

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Every job is over when it was submitted."""

    def shutdown(self) -> None:
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
