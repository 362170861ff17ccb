"""Wrappers around `fcntl` for file locks, descriptors, files in memory, and pipe sizes."""

from __future__ import annotations

import os
import struct
import sys
from contextlib import suppress

with suppress(ImportError):  # fcntl is missing on Windows, where reservations are not supported
    import fcntl

# struct flock from fcntl(2): type, whence, start, length (0 means to the end of the file), pid.
RANGE = struct.Struct("hhqqi4x")
# F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW and F_SEAL_WRITE: no process can change the file anymore.
SEALS = 0b1111


def lock_file(descriptor: int) -> None:
    """Lock an open file with flock(2), without blocking.

    Raises:
        BlockingIOError: Another open file description holds the lock.
        OSError: The file can't be locked.
    """
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def unlock_file(descriptor: int) -> None:
    """Release the locks that `lock_file`, `write_lock` and `read_lock` have taken.

    Raises:
        OSError: A lock can't be released.
    """
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    _set(descriptor, fcntl.F_UNLCK)


def is_file_locked(descriptor: int) -> bool:
    """Return whether another process has locked an open file with `lock_file`.

    The test takes a shared lock for a moment, which can make another process fail to lock the file.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def write_lock(descriptor: int) -> bool:
    """Try to take a write lock on an open file, and return whether this succeeded.

    Any process that can read a file can also lock it with flock(2). In contrast, this write lock
    proves that its holder can write to the file (fcntl(2), "Open file description locks"). Like a
    flock(2) lock, it is released when the last copy of the descriptor is closed. The two kinds of
    locks do not conflict.
    """
    try:
        _set(descriptor, fcntl.F_WRLCK)
    except OSError:
        return False
    return True


def is_write_locked(descriptor: int) -> bool:
    """Return whether a file is locked by `write_lock` through another open file description."""
    with suppress(OSError):
        return _query(descriptor) == fcntl.F_WRLCK
    return False


def has_write_locks(descriptor: int) -> bool:
    """Return whether the system supports `write_lock`. Some sandboxes do not."""
    try:
        _query(descriptor)
    except OSError:
        return False
    return True


def read_lock(descriptor: int) -> bool:
    """Try to take a read lock on an open file, and return whether this succeeded.

    Unlike `write_lock`, this does not require write permission. The two conflict with each other.
    """
    try:
        _set(descriptor, fcntl.F_RDLCK)
    except OSError:
        return False
    return True


def is_read_locked(descriptor: int) -> bool:
    """Return whether `read_lock` or `write_lock` locks a file through another file description."""
    with suppress(OSError):
        return _query(descriptor, fcntl.F_WRLCK) != fcntl.F_UNLCK
    return False


def _query(descriptor: int, kind: int | None = None) -> int:
    """Return the type of a conflicting lock, or F_UNLCK if there is none.

    Args:
        descriptor: The open file.
        kind: The type of lock that would conflict. Defaults to a read lock.
    """
    query = RANGE.pack(fcntl.F_RDLCK if kind is None else kind, os.SEEK_SET, 0, 0, 0)
    answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, query)
    return int(RANGE.unpack(answer)[0])


def _set(descriptor: int, kind: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, RANGE.pack(kind, os.SEEK_SET, 0, 0, 0))


def duplicate(descriptor: int, lowest: int) -> int:
    """Duplicate a descriptor to `lowest` or a higher number, with the close-on-exec flag set."""
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, lowest)


def sealed_file(data: bytes, lowest: int) -> int:
    """Create an unnamed file in memory with this content, which no process can change.

    Args:
        data: The content.
        lowest: The lowest number for the descriptor.

    Returns:
        The file's descriptor, with the close-on-exec flag set.

    Raises:
        OSError: The file can't be created, for example because a sandbox forbids it.
        AttributeError: Python was built for a C library without such files (glibc before 2.27).
    """
    with open(os.memfd_create("reserve_gpu", os.MFD_ALLOW_SEALING), "wb", buffering=0) as file:
        file.write(data)  # memory takes all of it in one call
        fcntl.fcntl(file.fileno(), fcntl.F_ADD_SEALS, SEALS)
        return duplicate(file.fileno(), lowest)


def is_sealed(descriptor: int) -> bool:
    """Return whether an open file comes from `sealed_file`.

    Raises:
        OSError: The descriptor is closed, or its file can't have seals.
        OverflowError: The number is too large.
        AttributeError: As for `sealed_file`.
    """
    # The kernel adds F_SEAL_EXEC if the sysctl vm.memfd_noexec is set.
    return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS == SEALS


def pipe_use(descriptor: int) -> tuple[int, int]:
    """Return the number of unread bytes in a pipe, and the pipe's capacity in bytes."""
    import termios

    unread = fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4))
    return int.from_bytes(unread, sys.byteorder), fcntl.fcntl(descriptor, fcntl.F_GETPIPE_SZ)
