"""A second sign that a device is held, which nobody can delete: the name of a socket.

Whoever made the lock directory, or a file in it, can delete that file, and a new one in its place
is locked by nobody. So who holds a device also binds an abstract Unix socket whose name is the
lock's path. The kernel gives a name to one socket alone, takes it back when that is closed, as when
its process ends, and lets nobody else take it away (https://man7.org/linux/man-pages/man7/unix.7.html).

It reaches as far as the network namespace. Elsewhere, and where such sockets are forbidden, the
file alone decides.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from contextlib import suppress

from reserve_gpu.device import Holder

LONGEST = 107  # bytes of a name, after the null byte that makes it abstract
SLOTS = 8  # of those who share a device; who comes after them goes by the file alone
BACKLOG = 16  # connections that nobody accepts: to connect is enough to learn the process
CREDENTIALS = "3i"  # struct ucred: pid, uid, gid


def bind(path: str, *, shared: bool = False) -> socket.socket | None:
    """A socket with the name of the lock at that path; None if another process has the name.

    shared: one of the names of those who share it. Raises OSError where there are no such sockets.
    """
    for slot in range(SLOTS if shared else 1):
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            bound.bind(_name(path, slot))
            bound.listen(BACKLOG)
        except OSError as error:
            bound.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return bound
    return None


def is_bound(descriptor: int, path: str, *, shared: bool) -> bool:
    """Whether it is a socket with a name of the lock at that path."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as found:
        names = [_name(path, slot) for slot in range(SLOTS if shared else 1)]
        return found.getsockname() in names
    return False


def holder(path: str, *, shared: bool = False) -> int | None:
    """The process that has the name of the lock at that path; 0 if it can't be seen, else None.

    shared: the first of those who share it.
    """
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(0)
        for slot in range(SLOTS if shared else 1):
            try:
                asking.connect(_name(path, slot))
            except ConnectionRefusedError:
                continue
            except BlockingIOError:  # too many have asked already
                return 0
            size = struct.calcsize(CREDENTIALS)
            credentials = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
            return int(struct.unpack(CREDENTIALS, credentials)[0])
    return None


def unlisted(path: str, *, shared: bool = False) -> Holder | None:
    """Who holds what this is the lock of without its file, which somebody deleted."""
    pid = holder(path, shared=shared)
    return None if pid is None else Holder(pid=pid or None, seen=pid > 0)


def _name(path: str, slot: int) -> bytes:
    name = os.fsencode(f"reserve_gpu:{path}:{slot}")
    if len(name) > LONGEST:
        from hashlib import blake2b

        name = b"reserve_gpu:" + blake2b(name, digest_size=32).hexdigest().encode()
    return b"\0" + name
