"""Either side of an engine in two processes is killed, with tensors in host memory."""

from __future__ import annotations

from pathlib import Path

from kill_tests import kill_the_manager, kill_the_worker


def test_a_worker_that_is_killed(tmp_path: Path) -> None:
    kill_the_worker(tmp_path, "numpy")


def test_a_manager_that_is_killed(tmp_path: Path) -> None:
    kill_the_manager(tmp_path, "numpy")
