"""Exceptions of kvbm_rs.

Each message names the thing, the value and the way out. All classes derive from `KvbmError`.
"""

__all__ = [
    "BuildFailed",
    "BusyError",
    "ClosedError",
    "ConfigInvalid",
    "ForkedError",
    "InternalError",
    "InvalidArgument",
    "KvbmError",
    "LostError",
    "NoRoomError",
]


class KvbmError(Exception):
    """Any error of kvbm."""


class BuildFailed(KvbmError):
    """A manager does not start: a worker, the disk, a thread."""


class BusyError(KvbmError):
    """A copy still reads or writes the blocks: wait with `before_reuse`."""


class ClosedError(KvbmError):
    """The manager was closed or is shutting down."""


class ConfigInvalid(KvbmError, ValueError):
    """A setting that there is not, that cannot have this value, or that breaks a rule."""


class ForkedError(KvbmError):
    """The object was made in the parent process: its threads do not exist in this one."""


class InternalError(KvbmError):
    """kvbm panicked: a defect of kvbm. The interpreter goes on."""


class InvalidArgument(KvbmError, ValueError):
    """An argument that makes no sense."""


class LostError(KvbmError):
    """A worker lost its memory: compute the blocks again."""


class NoRoomError(KvbmError):
    """A tier has no room."""
