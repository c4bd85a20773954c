"""`KvbmTier` over a stand-in for vLLM's classes.

The real engine runs in `cargo xtask engine-test`.
"""

from __future__ import annotations

import enum
import sys
import time
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kvbm_rs import ConfigInvalid, KvbmError

CHUNKS, BYTES = 32, 8192


@dataclass
class JobResult:
    job_id: int
    success: bool
    successful_keys: Any = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None


class SecondaryTierManager:
    def __init__(self, spec: Any, view: memoryview, tier_type: str, detector: Any = None) -> None:
        assert view.strides is not None
        self.tier_type, self.bp_detector, self.locality = tier_type, detector, None
        self.block_size_bytes = view.strides[0]


@pytest.fixture(scope="module")
def vllm() -> Iterator[Any]:
    """The modules of vLLM that the tier imports."""

    def module(name: str, **names: Any) -> Any:
        made = types.ModuleType(name)
        made.__dict__.update(names)
        sys.modules[name] = made
        return made

    before = dict(sys.modules)
    offload = "vllm.v1.kv_offload"
    for name in ("vllm.v1", offload, f"{offload}.tiering"):
        module(name)
    module("vllm", __version__="0.0")
    module("vllm.logger", init_logger=lambda name: None)
    base = module(
        f"{offload}.base",
        Locality=enum.Enum("Locality", {"LOCAL": "LOCAL", "REMOTE": "REMOTE"}),
        LookupResult=enum.Enum("LookupResult", ["MISS", "HIT", "HIT_PENDING", "RETRY"]),
        Medium=enum.Enum("Medium", ["CPU", "STORAGE"]),
        RequestOffloadingContext=type("RequestOffloadingContext", (), {}),
    )
    module(
        f"{offload}.tiering.base",
        JobResult=JobResult,
        SecondaryTierManager=SecondaryTierManager,
    )
    from kvbm_rs.vllm import _vllm_compat as compat

    missing, compat.missing = compat.missing, lambda used=None: []
    yield SimpleNamespace(base=base, compat=compat)
    compat.missing = missing
    # Another test has a stand-in of its own.
    for name in [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]:
        del sys.modules[name]
    sys.modules.update({name: old for name, old in before.items() if name.startswith("vllm")})


def spec_of(model: str = "/no/such/model", ranks: int = 1, **meaning: Any) -> Any:
    parallel = SimpleNamespace(
        tp_size=1,
        pp_size=1,
        pcp_size=1,
        dcp_size=1,
        world_size=1,
        data_parallel_index=0,
        data_parallel_size=ranks,
    )
    config = SimpleNamespace(
        model=SimpleNamespace(name=model, dtype="float32"),
        cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1),
        groups=[SimpleNamespace(tokens_per_block=16, layer_names=("a", "b"))],
        parallel=parallel,
        canonical_layout=False,
        replicated_layout=False,
        kv_cache_layout="NHD",
        worker_kv_bytes_per_block=BYTES,
    )
    vars(config).update(meaning)
    return SimpleNamespace(config=config, blocks_per_chunk=1)


class Primary:
    """vLLM's CPU tier: a memory view of rows."""

    def __init__(self) -> None:
        self.rows = np.zeros((CHUNKS, BYTES), dtype=np.uint8)
        self.view = self.rows.data

    def fill(self, count: int) -> None:
        for row in range(count):
            self.rows[row] = row + 1


def tier_over(primary: Primary, disk: Path | None = None, spec: Any = None, **options: Any) -> Any:
    from kvbm_rs.vllm.tier import KvbmTier

    if disk is not None:
        options = {"disk": str(disk), "disk_capacity": "256", **options}
    options = {"weights": "1", "policy.admission": "all", "disk.drive_writes_per_day": 0, **options}
    return KvbmTier(spec or spec_of(), primary.view, "kvbm", **options)


REQUEST = SimpleNamespace(req_id="r")


def job(number: int, keys: list[bytes], chunks: list[int]) -> Any:
    return SimpleNamespace(
        job_id=number, keys=keys, chunk_ids=np.array(chunks), req_context=REQUEST
    )


def keys_of(count: int, group: int = 0) -> list[bytes]:
    """Keys as vLLM makes them: a hash and the number of the cache group."""
    return [bytes([number]) * 32 + group.to_bytes(4, "big") for number in range(count)]


def ended(tier: Any) -> JobResult:
    deadline = time.monotonic() + 60
    while True:
        done: list[JobResult] = list(tier.get_finished_jobs())
        if done:
            assert len(done) == 1
            return done[0]
        assert time.monotonic() < deadline, "the job does not end"
        time.sleep(0.001)


