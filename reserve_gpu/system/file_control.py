"""File locks, duplicates of descriptors, sizes of pipes: all that needs `fcntl`."""

from __future__ import annotations

import os
import struct
import sys
from contextlib import suppress

with suppress(ImportError):  # Windows, where nothing can be reserved
    import fcntl

# struct flock of fcntl(2): type, whence, start, length (0: to the end of the file), pid.
RANGE = struct.Struct("hhqqi4x")


def lock_file(descriptor: int) -> None:
    """Lock the open file with flock(2).

    Raises:
        BlockingIOError: Another open file description has it locked.
        OSError: It can't be locked.
    """
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def unlock_file(descriptor: int) -> None:
    """Release the locks of `lock_file` and `write_lock`. Raises OSError."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    _set(descriptor, fcntl.F_UNLCK)


def write_lock(descriptor: int) -> bool:
    """Lock the open file as only a process can that may write to it; return whether it worked.

    A process can flock(2) every file that it may read. This lock (fcntl(2), "Open file description
    locks") shows that its holder may write to the file. Like that of flock(2) it ends when the last
    copy of the descriptor is closed. The two do not exclude each other.
    """
    try:
        _set(descriptor, fcntl.F_WRLCK)
    except OSError:
        return False
    return True


def is_write_locked(descriptor: int) -> bool:
    """Return whether another opening of the file has it locked with `write_lock`."""
    with suppress(OSError):
        return _query(descriptor) == fcntl.F_WRLCK
    return False


def has_write_locks(descriptor: int) -> bool:
    """Return whether the system has the locks of `write_lock`, which some sandboxes lack."""
    try:
        _query(descriptor)
    except OSError:
        return False
    return True


def _query(descriptor: int) -> int:
    """Return the kind of the lock that keeps this opening of a file from reading."""
    query = RANGE.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
    answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, query)
    return int(RANGE.unpack(answer)[0])


def _set(descriptor: int, kind: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, RANGE.pack(kind, os.SEEK_SET, 0, 0, 0))


def duplicate(descriptor: int, lowest: int) -> int:
    """Return a duplicate with a number of at least `lowest`, closed by exec. Raises OSError."""
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, lowest)


def pipe_use(descriptor: int) -> tuple[int, int]:
    """Return how many bytes of a pipe are unread, and its capacity in bytes. Raises OSError."""
    import termios

    unread = fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4))
    return int.from_bytes(unread, sys.byteorder), fcntl.fcntl(descriptor, fcntl.F_GETPIPE_SZ)
