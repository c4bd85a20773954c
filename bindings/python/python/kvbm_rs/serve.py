"""A node daemon as a program, where the package is installed and the program `kvbm` is not:

    python -m kvbm_rs.serve CONFIG

It does what `kvbm serve --config CONFIG` does, without metrics over HTTP and systemd: see
docs/node.md.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from pathlib import Path

from . import Config, NodeServer
from .errors import KvbmError

__all__ = ["main"]

#: How often it looks whether another daemon has taken over, in seconds. That one waits for the end.
_LOOK = 0.1


def main(arguments: list[str]) -> int:
    """Serves until SIGTERM or Ctrl-C."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m kvbm_rs.serve CONFIG", file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    asked = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: asked.set())
    try:
        # The server checks it: G1 belongs to the engines, so what `[device]` says does not matter.
        config = Config.from_toml(Path(arguments[0]).read_text(), arguments[0])
        config.apply_environment()
        server = NodeServer(config)
    except (KvbmError, OSError, UnicodeError) as error:
        print(f"kvbm: {error}", file=sys.stderr)
        return 1
    print(f"kvbm serve: at {server.socket}; process {os.getpid()}", flush=True)
    while not asked.wait(_LOOK) and not server.handed_over:
        pass
    if server.handed_over:
        print("kvbm serve: another daemon has taken over", file=sys.stderr)
    not_saved = server.close()
    if not_saved is not None:
        print(f"kvbm: {not_saved}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
