"""The short form of `stress.py`."""

from __future__ import annotations

from stress import many_calls, many_threads, problems


def test_many_calls_and_threads_leave_nothing_behind() -> None:
    report = {"calls": many_calls(20_000, 10_000), "threads": many_threads(8, 2.0)}
    assert problems(report) == [], report
