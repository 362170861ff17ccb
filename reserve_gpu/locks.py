"""Who holds what: one lock file for each device, in a directory that all users of a machine share.

The only module that imports `fcntl`. A device is held by the process that has its file locked with
flock(2), and by nothing else: the kernel drops the lock when that process ends, however it ends.
What a file says is written for people to read and decides nothing. Files are never deleted: a lock
on a deleted file would be a lock that nobody else can see.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from reserve_gpu import files, records
from reserve_gpu.device import Holder
from reserve_gpu.errors import LockError, MutexHeldError
from reserve_gpu.names import shown
from reserve_gpu.places import default_path
from reserve_gpu.settings import LOCK_DIRECTORY

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from typing_extensions import Self

with suppress(ImportError):  # Windows; nothing is locked there
    import fcntl

ALONE, SHARED = ".lock", ".shared"
MUTEX = "mutex.lock"
MUTEX_LIMIT_S = 30.0
POLL_S = 0.01
MUTEX_ASK_S = 1.0  # between two looks at who has it
RELEASED = -1
ATTEMPTS = 10  # at a file that others replace
MAKING_ATTEMPTS = 200  # at one that somebody is just making

# The descriptors of this process's locks, each with its file, as its number may come to mean
# another one, and the thread that opened it. A child made by fork would keep every lock alive, so
# it closes them; it must not unlock them, which would free its parent's.
_descriptors: dict[int, tuple[files.Identity, int]] = {}
_forking = threading.RLock()  # a signal handler may come in between and release
_hooked = False


class Lock:
    """A lock that this process holds, until it is released or the process ends."""

    def __init__(self, descriptor: int, path: str, *, shared: bool = False) -> None:
        self.path = path
        self.shared = shared
        self._since = time.time()
        self._signed = False
        self.descriptor = descriptor
        self._file = files.identity(os.fstat(descriptor))
        self._pid = os.getpid()

    def write(self, record: Mapping[str, Any]) -> None:
        """Say who holds the lock. A full disk loses the record, not the lock."""
        own = {"pid": self._pid, "namespace": records.pid_namespace(), "since": self._since}
        data = json.dumps({**own, **records.bounded(record)}).encode()
        self._signed = True
        with suppress(OSError):
            try:
                os.pwrite(self.descriptor, data, 0)
                os.ftruncate(self.descriptor, len(data))
            except OSError:
                os.ftruncate(self.descriptor, 0)

    def release(self) -> None:
        """Let go. Does nothing in a child of the process that took the lock, and nothing twice."""
        if not self.held():
            return
        if self._signed and not self.shared:  # what is written there may be another sharer's
            with suppress(OSError):
                os.ftruncate(self.descriptor, 0)
        _close(self.descriptor)
        self.descriptor = RELEASED  # the number may soon be another lock's

    def held(self) -> bool:
        """Whether this process, not its parent, still has the file open that it locked."""
        return self._pid == os.getpid() and _is_ours(self.descriptor)

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

    def __enter__(self) -> Self:
        self._fd = files.open_directory(self.path)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def acquire(self, name: str, *, shared: bool = False) -> Lock | Holder:
        """Lock the file of that name, or say who has it locked, without waiting.

        shared: others may have it locked as well, if they share it too. Raises LockError.
        """
        if lock := self._try(name, shared=shared):
            return lock
        descriptor = self._open(name)
        try:
            return self._holder(descriptor, name)
        finally:
            _close(descriptor)

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
        return True

    def holder(self, name: str) -> Holder | None:
        """Who has the file of that name locked, if anybody; to be asked under the mutex alone."""
        if not self.exists(name):
            return None
        found = self.acquire(name)
        if isinstance(found, Holder):
            return found
        found.release()
        return None

    def peek(self, name: str) -> Holder | None:
        """Who has the file of that name locked, by the kernel's list alone: nothing is locked."""
        if not self.exists(name):
            return None
        descriptor = self._open(name)
        try:
            holder = self._holder(descriptor, name)
            return holder if holder.seen else None
        finally:
            _close(descriptor)

    def record(self, name: str) -> dict[str, Any]:
        """What is written in the file of that name; foreign text."""
        descriptor = self._open(name)
        try:
            return records.parse(os.pread(descriptor, records.LIMIT + 1, 0))
        finally:
            _close(descriptor)

    @contextmanager
    def mutex(self, limit_s: float = MUTEX_LIMIT_S) -> Iterator[None]:
        """Hold the machine's mutex. Raises MutexHeldError if one process has it for limit_s s."""
        lock = self._try(MUTEX)
        deadline, asked, holder = time.monotonic() + limit_s, 0.0, Holder()
        while lock is None:
            time.sleep(POLL_S)
            if (now := time.monotonic()) > asked + MUTEX_ASK_S or now > deadline:
                before, asked = holder, now
                holder = self.peek(MUTEX) or Holder()
                if holder.pid != before.pid:  # it is not the same one all the time
                    deadline = now + limit_s
            if now > deadline:
                raise MutexHeldError(_mutex_message(holder, limit_s))
            lock = self._try(MUTEX)
        try:
            yield
        finally:
            lock.release()

    def _try(self, name: str, *, shared: bool = False) -> Lock | None:
        """Lock the file of that name, if nobody has it locked."""
        path = f"{self.path}/{name}"
        for _ in range(ATTEMPTS):
            descriptor = self._open(name)
            try:
                if not _flock(descriptor, path, shared=shared):
                    _close(descriptor)
                    return None
                if self._is_current(descriptor, name):
                    return Lock(descriptor, path, shared=shared)
            except BaseException:
                _close(descriptor)
                raise
            _close(descriptor)  # somebody replaced the file between our opening and locking it
        raise LockError(f"{path} is replaced again and again.")

    def _open(self, name: str) -> int:
        if "/" in name or name.startswith("."):  # it comes from the driver
            raise LockError(f"{shown(name)!r} can't be the name of a lock.")
        _hook_fork()
        for _ in range(MAKING_ATTEMPTS):
            with _forking:
                descriptor = files.open_file(self._fd, name, f"{self.path}/{name}")
                if descriptor is not None:
                    identity = files.identity(os.fstat(descriptor))
                    _descriptors[descriptor] = identity, threading.get_ident()
                    return descriptor
            time.sleep(POLL_S)
        raise LockError(f"{self.path}/{name} is not finished by whoever makes it.")

    def _is_current(self, descriptor: int, name: str) -> bool:
        try:
            there = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return files.identity(there) == files.identity(os.fstat(descriptor))

    def _holder(self, descriptor: int, name: str) -> Holder:
        """Who has the file locked: by the kernel's list where it shows us, and by the record."""
        record = records.parse(os.pread(descriptor, records.LIMIT + 1, 0))
        holder = records.merge(record, records.locking_pid(os.fstat(descriptor)))
        if name.endswith(SHARED) and holder.seen and not holder.confirmed:
            return Holder(pid=holder.pid, seen=True)  # what is written there is another sharer's
        return holder


