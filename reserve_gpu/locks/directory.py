"""The directory that all users of a machine have their locks in, and what is asked of it.

    UUID.lock                    who has reserved a whole device has this file locked
    UUID.share-UID-N.lock        one for each of those who share it
    queue-UID-N.lock             one for each of those who wait
    mutex.lock                   whoever looks, or takes something, has this meanwhile

Files are never deleted, as nobody sees a lock on a deleted file.
"""

from __future__ import annotations

import os
import re
import stat
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from itertools import count, takewhile
from typing import TYPE_CHECKING

from reserve_gpu import calls, foreign, proc, settings, this_process
from reserve_gpu.errors import LockError, MutexHeldError, shell_line, shown
from reserve_gpu.locks import descriptors, files
from reserve_gpu.locks.holders import SHARE, Holders, is_own_guest
from reserve_gpu.locks.lock import Lock, flock, kernel_device

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from typing_extensions import Self

    from reserve_gpu.clocks import Instant
    from reserve_gpu.model import Holder, Ticket

NAME = "reserve_gpu"
# Machine-wide places, best first. /tmp is last: a service with PrivateTmp has one of its own.
PLACES = ("/run/lock", "/dev/shm", "/tmp")  # noqa: S108 - nothing in them is ever trusted

MUTEX, QUEUE = "mutex.lock", "queue"
MUTEX_LIMIT_S = 30.0
BRIEF_LIMIT_S = 1.0  # at the end of a cell, or between two calls
MUTEX_POLL_S = 0.01
LONG_S = 10.0  # no look takes so long, unless the driver hangs
REPLACED_LIMIT = 10  # attempts to lock a file that others go on replacing
MOST_LOST = 256  # locks that are looked at to find those of lost devices; anybody may make some
MOST_OF_ONE_USER = 64  # sharers of a device, and waiters; nobody needs more, and each costs a look
OTHERS_MODE, OWN_MODE = 0o666, 0o644

