"""`KvbmTier`: kvbm's disk and volumes behind vLLM's own CPU offloading."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from vllm.v1.kv_offload.base import Locality, LookupResult, Medium, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from .. import Namespace, layout_of, logs
from ..errors import ConfigInvalid, KvbmError
from ..failures import Failures
from ..guarded import guarded
from ..model_identity import weights_version
from ..page_jobs import FinishedJob, PageJobs
from ..page_store import PageStore
from ..recording import RECORD_LIMIT
from ..settings import read_settings
from . import _vllm_compat as compat
from .options import own_folder

__all__ = ["KvbmTier"]

logger = compat.logger("kvbm_rs.vllm.tier")

_WHERE = "secondary_tiers"

#: What the tier sets where the options do not: host memory is a queue in front of the disk, all of
#: it, and what is loaded is in vLLM's CPU tier already.
_DEFAULTS = {
    "host.capacity": "128",
    "host.keep_loaded": "false",
    "offload.g2_g3.queue_share": "1.0",
    "volumes.queue_share": "1.0",
}

#: Longest wait for copies when vLLM resets its cache, in seconds.
_DRAIN = 60.0

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


class KvbmTier(SecondaryTierManager):  # type: ignore[misc]
    """Keeps chunks of vLLM's CPU tier on disk and in blob stores, each verified when it is read.

    What cannot work is refused at the start. Later no exception leaves a callback: what fails is a
    miss, see `failures`. docs/vllm.md has the options.
    """

    medium: ClassVar[Any] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        locality: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        compat.require("KvbmTier", compat.TIER)
        self.locality = None if locality is None else Locality(locality)
        self.failures = Failures(logger)
        view = compat.TierView(offloading_spec)
        store = _open(view, primary_kv_view, options)
        self._jobs: PageJobs | None = PageJobs(store)
        #: Jobs that did not begin.
        self._refused: list[JobResult] = []
        #: Keys that volumes do not have, or that did not arrive, by request, until it ends.
        self._absent: dict[str, set[bytes]] = {}
        #: Which request a load is for.
        self._loading: dict[int, str] = {}
        logger.info("%s", _describe(view, store))

    @property
    def _opened(self) -> PageJobs:
        if self._jobs is None:
            raise KvbmError("the tier was shut down")
        return self._jobs

    def on_new_request(self, req_context: Any) -> Any:
        """Chunks are offered as they are computed."""
        self._absent[req_context.req_id] = set()
        return RequestOffloadingContext()

    @guarded(lambda *_: LookupResult.MISS)
    def lookup(self, key: bytes, req_context: Any) -> Any:
        """Whether the chunk is here. Volumes are asked for keys that nobody here knows. A request
        is notified once of a chunk that they lack, or that did not arrive: it computes it.
        """
        absent = self._absent.get(req_context.req_id, set())
        if key in absent:
            return LookupResult.MISS
        found = self._opened.find(bytes(key))
        if found is None:
            return LookupResult.RETRY
        if not found and self._opened.has_volumes:
            absent.add(bytes(key))
        return LookupResult.HIT if found else LookupResult.MISS

    def on_request_finished(self, req_context: Any) -> None:
        """Forgets what was not here."""
        self._absent.pop(req_context.req_id, None)

    def submit_store(self, job_metadata: Any) -> None:
        """Begins to copy chunks out of vLLM's CPU tier."""
        self._submit("submit_store", job_metadata)

    def submit_load(self, job_metadata: Any) -> None:
        """Begins to copy chunks into vLLM's CPU tier."""
        self._loading[job_metadata.job_id] = job_metadata.req_context.req_id
        self._submit("submit_load", job_metadata)

    def _submit(self, where: str, job: Any) -> None:
        try:
            submit = getattr(self._opened, where)
            submit(job.job_id, [bytes(key) for key in job.keys], [int(at) for at in job.chunk_ids])
        except Exception as error:
            # vLLM waits for the end of each job.
            self.failures.add(where, error)
            self._refused.append(JobResult(job_id=job.job_id, success=False))
            self._absent.get(self._loading.pop(job.job_id, ""), set()).update(job.keys)

    @guarded(lambda *_: ())
    def get_finished_jobs(self) -> Iterable[Any]:
        """Jobs that are over: no copy touches their chunks any more."""
        over, self._refused = self._refused, []
        if self._jobs is not None:
            over += [self._result(done) for done in self._jobs.finished()]
        return over

    def _result(self, done: FinishedJob) -> Any:
        arrived = [key for key, there in zip(done.keys, done.succeeded) if there]
        request = self._loading.pop(done.job, "")
        if not done.whole:
            missing = len(done.keys) - len(arrived)
            self.failures.add(
                "transfer", KvbmError(f"{missing} of {len(done.keys)} chunks: {done.why}")
            )
            self._absent.get(request, set()).update(set(done.keys) - set(arrived))
        return JobResult(
            job_id=done.job,
            success=done.whole,
            successful_keys=tuple(arrived) if arrived and not done.whole else None,
            transfer_time=done.seconds,
            transfer_bytes=len(arrived) * self.block_size_bytes,
        )

    def drain_jobs(self) -> None:
        """Waits until no copy touches vLLM's CPU tier.

        Raises `KvbmError` where that takes more than a minute: vLLM must not reuse the memory.
        """
        if self._jobs is not None:
            self._jobs.drain(_DRAIN)

    def shutdown(self) -> None:
        """Saves what time allows, and lets go of vLLM's CPU tier."""
        jobs, self._jobs = self._jobs, None
        if jobs is None:
            return
        not_saved = jobs.close(timeout=5.0)
        if not_saved is not None:
            logger.warning("kvbm: %s", not_saved)


