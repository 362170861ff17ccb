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

from reserve_gpu import descriptors, files, myself, witness
from reserve_gpu.descriptors import NONE
from reserve_gpu.device import Holder
from reserve_gpu.errors import LockError, MutexHeldError
from reserve_gpu.files import ALONE, SHARED
from reserve_gpu.settings import LOCK_DIRECTORY, default_path

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from typing_extensions import Self

    from reserve_gpu.holders import Holders

with suppress(ImportError):  # Windows; nothing is locked there
    import fcntl

MUTEX = "mutex.lock"
MUTEX_LIMIT_S = 30.0
POLL_S = 0.01
MUTEX_ASK_S = 1.0  # between two looks at who has it
# In a handler of a signal, say, that comes in between; it would wait for itself. Said only where a
# process of another PID namespace can't have the same number.
OWN_MUTEX = "This process is reserving already; it can't reserve once more in the midst of that."
HIGH = 100  # the first number of a descriptor that a command inherits
ATTEMPTS = 10  # at a file that others replace
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
        own = {"pid": self._pid, "namespace": myself.pid_namespace(), "since": self._since}
        own["written"] = time.time()
        data = json.dumps({**own, **myself.bounded(record)}).encode()
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
        self._holders: Holders | None = None

    def __enter__(self) -> Self:
        self.descriptor = files.open_directory(self.path)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)

    def acquire(
        self, name: str, *, shared: bool = False, again: Lock | None = None
    ) -> Lock | Holder:
        """Lock the file of that name, or say who has it locked, without waiting.

        shared: others may have it locked as well, if they share it too. again: this process's lock
        on a file of that name that was deleted since; its witness is taken over. Raises LockError.
        """
        if lock := self._try(name, shared=shared, again=again):
            return lock
        return self.holders.who(name)

    @property
    def holders(self) -> Holders:
        """Who has what locked; most of the time nobody asks."""
        if self._holders is None:
            from reserve_gpu.holders import Holders

            self._holders = Holders(self.path, self.descriptor, once=self._has_mutex)
        return self._holders

    def names(self) -> list[str]:
        """The names of all files there."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        try:
            descriptor = os.open(".", flags, dir_fd=self.descriptor)
            try:
                return os.listdir(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise LockError(f"{self.path} can't be listed: {error.strerror}.") from error

    def holder(self, name: str) -> Holder | None:
        """Who has the file of that name locked, if anybody; to be asked under the mutex alone."""
        path = f"{self.path}/{name}"
        if files.exists(self.descriptor, name, path):
            found = self.acquire(name)
            if isinstance(found, Holder):
                return found
            found.release()
        return witness.unlisted(path, shared=name.endswith(SHARED))

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
                holder = self.holders.peek(MUTEX) or Holder()
                if holder.pid != before.pid:  # it is not the same one all the time
                    deadline = min(now + limit_s, latest)
                elif holder.pid == os.getpid() and myself.sees_all_locks():
                    raise MutexHeldError(OWN_MUTEX)
            if now > deadline:
                raise MutexHeldError(_mutex_message(holder, limit_s))
            lock = self._try(MUTEX)
        try:
            self._has_mutex, self._holders = True, None
            yield
        finally:
            self._has_mutex, self._holders = False, None
            lock.release()

    def _try(self, name: str, *, shared: bool = False, again: Lock | None = None) -> Lock | None:
        """Lock the file of that name, if nobody has it locked."""
        path = f"{self.path}/{name}"
        for _ in range(ATTEMPTS):
            descriptor = descriptors.open_lock(self.descriptor, name, path)
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

    def _is_current(self, descriptor: int, name: str) -> bool:
        try:
            there = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return files.identity(there) == files.identity(os.fstat(descriptor))


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


def _mutex_message(holder: Holder, limit_s: float) -> str:
    who = "a process that can't be seen from here"
    if holder.pid:
        who = f"process {holder.pid} of {myself.user_of(holder.pid)}"
    return (
        f"Another reservation has been under way for {limit_s:g} s, by {who}. If the NVIDIA driver "
        "hangs there, that process must end before anybody can reserve a GPU; else try again."
    )
