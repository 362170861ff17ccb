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

from reserve_gpu.errors import LockError
from reserve_gpu.locks import descriptors

DIRECTORY_MODE = 0o1777
YOUNG_S = 1.0  # a file that was made so lately may still be in the making
IN_THE_MAKING = {errno.EACCES, errno.EEXIST, errno.ENOENT}
# What opening answers where a link, a directory, or a file that its owner keeps for himself stands.
NO_LOCK_FILE = {errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.ENXIO, errno.EACCES, errno.EPERM}
MAKING_LIMIT = 200  # attempts at a file that somebody is making just now
MAKING_POLL_S = 0.01
SET_ANOTHER = "Set RESERVE_GPU_LOCK_DIR to a directory that all users of this machine may write to."


def open_directory(path: str) -> int:
    """A descriptor to reach the directory by, made for all users if it is not there.

    Raises LockError.
    """
    try:
        with suppress(FileExistsError):
            os.mkdir(path, DIRECTORY_MODE)
        # O_PATH: even a directory that its maker may not read yet, under umask 0777.
        flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        with descriptors.no_fork():
            descriptor = descriptors.remember(os.open(path, flags))
    except OSError as error:
        raise LockError(_directory_message(path, error)) from error
    try:
        _require_own_files(descriptor, path)
    except BaseException:
        descriptors.close(descriptor)
        raise
    return descriptor


def open_to_lock(directory: int, name: str, path: str, mode: int) -> int:
    """A descriptor of the lock file, open for reading and writing, made if it is not there.

    directory: as open_directory gives it. path: what messages call the file. mode: the file's.
    Raises LockError.
    """
    for _ in range(MAKING_LIMIT):
        with descriptors.no_fork():
            descriptor = _open_now(directory, name, path, mode)
            if descriptor is not None:
                return descriptors.remember(descriptor)
        time.sleep(MAKING_POLL_S)
    raise LockError(f"{path} is not finished by whoever makes it.")


def open_to_look(directory: int, name: str, path: str | None = None) -> int | None:
    """A descriptor to see whether the file is locked; None if it is not there, or no lock file.

    path: what messages call the file. With it what is no lock file, and so can't be locked by
    anybody, raises LockError.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        with descriptors.no_fork():
            descriptor = descriptors.remember(os.open(name, flags, dir_fd=directory))
    except OSError as error:
        is_file = path is not None or error.errno not in NO_LOCK_FILE
        if isinstance(error, FileNotFoundError) or not is_file:
            return None
        path = path or name
        raise LockError(_file_message(path, error, directory, name)) from error
    try:
        _require_plain(descriptor, path or name)
    except LockError:
        descriptors.close(descriptor)
        if path is None:
            return None
        raise
    return descriptor


def owner(directory: int, name: str) -> int | None:
    """The user that a regular file belongs to; None if there is none of that name."""
    with suppress(OSError):
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        return status.st_uid if stat.S_ISREG(status.st_mode) else None
    return None


def sole_owner(directory: int, name: str) -> int | None:
    """The owner, if nobody else can write to the file.

    The lock files of devices are writable by all, and so anybody can give them a second name, which
    would be locked as long as the device is.
    """
    with suppress(OSError):
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        is_sole = stat.S_ISREG(status.st_mode) and not status.st_mode & (
            stat.S_IWGRP | stat.S_IWOTH
        )
        return status.st_uid if is_sole else None
    return None


def is_others(directory: int, name: str) -> bool:
    """Whether something stands there that this user did not make."""
    try:
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise LockError(f"{name} can't be looked at: {error.strerror}.") from error
    is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
    return not is_own or status.st_nlink > 1


def is_current(directory: int, name: str, descriptor: int) -> bool:
    """Whether the open file is the one of that name, not one that was deleted since."""
    with suppress(FileNotFoundError):
        there = os.stat(name, dir_fd=directory, follow_symlinks=False)
        opened = os.fstat(descriptor)
        return (there.st_dev, there.st_ino) == (opened.st_dev, opened.st_ino)
    return False


def _open_now(directory: int, name: str, path: str, mode: int) -> int | None:
    """The descriptor; None if somebody is making the file just now."""
    try:
        descriptor = _open_or_make(directory, name, mode)
    except OSError as error:
        if error.errno in IN_THE_MAKING and _is_young(directory, name):
            return None
        raise LockError(_file_message(path, error, directory, name)) from error
    try:
        _require_plain(descriptor, path)
        _finish(descriptor, mode)
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, OSError):
            raise LockError(_file_message(path, error, directory, name)) from error
        raise
    return descriptor


def _open_or_make(directory: int, name: str, mode: int) -> int:
    """Open without O_CREAT first: fs.protected_regular refuses it on another user's file."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    with suppress(FileNotFoundError):
        return os.open(name, flags, dir_fd=directory)
    return os.open(name, flags | os.O_CREAT | os.O_EXCL, mode, dir_fd=directory)


