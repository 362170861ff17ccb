"""Who holds what: one lock file for each device, in a directory that all users of a machine share.

The only module that imports `fcntl`. A device is held by the process that has its file locked with
flock(2): the kernel drops the lock when that process ends, however it ends. What a file says is
written for people to read and decides nothing. We never delete a file, as a lock on a deleted file
is one that nobody else can see; against others who do there is the witness.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import contextmanager, suppress
from math import inf
from typing import TYPE_CHECKING, Any

from reserve_gpu import descriptors, files, processes, witness
from reserve_gpu.device import Holder
from reserve_gpu.errors import LockError, MutexHeldError
from reserve_gpu.settings import LOCK_DIRECTORY, default_path
from reserve_gpu.text import shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from typing_extensions import Self

with suppress(ImportError):  # Windows; nothing is locked there
    import fcntl

ALONE, SHARED, TICKET = ".lock", ".shared", ".ticket"
MUTEX = "mutex.lock"
MUTEX_LIMIT_S = 30.0
POLL_S = 0.01
MUTEX_ASK_S = 1.0  # between two looks at who has it
NONE = -1  # no descriptor
HIGH = 100  # the first number of a descriptor that a command inherits
ATTEMPTS = 10  # at a file that others replace
MAKING_ATTEMPTS = 200  # at one that somebody is just making
WITNESS_ATTEMPTS = 20  # at one that a process has that ends, or that is forked, just now


class Lock:
    """A lock that this process holds, until it is released or the process ends."""

    def __init__(
        self,
        descriptor: int,
        path: str,
        *,
        shared: bool = False,
        witness: int = NONE,
        since: float | None = None,
    ) -> None:
        self.path = path
        self.shared = shared
        self.witness = witness  # the descriptor of a socket
        self._since = since or time.time()
        self._signed = False
        self.descriptor = descriptor
        self._file = files.identity(os.fstat(descriptor))
        self._pid = os.getpid()

    def write(self, record: Mapping[str, Any]) -> None:
        """Say who holds the lock. A full disk loses the record, not the lock."""
        own = {"pid": self._pid, "namespace": processes.pid_namespace(), "since": self._since}
        own["written"] = time.time()
        data = json.dumps({**own, **processes.bounded(record)}).encode()
        self._signed = True
        with suppress(OSError):
            try:
                os.pwrite(self.descriptor, data, 0)
                os.ftruncate(self.descriptor, len(data))
            except OSError:
                os.ftruncate(self.descriptor, 0)

    def touch(self) -> None:
        """Set the file's time stamp to now; who may write to a file may do that."""
        if self.held():
            with suppress(OSError):
                os.utime(self.descriptor)

    def release(self) -> None:
        """Let go. Does nothing in a child of the process that took the lock, and nothing twice."""
        if not self.held():
            return
        if self._signed and not self.shared:  # what is written there may be another sharer's
            with suppress(OSError):
                os.ftruncate(self.descriptor, 0)
        descriptors.close(self.witness)  # before the file: who finds that free must not find this
        with suppress(OSError):  # a fork of just now may not have closed it yet
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)
        descriptors.close(self.descriptor)
        self.descriptor = self.witness = NONE  # the numbers may soon be another lock's

    def held(self) -> bool:
        """Whether this process, not its parent, still has the file open that it locked."""
        return self._pid == os.getpid() and descriptors.is_ours(self.descriptor)

    def give_witness(self) -> int:
        """Hand the witness over to another lock of the same name."""
        given, self.witness = self.witness, NONE
        return given

    def keep_over_exec(self) -> None:
        """Let the next program in this process have the lock, and what that starts."""
        self.descriptor, self.witness = (
            NONE if number == NONE else descriptors.keep_over_exec(_out_of_the_way(number))
            for number in (self.descriptor, self.witness)
        )

    def stands(self) -> bool:
        """Whether the locked file is still where others look for it, and not deleted."""
        with suppress(OSError):
            return files.identity(os.stat(self.path, follow_symlinks=False)) == self._file
        return False