def _open(view: compat.TierView, memory: memoryview, options: dict[str, Any]) -> PageStore:
    folder = own_folder(view.data_parallel)
    config, own = read_settings(
        {name: value for name, value in options.items() if value is not None},
        where=_WHERE,
        own=("weights", "log_level", "record", "record_limit"),
        folder=folder,
        defaults=_DEFAULTS,
    )
    if not options.keys() & {"config", "disk", "disk.dir", "volume", "volume.uri"}:
        raise ConfigInvalid(
            f"{_WHERE}: give 'disk' or 'volume': chunks in host memory are in vLLM's CPU tier already"
        )
    level = own.get("log_level", "INFO")
    if level not in _LEVELS:
        raise ConfigInvalid(
            f"{_WHERE}: option 'log_level' is {level!r}: give one of {', '.join(_LEVELS)}"
        )
    logs.set_level(compat.log_level(level))
    layout = layout_of([np.asarray(memory)], page_size=view.chunk_tokens)
    namespace = Namespace(
        view.model,
        weights=_weights(view.model, own.get("weights")),
        dtype=view.dtype,
        page_size=view.chunk_tokens,
        kv_quantization=json.dumps(view.meaning, sort_keys=True),
        flat=True,
    )
    record = own.get("record")
    return PageStore(
        config,
        layout,
        namespace,
        record=record if record is None or folder is None else f"{record}.{folder}",
        record_limit=own.get("record_limit", RECORD_LIMIT),
    )


def _weights(model: str, given: Any) -> str:
    """The version of the weights. vLLM tells a tier the model's name and nothing of its revision."""
    if given is not None:
        return str(given)
    if not Path(model).is_dir():
        raise ConfigInvalid(
            f"{_WHERE}: option 'weights' is missing: vLLM gives its tiers no revision of {model!r}, and blocks of another "
            "one would be taken for right; give the commit of the model, such as 'a1b2c3d'"
        )
    return weights_version(model, None)


def _describe(view: compat.TierView, store: PageStore) -> str:
    """What the tier will do, in a sentence."""
    manager, tokens = store.manager, view.chunk_tokens
    _, host, disk, _ = manager.capacity
    status = manager.status()
    on_disk, volumes = status["tiers"]["g3"], status["volumes"]
    there = on_disk["inactive"] + on_disk["active"]
    parts = [f"{host * manager.block_bytes / 2**20:.0f} MiB of host memory on the way"]
    if disk:
        parts.append(f"disk for {disk * tokens:,} tokens, {there * tokens:,} of them from before")
    if volumes:
        parts.append(f"{len(volumes)} volumes")
    parts.append(f"chunks of {tokens} tokens, {manager.block_bytes / 1024:.0f} KiB")
    return f"kvbm behind vLLM's CPU tier: {'; '.join(parts)}"
