"""Open lock files and their directory safely, although every user may create files there.

No link is ever followed, and nothing but a regular file of one name is ever written to. What is
made is made for all users, whatever the umask; what its maker could not finish, being killed
half-way, the same user finishes later.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from contextlib import contextmanager, suppress
from functools import cache, partial
from itertools import count
from typing import TYPE_CHECKING

from reserve_gpu.model.errors import TOO_MANY_FILES, LockError, shell_line
from reserve_gpu.system import containers, executor, procfs, watchdog
from reserve_gpu.system.forks import no_fork

if TYPE_CHECKING:
    from collections.abc import Iterator

DIRECTORY_MODE = 0o1777
YOUNG_S = 1.0  # a file that was made so lately may still be in the making
IN_THE_MAKING = {errno.EACCES, errno.EEXIST}
# Errors of this process or machine. The owner of a file can cause all others: by its mode, by a
# lease (EAGAIN), or by a file system that is mounted over it.
EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
# Errors of a directory in which no file can be created.
NOT_MADE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT}
MAKING_LIMIT = 200  # attempts at a file that somebody is making just now
MAKING_POLL_S = 0.01
SET_ANOTHER = "Set RESERVE_GPU_LOCK_DIR to a directory that all users of this machine may write to."


def open_directory(path: str) -> int:
    """Open the directory, made for all users if it is not there; returns a descriptor.

    Raises LockError.
    """
    try:
        with suppress(FileExistsError):
            os.mkdir(path, DIRECTORY_MODE)
        # O_PATH: even a directory that its maker may not read yet, under umask 0777.
        flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW
        with no_fork:
            descriptor = remember(os.open(path, flags))
        try:
            _require_own_files(descriptor, path)
        except BaseException:
            close(descriptor)
            raise
    except OSError as error:
        raise LockError(_directory_message(path, error)) from error
    return descriptor


def open_to_lock(directory: int, name: str, path: str, mode: int) -> int:
    """Open the lock file for reading and writing, made if it is not there; returns a descriptor.

    directory: as open_directory gives it. path: what messages call the file. mode: the file's.
    Raises LockError.
    """
    for _ in range(MAKING_LIMIT):
        try:
            # Without O_CREAT first: fs.protected_regular refuses it on another user's file.
            with suppress(FileNotFoundError):
                return _open(directory, name, path, os.O_RDWR, mode)
            return _open(directory, name, path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
        except OSError as error:
            if error.errno not in IN_THE_MAKING or not _is_young(directory, name):
                raise LockError(_file_message(path, error, directory, name)) from error
        time.sleep(MAKING_POLL_S)
    raise LockError(f"{path} is still being made by another process. Try again.")


def open_to_look(directory: int, name: str, path: str | None = None) -> int | None:
    """Open a file to see whether it is locked; None if it is not there, or is no lock file.

    path: what messages call the file. With it what is no lock file, and so can't be locked by
    anybody, raises LockError.
    """
    try:
        return _open(directory, name, path or name, os.O_RDONLY)
    except FileNotFoundError:
        return None
    except LockError:
        if path is None:
            return None
        raise
    except OSError as error:
        if path is None and error.errno not in EXHAUSTED:
            return None
        raise LockError(_file_message(path or name, error, directory, name)) from error


def finish(descriptor: int, path: str, mode: int) -> None:
    """Give an open file of this user the permissions that it lacks. Raises LockError.

    Args:
        descriptor: The descriptor of the file.
        path: The path for messages.
        mode: The permissions.
    """
    try:
        _finish(descriptor, os.fstat(descriptor), mode)
    except OSError as error:
        raise LockError(f"The mode of {path} can't be set: {error.strerror}.") from error


def is_open_to_others(status: os.stat_result) -> bool:
    """Return whether other users can write to a file."""
    return bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def status_of(directory: int, name: str) -> os.stat_result | None:
    """Return the status of what has that name, be it a link; None if nothing can be seen."""
    with suppress(OSError):
        return os.stat(name, dir_fd=directory, follow_symlinks=False)
    return None


def sole_owner(directory: int, name: str) -> int | None:
    """Return the user that a regular file belongs to, if nobody else can write to it.

    The lock files of devices are writable by all, and so anybody can give them a second name, which
    would be locked as long as the device is.
    """
    status = status_of(directory, name)
    if status is None or not stat.S_ISREG(status.st_mode):
        return None
    return None if is_open_to_others(status) else status.st_uid


def is_others(directory: int, name: str) -> bool:
    """Tell whether something stands there that this user did not make."""
    status = status_of(directory, name)
    if status is None:
        return False
    is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
    return not is_own or status.st_nlink > 1


def is_current(directory: int, name: str, descriptor: int) -> bool:
    """Tell whether the open file is the one of that name, not one that was deleted since.

    directory: to look in; none is needed for an absolute path.
    """
    status = status_of(directory, name)
    with suppress(OSError):  # other code has closed the descriptor
        return status is not None and os.path.samestat(status, os.fstat(descriptor))
    return False


def _open(directory: int, name: str, path: str, flags: int, mode: int | None = None) -> int:
    """Open a regular file. Raises OSError, and LockError if it is none.

    mode: to be given to a file of this user's.
    """
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK
    with no_fork:
        descriptor = os.open(name, flags, mode or 0, dir_fd=directory)
        try:
            status = os.fstat(descriptor)
            _require_plain(status, path)
            if mode is not None:
                _finish(descriptor, status, mode)
            return remember(descriptor)
        except BaseException:
            os.close(descriptor)
            raise


def _require_own_files(directory: int, path: str) -> None:
    """Raise LockError for a directory in which anybody can delete the files of others."""
    status = os.fstat(directory)
    if status.st_mode & stat.S_ISVTX:  # else somebody made it for another purpose, or for himself
        _finish(directory, status, DIRECTORY_MODE)
    elif status.st_mode & stat.S_IWOTH:
        run = shell_line(f"chmod 1777 {path}")
        raise LockError(f"In {path} anybody can delete anybody's locks. Run: {run}")


def _finish(descriptor: int, status: os.stat_result, mode: int) -> None:
    """Give what this user made the mode that it is meant to have: the umask took away from it."""
    missing = mode & ~stat.S_IMODE(status.st_mode)
    if missing and status.st_uid == os.geteuid() and not is_open_to_others(status):
        os.chmod(f"/proc/self/fd/{descriptor}", mode)  # works for O_PATH, as fchmod does not


def _require_plain(status: os.stat_result, path: str) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, path)
    if not stat.S_ISREG(status.st_mode):
        raise LockError(f"{path} is not a regular file. Remove it, or ask its owner to.")
    if status.st_nlink > 1 and not status.st_mode & stat.S_IWOTH:  # else all may write to it anyway
        raise LockError(f"{path} is a second name of another file, which is not ours. Remove it.")


def _is_young(directory: int, name: str) -> bool:
    """Tell whether the file, or else the directory, was made or changed just now."""
    status = status_of(directory, name) or os.fstat(directory)
    return abs(time.time() - status.st_ctime) < YOUNG_S


def remedy(number: int | None, directory: str) -> str:
    """Return the advice for an error of the lock directory, or of a file in it.

    Args:
        number: The errno.
        directory: The path of the directory.
    """
    place = directory if os.path.exists(directory) else os.path.dirname(directory)
    is_denied = number in (errno.EACCES, errno.EPERM)
    if is_denied and not containers.container() and not os.access(place, os.W_OK | os.X_OK):
        return SET_ANOTHER  # its permissions deny it, and no sandbox
    if is_denied or number == errno.EROFS:
        return _to_allow(directory)
    if number in (errno.ENOSPC, errno.EDQUOT):
        return "Free some space there, or ask the administrator to."
    if number == errno.ESTALE:
        return "The network file system has lost it. Put the lock directory on a local one."
    if number == errno.EIO:
        return "The disk or its file system fails. Tell the administrator."
    if number in (errno.ENFILE, errno.ENOMEM):
        return "Tell the administrator: the whole machine is short of it."
    return SET_ANOTHER


def _to_allow(directory: str) -> str:
    """Return how to let this process write to a directory that is open to other processes."""
    if containers.container():
        how = containers.how_to_bind(directory)
        return f"To see the reservations of the whole machine, {how}, and let users write to it."
    return (
        f"Let this process write there: a sandbox needs {directory} among its writable paths, a "
        f"systemd service ReadWritePaths={directory}."
    )


def _directory_message(path: str, error: OSError) -> str:
    if error.errno == errno.EMFILE:
        return TOO_MANY_FILES
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        return f"The lock directory {path} is a link or no directory. {SET_ANOTHER}"
    return f"The lock directory {path} can't be used: {error.strerror}. {remedy(error.errno, path)}"


def _file_message(path: str, error: OSError, directory: int, name: str) -> str:
    if error.errno == errno.EMFILE:
        return TOO_MANY_FILES
    if error.errno == errno.ELOOP:
        return f"{path} is a link, which is never followed. Remove it, or ask its owner to."
    if error.errno == errno.EISDIR:
        return f"{path} is a directory, not a lock file. Remove it, or ask its owner to."
    folder, status = os.path.dirname(path), status_of(directory, name)
    mode = status.st_mode if status else 0
    if not stat.S_ISREG(mode) and error.errno in NOT_MADE:
        return _directory_message(folder, error)
    if status and error.errno == errno.EACCES and not mode & stat.S_IWOTH:
        return (
            f"This user may not open {path}. It belongs to uid {status.st_uid}; its mode must be "
            "0666."
        )
    if status and error.errno == errno.EAGAIN:  # fcntl(2), "Leases": O_NONBLOCK does not wait
        owner = procfs.user_name(status.st_uid)  # besides root only the owner can take a lease
        return (
            f"{path} can't be opened: a process of {owner} has a lease on it. Ask {owner}, or an "
            "administrator, to end that process. Run: grep LEASE /proc/locks"
        )
    return f"{path} can't be opened: {error.strerror or error}. {remedy(error.errno, folder)}"


# -- the descriptors of this process's locks ------------------------------------------------------

# A child made by fork inherits the descriptors, and with them the locks, which would then outlive
# this process. So the child closes them. It must not unlock them: that would free its parent's.
#
# Other code may close all descriptors of a process. Then a number means another file, or another
# open file description of the same file. So each number is stored with the file that it meant.

NONE = -1  # no descriptor

# By number: a serial number, then the file.
_opened: dict[int, tuple[object, ...]] = executor.survive_reload("opened", dict)
_serial = executor.survive_reload("serial", partial(count, 1))


def remember(descriptor: int) -> int:
    """Register a descriptor and return it. Open and register it in one `no_fork` block."""
    _hook_fork()
    _opened[descriptor] = (next(_serial), *_identity(descriptor))
    return descriptor


def opening(descriptor: int) -> tuple[object, ...] | None:
    """Return a unique key of a registered descriptor, or None if it means another file now."""
    known = _opened.get(descriptor)
    try:
        return known if known and known[1:] == _identity(descriptor) else None
    except OSError:
        return None


def close(descriptor: int) -> None:
    """Close a registered descriptor, unless it means another file now."""
    with no_fork:
        if opening(descriptor):
            os.close(descriptor)
        _opened.pop(descriptor, None)


@contextmanager
def closing(descriptor: int) -> Iterator[None]:
    """Close the descriptor at the end of the block."""
    try:
        yield
    finally:
        close(descriptor)


@contextmanager
def pidfd(pid: int) -> Iterator[int]:
    """Yield a pidfd of the process, closed at the end of the block. Raises OSError."""
    with no_fork:
        descriptor = remember(watchdog.open_process(pid))
    with closing(descriptor):
        yield descriptor


def adopt(descriptor: int) -> None:
    """Register a descriptor that was kept open over exec."""
    with no_fork:
        os.set_inheritable(descriptor, False)  # noqa: FBT003 - it takes no name
        remember(descriptor)


def _identity(descriptor: int) -> tuple[object, ...]:
    """Return a key of the open file."""
    status = os.fstat(descriptor)
    if stat.S_IFMT(status.st_mode):
        return status.st_dev, status.st_ino
    # A pidfd, epoll, eventfd and others share one inode, but their links differ.
    return (os.readlink(f"/proc/self/fd/{descriptor}"),)


@cache
def _hook_fork() -> None:
    """Register the fork hook once. Without it, every child would inherit every lock."""
    os.register_at_fork(after_in_child=_close_all)


def _close_all() -> None:
    for descriptor in list(_opened):
        close(descriptor)
