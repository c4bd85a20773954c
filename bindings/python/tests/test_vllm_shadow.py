"""What shadow mode reports."""

from __future__ import annotations

import hashlib

import pytest
from kvbm_rs.prefill_speed import PrefillSpeed
from kvbm_rs.vllm import shadow
from kvbm_rs.vllm.shadow import DistinctBlocks, ShadowReport


def hashes(first: int, end: int) -> list[bytes]:
    return [hashlib.blake2b(b"%d" % at, digest_size=16).digest() for at in range(first, end)]


def test_different_blocks_are_counted_in_bounded_memory() -> None:
    exact = DistinctBlocks()
    exact.add(hashes(0, 1000))
    exact.add(hashes(500, 1500))
    assert exact.count == 1500
    sampled = DistinctBlocks(most=1024)
    for first in range(0, 40_000, 500):
        sampled.add(hashes(first, first + 1000))
    assert len(sampled._seen) <= 1024
    assert abs(sampled.count - 40_500) < 4_000


def test_the_speed_of_prompts_is_measured_from_long_steps() -> None:
    speed = PrefillSpeed()
    for tokens, now in ((1000, 10.0), (8, 10.5), (8, 10.6), (2000, 10.7), (0, 11.7), (900, 12.0)):
        speed.step(tokens, now)
    assert speed.tokens_per_s == pytest.approx(3000 / 1.5)
    speed.step(8, 100.0)
    assert speed.tokens_per_s == pytest.approx(3000 / 1.5), "a pause is no step"
    given = PrefillSpeed(500.0)
    given.step(1000, 1.0)
    given.step(1000, 2.0)
    assert given.tokens_per_s == 500.0


def test_the_report_says_what_an_operator_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    report = ShadowReport(block_size=32, block_bytes=1 << 20, prefill_tokens_per_s=None)
    report.add(4096, hashes(0, 128), 0, [0, 0, 0, 0])
    assert "prefill speed not known yet" in report.line()
    report.add(4096, hashes(0, 128), 16, [0, 64, 32, 0])
    report.speed.step(2048, 1.0)
    report.speed.step(0, 3.0)
    assert report.saved_seconds == pytest.approx(96 * 32 / 1024)
    assert report.found_bytes == 96 << 20 and report.all_bytes == 128 << 20
    assert report.line() == (
        "shadow mode: 3,072 of 8,192 prompt tokens (37.5 %) would be loaded (host memory 2,048, disk 1,024), "
        "3.0 s of prefill saved; blocks that came again take 0.09 GiB, all blocks 0.12 GiB; 1 of 2 requests had a hit"
    )
    now = report._reported
    assert not report.is_due(now + 1)
    assert report.is_due(now + shadow.REPORT_INTERVAL) and not report.is_due(now + 61)
