"""Where the locks of a machine are: one directory, the same for all its users and containers."""

from __future__ import annotations

import os
import stat
from contextlib import suppress

from reserve_gpu.errors import LockError
from reserve_gpu.records import INITIAL_PID_NAMESPACE, pid_namespace
from reserve_gpu.settings import LOCK_DIRECTORY, lock_directory

NAME = "reserve_gpu"
# Machine-wide places, best first. /tmp is last: a service with PrivateTmp has one of its own.
PLACES = ("/run/lock", "/dev/shm", "/tmp")  # noqa: S108 - nothing in them is ever trusted


def default_path() -> str:
    """The lock directory: the one that was set, else in the first place open to all users."""
    if configured := lock_directory():
        return configured
    for place in PLACES:
        with suppress(OSError):
            mode = os.stat(place).st_mode
            if stat.S_ISDIR(mode) and mode & stat.S_ISVTX and mode & stat.S_IWOTH:
                return f"{place}/{NAME}"
    raise LockError(
        f"None of {', '.join(PLACES)} is a directory that every user may write to (mode 1777). "
        f"Set {LOCK_DIRECTORY} to a directory that all users of this machine share."
    )


def is_private(path: str) -> bool:
    """Whether this is a container and the directory is in it alone, not mounted from outside.

    A container's own mounts are its root, and temporary file systems such as /dev/shm.
    """
    if pid_namespace() in (None, INITIAL_PID_NAMESPACE):
        return False
    path = os.path.realpath(path)
    point, kind = "", ""
    with suppress(OSError, ValueError, IndexError), open("/proc/self/mountinfo") as mounts:
        for line in mounts:
            fields, rest = (part.split() for part in line.split(" - ", 1))
            if len(fields[4]) >= len(point) and _is_below(path, fields[4]):
                point, kind = fields[4], rest[0]
    return point != path and (point in ("", "/") or kind in ("tmpfs", "overlay"))


def _is_below(path: str, point: str) -> bool:
    return f"{path}/".startswith(f"{point.rstrip('/')}/")
