"""Find the folders that contain histories.

    /var/lib/reserve_gpu/history/1000/      if root has created the parent directory
    /var/lib/reserve_gpu/history/1000-1/    if another user owns the folder 1000
    ~/.local/state/reserve_gpu/lab1/        otherwise, for the machine lab1

A history is kept if `history = true` is set in the user's or the administrator's file, or if a
directory for histories exists and neither file sets `history = false`. Each folder contains a file
for each month (`2026-11.jsonl`) and for each open reservation (`1f9c2a7e5b3d4c60.open`). See
`log_writer` for a description of these files.
"""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress
from typing import TYPE_CHECKING

from reserve_gpu.allocation import admin_rules
from reserve_gpu.model.errors import HistoryError
from reserve_gpu.system import procfs, settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reserve_gpu.model.requests import Rules

OWN_MODE = 0o700
ROOT = 0
MOST_FOLDERS = 1000  # maximum number of folder names tried per user
NAME = re.compile(r"([0-9]{1,10})(-[0-9]{1,3})?")


def to_write(rules: Rules | None) -> int | None:
    """Open the folder for this user's history, creating it if necessary.

    Args:
        rules: The administrator's rules.

    Returns:
        The file descriptor of the folder, or None if no history is kept.

    Raises:
        HistoryError: All possible folders belong to other users, or other users can write to them.
        OSError: The folder can't be created or opened.
        RequestError: The user's file is invalid.
    """
    path = path_to_write(rules)
    if path is None:
        return None
    if path == _in_home():
        os.makedirs(settings.state_directory(), OWN_MODE, exist_ok=True)
        return _made(path)
    for each in _numbered(path):
        with suppress(HistoryError):
            return _made(each)
    raise HistoryError(f"{path} and the folders {path}-N belong to other users")


def path_to_write(rules: Rules | None) -> str | None:
    """Return the path of this user's history folder, even if the folder does not exist yet.

    The setting in the user's file takes precedence over the administrator's.

    Args:
        rules: The administrator's rules.

    Returns:
        The path, or None if no history is kept.

    Raises:
        RequestError: The user's file is invalid.
    """
    user_setting = admin_rules.user_history_setting()
    setting = user_setting if user_setting is not None else rules.history if rules else None
    if setting is False:
        return None
    if is_for_all(settings.history_directory()):
        return os.path.join(settings.history_directory(), str(os.geteuid()))
    return _in_home() if setting or os.path.isdir(settings.state_directory()) else None


def to_read() -> Iterator[tuple[int, int]]:
    """Yield each history folder that this user has permission to read, along with its owner's UID.

    Each folder is yielded as an open file descriptor, which is closed when the iterator moves on.
    Root can read all users' histories.
    """
    reader, parent = os.geteuid(), settings.history_directory()
    names = _numbered(str(reader))
    if reader == ROOT and is_for_all(parent):
        with suppress(OSError):
            names = iter(sorted(filter(NAME.fullmatch, os.listdir(parent))))
    paths = [(os.path.join(parent, name), int(name.partition("-")[0])) for name in names]
    for path, uid in [*paths, (_in_home(), reader)]:
        with suppress(OSError, HistoryError):
            folder = opened(path, uid)
            try:
                yield folder, uid
            finally:
                os.close(folder)


def is_for_all(path: str) -> bool:
    """Return whether a directory is suitable for all users' history folders.

    The directory must belong to root or to the user who configured it. If other users can write to
    it, it must have the sticky bit, which lets users create folders but not remove each other's.
    """
    with suppress(OSError):
        status = os.lstat(path)
        is_shared = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        is_safe = not is_shared or bool(status.st_mode & stat.S_ISVTX)
        return stat.S_ISDIR(status.st_mode) and status.st_uid in admin_rules.owners() and is_safe
    return False


def opened(path: str, uid: int) -> int:
    """Open a user's history folder.

    Args:
        path: The folder's path.
        uid: The user's UID.

    Returns:
        The folder's file descriptor.

    Raises:
        OSError: The folder can't be opened.
        HistoryError: The folder belongs to another user, or other users can write to it.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    status = os.fstat(descriptor)
    if status.st_uid == uid and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return descriptor
    os.close(descriptor)
    raise HistoryError(f"{path} belongs to another user, or other users can write to it")


def _made(path: str) -> int:
    """Create a folder for this user if it does not exist, and return its file descriptor."""
    try:
        os.mkdir(path, OWN_MODE)
    except FileExistsError:
        if os.lstat(path).st_uid != os.geteuid():
            raise HistoryError(f"{path} belongs to another user") from None
    return opened(path, os.geteuid())


def _numbered(name: str) -> Iterator[str]:
    """Yield the possible names for a user's folder, in the order in which to try them."""
    yield name
    yield from (f"{name}-{number}" for number in range(1, MOST_FOLDERS))


def _in_home() -> str:
    return os.path.join(settings.state_directory(), procfs.machine_name())
