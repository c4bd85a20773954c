"""Unix sockets in a folder that only this user may use."""

from __future__ import annotations

import errno
import os
import socket
import stat
import tempfile
import time
from pathlib import Path

from .errors import BuildFailed

__all__ = ["private_path"]

#: A socket that is younger may belong to a process that does not listen yet.
_YOUNG = 60.0

#: Longest path of a Unix socket in bytes.
_MOST = 107


def private_path(name: str) -> str:
    """A path for the socket `name`, below `XDG_RUNTIME_DIR` or the folder of temporary files.

    Sockets there that no process listens at any more are removed: a process that was killed leaves
    its own.
    """
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    folder = Path(base) / f"kvbm-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    about = os.lstat(folder)
    is_private = stat.S_ISDIR(about.st_mode) and stat.S_IMODE(about.st_mode) & 0o077 == 0
    if not is_private or about.st_uid != os.getuid():
        raise BuildFailed(
            f"{folder} is no private folder of this user (mode {about.st_mode:o}, owner {about.st_uid}): remove it, or set "
            "XDG_RUNTIME_DIR to a folder of your own"
        )
    for old in folder.glob("*.sock"):
        _remove_stale(old)
    path = str(folder / f"{name}.sock")
    if len(os.fsencode(path)) > _MOST:
        raise BuildFailed(
            f"the socket {path} has a path of more than {_MOST} bytes: set XDG_RUNTIME_DIR to a shorter one"
        )
    return path


def _remove_stale(path: Path) -> None:
    try:
        if time.time() - path.lstat().st_mtime < _YOUNG:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            if probe.connect_ex(str(path)) == errno.ECONNREFUSED:
                path.unlink(missing_ok=True)
    except OSError:
        return