def _require_own_files(directory: int, path: str) -> None:
    """Raise LockError for a directory in which anybody can delete the files of others."""
    mode = os.fstat(directory).st_mode
    if not mode & stat.S_ISVTX:  # somebody made it for another purpose, or for himself
        if mode & stat.S_IWOTH:
            raise LockError(f"In {path} anybody can delete anybody's locks. Run: chmod 1777 {path}")
        return
    try:
        _finish(directory, DIRECTORY_MODE)
    except OSError as error:
        raise LockError(_directory_message(path, error)) from error


def _finish(descriptor: int, mode: int) -> None:
    """Give what this user made the mode that it is meant to have: the umask took away from it."""
    status = os.fstat(descriptor)
    opened_to_others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    missing = mode & ~stat.S_IMODE(status.st_mode)
    if status.st_uid == os.geteuid() and not opened_to_others and missing:
        os.chmod(f"/proc/self/fd/{descriptor}", mode)  # works for O_PATH, as fchmod does not


def _require_plain(descriptor: int, path: str) -> None:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        is_directory = stat.S_ISDIR(status.st_mode)
        kind = "a directory, not a lock file" if is_directory else "not a regular file"
        raise LockError(f"{path} is {kind}. Remove it, or ask its owner to.")
    if status.st_nlink > 1 and not status.st_mode & stat.S_IWOTH:  # else all may write to it anyway
        raise LockError(f"{path} is a second name of another file, which is not ours. Remove it.")


def _is_young(directory: int, name: str) -> bool:
    """Whether the file, or the directory that it is missing from, was made or changed just now."""
    try:
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except OSError:
        status = os.fstat(directory)
    return abs(time.time() - status.st_ctime) < YOUNG_S


def _directory_message(path: str, error: OSError) -> str:
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        return (
            f"The lock directory {path} is a link or no directory. Set RESERVE_GPU_LOCK_DIR to a "
            "directory that all users of this machine share."
        )
    return f"The lock directory {path} can't be used: {error.strerror}. {SET_ANOTHER}"


def _file_message(path: str, error: OSError, directory: int, name: str) -> str:
    if error.errno == errno.ELOOP:
        return f"{path} is a link, which is never followed. Remove it, or ask its owner to."
    if error.errno == errno.ENOENT:
        return f"{path} can't be made. {SET_ANOTHER}"
    if error.errno == errno.EISDIR:
        return f"{path} is a directory, not a lock file. Remove it, or ask its owner to."
    if error.errno == errno.EACCES:
        uid = owner(directory, name)
        if uid is None:
            return _directory_message(os.path.dirname(path), error)
        return (
            f"{path} may not be opened by this user. It belongs to uid {uid}; its mode must be "
            "0666."
        )
    return f"{path} can't be opened: {error.strerror or error}. {SET_ANOTHER}"