# Behind the prefix. Text, which `re` compiles at its first use: mostly there is no such file.
NUMBERED = r"-[0-9]{1,10}-([0-9]{1,10})\.lock"


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
        self._holders: Holders | None = None
        self._device: str | None = None  # known from the first lock on, as Holders wants it

    def __enter__(self) -> Self:
        self.descriptor = files.open_directory(self.path)
        return self

    def __exit__(self, *_: object) -> None:
        descriptors.close(self.descriptor)

    def follow(self) -> None:
        """Use the directory that others find under the path now.

        A program that cleans up may have removed the old one. Raises LockError.
        """
        if not files.is_current(descriptors.NONE, self.path, self.descriptor):
            before, self.descriptor = self.descriptor, files.open_directory(self.path)
            self._device = None
            descriptors.close(before)

    @contextmanager
    def mutex(self, limit_s: float = MUTEX_LIMIT_S, *, reads_only: bool = False) -> Iterator[None]:
        """Hold the machine's mutex.

        Args:
            limit_s: Seconds after which MutexHeldError is raised.
            reads_only: Whether a directory that is read-only for this process will do.
        """
        start = time.monotonic()
        while (mutex := self._lock_mutex(reads_only=reads_only)) is None:
            waited_s = time.monotonic() - start
            if waited_s >= limit_s:
                raise MutexHeldError(_mutex_message(self.holders.of(MUTEX).pid, waited_s))
            calls.sleep(MUTEX_POLL_S)
        try:
            self._device = kernel_device(mutex.descriptor)
            self._holders = Holders(self.path, self.descriptor, self._device)
            yield
        finally:
            self._holders = None
            mutex.release()

    def _lock_mutex(self, *, reads_only: bool) -> Lock | None:
        """Lock the mutex, None while another process has it. Raises LockError.

        flock(2) needs no permission to write.
        """
        try:
            return self.acquire(MUTEX)
        except LockError:
            path = f"{self.path}/{MUTEX}"
            descriptor = files.open_to_look(self.descriptor, MUTEX) if reads_only else None
            if descriptor is None:
                raise
            with ExitStack() as stack:
                stack.callback(descriptors.close, descriptor)
                if not flock(descriptor, path):
                    return None
                stack.pop_all()
            return Lock(descriptor, path)

    def acquire(
        self, name: str, mode: int = OTHERS_MODE, taken: Instant | None = None
    ) -> Lock | None:
        """Lock the file of that name, made if it is not there; None if somebody has it locked.

        Args:
            name: The name of the file.
            mode: The mode of a new file.
            taken: The time of the lock that this one replaces.

        Raises:
            LockError: If the file can't be used.
        """
        path = f"{self.path}/{name}"
        if "/" in name or name.startswith("."):  # UUIDs come from the driver
            raise LockError(f"{shown(name)!r} can't be the name of a lock.")
        for _ in range(REPLACED_LIMIT):
            lock = None
            descriptor = files.open_to_lock(self.descriptor, name, path, mode)
            try:
                if name != MUTEX and files.is_current(self.descriptor, MUTEX, descriptor):
                    raise LockError(_second_name(path))
                if not flock(descriptor, path):
                    return None
                # Somebody may have replaced the file before it was locked.
                if files.is_current(self.descriptor, name, descriptor):
                    lock = Lock(descriptor, path, taken)
                    return lock
            finally:
                if lock is None:
                    descriptors.close(descriptor)
        raise LockError(f"Other processes replace {path} again and again.")

    def lock_device(
        self, uuid: str, *, share: bool, held: Lock | None = None, taken: Instant | None = None
    ) -> Lock | Holder:
        """Lock a device, whole or as a sharer, or return who has it; under the mutex.

        held: the lock that this process has on the device already, which does not count against it.
        taken: The time of the lock that the new one replaces. Raises LockError.
        """
        name, prefix = lock_name(uuid), _share_prefix(uuid)
        held_names = {held.name} if held else set()
        if name in held_names:  # it is held whole, and others are to be let in
            return self.acquire_own(prefix, taken)
        whole = self.acquire(name, taken=taken)
        if whole is None:
            return self.holders.of(name)
        with ExitStack() as stack:
            stack.callback(whole.release)
            if share:
                return self.acquire_own(prefix, taken)
            sharers = map(self.holders.of, self._living(prefix, held_names))
            # Guests of the reservation in whose place this one comes are no others.
            own = () if taken is None else (taken.wall,)
            others = (each for each in sharers if not is_own_guest(each, own))
            if (other := next(others, None)) is not None:
                return other
            stack.pop_all()
            return whole

    def acquire_guests(self, uuid: str, taken: Instant) -> Lock:
        """Lock a sharer's file of the device for a guest; under the mutex. Raises LockError.

        taken: The time at which the holder that it joins took the device.
        """
        return self.acquire_own(_share_prefix(uuid), taken)

    def acquire_own(
        self, prefix: str, taken: Instant | None = None, besides: Sequence[str] = ()
    ) -> Lock:
        """Lock a file of this user's own, `PREFIX-UID-N.lock`; under the mutex. Raises LockError.

        Only their owner can write to these files, so nobody can take a user's places away or write
        into them under another name. Files of other users that bear this user's UID are passed by.
        besides: files that are left alone as long as there may be others.
        """
        names, living = self.holders.names, 0
        for number in count():
            name = _own_name(prefix, os.geteuid(), number)
            if name in besides or files.is_others(self.descriptor, name):
                continue
            if living + len(besides) >= MOST_OF_ONE_USER:
                break
            if lock := self.acquire(name, OWN_MODE, taken):
                names.add(name)
                return lock
            living += 1
        if lock := self.acquire_first(besides):
            return lock
        raise LockError(
            f"This user has {living} locks {self.path}/{prefix}-..., and may have no more."
        )

    def acquire_first(self, names: Iterable[str]) -> Lock | None:
        """Lock the first of these files that can be had, None if none can. Raises LockError."""
        return next(filter(None, (self.acquire(name, OWN_MODE) for name in names)), None)

    def left_tickets(self, for_s: float) -> list[Ticket]:
        """Return the tickets that processes of this user have left for so long; under the mutex.

        Those that have got what they waited for leave nothing in their files. Only the file's ctime
        tells when that was, so if the wall clock is set meanwhile, the place may be lost.
        """
        names = (_own_name(QUEUE, os.geteuid(), number) for number in range(MOST_OF_ONE_USER))
        there = (name for name in names if name in self.holders.names)
        return sorted(map(self.holders.ticket, (n for n in there if self._is_left(n, for_s))))

    def _is_left(self, name: str, for_s: float) -> bool:
        status = files.status_of(self.descriptor, name)
        if status is None or not status.st_size or files.is_others(self.descriptor, name):
            return False
        return abs(time.time() - status.st_ctime) < for_s and not self._is_held(name)

    def holders_of(self, uuid: str) -> tuple[Holder, ...]:
        """Return the holders of a device, several if they share it; under the mutex."""
        name = lock_name(uuid)
        whole = [self.holders.of(name)] if self._is_held(name, f"{self.path}/{name}") else []
        return (*whole, *self.sharers_of(uuid))

    def sharers_of(self, uuid: str, besides: Collection[str] = ()) -> tuple[Holder, ...]:
        """Return the sharers of a device, without those whose files are named; under the mutex."""
        return tuple(map(self.holders.of, self._living(_share_prefix(uuid), besides)))

    def holders_besides(self, uuids: Collection[str]) -> tuple[Holder, ...]:
        """Return the holders of all other devices, perhaps of lost ones; under the mutex.

        Anybody may have made such a file, so this is for people to read. Raises LockError.
        """
        devices = [lock_name(uuid).removesuffix("lock") for uuid in uuids]
        known = (*devices, MUTEX, QUEUE)
        names = [name for name in self.holders.names if name.endswith(".lock")]
        others = sorted(name for name in names if not name.startswith(known))[:MOST_LOST]
        return tuple(map(self.holders.of, filter(self._is_held, others)))

    def listed_numbers(self) -> dict[str, list[str]]:
        """Return the lock files of whole GPUs by the label that the GPU had at its reservation.

        Only processes with the same numbering of the GPUs as this process count. The labels are
        from the holders' records and the locks from the kernel's list, which may miss some.
        """
        mounts, job = proc.mount_namespace(), this_process.job()
        names = (n for n in self.holders.names if n.endswith(".lock"))
        others = sorted(n for n in names if not n.startswith((MUTEX, QUEUE)))[:MOST_LOST]
        found: dict[str, list[str]] = {}
        for name in filter(self.holders.lists, others):
            said = foreign.Fields(self.holders.fields(name))
            label, index = said.text("label"), said.integer("index")
            is_whole = index is not None and label == f"GPU{index}"
            if label and is_whole and (said.integer("mounts"), said.text("job")) == (mounts, job):
                found.setdefault(label, []).append(name)
        return found

    def others_with_number(
        self, index: int, uuid: str, numbers: Mapping[str, Sequence[str]]
    ) -> list[Holder]:
        """Return the holders of other GPUs that had this number at their reservation.

        Args:
            index: The number of a GPU.
            uuid: The UUID of the device that has the number now.
            numbers: The result of `listed_numbers`.
        """
        own = device_of(lock_name(uuid))
        names = (name for name in numbers.get(f"GPU{index}", ()) if device_of(name) != own)
        holders = map(self.holders.of, names)
        return [holder for holder in holders if holder.listed_pid != os.getpid()]

    def holders_by(
        self, uid: int, uuids: Collection[str], besides: Collection[str] = ()
    ) -> tuple[Holder, ...]:
        """Return the holders of these devices that are a user's processes; under the mutex.

        For a whole device the kernel's list of locks says whose process it is. For a shared one
        the owner of the file does, as nobody else can write to that. A whole device that a process
        of another PID namespace has counts for no user. What else lies in the directory counts for
        nobody: anybody may have put it there.
        besides: files that do not count.
        """
        names = [name for uuid in uuids for name in self._device_files(uuid)]
        statuses = {name: files.status_of(self.descriptor, name) for name in (MUTEX, *names)}
        # Anybody can give one file several names: it is locked once.
        by_file = {(s.st_dev, s.st_ino): name for name, s in reversed(statuses.items()) if s}
        holders = [
            self._holder_by(uid, name)
            for name in reversed(by_file.values())
            if name not in (MUTEX, *besides)
        ]
        return tuple(holder for holder in holders if holder)

    def _device_files(self, uuid: str) -> list[str]:
        return [lock_name(uuid), *self.user_files(_share_prefix(uuid))]

    def _holder_by(self, uid: int, name: str) -> Holder | None:
        holders = self.holders
        if not holders.lists(name):
            if not self._is_held(name):
                return None
            holders = Holders(self.path, self.descriptor, self._device)  # it may have missed one
        holder = holders.of(name)
        return holder if holder.uid == uid else None

    def unlisted(self, names: Collection[str], by: int | None = None) -> set[str]:
        """Return the files that nobody has locked by the kernel's list.

        A cheap hint that somebody may have released something; it decides nothing.
        by: only what that process has taken counts as locked; None for whatever any has.
        """
        holders = self.holders
        return {name for name in names if not holders.lists(name, by)}

    def listed_holders_of(self, uuid: str) -> tuple[Holder, ...]:
        """Return the holders by the kernel's list, which may miss some; it decides nothing."""
        holders = self.holders
        return tuple(map(holders.of, filter(holders.lists, self._device_files(uuid))))

    def listed_own_sharers_of(self, uuid: str) -> list[Holder]:
        """Return this user's sharers of a device that the kernel's list shows."""
        names = self._listed_by_name(_share_prefix(uuid), os.geteuid())
        return list(map(self.holders.of, names))

    def tickets(self, besides: Collection[str] = ()) -> list[Ticket]:
        """Return the living tickets of those who wait, the first one first; under the mutex."""
        return sorted(map(self.holders.ticket, self._living(QUEUE, besides)))

    def listed_tickets(self) -> list[Ticket]:
        """Return the tickets that the kernel's list shows; it decides nothing."""
        holders = self.holders
        return sorted(map(holders.ticket, filter(holders.lists, self.user_files(QUEUE))))

    def listed_users_tickets(self) -> list[Ticket]:
        """Return the tickets of users whom the kernel's list shows; it decides nothing."""
        uids = self.holders.listed_uids()
        names = [name for uid in uids for name in self._listed_by_name(QUEUE, uid)]
        return sorted(map(self.holders.ticket, names))

    def _listed_by_name(self, prefix: str, uid: int) -> list[str]:
        """Return a user's files that the kernel's list shows; it may miss some.

        Their names are tried one by one, from the first: anybody may have made so many files that
        to list the directory takes long.
        """
        names = (_own_name(prefix, uid, number) for number in range(MOST_OF_ONE_USER))
        there = takewhile(lambda name: files.status_of(self.descriptor, name), names)
        holders = self.holders
        return [name for name in there if holders.lists(name)]

    def user_files(self, prefix: str) -> list[str]:
        """Return the names `PREFIX-UID-N.lock`, the first ones of each owner.

        The files are counted by their owner, not by the UID in their names: a container with a
        user namespace has other UIDs, and anybody can give a file any name.
        """
        candidates = [name for name in self.holders.names if name.startswith(prefix)]
        matches = [(re.fullmatch(NUMBERED, name[len(prefix) :]), name) for name in candidates]
        numbered = [(int(match[1]), name) for match, name in matches if match]
        # The files of all users that this user namespace does not know have this one owner.
        strangers = proc.unmapped_uid() if numbered else None
        by_owner: dict[int, list[str]] = {}
        for _, name in sorted(numbered):
            owner = files.sole_owner(self.descriptor, name)
            if owner is None:
                continue
            names = by_owner.setdefault(owner, [])
            if owner == strangers or len(names) < MOST_OF_ONE_USER:
                names.append(name)
        return [name for names in by_owner.values() for name in names]

    @property
    def holders(self) -> Holders:
        """Return the reader of holders; under the mutex one is enough, as others change nothing."""
        return self._holders or Holders(self.path, self.descriptor, self._device)

    def _living(self, prefix: str, besides: Collection[str] = ()) -> Iterator[str]:
        for name in self.user_files(prefix):
            if name not in besides and self._is_held(name):
                yield name

    def _is_held(self, name: str, path: str | None = None) -> bool:
        """Tell whether somebody has the file locked: the lock decides, not the kernel's list.

        path: with it LockError is raised where something stands there that nobody can lock.
        """
        descriptor = files.open_to_look(self.descriptor, name, path)
        if descriptor is None:
            return False
        with descriptors.closing(descriptor):
            if files.is_current(self.descriptor, MUTEX, descriptor):
                if path:
                    raise LockError(_second_name(path))
                return False
            return not flock(descriptor, f"{self.path}/{name}")


