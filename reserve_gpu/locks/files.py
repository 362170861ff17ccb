"""Open lock files and their directory safely, although every user can create files there.

Symbolic links are never followed, and only regular files are opened. A file with several hard links
is rejected unless every user can write to it.

New files and directories get the intended mode regardless of the umask. If a process is killed
before it has set a new file's mode, the next process of the same user sets it.
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
YOUNG_S = 1.0  # seconds for which a new file's permissions might be incomplete
# Errors when opening a file that another process is creating.
CREATION_ERRORS = {errno.EACCES, errno.EEXIST}
# Errors caused by this process or machine. A file's owner can cause any other error, through the
# file's mode, a lease on the file (EAGAIN), or a file system mounted over it.
EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
# Errors when this process can't create a file in a directory.
CANNOT_CREATE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT}
CREATION_ATTEMPTS = 200  # maximum attempts to open a file that another process is creating
CREATION_POLL_S = 0.01
SET_ANOTHER = "Set RESERVE_GPU_LOCK_DIR to a directory that all users of this machine can write to."


def open_directory(path: str) -> int:
    """Open the lock directory, creating it for all users if it does not exist.

    Args:
        path: The directory's path.

    Returns:
        The directory's descriptor, opened with O_PATH and registered with `remember`.

    Raises:
        LockError: The directory can't be used, or users could delete each other's files in it.
    """
    try:
        with suppress(FileExistsError):
            os.mkdir(path, DIRECTORY_MODE)
        # With umask 0777, not even the creator can read a new directory, but O_PATH still works.
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
    """Open a lock file for reading and writing, creating the file if it does not exist.

    Args:
        directory: The descriptor that `open_directory` returned.
        name: The file's name in the directory.
        path: The file's path, for error messages.
        mode: The mode that the file should have.

    Returns:
        The file's descriptor, registered with `remember`.

    Raises:
        LockError: The file can't be opened or created, or is not a regular file.
    """
    for _ in range(CREATION_ATTEMPTS):
        try:
            # Try without O_CREAT first, because fs.protected_regular denies O_CREAT on other users'
            # files.
            with suppress(FileNotFoundError):
                return _open(directory, name, path, os.O_RDWR, mode)
            return _open(directory, name, path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
        except OSError as error:
            if error.errno not in CREATION_ERRORS or not _is_young(directory, name):
                raise LockError(_file_message(path, error, directory, name)) from error
        time.sleep(CREATION_POLL_S)
    raise LockError(f"Another process is still creating {path}. Try again.")


def open_to_read(directory: int, name: str, path: str | None = None) -> int | None:
    """Open a file for reading, to check whether it is locked.

    Args:
        directory: The descriptor that `open_directory` returned.
        name: The file's name in the directory.
        path: The file's path, for error messages. Without it, errors that the file's owner could
            have caused are not raised.

    Returns:
        The file's descriptor, registered with `remember`, or None if the file does not exist. If
        `path` is omitted, also None if the file can't be opened or can't be a lock file.

    Raises:
        LockError: The process or machine has too many open files or too little memory. If `path`
            is given, also raised if the file can't be opened or can't be a lock file.
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
    """Set an open file's mode if this user owns the file and permissions are missing.

    Args:
        descriptor: The file's descriptor.
        path: The file's path, for error messages.
        mode: The mode that the file should have.

    Raises:
        LockError: The mode can't be set.
    """
    try:
        _finish(descriptor, os.fstat(descriptor), mode)
    except OSError as error:
        raise LockError(f"The permissions of {path} can't be set: {error.strerror}.") from error


def is_open_to_others(status: os.stat_result) -> bool:
    """Return whether users other than the owner can write to a file."""
    return bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def status_of(directory: int, name: str) -> os.stat_result | None:
    """Return the stat result of a file or a symbolic link, or None if it is not accessible."""
    with suppress(OSError):
        return os.stat(name, dir_fd=directory, follow_symlinks=False)
    return None


def sole_owner(directory: int, name: str) -> int | None:
    """Return the UID of a regular file's owner, or None if other users can write to the file.

    Any user can write to a device's lock file, and can therefore create a hard link to it. The link
    appears to be locked whenever the lock file is, so its owner must not be taken for a holder.
    """
    status = status_of(directory, name)
    if status is None or not stat.S_ISREG(status.st_mode):
        return None
    return None if is_open_to_others(status) else status.st_uid


