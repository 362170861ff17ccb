"""Opening lock files, and their directory, in a place where everybody may have put anything.

No link is ever followed, and nothing but a regular file of one name is ever written to. What is
made is made for all users, whatever the umask; what its maker could not finish, being killed
half-way, the same user finishes later.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from contextlib import suppress
from typing import TypeAlias

from reserve_gpu.errors import LockError
from reserve_gpu.settings import LOCK_DIRECTORY

ALONE, SHARED, TICKET = ".lock", ".shared", ".ticket"
FILE_MODE, DIRECTORY_MODE = 0o666, 0o1777
YOUNG_S = 1.0  # what was made so lately may still be in the making
IN_THE_MAKING = {errno.EACCES, errno.EEXIST, errno.ENOENT}

Identity: TypeAlias = tuple[int, int]  # device and inode


def file_name(uuid: str, *, shared: bool = False) -> str:
    """The lock file of a device, or the one that those who share it hold together.

    Two files, as the holder of the first must not keep others from sharing what is theirs to share.
    """
    return f"{uuid.replace('/', '_')}{SHARED if shared else ALONE}"  # old MIG UUIDs have slashes


def open_directory(path: str) -> int:
    """A descriptor to reach the directory by, made for all users if it is not there.

    Raises LockError.
    """
    try:
        with suppress(FileExistsError):
            os.mkdir(path, DIRECTORY_MODE)
        # O_PATH: even a directory that its maker may not read yet, under umask 0777.
        flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags)
        mode = os.fstat(descriptor).st_mode
        if mode & stat.S_ISVTX:  # else somebody made it for another purpose
            _finish(descriptor, DIRECTORY_MODE)
        elif mode & stat.S_IWOTH:
            os.close(descriptor)
            raise LockError(f"In {path} anybody can delete anybody's locks. Run: chmod 1777 {path}")
    except OSError as error:
        raise LockError(_directory_message(path, error)) from error
    return descriptor


def open_file(directory: int, name: str, path: str) -> int | None:
    """A descriptor of the lock file, open for reading and writing, made for all if it is not there.

    None if somebody is making it just now: try again. Raises LockError.
    directory: as open_directory gives it. path: what messages call the file.
    """
    try:
        descriptor = _open_or_make(directory, name)
    except OSError as error:
        if error.errno in IN_THE_MAKING and _is_young(directory, name):
            return None
        raise LockError(_file_message(path, error, directory, name)) from error
    try:
        _require_plain(descriptor, path)
        _finish(descriptor, FILE_MODE)
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, OSError):
            raise LockError(_file_message(path, error, directory, name)) from error
        raise
    return descriptor


def exists(directory: int, name: str, path: str) -> bool:
    """Whether there is a file of that name, locked or not. Raises LockError. path: as above."""
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    except OSError as error:
        where = os.path.dirname(path)
        raise LockError(f"{where} can't be searched: {error.strerror}.") from error
    return True


def identity(file: os.stat_result) -> Identity:
    """What tells one file from another, under whatever name."""
    return file.st_dev, file.st_ino


def _open_or_make(directory: int, name: str) -> int:
    """Open without O_CREAT first: fs.protected_regular refuses it on another user's file."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    with suppress(FileNotFoundError):
        return os.open(name, flags, dir_fd=directory)
    return os.open(name, flags | os.O_CREAT | os.O_EXCL, FILE_MODE, dir_fd=directory)


def _finish(descriptor: int, mode: int) -> None:
    """Open to all what this user made and nobody else can write to: the umask took that away."""
    found = os.fstat(descriptor)
    if found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        os.chmod(f"/proc/self/fd/{descriptor}", mode)  # works for O_PATH, as fchmod does not


def _require_plain(descriptor: int, path: str) -> None:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise LockError(f"{path} is not a regular file. Remove it, or ask its owner to.")
    if found.st_nlink > 1 and not found.st_mode & stat.S_IWOTH:  # else all may write to it anyway
        raise LockError(f"{path} is a second name of another file, which is not ours. Remove it.")


def _is_young(directory: int, name: str) -> bool:
    """Whether the file, or the directory that it is missing from, was made or changed just now."""
    try:
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except OSError:
        found = os.fstat(directory)
    return abs(time.time() - found.st_ctime) < YOUNG_S


def _directory_message(path: str, error: OSError) -> str:
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        return (
            f"The lock directory {path} is a link or no directory. Set {LOCK_DIRECTORY} to a "
            "directory that all users of this machine share."
        )
    return f"The lock directory {path} can't be used: {error.strerror}. {_set_another()}"


def _set_another() -> str:
    return f"Set {LOCK_DIRECTORY} to a directory that all users of this machine may write to."


def _file_message(path: str, error: OSError, directory: int, name: str) -> str:
    if error.errno == errno.ELOOP:
        return f"{path} is a link, which is never followed. Remove it, or ask its owner to."
    if error.errno == errno.ENOENT:
        return f"{path} can't be made. {_set_another()}"
    if error.errno == errno.EISDIR:
        return f"{path} is a directory, not a lock file. Remove it, or ask its owner to."
    if error.errno == errno.EACCES:
        try:
            owner = os.stat(name, dir_fd=directory, follow_symlinks=False).st_uid
        except OSError:
            return _directory_message(os.path.dirname(path), error)
        whose = f"It belongs to uid {owner}; its mode must be 0666."
        return f"{path} may not be opened by this user. {whose}"
    return f"{path} can't be opened: {error.strerror or error}. {_set_another()}"