class LockDirectory:
    """The directory of one machine's locks, open; a context manager.

    path: absolute; it is made, for all users, if it is not there.
    Raises LockError on entry if it can't be used.
    """

    def __init__(self, path: str | None = None) -> None:
        platform: str = sys.platform
        if platform != "linux":
            raise LockError(f"Reservations need Linux or WSL2; this is {platform}.")
        self.path = path or default_path()
        self._has_mutex = False
        self._pids: dict[str, list[int]] | None = None

    def __enter__(self) -> Self:
        self._fd = files.open_directory(self.path)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def acquire(
        self, name: str, *, shared: bool = False, again: Lock | None = None
    ) -> Lock | Holder:
        """Lock the file of that name, or say who has it locked, without waiting.

        shared: others may have it locked as well, if they share it too. again: this process's lock
        on a file of that name that was deleted since; its witness is taken over. Raises LockError.
        """
        if lock := self._try(name, shared=shared, again=again):
            return lock
        descriptor = self._open(name)
        try:
            return self._holder(descriptor, name)
        finally:
            descriptors.close(descriptor)

    def names(self) -> list[str]:
        """The names of all files there."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        try:
            descriptor = os.open(".", flags, dir_fd=self._fd)
            try:
                return os.listdir(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise LockError(f"{self.path} can't be listed: {error.strerror}.") from error

    def exists(self, name: str) -> bool:
        """Whether there is a file of that name, locked or not."""
        try:
            os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise LockError(f"{self.path} can't be searched: {error.strerror}.") from error
        return True

    def holder(self, name: str) -> Holder | None:
        """Who has the file of that name locked, if anybody; to be asked under the mutex alone."""
        if self.exists(name):
            found = self.acquire(name)
            if isinstance(found, Holder):
                return found
            found.release()
        return self._unlisted(name)

    def peek(self, name: str) -> Holder | None:
        """Who has the file of that name locked, by the kernel's list alone: nothing is locked."""
        if not self.exists(name):
            return self._unlisted(name)
        descriptor = self._open(name)
        try:
            holder = self._holder(descriptor, name)
            is_held = holder.seen or self._witnessed(name) is not None  # 0: by whom can't be seen
            return holder if is_held else None
        finally:
            descriptors.close(descriptor)

    def pids(self, name: str) -> list[int]:
        """The processes that have the file of that name locked, by the kernel's list."""
        try:
            file = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return []
        listed = self._locking_pids().get(processes.file_key(file), [])
        return [processes.keeper(pid, file) for pid in listed]

    def locked(self, names: Iterable[str]) -> set[str]:
        """Those of the files that a process has locked, by the kernel's list: no lock is tried."""
        listed, found = self._locking_pids(), set()
        for name in names:
            with suppress(FileNotFoundError):
                file = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
                found |= {name} if processes.file_key(file) in listed else set()
        return found

    def record(self, name: str) -> dict[str, Any]:
        """What is written in the file of that name; foreign text."""
        descriptor = self._open(name)
        try:
            return processes.parse(os.pread(descriptor, processes.LIMIT + 1, 0))
        finally:
            descriptors.close(descriptor)

    @contextmanager
    def mutex(self, limit_s: float = MUTEX_LIMIT_S, until: float = inf) -> Iterator[None]:
        """Hold the machine's mutex. Raises MutexHeldError if one process has it for limit_s s.

        until: the latest moment, by time.monotonic(), for whoever has something better to do; but
            a mutex that is free within a second is always waited for.
        """
        lock = self._try(MUTEX)
        start, asked, holder = time.monotonic(), 0.0, Holder()
        latest = max(until, start + MUTEX_ASK_S)
        limit_s = min(limit_s, latest - start)
        deadline = start + limit_s
        while lock is None:
            time.sleep(POLL_S)
            if (now := time.monotonic()) > asked + MUTEX_ASK_S or now > deadline:
                before, asked = holder, now
                holder = self.peek(MUTEX) or Holder()
                if holder.pid != before.pid:  # it is not the same one all the time
                    deadline = min(now + limit_s, latest)
            if now > deadline:
                raise MutexHeldError(_mutex_message(holder, limit_s))
            lock = self._try(MUTEX)
        try:
            self._has_mutex, self._pids = True, None
            yield
        finally:
            self._has_mutex = False
            lock.release()

    def _try(self, name: str, *, shared: bool = False, again: Lock | None = None) -> Lock | None:
        """Lock the file of that name, if nobody has it locked."""
        path = f"{self.path}/{name}"
        for _ in range(ATTEMPTS):
            descriptor = self._open(name)
            try:
                if not _flock(descriptor, path, shared=shared):
                    descriptors.close(descriptor)
                    return None
                if self._is_current(descriptor, name):
                    bound = again.give_witness() if again else _bind(path, shared=shared)
                    if bound is not None:
                        return Lock(descriptor, path, shared=shared, witness=bound)
                    descriptors.close(descriptor)
                    return None
            except BaseException:
                descriptors.close(descriptor)
                raise
            descriptors.close(descriptor)  # somebody replaced the file before we had locked it
        raise LockError(f"{path} is replaced again and again.")

    def _open(self, name: str) -> int:
        if "/" in name or name.startswith("."):  # it comes from the driver
            raise LockError(f"{shown(name)!r} can't be the name of a lock.")
        for _ in range(MAKING_ATTEMPTS):
            with descriptors.opening():
                descriptor = files.open_file(self._fd, name, f"{self.path}/{name}")
                if descriptor is not None:
                    return descriptors.note(descriptor)
            time.sleep(POLL_S)
        raise LockError(f"{self.path}/{name} is not finished by whoever makes it.")

    def _locking_pids(self) -> dict[str, list[int]]:
        """The kernel's list of locks, read once while nobody else can take one of ours."""
        if not self._has_mutex:
            return processes.locking_pids()
        if self._pids is None:
            self._pids = processes.locking_pids()
        return self._pids

    def _unlisted(self, name: str) -> Holder | None:
        """Who holds what this is the name of without its file, which somebody deleted."""
        pid = self._witnessed(name)
        return None if pid is None else Holder(pid=pid or None, seen=pid > 0)

    def _witnessed(self, name: str) -> int | None:
        return witness.holder(f"{self.path}/{name}", shared=name.endswith(SHARED))

    def _is_current(self, descriptor: int, name: str) -> bool:
        try:
            there = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return files.identity(there) == files.identity(os.fstat(descriptor))

    def _holder(self, descriptor: int, name: str) -> Holder:
        """Who has the file locked: by the kernel's list where it shows us, and by the record."""
        record = processes.parse(os.pread(descriptor, processes.LIMIT + 1, 0))
        file = os.fstat(descriptor)
        listed = self._locking_pids().get(processes.file_key(file), ())
        pid = next(iter(listed), None) or self._witnessed(name)
        holder = processes.merge(record, pid or None, file.st_mtime)
        if holder.seen and holder.pid:
            holder = holder.replace(pid=processes.keeper(holder.pid, file))
        if name.endswith(SHARED) and holder.seen and not holder.confirmed:
            return Holder(pid=holder.pid, seen=True)  # what is written there is another sharer's
        return holder


