"""The folder for the sockets of a user's processes, and the sockets in it.

Every user may create files in the lock directory. So a folder counts only if it belongs to the user
and is closed to all others. A process that listens keeps the descriptor of its
folder open: others find it there, however many names other users have taken.
"""

from __future__ import annotations

import os
import re
import socket
import struct
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING

from reserve_gpu.locks.directory import default_path
from reserve_gpu.system import procfs

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "asked-{uid}"  # with a random suffix if another user has taken this name
MODE = 0o700
MESSAGE_LIMIT = 1 << 16  # bytes of a request or an answer
OTHERS = 0o077  # the permissions of all other users
CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def open_first() -> int:
    """Open this user's folder under its first name, created if it is not there.

    Raises LockError, and OSError, for example because another user has taken the name.
    """
    uid = os.geteuid()
    return _created(f"{default_path()}/{NAME.format(uid=uid)}", uid)


def open_any() -> int:
    """Open a folder of this user, or create one with a random name.

    This lists the lock directory, which takes seconds if another user has filled it. Other empty
    folders of this user are removed. Raises OSError, LockError.
    """
    uid = os.geteuid()
    found = []
    for path in _named(uid):
        with suppress(OSError):
            found.append(opened(path, uid))
    for surplus in found[1:]:
        remove_if_empty(surplus)
        os.close(surplus)
    if found:
        return found[0]
    name = f"{NAME.format(uid=uid)}-{os.urandom(8).hex()}"
    return _created(f"{default_path()}/{name}", uid)


def remove_if_empty(folder: int) -> None:
    """Remove a folder that has no socket of a living process, wherever it is now."""
    sweep(folder)
    with suppress(OSError):
        path = os.path.realpath(f"/proc/self/fd/{folder}")
        if os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(folder)):
            os.rmdir(path)


def of_process(pid: int, uid: int) -> Iterator[int]:
    """Yield descriptors of the folders in which a process of a user may have its socket."""
    for path in chain(_kept_open(pid), _named(uid)):
        with suppress(OSError):
            folder = opened(path, uid)
            try:
                yield folder
            finally:
                os.close(folder)


def sockets_of(pid: int) -> str:
    """Return the prefix of the names of a process's sockets: its PID namespace and its pid."""
    return f"{procfs.pid_namespace()}-{pid}-"


def sweep(folder: int) -> None:
    """Remove the sockets of processes that have ended."""
    for name in names_in(folder):
        pid = re.fullmatch(rf"{procfs.pid_namespace()}-([0-9]{{1,10}})-[0-9a-f]+", name)
        if pid and procfs.uid_of(int(pid[1])) is None:
            with suppress(OSError):
                os.unlink(name, dir_fd=folder)


def names_in(folder: int) -> list[str]:
    """Return the names of what is in a folder, none if it can't be listed."""
    with suppress(OSError):
        return os.listdir(f"/proc/self/fd/{folder}")
    return []


def opened(path: str, uid: int) -> int:
    """Open a folder that only this user and root can enter. Raises OSError."""
    folder = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
    status = os.fstat(folder)
    if status.st_uid == uid and not status.st_mode & OTHERS:
        return folder
    os.close(folder)
    raise PermissionError(path)


def peer(connection: socket.socket) -> tuple[int, int]:
    """Return the pid and the uid of the process at the other end, as the kernel reports them."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    pid, uid, _ = CREDENTIALS.unpack(data)
    return pid, uid


def _created(path: str, uid: int) -> int:
    """Open the folder, created if it is not there. Raises OSError."""
    with suppress(FileExistsError):
        os.mkdir(path, MODE)
    folder = opened(path, uid)
    if os.fstat(folder).st_mode & MODE != MODE:  # the umask has taken permissions away
        os.chmod(f"/proc/self/fd/{folder}", MODE)
    return folder


def _kept_open(pid: int) -> Iterator[str]:
    """Yield paths of what a process has open in the lock directory, if this process may see it.

    Each leads to what is open, even if the owner of the directory has renamed it.
    """
    with suppress(OSError):
        directory = os.path.realpath(default_path())
        for number in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                path = f"/proc/{pid}/fd/{number}"
                if os.path.dirname(os.readlink(path)) == directory:
                    yield f"{path}/."


def _named(uid: int) -> list[str]:
    """Return the paths of a user's folders, by one listing of the lock directory."""
    directory, prefix = default_path(), NAME.format(uid=uid)
    names = []
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.startswith(prefix) and entry.is_dir(follow_symlinks=False):
                with suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_uid == uid:
                        names.append(entry.name)
    return [f"{directory}/{name}" for name in sorted(names)]
