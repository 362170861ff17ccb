"""One lock: a file locked with flock(2), which the kernel drops when its process ends.

The record in the file is for people to read. Only the lock decides.
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
KINDS = ("FLOCK", "OFDLCK")  # the locks of `lock_file` and `write_lock` in /proc/locks
RECORD_LIMIT = 1 << 16  # bytes
HIGH = 100  # scripts use the descriptors below it, as in `exec 5>log`


class Lock:
    """A lock that this process has, until it is released or the process ends.

    descriptor: The locked file. path: The path of that file. taken: The time of the lock.

    Attributes:
        owned: The lock on a file next to it that only this user can write. The record in there
            is the one that others trust. None if the locked file itself is such a file.
        is_write_locked: Whether write_lock has locked it as well.
    """

    owned: Lock | None = None
    is_write_locked = False

    def __init__(self, descriptor: int, path: str, taken: Instant | None = None) -> None:
        self.path = path
        self.descriptor = descriptor
        self.taken = taken or procfs.now()
        self._opening = files.opening(descriptor)
        self._pid = os.getpid()

    @property
    def since(self) -> float:
        """Return the time of the lock by the wall clock of that time. Joined processes note it."""
        return self.taken.wall

    @property
    def name(self) -> str:
        """Return the name of the file in its directory."""
        return os.path.basename(self.path)

    def write(self, record: Record) -> str | None:
        """Write the record of the holder.

        Returns:
            The system's reason if the record is lost, as on a full disk. The lock is not.
        """
        if not self.held():
            return None
        now = procfs.now()
        record = record._replace(since=self.taken.wall, since_boot=self.taken.boot)
        record = record._replace(written=now.wall, written_boot=now.boot)
        reason = self.owned.write(record) if self.owned else None
        # Older versions read the file of the device, which every user can write.
        record = record._replace(write_locked=self.is_write_locked)
        return write_record(self.descriptor, record) or reason

    def stamp(self, nanoseconds: int | None = None) -> None:
        """Set the time of the file's last change: to now, or to that time since the epoch."""
        if self.owned:
            self.owned.stamp(nanoseconds)
        if self.held():
            with suppress(OSError):
                if nanoseconds is None:
                    os.utime(self.descriptor)
                else:
                    os.utime(self.descriptor, ns=(nanoseconds, nanoseconds))

    def release(self, *, keeps_record: bool = False) -> None:
        """Release the lock, if this process took it and still has it; a forked child has not.

        keeps_record: what is written in the file stays, for who comes back.
        """
        if self.owned:
            self.owned.release(keeps_record=keeps_record)
        if not self.held():
            return
        if not keeps_record:
            with suppress(OSError):
                os.ftruncate(self.descriptor, 0)
        # A child that was forked in C runs no hook of Python's: it still has the file open.
        with suppress(OSError):
            file_control.unlock_file(self.descriptor)
        files.close(self.descriptor)
        self.descriptor = files.NONE  # the number may soon be another file's

    def held(self) -> bool:
        """Tell whether this process, not its parent, still has the file open that it locked."""
        opening = files.opening(self.descriptor)
        return self._pid == os.getpid() and opening is not None and opening == self._opening

    def is_valid(self) -> bool:
        """Tell whether it keeps others off: it is held, and they find its file under its name."""
        return self.held() and files.is_current(files.NONE, self.path, self.descriptor)

    def keep_over_exec(self) -> None:
        """Pass the lock on to the program that this process becomes, and to its children."""
        if self.owned:
            self.owned.keep_over_exec()
        with no_fork, suppress(OSError):  # the limit of open files may be lower than HIGH
            number = file_control.duplicate(self.descriptor, HIGH)
            files.remember(number)
            files.close(self.descriptor)
            self.descriptor, self._opening = number, files.opening(number)
        os.set_inheritable(self.descriptor, True)  # noqa: FBT003 - it takes no name


def flock(descriptor: int, path: str) -> bool:
    """Lock the open file, unless another process has it locked. Raises LockError.

    path: what messages call the file.
    """
    try:
        file_control.lock_file(descriptor)
    except BlockingIOError:
        return False
    except OSError as error:
        why = cause(error.errno, os.path.dirname(path))
        raise LockError(f"{path} can't be locked: {error.strerror}. {why}") from error
    return True


def cause(number: int | None, directory: str) -> str:
    """Return the cause of an error of flock(2), with advice.

    Args:
        number: The errno.
        directory: The path of the lock directory.
    """
    if number in NO_FLOCK:
        return "The file system has no flock; put the lock directory on a local one."
    if number in (errno.EACCES, errno.EPERM):
        return (
            "A security policy denies it, as AppArmor or SELinux do. Ask the administrator to "
            f"allow locks on the files in {directory} (in AppArmor the permission k)."
        )
    return files.remedy(number, directory)


def kernel_device(descriptor: int) -> str | None:
    """Return what the kernel's list of locks calls the file system of a locked file.

    On btrfs, overlayfs and others that is not the st_dev of stat(2). None if this very opening of
    the file has it not locked. Documentation/filesystems/proc.rst, "/proc/<pid>/fdinfo".
    """
    with suppress(OSError), open(f"/proc/self/fdinfo/{descriptor}", encoding="utf-8") as info:
        for line in info:  # `lock: 1: FLOCK ADVISORY WRITE 4321 00:19:47 0 EOF`
            fields = line.split()
            if fields[0] == "lock:" and fields[2] in KINDS and fields[4] == "WRITE":
                return fields[6].rpartition(":")[0]
    return None


# -- the record in a lock file ---------------------------------------------------------------------


def myself() -> ProcessInfo:
    """Describe this process for the record.

    Readers that can see this process take its user from the kernel, so $LOGNAME is good enough
    here.
    """
    title = process_identity.title()
    return ProcessInfo(
        user=os.environ.get("LOGNAME") or procfs.user_of(os.getpid()),
        # An ipyparallel engine inherits the variable of the notebook that started it.
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
    """Return the record in an open lock file, an empty one if the file contains none."""
    return Record.from_dict(read_fields(descriptor))


def write_record(descriptor: int, record: Record) -> str | None:
    """Write the record into an open lock file, unless it is there already.

    Returns:
        The system's reason if the record is lost, as on a full disk.
    """
    new, old = record.to_dict(), read_fields(descriptor)
    if old and _without_times(new) == _without_times(old):
        return None
    data = untrusted.encoded(new, RECORD_LIMIT)
    try:
        # Overwrite a longer record completely: a reader must not find its end after this one.
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
    """Return the fields in an open lock file; an empty dict if it contains none."""
    with suppress(OSError, ValueError):
        parsed = untrusted.parsed(os.pread(descriptor, RECORD_LIMIT + 1, 0), RECORD_LIMIT)
        if isinstance(parsed, dict):
            return parsed
    return {}


def _without_times(said: Mapping[str, Any]) -> dict[str, Any]:
    times = ("since", "written", "since_boot", "written_boot")
    return {name: value for name, value in said.items() if name not in times}