def file_name(uuid: str, *, shared: bool = False) -> str:
    """The lock file of a device, or the one that those who share it hold together.

    Two files, as the holder of the first must not keep others from sharing what is theirs to share.
    """
    return f"{uuid.replace('/', '_')}{SHARED if shared else ALONE}"  # old MIG UUIDs have slashes


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


def close_strays(kept: Iterable[Lock]) -> None:
    """Close what this thread has opened and, interrupted at a bad moment, would never close."""
    numbers = {lock.descriptor for lock in kept}
    for descriptor, (_, thread) in list(_descriptors.items()):
        if thread == threading.get_ident() and descriptor not in numbers:
            _close(descriptor)


def _is_ours(descriptor: int) -> bool:
    """Whether the number still means the file that we opened: somebody may have closed them all."""
    with suppress(OSError):
        known = _descriptors.get(descriptor)
        return known is not None and files.identity(os.fstat(descriptor)) == known[0]
    return False


def _close(descriptor: int) -> None:
    with _forking:
        if _is_ours(descriptor):
            os.close(descriptor)
        _descriptors.pop(descriptor, None)


def _hook_fork() -> None:
    global _hooked
    with _forking:
        if _hooked:
            return
        _hooked = True
    # Taken around the fork, so that no descriptor is open and not yet noted when it happens.
    os.register_at_fork(
        before=_forking.acquire,
        after_in_parent=_forking.release,
        after_in_child=_after_fork_in_child,
    )


def _after_fork_in_child() -> None:
    for descriptor in list(_descriptors):
        _close(descriptor)
    _forking.release()


def _mutex_message(holder: Holder, limit_s: float) -> str:
    who = "a process that can't be seen from here"
    if holder.pid:
        who = f"process {holder.pid} of {records.user_of(holder.pid)}"
    return (
        f"Another reservation has been under way for {limit_s:g} s, by {who}. If the NVIDIA driver "
        "hangs there, that process must end before anybody can reserve a GPU; else try again."
    )