def _own_name(prefix: str, uid: int, number: int) -> str:
    return f"{prefix}-{uid}-{number}.lock"


def device_of(name: str) -> str:
    """Return the device that a lock file belongs to, by what its name begins with."""
    return name.partition(SHARE)[0].removesuffix(".lock")


def lock_name(uuid: str) -> str:
    """Return the name of the file that a whole device's holder has locked."""
    return f"{uuid.replace('/', '_')}.lock"  # MIG instances had slashes before driver 470


def default_path() -> str:
    """Return the lock directory: the one that was set, else in the first place open to all.

    Raises LockError. A relative path would be another directory for every working directory.
    """
    configured = os.path.expanduser(os.environ.get(settings.LOCK_DIRECTORY, ""))
    if configured and not os.path.isabs(configured):
        where = f"{settings.LOCK_DIRECTORY}={shown(configured)!r}"
        raise LockError(f"{where} must be an absolute path.")
    if configured:
        return os.path.normpath(configured)
    for place in PLACES:
        with suppress(OSError):
            mode = os.stat(place).st_mode
            if stat.S_ISDIR(mode) and mode & stat.S_ISVTX and mode & stat.S_IWOTH:
                return f"{place}/{NAME}"
    raise LockError(
        f"None of {', '.join(PLACES)} is a directory that every user may write to (mode 1777). "
        f"{files.SET_ANOTHER}"
    )


def preferred_paths(path: str) -> tuple[str, ...]:
    """Return the default directories that the host may prefer, and this lock directory.

    In an image in which `/run/lock` is closed the default is `/dev/shm`, unlike on its host.
    """
    if os.environ.get(settings.LOCK_DIRECTORY):
        return (path,)
    paths = tuple(f"{place}/{NAME}" for place in PLACES)
    return paths[: paths.index(path) + 1] if path in paths else (path,)


def _second_name(path: str) -> str:
    return f"its lock file is a second name of {MUTEX}. Run: {shell_line(f'rm {path}')}"


def _share_prefix(uuid: str) -> str:
    return f"{lock_name(uuid).removesuffix('.lock')}{SHARE}"


def _mutex_message(pid: int | None, waited_s: float) -> str:
    who = "a process that can't be seen from here"
    if pid:
        who = f"process {pid} of {proc.user_of(pid) or 'an unknown user'}"
    text = f"Other reservations have been under way for {waited_s:.0f} s, by {who}. Try again."
    if waited_s < LONG_S:
        return text
    return (
        f"{text} If that does not help, the NVIDIA driver hangs in that process, which must end "
        "before anybody can reserve a GPU."
    )