def is_taken(directory: int, name: str) -> bool:
    """Return whether a name is taken by something other than one of this user's files.

    A name also counts as taken if its file is not a regular file or has several hard links.
    """
    status = status_of(directory, name)
    if status is None:
        return False
    is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
    return not is_own or status.st_nlink > 1


def is_current(directory: int, name: str, descriptor: int) -> bool:
    """Return whether a path still refers to the given open file.

    Args:
        directory: The descriptor of the file's directory, or `NONE` if `name` is an absolute path.
        name: The file's name or absolute path.
        descriptor: The open file's descriptor.
    """
    with suppress(OSError):  # other code might have closed the descriptor
        return is_same(directory, name, os.fstat(descriptor))
    return False


def is_same(directory: int, name: str, file: os.stat_result) -> bool:
    """Return whether a path refers to the given file, as in `is_current`."""
    status = status_of(directory, name)
    return status is not None and os.path.samestat(status, file)


def _open(directory: int, name: str, path: str, flags: int, mode: int | None = None) -> int:
    """Open and register a regular file. If a mode is given, add missing permissions.

    Raises:
        OSError: The file can't be opened.
        LockError: The file can't be a lock file.
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
    """Raise LockError if users can delete each other's files in the directory."""
    status = os.fstat(directory)
    if status.st_mode & stat.S_ISVTX:  # without this bit, the directory might serve another purpose
        _finish(directory, status, DIRECTORY_MODE)
    elif status.st_mode & stat.S_IWOTH:
        run = shell_line(f"chmod 1777 {path}")
        raise LockError(f"In {path}, any user can delete other users' locks. Run: {run}")


def _finish(descriptor: int, status: os.stat_result, mode: int) -> None:
    """Set the mode of a file or directory that this user created with a restrictive umask."""
    missing = mode & ~stat.S_IMODE(status.st_mode)
    if missing and status.st_uid == os.geteuid() and not is_open_to_others(status):
        os.chmod(f"/proc/self/fd/{descriptor}", mode)  # fchmod rejects O_PATH descriptors


def _require_plain(status: os.stat_result, path: str) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, path)
    if not stat.S_ISREG(status.st_mode):
        raise LockError(f"{path} is not a regular file. Remove it, or ask its owner to.")
    # Any user can create hard links to a world-writable file, so accept those.
    if status.st_nlink > 1 and not status.st_mode & stat.S_IWOTH:
        raise LockError(f"{path} is a hard link to another file. Remove it.")


def _is_young(directory: int, name: str) -> bool:
    """Return whether a file, or its directory if the file is missing, was changed very recently."""
    status = status_of(directory, name) or os.fstat(directory)
    return abs(time.time() - status.st_ctime) < YOUNG_S


def remedy(number: int | None, directory: str) -> str:
    """Return advice on how to fix an error in the lock directory.

    Args:
        number: The errno.
        directory: The directory's path.
    """
    folder = directory if os.path.exists(directory) else os.path.dirname(directory)
    is_denied = number in (errno.EACCES, errno.EPERM)
    if is_denied and not containers.container() and not os.access(folder, os.W_OK | os.X_OK):
        return SET_ANOTHER  # the directory's own permissions deny access
    if is_denied or number == errno.EROFS:
        return _writing_advice(directory)
    if number in (errno.ENOSPC, errno.EDQUOT):
        return "Free some space there, or ask the administrator to."
    if number == errno.ESTALE:
        return "The network file system has lost it. Put the lock directory on a local file system."
    if number == errno.EIO:
        return "The disk or its file system is failing. Tell the administrator."
    if number in (errno.ENFILE, errno.ENOMEM):
        return "The whole machine is affected. Tell the administrator."
    return SET_ANOTHER


def _writing_advice(directory: str) -> str:
    """Return advice on how to let this process write to the lock directory."""
    if containers.container():
        how = containers.bind_instruction(directory)
        return (
            f"To see all reservations on this machine from this container, {how}. All users must "
            "be able to write to that directory."
        )
    return (
        f"Let this process write there: add {directory} to the sandbox's writable paths, or add "
        f"ReadWritePaths={directory} to the systemd service."
    )


def _directory_message(path: str, error: OSError) -> str:
    if error.errno == errno.EMFILE:
        return TOO_MANY_FILES
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        return f"The lock directory {path} is a symbolic link, or not a directory. {SET_ANOTHER}"
    return f"The lock directory {path} can't be used: {error.strerror}. {remedy(error.errno, path)}"


