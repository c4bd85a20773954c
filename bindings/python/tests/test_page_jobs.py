"""Jobs over pages that are submitted and polled."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from kvbm_rs import Config, Namespace, layout_of
from kvbm_rs.page_jobs import FinishedJob, PageJobs
from kvbm_rs.page_store import PageStore

PAGES, BYTES = 64, 8192


def pool() -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    return np.zeros((PAGES, BYTES), dtype=np.uint8)


def jobs_over(memory: object, disk: Path | None, host: str = "32", **settings: str) -> PageJobs:
    config = Config()
    config.set("host.capacity", host)
    config.set("host.keep_loaded", "false")
    config.set("policy.admission", "all")
    config.set("offload.g2_g3.queue_share", "1.0")
    if disk is not None:
        config.set("disk.dir", str(disk))
        config.set("disk.capacity", "256")
        config.set("disk.drive_writes_per_day", "0")
        config.set("offload.g2_g3.write_through", "true")
    for name, value in settings.items():
        config.set(name.replace("__", "."), value)
    namespace = Namespace("test", weights="1", page_size=16, flat=True)
    return PageJobs(PageStore(config, layout_of([memory], page_size=16), namespace))


def keys_of(numbers: range | list[int]) -> list[bytes]:
    return [b"key %d" % number for number in numbers]


def fill(memory: np.ndarray[tuple[int, int], np.dtype[np.uint8]], pages: range) -> None:
    for page in pages:
        memory[page] = page + 1


def ended(jobs: PageJobs, count: int = 1) -> dict[int, FinishedJob]:
    """The next `count` jobs that end."""
    over: dict[int, FinishedJob] = {}
    deadline = time.monotonic() + 60
    while len(over) < count:
        assert time.monotonic() < deadline, f"{jobs.pending} jobs do not end"
        over |= {done.job: done for done in jobs.finished()}
        time.sleep(0.001)
    return over


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "disk"


def test_what_was_stored_is_loaded_after_a_restart(disk: Path) -> None:
    memory = pool()
    jobs = jobs_over(memory, disk)
    # More than host memory holds: stores take turns.
    fill(memory, range(PAGES))
    for job, first in enumerate(range(0, PAGES, 16)):
        jobs.submit_store(job, keys_of(range(first, first + 16)), list(range(first, first + 16)))
    done = ended(jobs, 4)
    assert all(job.whole for job in done.values()), done
    assert jobs.pending == 0 and jobs.finished() == []
    assert jobs.close(10.0) is None

    memory = pool()
    jobs = jobs_over(memory, disk)
    assert [jobs.find(key) for key in keys_of([0, 63, 64])] == [True, True, False]
    # Any order, other pages than before.
    order = list(reversed(range(PAGES)))
    jobs.submit_load(9, keys_of(order), list(range(PAGES)))
    done = ended(jobs)
    assert done[9].whole and done[9].why is None
    for page, number in enumerate(order):
        assert (memory[page] == number + 1).all(), page
    jobs.close(10.0)


def test_a_missing_page_fails_alone(disk: Path) -> None:
    memory = pool()
    jobs = jobs_over(memory, disk)
    fill(memory, range(8))
    jobs.submit_store(1, keys_of(range(8)), list(range(8)))
    assert ended(jobs)[1].whole
    jobs.submit_load(2, keys_of([0, 1, 99, 3, 98, 5]), list(range(20, 26)))
    done = ended(jobs)[2]
    assert done.succeeded == [True, True, False, True, False, True]
    assert not done.whole and done.why == "a page is not here any more"
    for page, number in ((20, 0), (21, 1), (23, 3), (25, 5)):
        assert (memory[page] == number + 1).all()
    jobs.close(10.0)


def test_a_damaged_page_is_not_loaded(disk: Path) -> None:
    memory = pool()
    jobs = jobs_over(memory, disk)
    fill(memory, range(8))
    jobs.submit_store(1, keys_of(range(8)), list(range(8)))
    ended(jobs)
    assert jobs.close(10.0) is None
    for path in disk.rglob("*"):
        if path.is_file() and path.stat().st_size >= 8 * BYTES:
            content = bytearray(path.read_bytes())
            # The byte of page 3 is 4, and no other page has it.
            at = content.find(b"\x04" * 4096)
            if at >= 0:
                content[at + 100] ^= 1
                path.write_bytes(content)
                break
    else:
        pytest.fail("no slot file holds page 3")
    memory = pool()
    jobs = jobs_over(memory, disk)
    jobs.submit_load(2, keys_of(range(8)), list(range(8)))
    done = ended(jobs)[2]
    assert done.succeeded == [number != 3 for number in range(8)], done
    assert jobs.find(keys_of([3])[0]) is False, "quarantined"
    jobs.close(10.0)


def test_what_finds_no_room_in_time_fails(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = pool()
    jobs = jobs_over(memory, disk, host="4")
    fill(memory, range(PAGES))
    monkeypatch.setattr("kvbm_rs.page_jobs.PATIENCE", 0.0)
    jobs.submit_store(1, keys_of(range(PAGES)), list(range(PAGES)))
    done = ended(jobs)[1]
    assert not done.whole and "no room in host memory" in str(done.why)
    assert any(done.succeeded), "what began is kept"
    jobs.submit_load(2, keys_of([0]), [0])
    late = ended(jobs)[2]
    assert late.succeeded == [False] and "not begun within" in str(late.why)
    jobs.close(10.0)


def test_drained_jobs_touch_nothing(disk: Path) -> None:
    memory = pool()
    jobs = jobs_over(memory, disk, host="4")
    fill(memory, range(PAGES))
    jobs.submit_store(1, keys_of(range(PAGES)), list(range(PAGES)))
    jobs.drain(60.0)
    (done,) = jobs.finished()
    assert done.why == "drained before its copy began" and not done.whole
    # Nothing reads the pages now.
    memory[:] = 0
    stored = [number for number, here in enumerate(done.succeeded) if here]
    jobs.submit_load(2, keys_of(stored), stored)
    assert ended(jobs)[2].whole
    assert all((memory[number] == number + 1).all() for number in stored)
    jobs.close(10.0)


def test_volumes_are_asked(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    memory = pool()
    volume = {"volume__uri": f"file://{store}"}
    jobs = jobs_over(memory, None, **volume)
    assert jobs.has_volumes
    fill(memory, range(8))
    jobs.submit_store(1, keys_of(range(8)), list(range(8)))
    assert ended(jobs)[1].whole
    assert jobs.close(30.0) is None

    memory = pool()
    jobs = jobs_over(memory, None, **volume)

    def found(key: bytes) -> bool:
        deadline = time.monotonic() + 60
        while (answer := jobs.find(key)) is None:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return answer

    assert [found(key) for key in keys_of([0, 7, 8])] == [True, True, False]
    jobs.submit_load(2, keys_of(range(8)), list(range(8)))
    assert ended(jobs)[2].whole
    assert all((memory[number] == number + 1).all() for number in range(8))
    jobs.close(10.0)
