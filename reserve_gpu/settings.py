"""The two settings: where the locks of this machine are, and up to what memory a device is idle.

They are kept in environment variables, so that what a process starts has them too.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress

LOCK_DIRECTORY = "RESERVE_GPU_LOCK_DIR"
IDLE_MEMORY = "RESERVE_GPU_IDLE_MEMORY"
HELD = "RESERVE_GPU_HELD"  # what a process held before exec made it another program; see handover

NAME = "reserve_gpu"
# Machine-wide places, best first. /tmp is last: a service with PrivateTmp has one of its own.
PLACES = ("/run/lock", "/dev/shm", "/tmp")  # noqa: S108 - nothing in them is ever trusted


def lock_directory() -> str | None:
    """The lock directory that was set; None for the machine's default one. Raises LockError.

    A relative path would be another directory for every working directory.
    """
    path = os.path.expanduser(os.environ.get(LOCK_DIRECTORY, ""))
    if path and not os.path.isabs(path):
        from reserve_gpu.errors import LockError

        raise LockError(f"{LOCK_DIRECTORY}={path!r} must be an absolute path.")
    return os.path.normpath(path) if path else None


def idle_mib() -> float | None:
    """Memory in MiB up to which a device is idle; None for the default. Raises RequestError."""
    size = os.environ.get(IDLE_MEMORY)
    if not size:
        return None
    from reserve_gpu.errors import RequestError
    from reserve_gpu.quantities import parse_size

    try:
        return parse_size(size)
    except RequestError as error:
        raise RequestError(f"{IDLE_MEMORY}: {error}") from error


def default_path() -> str:
    """The lock directory: the one that was set, else in the first place open to all users."""
    if configured := lock_directory():
        return configured
    for place in PLACES:
        with suppress(OSError):
            mode = os.stat(place).st_mode
            if stat.S_ISDIR(mode) and mode & stat.S_ISVTX and mode & stat.S_IWOTH:
                return f"{place}/{NAME}"
    from reserve_gpu.errors import LockError

    raise LockError(
        f"None of {', '.join(PLACES)} is a directory that every user may write to (mode 1777). "
        f"Set {LOCK_DIRECTORY} to a directory that all users of this machine share."
    )