def _file_message(path: str, error: OSError, directory: int, name: str) -> str:
    if error.errno == errno.EMFILE:
        return TOO_MANY_FILES
    if error.errno == errno.ELOOP:
        return (
            f"{path} is a symbolic link. Symbolic links are not followed here. Remove it, or ask "
            "its owner to."
        )
    if error.errno == errno.EISDIR:
        return f"{path} is a directory, not a lock file. Remove it, or ask its owner to."
    folder, status = os.path.dirname(path), status_of(directory, name)
    mode = status.st_mode if status else 0
    if not stat.S_ISREG(mode) and error.errno in CANNOT_CREATE:
        return _directory_message(folder, error)
    if status and error.errno == errno.EACCES and not mode & stat.S_IWOTH:
        return (
            f"You don't have permission to open {path}. It belongs to UID {status.st_uid}, and its "
            "mode must be 0666."
        )
    if status and error.errno == errno.EAGAIN:  # see fcntl(2), "Leases"
        owner = procfs.user_name(status.st_uid)  # only the file's owner and root can take a lease
        return (
            f"{path} can't be opened: a process of {owner} has a lease on it. Ask {owner}, or an "
            "administrator, to end that process. To find it, run: grep LEASE /proc/locks"
        )
    return f"{path} can't be opened: {error.strerror or error}. {remedy(error.errno, folder)}"


# -- descriptors of this process's locks ----------------------------------------------------------

# A forked child inherits the descriptors and therefore the locks, which would then outlive this
# process. To prevent this, the child closes the descriptors. It must not unlock the files, because
# that would release its parent's locks.
#
# Other code might close all of a process's descriptors. A descriptor's number might then be reused
# for another file, or for another open file description of the same file. Each number is therefore
# stored with a serial number and the file's identity.

NONE = -1  # used where there is no descriptor

# Each descriptor's serial number and file identity.
_opened: dict[int, tuple[object, ...]] = executor.survive_reload("opened", dict)
_serial = executor.survive_reload("serial", partial(count, 1))


def remember(descriptor: int) -> int:
    """Register a descriptor for forked children to close, and return the descriptor.

    Open and register a descriptor in the same `no_fork` block, so that no fork happens in between.
    """
    _hook_fork()
    _opened[descriptor] = (next(_serial), *_identity(descriptor))
    return descriptor


def opening_key(descriptor: int) -> tuple[object, ...] | None:
    """Return a registered descriptor's unique key, or None if its file was closed."""
    known = _opened.get(descriptor)
    try:
        return known if known and known[1:] == _identity(descriptor) else None
    except OSError:
        return None


def close(descriptor: int) -> None:
    """Close a registered descriptor, unless its number now belongs to another file."""
    with no_fork:
        if opening_key(descriptor):
            os.close(descriptor)
        _opened.pop(descriptor, None)


@contextmanager
def closing(descriptor: int) -> Iterator[None]:
    """Close the descriptor at the end of the `with` block."""
    try:
        yield
    finally:
        close(descriptor)


@contextmanager
def pidfd(pid: int) -> Iterator[int]:
    """Yield a pidfd for the process, and close it at the end of the `with` block.

    Raises:
        OSError: The process does not exist, or pidfds are not supported.
    """
    with no_fork:
        descriptor = remember(watchdog.open_process(pid))
    with closing(descriptor):
        yield descriptor


def adopt(descriptor: int) -> None:
    """Register a descriptor that stayed open across exec."""
    with no_fork:
        os.set_inheritable(descriptor, False)  # noqa: FBT003 - positional-only
        remember(descriptor)


def _identity(descriptor: int) -> tuple[object, ...]:
    """Return values that identify an open file."""
    status = os.fstat(descriptor)
    if stat.S_IFMT(status.st_mode):
        return status.st_dev, status.st_ino
    # All pidfd, epoll and eventfd descriptors share one inode, but their links in /proc differ.
    return (os.readlink(f"/proc/self/fd/{descriptor}"),)


@cache
def _hook_fork() -> None:
    """Register the fork hook once. Without it, forked children would keep all locks."""
    os.register_at_fork(after_in_child=_close_all)


def _close_all() -> None:
    for descriptor in list(_opened):
        close(descriptor)
