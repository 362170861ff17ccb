"""Where histories stand, and whether this user's is kept.

    /var/lib/reserve_gpu/log/1000/      if root has made the directory above it
    /var/lib/reserve_gpu/log/1000-1/    if another user was there first
    ~/.local/state/reserve_gpu/lab1/        else: of the machine lab1

Neither is made unless somebody says `history = true`, in the administrator's file or in the user's
own. In a folder there is a file for each month (`2026-11.jsonl`) and one for each reservation that
lasts (`1f9c2a7e.open`): its last line, which is written anew each minute.
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
MOST_FOLDERS = 1000  # that may bear the name of one user, whoever has made them
NAME = re.compile(r"([0-9]{1,10})(-[0-9]{1,3})?")


def to_write(ruled: Rules | None) -> int | None:
    """Open the folder for what this user does, made if it has to be; None if nothing is kept.

    ruled: what the administrator's file says. Raises HistoryError, OSError, RequestError.
    """
    path = path_to_write(ruled)
    if path is None:
        return None
    if path == _in_home():
        os.makedirs(settings.state_directory(), OWN_MODE, exist_ok=True)
        return _made(path)
    for each in _numbered(path):
        with suppress(HistoryError):
            return _made(each)
    raise HistoryError(f"{path}, and what is called like it, belongs to another user")


def path_to_write(ruled: Rules | None) -> str | None:
    """Return the path of the folder for this user's history; None if nothing is kept.

    It need not be there. The user's own word counts before the administrator's.
    ruled: what the administrator's file says. Raises RequestError.
    """
    own = admin_rules.own_history()
    word = own if own is not None else ruled.history if ruled else None
    if word is False:
        return None
    if is_for_all(settings.history_directory()):
        return os.path.join(settings.history_directory(), str(os.geteuid()))
    return _in_home() if word or os.path.isdir(settings.state_directory()) else None


def to_read() -> Iterator[tuple[int, int]]:
    """Yield each folder that this user may read, and the user whose it is; root reads all.

    The folder's descriptor is open until the next one is asked for.
    """
    own, above = os.geteuid(), settings.history_directory()
    names = _numbered(str(own))
    if own == ROOT and is_for_all(above):
        with suppress(OSError):
            names = iter(sorted(filter(NAME.fullmatch, os.listdir(above))))
    paths = [(os.path.join(above, name), int(name.partition("-")[0])) for name in names]
    for path, uid in [*paths, (_in_home(), own)]:
        with suppress(OSError, HistoryError):
            folder = opened(path, uid)
            try:
                yield folder, uid
            finally:
                os.close(folder)


def is_for_all(path: str) -> bool:
    """Tell whether root, or who has named it, has made that directory so that it protects users.

    There everybody makes a folder, and nobody can remove another's.
    """
    with suppress(OSError):
        status = os.lstat(path)
        is_shared = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        is_safe = not is_shared or bool(status.st_mode & stat.S_ISVTX)
        return stat.S_ISDIR(status.st_mode) and status.st_uid in admin_rules.owners() and is_safe
    return False


def opened(path: str, uid: int) -> int:
    """Open a folder; returns a descriptor. Raises OSError, and HistoryError if it is not uid's."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    status = os.fstat(descriptor)
    if status.st_uid == uid and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return descriptor
    os.close(descriptor)
    raise HistoryError(f"{path} belongs to another user, or others may write to it")


def _made(path: str) -> int:
    """Make a folder, or take it if it is this user's; returns a descriptor.

    Raises HistoryError where it is not, and OSError where nothing can be made.
    """
    try:
        os.mkdir(path, OWN_MODE)
    except FileExistsError:
        if os.lstat(path).st_uid != os.geteuid():
            raise HistoryError(f"{path} belongs to another user") from None
    return opened(path, os.geteuid())


def _numbered(name: str) -> Iterator[str]:
    """Yield the names that a user's folder may have: the first one that nobody else has made."""
    yield name
    yield from (f"{name}-{number}" for number in range(1, MOST_FOLDERS))


def _in_home() -> str:
    return os.path.join(settings.state_directory(), procfs.machine_name())