def file_name(uuid: str, *, shared: bool = False) -> str:
    """The lock file of a device, or the one that those who share it hold together.

    Two files, as the holder of the first must not keep others from sharing what is theirs to share.
    """
    return f"{uuid.replace('/', '_')}{SHARED if shared else ALONE}"  # old MIG UUIDs have slashes


def _out_of_the_way(descriptor: int) -> int:
    """The same under a number that no script uses, as one that says `exec 5>log` does."""
    with suppress(OSError):  # so many may not be open here
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, HIGH)
    return descriptor


def _flock(descriptor: int, path: str, *, shared: bool) -> bool:
    """Lock the file if nobody else has it locked in a way that excludes this one."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise LockError(
            f"{path} can't be locked: {error.strerror}. The file system has no flock; set "
            f"{LOCK_DIRECTORY} to a directory on a local one."
        ) from error
    return True


def _bind(path: str, *, shared: bool) -> int | None:
    """The descriptor of the witness of a locked file, NONE where there can be none.

    None if another process has it: where the file is a new one, in the place of one that the other
    process locked, and for a moment where that process is ending.
    """
    name = os.path.basename(path)
    if name == MUTEX or not (shared or name.endswith(ALONE)):
        return NONE
    for _ in range(WITNESS_ATTEMPTS):
        with descriptors.opening():
            try:
                bound = witness.bind(path, shared=shared)
            except OSError:
                return NONE
            if bound is not None:
                number = descriptors.note(bound.fileno())  # interrupted here, it is closed
                bound.detach()
                return number
        if shared:
            return NONE  # they are very many
        time.sleep(POLL_S)
    return None


def adopt(descriptor: int, path: str, *, shared: bool, witness_number: int = NONE) -> Lock | None:
    """The lock that this process had before exec made it another program; None if it is not that.

    Only the kernel is believed: the descriptor is open, its file is the one at the path, and this
    very opening of the file has it locked. From now on it is closed in forks and over exec.
    """
    with suppress(OSError, OverflowError, ValueError):
        there = files.identity(os.stat(path, follow_symlinks=False))
        is_there = files.identity(os.fstat(descriptor)) == there
        if not is_there or not _has_locked(descriptor, shared=shared):
            return None
        if witness_number != NONE and not witness.is_bound(witness_number, path, shared=shared):
            witness_number = NONE
        record = {} if shared else processes.parse(os.pread(descriptor, processes.LIMIT + 1, 0))
        for number in {descriptor, witness_number} - {NONE}:
            descriptors.adopt(number)
        since = processes.merge(record, None).since
        return Lock(descriptor, path, shared=shared, witness=witness_number, since=since)
    return None


def _has_locked(descriptor: int, *, shared: bool) -> bool:
    """Whether this opening of the file, not another one, has it locked.

    `lock: 1: FLOCK ADVISORY WRITE 4321 00:19:47 0 EOF`: Documentation/filesystems/proc.rst.
    """
    kind = ["FLOCK", "ADVISORY", "READ" if shared else "WRITE"]
    with open(f"/proc/self/fdinfo/{descriptor}", encoding="utf-8") as info:
        return any(line.startswith("lock:") and line.split()[2:5] == kind for line in info)


def _mutex_message(holder: Holder, limit_s: float) -> str:
    who = "a process that can't be seen from here"
    if holder.pid:
        who = f"process {holder.pid} of {processes.user_of(holder.pid)}"
    return (
        f"Another reservation has been under way for {limit_s:g} s, by {who}. If the NVIDIA driver "
        "hangs there, that process must end before anybody can reserve a GPU; else try again."
    )
