"""Starts scenarios, each in a process of its own.

Most are forked from a process that has imported vLLM already (`preload`): an import costs more than
the start of an engine. A fresh one begins with an interpreter of its own, whose hash seed is its
own.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

__all__ = ["start"]

HERE = Path(__file__).parent


def start(
    program: str,
    name: str,
    arguments: dict[str, Any],
    environment: dict[str, str],
    log: Path,
    result: Path,
    fresh: bool,
) -> BaseProcess:
    """Starts scenario `name` of the module `program`, which writes its result as JSON."""
    result.unlink(missing_ok=True)
    context = multiprocessing.get_context("spawn" if fresh else "forkserver")
    if not fresh:
        context.set_forkserver_preload(["preload"])
    module = Path(program).stem
    work = (module, name, arguments, environment, str(log), str(result))
    process: BaseProcess = context.Process(target=_work, args=work, name=name)
    # Objects of processes that were killed, or ended as `_work` ends them, are nobody's leak.
    quiet = {"PYTHONWARNINGS": "ignore::UserWarning:multiprocessing.resource_tracker"}
    with _environment(quiet | (environment if fresh else {})):
        process.start()
    return process


@contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    """What the interpreter of a new process reads."""
    before = dict(os.environ)
    paths = [str(HERE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ.update(changes, PYTHONPATH=os.pathsep.join(dict.fromkeys(filter(None, paths))))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _work(
    module: str,
    name: str,
    arguments: dict[str, Any],
    environment: dict[str, str],
    log: str,
    result: str,
) -> None:
    os.environ.update(environment)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    importlib.import_module(module)
    from scenarios import SCENARIOS

    found = SCENARIOS[name](**arguments)
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    found["cpu_s"] = round(sum(use.ru_utime + use.ru_stime for use in uses), 1)
    Path(result).write_text(json.dumps(found))
    # Threads of vLLM that linger must not turn a result into a failure.
    os._exit(0)
