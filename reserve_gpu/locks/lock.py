"""A flock(2) lock on one file. The Linux kernel releases it when the process exits.

The record in the file only informs other users. The lock alone determines whether a device is held.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from reserve_gpu.locks import files
from reserve_gpu.model import untrusted
from reserve_gpu.model.errors import LockError
from reserve_gpu.model.holders import ProcessInfo, Record
from reserve_gpu.system import file_control, jupyter_kernel, process_identity, procfs, settings
from reserve_gpu.system.forks import no_fork

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reserve_gpu.model.clocks import Instant

NO_FLOCK = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
KINDS = ("FLOCK", "OFDLCK")  # how /proc/locks labels locks from `lock_file` and `write_lock`
RECORD_LIMIT = 1 << 16  # maximum size of a record, in bytes
HIGH = 100  # lowest descriptor to keep across exec; shell scripts use lower ones (`exec 5>log`)


class Lock:
    """A lock that this process holds until the lock is released or the process exits.

    Args:
        descriptor: The locked file's descriptor.
        path: The locked file's path.
        taken: The time when the lock was taken. Defaults to now.

    Attributes:
        owned: The lock on the record file, if this is the lock on a whole device. Only the record
            file's owner can write to it, so other processes trust the record in it. None if there
            is no record file.
        is_write_locked: Whether the file is also locked with `write_lock`.
    """

    owned: Lock | None = None
    is_write_locked = False

    def __init__(self, descriptor: int, path: str, taken: Instant | None = None) -> None:
        self.path = path
        self.descriptor = descriptor
        self.taken = taken or procfs.now()
        self._opening = files.opening_key(descriptor)
        self._pid = os.getpid()

    @property
    def since(self) -> float:
        """Return the wall-clock time when the lock was taken, regardless of later clock changes."""
        return self.taken.wall

    @property
    def name(self) -> str:
        """Return the name of the lock file."""
        return os.path.basename(self.path)

    def write(self, record: Record) -> str | None:
        """Write the holder's record to the lock file.

        Returns:
            The system's error message if the record can't be written, for example because the disk
            is full, or None on success. The lock is held in either case.
        """
        if not self.held():
            return None
        now = procfs.now()
        record = record._replace(since=self.taken.wall, since_boot=self.taken.boot)
        record = record._replace(written=now.wall, written_boot=now.boot)
        reason = self.owned.write(record) if self.owned else None
        # Older versions read the record from the device's lock file, although it is untrusted.
        record = record._replace(write_locked=self.is_write_locked)
        return write_record(self.descriptor, record) or reason

    def release_device(self, *, was_held: bool) -> None:
        """Release a device's lock, but keep the record in the file that only this user can write.

        The record names the last holder, whose processes or memory might still be on the device.

        Args:
            was_held: Whether this process has held the device. Otherwise, the record is from an
                earlier process.
        """
        signed = self.owned or self
        if signed.is_write_locked:
            if was_held:
                # Other users need no more than the process's name and pid.
                who = describe_this_process()._replace(
                    cwd=None, origin=None, agent=None, job=None, job_name=None, mounts=None
                )
                signed.write(Record(who, released=True))
            signed.release(keeps_record=True)
        self.release()

    def stamp(self, nanoseconds: int | None = None) -> None:
        """Set the lock file's modification time.

        Args:
            nanoseconds: The time in nanoseconds since the epoch. Defaults to now.
        """
        if self.owned:
            self.owned.stamp(nanoseconds)
        if self.held():
            with suppress(OSError):
                if nanoseconds is None:
                    os.utime(self.descriptor)
                else:
                    os.utime(self.descriptor, ns=(nanoseconds, nanoseconds))

    def release(self, *, keeps_record: bool = False) -> None:
        """Release the lock if this process took it and still holds it.

        In a forked child, this method does nothing.

        Args:
            keeps_record: Whether to leave the record in the file, so that a waiter can return to
                its position in the queue.
        """
        if self.owned:
            self.owned.release(keeps_record=keeps_record)
        if not self.held():
            return
        if not keeps_record:
            with suppress(OSError):
                os.ftruncate(self.descriptor, 0)
        # If C code forked a child, Python's fork hooks did not run, so the child still has the file
        # open. Closing the descriptor here would then not release the lock.
        with suppress(OSError):
            file_control.unlock_file(self.descriptor)
        files.close(self.descriptor)
        self.descriptor = files.NONE  # the number might be reused for another file

    def held(self) -> bool:
        """Return whether this process, and not its parent, took the lock and still holds it."""
        opening = files.opening_key(self.descriptor)
        return self._pid == os.getpid() and opening is not None and opening == self._opening

    def is_valid(self) -> bool:
        """Return whether the lock is held and its file still exists at its path."""
        return self.held() and files.is_current(files.NONE, self.path, self.descriptor)

    def keep_over_exec(self) -> None:
        """Keep the lock across exec, and let child processes that are started later inherit it."""
        if self.owned:
            self.owned.keep_over_exec()
        with no_fork, suppress(OSError):  # the limit on open files might be below HIGH
            number = file_control.duplicate(self.descriptor, HIGH)
            files.remember(number)
            files.close(self.descriptor)
            self.descriptor, self._opening = number, files.opening_key(number)
        os.set_inheritable(self.descriptor, True)  # noqa: FBT003 - positional-only


def flock(descriptor: int, path: str) -> bool:
    """Lock an open file, unless another process has locked it.

    Args:
        descriptor: The file's descriptor.
        path: The file's path, for error messages.

    Returns:
        Whether the file is now locked.

    Raises:
        LockError: The file can't be locked.
    """
    try:
        file_control.lock_file(descriptor)
    except BlockingIOError:
        return False
    except OSError as error:
        advice = cause(error.errno, os.path.dirname(path))
        raise LockError(f"{path} can't be locked: {error.strerror}. {advice}") from error
    return True


def cause(number: int | None, directory: str) -> str:
    """Return the cause of a flock(2) error, and advice on how to fix it.

    Args:
        number: The errno.
        directory: The lock directory's path.
    """
    if number in NO_FLOCK:
        return (
            "The file system does not support flock. Put the lock directory on a local file system."
        )
    if number in (errno.EACCES, errno.EPERM):
        return (
            "A security policy such as AppArmor or SELinux denies it. Ask the administrator to "
            f"allow locks on the files in {directory} (permission k in AppArmor)."
        )
    return files.remedy(number, directory)


def kernel_device(descriptor: int) -> str | None:
    """Return the device number that /proc/locks shows for a locked file.

    On btrfs, overlayfs and some other file systems, this number differs from the `st_dev` that
    stat(2) returns. See "/proc/<pid>/fdinfo" in the Linux kernel's
    Documentation/filesystems/proc.rst.

    Returns:
        The device number, such as `00:19`, or None if this file description does not hold the lock.
    """
    with suppress(OSError), open(f"/proc/self/fdinfo/{descriptor}", encoding="utf-8") as info:
        for line in info:  # `lock: 1: FLOCK ADVISORY WRITE 4321 00:19:47 0 EOF`
            fields = line.split()
            if fields[0] == "lock:" and fields[2] in KINDS and fields[4] == "WRITE":
                return fields[6].rpartition(":")[0]
    return None


# -- the record in a lock file ---------------------------------------------------------------------


def describe_this_process() -> ProcessInfo:
    """Return a description of this process for use in its records.

    $LOGNAME is good enough for the user's name, because a reader that can see this process gets the
    user from the Linux kernel instead.
    """
    title = process_identity.title()
    return ProcessInfo(
        user=os.environ.get("LOGNAME") or procfs.user_of(os.getpid()),
        # An ipyparallel engine inherits the environment of the notebook that started it.
        notebook=None if title else process_identity.notebook(),
        command=title or process_identity.own_command(),
        cwd=process_identity.working_directory(),
        pid=os.getpid(),
        namespace=procfs.pid_namespace(),
        origin=jupyter_kernel.origin(),
        agent=os.environ.get(settings.AGENT) or None,
        job=process_identity.job(),
        job_name=os.environ.get("SLURM_JOB_NAME"),
        mounts=procfs.mount_namespace(),
    )


def read_record(descriptor: int) -> Record:
    """Return the record in an open lock file, or an empty record if the file contains none."""
    return Record.from_dict(read_fields(descriptor))


def write_record(descriptor: int, record: Record) -> str | None:
    """Write a record to an open lock file, unless only the time of writing would change.

    Returns:
        The system's error message if the record can't be written, for example because the disk is
        full, or None on success.
    """
    new, old = record.to_dict(), read_fields(descriptor)
    if old and _without_time(new) == _without_time(old):
        return None
    data = untrusted.encoded(new, RECORD_LIMIT)
    try:
        # Pad the new record to the old record's length, so that no reader sees the rest of the old
        # record after the new one.
        data = data.ljust(min(os.fstat(descriptor).st_size, RECORD_LIMIT))
        if os.pwrite(descriptor, data, 0) == len(data):
            os.ftruncate(descriptor, len(data))
            return None
        reason = os.strerror(errno.ENOSPC)
    except OSError as error:
        reason = error.strerror or str(error)
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
    return reason


def read_fields(descriptor: int) -> dict[str, Any]:
    """Return the record's fields from an open lock file, or an empty dict if it has no record."""
    with suppress(OSError, ValueError):
        parsed = untrusted.parsed(os.pread(descriptor, RECORD_LIMIT + 1, 0), RECORD_LIMIT)
        if isinstance(parsed, dict):
            return parsed
    return {}


def _without_time(fields: Mapping[str, Any]) -> dict[str, Any]:
    times = ("written", "written_boot")
    return {name: value for name, value in fields.items() if name not in times}