def test_chunks_come_back_after_a_restart(vllm: Any, tmp_path: Path) -> None:
    found = vllm.base.LookupResult
    primary = Primary()
    primary.fill(8)
    tier = tier_over(primary, tmp_path)
    assert tier.medium is vllm.base.Medium.STORAGE
    tier.on_new_request(REQUEST)
    assert tier.lookup(keys_of(1)[0], REQUEST) is found.MISS
    tier.submit_store(job(1, keys_of(8), list(range(8))))
    done = ended(tier)
    assert (done.success, done.successful_keys, done.transfer_bytes) == (True, None, 8 * BYTES)
    assert tier.lookup(keys_of(1)[0], REQUEST) is found.HIT
    tier.shutdown()
    # vLLM releases its view behind the tiers.
    primary.view.release()

    primary = Primary()
    tier = tier_over(primary, tmp_path)
    assert [tier.lookup(key, REQUEST) for key in keys_of(9)] == [found.HIT] * 8 + [found.MISS]
    # The same hash in another cache group is another chunk.
    assert tier.lookup(keys_of(1, group=1)[0], REQUEST) is found.MISS
    tier.submit_load(job(2, keys_of(8), list(range(10, 18))))
    assert ended(tier).success
    assert all((primary.rows[10 + row] == row + 1).all() for row in range(8))
    tier.submit_load(job(3, keys_of(10)[7:], [1, 2, 3]))
    done = ended(tier)
    assert not done.success and done.successful_keys == tuple(keys_of(8)[7:])
    assert tier.failures.counts == {"transfer": 1}
    tier.drain_jobs()
    tier.shutdown()
    tier.shutdown()


@pytest.mark.parametrize(
    "other",
    [
        {"weights": "2"},
        {"spec": spec_of(kv_cache_layout="HND")},
        {"spec": spec_of(worker_kv_bytes_per_block=2 * BYTES)},
        {"spec": spec_of("/no/other/model")},
    ],
)
def test_chunks_of_something_else_are_not_found(
    vllm: Any, tmp_path: Path, other: dict[str, Any]
) -> None:
    primary = Primary()
    tier = tier_over(primary, tmp_path)
    tier.submit_store(job(1, keys_of(2), [0, 1]))
    assert ended(tier).success
    tier.shutdown()
    tier = tier_over(primary, tmp_path, **other)
    assert tier.lookup(keys_of(1)[0], REQUEST) is vllm.base.LookupResult.MISS
    tier.shutdown()


def test_what_cannot_work_is_refused_at_the_start(vllm: Any, tmp_path: Path) -> None:
    primary = Primary()
    with pytest.raises(ConfigInvalid, match="'weights' is missing.*Qwen/Qwen3-8B"):
        tier_over(primary, tmp_path, spec_of("Qwen/Qwen3-8B"), weights=None)
    with pytest.raises(ConfigInvalid, match="'n_read_threads', which is no option"):
        tier_over(primary, tmp_path, n_read_threads=4)
    with pytest.raises(ConfigInvalid, match="disk_capacity"):
        tier_over(primary, tmp_path, disk_capacity=None)
    with pytest.raises(ConfigInvalid, match="'log_level' is 'loud'"):
        tier_over(primary, tmp_path, log_level="loud")
    with pytest.raises(ConfigInvalid, match="'disk' or 'volume'"):
        tier_over(primary)
    vllm.compat.missing = lambda used=None: ["vllm.v1.kv_offload.base.Gone"]
    try:
        with pytest.raises(KvbmError, match="lacks what KvbmTier uses: .*Gone"):
            tier_over(primary, tmp_path)
    finally:
        vllm.compat.missing = lambda used=None: []


def test_no_exception_leaves_a_callback(vllm: Any, tmp_path: Path) -> None:
    tier = tier_over(Primary(), tmp_path)
    tier.shutdown()
    assert tier.lookup(b"key", REQUEST) is vllm.base.LookupResult.MISS
    # vLLM waits for the end of each job.
    tier.submit_load(job(4, keys_of(1), [0]))
    tier.submit_store(job(5, keys_of(1), [0]))
    assert [(done.job_id, done.success) for done in tier.get_finished_jobs()] == [
        (4, False),
        (5, False),
    ]
    assert tier.failures.counts == {"lookup": 1, "submit_load": 1, "submit_store": 1}
    tier.on_request_finished(REQUEST)
    tier.drain_jobs()


def test_each_data_parallel_rank_has_its_own_directory(vllm: Any, tmp_path: Path) -> None:
    tier = tier_over(Primary(), tmp_path, spec_of("/no/such/model", ranks=2))
    tier.shutdown()
    assert (tmp_path / "dp0").is_dir()


def test_a_chunk_that_does_not_arrive_is_not_promised_to_its_request_again(
    vllm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = vllm.base.LookupResult
    primary = Primary()
    tier = tier_over(primary, tmp_path)
    tier.submit_store(job(1, keys_of(2), [0, 1]))
    assert ended(tier).success
    tier.on_new_request(REQUEST)
    with monkeypatch.context() as patch:
        # As a disk that does not answer in time.
        patch.setattr("kvbm_rs.page_jobs.PATIENCE", -1.0)
        tier.submit_load(job(2, keys_of(2), [2, 3]))
        assert not ended(tier).success
    assert [tier.lookup(key, REQUEST) for key in keys_of(2)] == [found.MISS] * 2
    tier.on_request_finished(REQUEST)
    tier.on_new_request(REQUEST)
    assert [tier.lookup(key, REQUEST) for key in keys_of(2)] == [found.HIT] * 2
    tier.shutdown()
