"""The two settings, kept in environment variables, so that what a process starts has them too."""

from __future__ import annotations

import os

LOCK_DIRECTORY = "RESERVE_GPU_LOCK_DIR"
IDLE_MEMORY = "RESERVE_GPU_IDLE_MEMORY"


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
    from reserve_gpu.choosing import parse_size
    from reserve_gpu.errors import RequestError

    try:
        return parse_size(size)
    except RequestError as error:
        raise RequestError(f"{IDLE_MEMORY}: {error}") from error
