"""A user's socket directory, which contains the Unix sockets of the user's processes.

Socket directories are in the lock directory, where any user can create files. So a socket directory
is valid only if it belongs to the user and no other user can enter it. A listening process keeps
its socket directory open. Other processes find the directory through the open descriptor, even if
other users have taken the directory's usual names.
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

NAME = "asked-{uid}"  # the directory's name, with a random suffix if another user has taken it
MODE = 0o700  # the directory's permissions
MESSAGE_LIMIT = 1 << 16  # maximum size of a request or reply in bytes
OTHERS = 0o077  # permission bits of the group and of other users
CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def open_first() -> int:
    """Open or create this user's socket directory under its default name.

    Returns:
        A descriptor of the directory.

    Raises:
        LockError: No lock directory can be used.
        OSError: The directory can't be opened, for example if another user has taken its name.
    """
    uid = os.geteuid()
    return _created(f"{default_path()}/{NAME.format(uid=uid)}", uid)


def open_any() -> int:
    """Open one of this user's socket directories, or create one with a random name.

    This function lists the lock directory, which can take seconds if another user has filled it
    with files. If this user has several socket directories, the function also removes empty ones.

    Returns:
        A descriptor of the directory.

    Raises:
        LockError: No lock directory can be used.
        OSError: The directory can't be created.
    """
    uid = os.geteuid()
    folders = []
    for path in _paths_of(uid):
        with suppress(OSError):
            folders.append(opened(path, uid))
    for surplus in folders[1:]:
        remove_if_empty(surplus)
        os.close(surplus)
    if folders:
        return folders[0]
    name = f"{NAME.format(uid=uid)}-{os.urandom(8).hex()}"
    return _created(f"{default_path()}/{name}", uid)


def remove_if_empty(folder: int) -> None:
    """Remove a socket directory unless it contains a running process's socket.

    Args:
        folder: A descriptor of the directory, which may have been renamed.
    """
    sweep(folder)
    with suppress(OSError):
        path = os.path.realpath(f"/proc/self/fd/{folder}")
        if os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(folder)):
            os.rmdir(path)


def of_process(pid: int, uid: int) -> Iterator[int]:
    """Yield a descriptor of each directory that might contain a process's socket.

    Each descriptor is closed when the next one is requested.

    Args:
        pid: The process's pid.
        uid: The process's uid.
    """
    for path in chain(_open_paths_of(pid), _paths_of(uid)):
        with suppress(OSError):
            folder = opened(path, uid)
            try:
                yield folder
            finally:
                os.close(folder)


def sockets_of(pid: int) -> str:
    """Return the prefix of a process's socket names, which includes its PID namespace and pid."""
    return f"{procfs.pid_namespace()}-{pid}-"


def sweep(folder: int) -> None:
    """Remove the sockets of exited processes from a directory."""
    for name in names_in(folder):
        match = re.fullmatch(rf"{procfs.pid_namespace()}-([0-9]{{1,10}})-[0-9a-f]+", name)
        if match and procfs.uid_of(int(match[1])) is None:
            with suppress(OSError):
                os.unlink(name, dir_fd=folder)


def names_in(folder: int) -> list[str]:
    """Return the names of the files in a directory, or an empty list if it can't be listed."""
    with suppress(OSError):
        return os.listdir(f"/proc/self/fd/{folder}")
    return []


def opened(path: str, uid: int) -> int:
    """Open a directory, which must belong to the given user and be inaccessible to other users.

    Raises:
        OSError: The directory does not exist, belongs to another user, or is accessible to
            other users.
    """
    folder = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
    status = os.fstat(folder)
    if status.st_uid == uid and not status.st_mode & OTHERS:
        return folder
    os.close(folder)
    raise PermissionError(path)


def peer(connection: socket.socket) -> tuple[int, int]:
    """Return the pid and uid of the process at the other end of a Unix socket connection."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    pid, uid, _ = CREDENTIALS.unpack(data)
    return pid, uid


def _created(path: str, uid: int) -> int:
    """Open a socket directory, creating it if it does not exist.

    Raises:
        OSError: The directory can't be created, or is not valid.
    """
    with suppress(FileExistsError):
        os.mkdir(path, MODE)
    folder = opened(path, uid)
    if os.fstat(folder).st_mode & MODE != MODE:  # the umask has removed permissions
        os.chmod(f"/proc/self/fd/{folder}", MODE)
    return folder


def _open_paths_of(pid: int) -> Iterator[str]:
    """Yield the paths of files and directories in the lock directory that a process has open.

    The paths go through /proc/PID/fd, so they stay valid if a file is renamed. Nothing is yielded
    if this process is not allowed to list the other process's open files.
    """
    with suppress(OSError):
        directory = os.path.realpath(default_path())
        for number in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                path = f"/proc/{pid}/fd/{number}"
                if os.path.dirname(os.readlink(path)) == directory:
                    yield f"{path}/."


def _paths_of(uid: int) -> list[str]:
    """Return the paths of a user's socket directories in the lock directory."""
    directory, prefix = default_path(), NAME.format(uid=uid)
    names = []
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.startswith(prefix) and entry.is_dir(follow_symlinks=False):
                with suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_uid == uid:
                        names.append(entry.name)
    return [f"{directory}/{name}" for name in sorted(names)]
