"""The directory that all users of a machine have their locks in, and what is asked of it.

    UUID.lock                    locked by the process that has reserved a whole device
    UUID.record-UID-N            the record of that process
    UUID.share-UID-N.lock        one for each process that shares the device
    queue-UID-N.lock             one for each process that waits
    mutex.lock                   locked by a process while it looks, or takes something

Every user can write to UUID.lock and mutex.lock. Only its owner can write to a file with a UID in
its name, and such a file counts as locked only if its owner has it locked
(`file_control.write_lock`).

Locked files are never deleted, because other processes do not see a lock on a deleted file.
"""

from __future__ import annotations

import os
import stat
import sys
import time
from collections import Counter
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain, takewhile
from typing import TYPE_CHECKING

from reserve_gpu.locks import files
from reserve_gpu.locks.holders import (
    MANY,
    MOST_OF_ONE_USER,
    QUEUE,
    RECORD,
    SHARE,
    Holders,
    has_joined_own,
    has_owner,
    is_sharers,
    is_waiters,
)
from reserve_gpu.locks.lock import Lock, flock, kernel_device, read_record
from reserve_gpu.model.errors import LockError, MutexHeldError, shell_line
from reserve_gpu.model.holders import Claim, Holder
from reserve_gpu.model.queue import in_order
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.system import executor, process_identity, procfs, settings
from reserve_gpu.system.file_control import has_write_locks, is_write_locked, write_lock

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from typing_extensions import Self

    from reserve_gpu.model.clocks import Instant
    from reserve_gpu.model.queue import Ticket
    from reserve_gpu.model.requests import TicketAhead

NAME = "reserve_gpu"
# Machine-wide places, best first. /tmp is last: a service with PrivateTmp has one of its own.
PLACES = ("/run/lock", "/dev/shm", "/tmp")  # noqa: S108 - nothing in them is ever trusted

MUTEX = "mutex.lock"
MUTEX_LIMIT_S = 30.0
BRIEF_LIMIT_S = 1.0  # at the end of a cell, or between two calls
MUTEX_POLL_S = 0.01
LONG_S = 10.0  # no look takes so long, unless the driver hangs
REPLACED_LIMIT = 10  # attempts to lock a file that others go on replacing
MOST_LOST = 256  # locks that are looked at to find those of lost devices; anybody may make some
MOST_NUMBERS = 10**10
OTHERS_MODE, OWN_MODE = 0o666, 0o644
NEW_MODE = 0o600  # a user's own file has it until it is locked


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
        files.close(self.descriptor)

    def follow(self) -> None:
        """Use the directory that others find under the path now.

        A program that cleans up may have removed the old one. Raises LockError.
        """
        if not files.is_current(files.NONE, self.path, self.descriptor):
            before, self.descriptor = self.descriptor, files.open_directory(self.path)
            self._device = None
            files.close(before)

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
            executor.sleep(MUTEX_POLL_S)
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
                stack.callback(files.close, descriptor)
                if not flock(descriptor, path):
                    return None
                stack.pop_all()
            return Lock(descriptor, path)

    def acquire(
        self, name: str, mode: int = OTHERS_MODE, taken: Instant | None = None
    ) -> Lock | None:
        """Lock the file of that name, made if it is not there; None if somebody has it locked.

        A file of this user is locked with `write_lock` too, if the system has such locks.

        Args:
            name: The name of the file.
            mode: The mode of a new file.
            taken: The time of the lock that this one replaces.

        Raises:
            LockError: If the file can't be used.
        """
        path = f"{self.path}/{name}"
        if "/" in name or name.startswith("."):  # UUIDs come from the driver
            raise LockError(f"{sanitize(name)!r} can't be the name of a lock.")
        is_own = mode == OWN_MODE
        for _ in range(REPLACED_LIMIT):
            lock = None
            # Others can lock a file that they can read, so a new one is closed until it is locked.
            new_mode = NEW_MODE if is_own else mode
            descriptor = files.open_to_lock(self.descriptor, name, path, new_mode)
            try:
                status = os.fstat(descriptor)
                if name != MUTEX and files.is_current(self.descriptor, MUTEX, descriptor):
                    raise LockError(_second_name(path, MUTEX, status))
                if is_own and files.is_open_to_others(status):  # it would not count
                    return None
                if RECORD not in name and not flock(descriptor, path):
                    return None
                is_owners = is_own and write_lock(descriptor)
                if is_own and not is_owners and has_write_locks(descriptor):
                    return None
                # Somebody may have replaced the file before it was locked.
                if files.is_current(self.descriptor, name, descriptor):
                    if is_own:
                        files.finish(descriptor, path, mode)
                    lock = Lock(descriptor, path, taken)
                    lock.is_write_locked = is_owners
                    return lock
            finally:
                if lock is None:
                    files.close(descriptor)
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
            if problem := self._problem(name):
                raise LockError(problem)
            return self.holders.of(name)
        with ExitStack() as stack:
            stack.callback(whole.release)
            if share:
                return self.acquire_own(prefix, taken)
            sharers = map(self.holders.of, self._living(prefix, held_names))
            # Joined processes of the reservation in whose place this one comes are no others.
            own = () if taken is None else (taken.wall,)
            others = (each for each in sharers if not has_joined_own(each, own))
            if (other := next(others, None)) is not None:
                return other
            whole.owned = self._acquire_record(uuid, whole)
            stack.pop_all()
            return whole

    def acquire_again(self, name: str, taken: Instant) -> Lock | None:
        """Lock the file of a device that another process of this user has just released.

        Args:
            name: The name of the file.
            taken: The time of the lock of that process.

        Returns:
            The lock, or None if another process has the file locked. Under the mutex.

        Raises:
            LockError: If the file can't be used.
        """
        if SHARE in name:
            return self.acquire_mine(name, taken)
        lock = self.acquire(name, OTHERS_MODE, taken)
        if lock:
            lock.owned = self._acquire_record(device_of(name), lock)
        return lock

    def _acquire_record(self, uuid: str, whole: Lock) -> Lock | None:
        """Lock a file for the record of a whole device's holder, None if that is not possible."""
        with suppress(LockError):
            if has_write_locks(whole.descriptor):
                return self.acquire_own(_record_prefix(uuid), whole.taken)
        return None

    def acquire_joined(self, uuid: str, taken: Instant) -> Lock:
        """Lock a sharer's file for a process that joins; under the mutex. Raises LockError.

        taken: The time at which the holder that it joins took the device.
        """
        return self.acquire_own(_share_prefix(uuid), taken)

    def acquire_own(
        self, prefix: str, taken: Instant | None = None, besides: Sequence[str] = ()
    ) -> Lock:
        """Lock a file of this user's own, `PREFIX-UID-N.lock`; under the mutex. Raises LockError.

        Files of other users that contain this user's UID are passed by. A process of another user
        may have locked a file of this user: it gets replaced.
        besides: files that are left alone as long as there may be others.
        """
        living = 0
        for name in self._own_names(prefix):
            if living + len(besides) >= MOST_OF_ONE_USER:
                break
            if name in besides or files.is_others(self.descriptor, name):
                continue
            if lock := self.acquire_mine(name, taken):
                return lock
            living += 1
        if lock := self.acquire_first(besides):
            return lock
        raise LockError(
            f"This user has {living} locks {self.path}/{prefix}-..., and may have no more."
        )

    def _own_names(self, prefix: str) -> Iterator[str]:
        """Yield the names of files that this user may have.

        If another user has made files under the first names, random ones follow.
        """
        uid = os.geteuid()
        first = _first_names(prefix, uid)
        yield from first
        others = (name for name in self.holders.user_files(prefix, uid) if name not in first)
        random = (_own_name(prefix, uid, _random_number()) for _ in first)
        yield from chain(others, random)

    def acquire_mine(self, name: str, taken: Instant | None = None) -> Lock | None:
        """Lock a file of this user; under the mutex.

        Returns:
            The lock, or None if another process of this user has it, or another user has made a
            file of that name meanwhile.

        Raises:
            LockError: If the file can't be used.
        """
        try:
            lock = self.acquire(name, OWN_MODE, taken)
            if lock is None and not self._is_living(name):
                # Another user has it locked, which takes no more than permission to read.
                with suppress(OSError):
                    os.unlink(name, dir_fd=self.descriptor)
                lock = self.acquire(name, OWN_MODE, taken)
        except LockError:
            if not files.is_others(self.descriptor, name):  # another user may have been faster
                raise
            return None
        if lock:
            self.holders.add(name)
        return lock

    def acquire_first(self, names: Iterable[str]) -> Lock | None:
        """Lock the first of this user's files that is free, None if none is. Raises LockError."""
        return next(filter(None, map(self.acquire_mine, names)), None)

    def left_tickets(self, for_s: float) -> list[Ticket]:
        """Return the tickets that processes of this user have left for so long; under the mutex.

        Those that have got what they waited for leave nothing in their files. Only the file's ctime
        tells when that was, so if the wall clock is set meanwhile, the place may be lost.
        """
        prefix = f"{QUEUE}-{os.geteuid()}-"
        names = _first_names(QUEUE, os.geteuid())
        if any(files.is_others(self.descriptor, name) for name in names):  # own files have others
            names = [name for name in self.holders.listing() if name.startswith(prefix)]
        return sorted(map(self.holders.ticket, (n for n in names if self._is_left(n, for_s))))

    def _is_left(self, name: str, for_s: float) -> bool:
        status = files.status_of(self.descriptor, name)
        if status is None or not status.st_size or files.is_others(self.descriptor, name):
            return False
        return abs(time.time() - status.st_ctime) < for_s and not self._is_living(name)

    def left_by(self, ahead: TicketAhead) -> tuple[int, float] | None:
        """Return the owner of a left ticket and its age in seconds, or None if it has changed."""
        status = files.status_of(self.descriptor, ahead.name) if is_waiters(ahead.name) else None
        if status is None or not status.st_size or status.st_mtime_ns != ahead.number:
            return None
        is_safe = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
        if not is_safe or files.is_open_to_others(status):
            return None
        return status.st_uid, abs(time.time() - status.st_ctime)

    def is_served(self, name: str) -> bool:
        """Return whether a waiter has left an empty file, as one that got a device does."""
        status = files.status_of(self.descriptor, name)
        return status is not None and not status.st_size

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
        names = [name for name in self.holders.possibly_locked if name.endswith(".lock")]
        others = sorted(name for name in names if not name.startswith(known))[:MOST_LOST]
        held = filter(lambda n: self._is_living(n) if has_owner(n) else self._is_held(n), others)
        return tuple(map(self.holders.of, held))

    def listed_numbers(self) -> dict[str, list[Claim]]:
        """Return the holders of whole GPUs by the label that the GPU had at its reservation.

        Only processes with the same numbering of the GPUs as this process count. The labels are
        from records that only their owners can write, of devices that they have locked. The
        kernel's list may miss some locks.
        """
        mounts, job = procfs.mount_namespace(), process_identity.job()
        claims: dict[int, list[Holder]] = {}
        for owner, file in self._locked_by_owner():
            is_held = is_sharers(file) or self._is_held(file)
            holder = self.holders.of(file) if is_held else Holder()
            record, own = holder.record, claims.setdefault(owner, [])
            is_whole = record.index is not None and record.label == f"GPU{record.index}"
            is_here = (record.who.mounts, record.who.job) == (mounts, job)
            if holder.record_owner == owner and is_whole and is_here:
                own.append(holder)
        found: dict[str, list[Claim]] = {}
        for own in claims.values():
            # One user says one number of a device, so that it makes no others unusable.
            by_device = {device_of(holder.file or ""): holder for holder in own}
            for device, holder in by_device.items():
                claim = Claim(holder, device, tuple(by_device))
                found.setdefault(holder.record.label or "", []).append(claim)
        return found

    def _locked_by_owner(self) -> dict[tuple[int, str], None]:
        """Return the owners of living files, each with the lock file of the device.

        Every user can lock any number of files: so many of each owner count, those with the lowest
        numbers, of whatever device.
        """
        found: dict[tuple[int, str], None] = {}
        looks: Counter[int] = Counter()
        living: Counter[int] = Counter()
        names = filter(has_owner, self.holders.possibly_locked)
        for name in sorted(names, key=_by_number):
            owner = files.sole_owner(self.descriptor, name)
            if owner is None or looks[owner] >= MANY or living[owner] >= MOST_OF_ONE_USER:
                continue
            looks[owner] += 1
            if self._is_living(name):
                living[owner] += 1
                found[owner, name if is_sharers(name) else f"{device_of(name)}.lock"] = None
        return found

    def others_with_number(
        self, index: int, uuid: str, numbers: Mapping[str, Sequence[Claim]]
    ) -> list[Claim]:
        """Return the holders of other GPUs that had this number at their reservation.

        Args:
            index: The number of a GPU.
            uuid: The UUID of the device that has the number now.
            numbers: The result of `listed_numbers`.
        """
        own, this_process = device_of(lock_name(uuid)), os.getpid()
        return [
            claim
            for claim in numbers.get(f"GPU{index}", ())
            if claim.device != own and claim.holder.listed_pid != this_process
        ]

    def holders_by(
        self, uid: int, uuids: Collection[str], besides: Collection[str] = ()
    ) -> tuple[Holder, ...]:
        """Return the holders of these devices that are a user's processes; under the mutex.

        The user of a whole device is that of the process in the kernel's list of locks. The user of
        a shared one is the owner of its file, because no other user can lock it. A whole device
        that a process of another PID namespace has counts for no user. Other files in the directory
        count for no user, because every user can create them.
        besides: files that do not count.
        """
        names = [name for uuid in uuids for name in self._device_files(uuid)]
        names.sort(key=lambda name: not is_sharers(name) and self._problem(name) is not None)
        ordered = (MUTEX, *besides, *names)
        statuses = {name: files.status_of(self.descriptor, name) for name in ordered}
        # Every user can give one file several names: only the first name counts.
        by_file = {(s.st_dev, s.st_ino): name for name, s in reversed(statuses.items()) if s}
        holders = [
            self._holder_by(uid, name)
            for name in reversed(by_file.values())
            if name not in (MUTEX, *besides)
        ]
        return tuple(holder for holder in holders if holder)

    def _device_files(self, uuid: str) -> list[str]:
        return [lock_name(uuid), *self.holders.user_files(_share_prefix(uuid))]

    def _holder_by(self, uid: int, name: str) -> Holder | None:
        if is_sharers(name):
            is_owner = files.sole_owner(self.descriptor, name) == uid
            return self.holders.of(name) if is_owner and self._is_living(name) else None
        if not self.holders.lists(name) and not self._is_held(name):
            return None
        holder = self.holders.of(name)
        return holder if holder.uid == uid else None

    def unlisted(self, names: Collection[str]) -> set[str] | None:
        """Return the files that the kernel's list does not show; None if it is too long.

        A cheap hint that somebody may have released something; it decides nothing.
        """
        with self._one_look() as holders:
            return {n for n in names if not holders.lists(n)} if holders.shows_all_locks else None

    def are_listed(self, names: Collection[str], by: int) -> bool:
        """Return whether the kernel's list shows that a process has taken all of these locks."""
        with self._one_look() as holders:
            return all(holders.lists(name, by) for name in names)

    def listed_holders_of(self, uuid: str) -> tuple[Holder, ...]:
        """Return the holders by the kernel's list, which may miss some; it decides nothing."""
        with self._one_look() as holders:
            names = filter(holders.lists, self._device_files(uuid))
            held = [
                name
                for name in names
                if (self._is_living(name) if is_sharers(name) else not self._problem(name))
            ]
            return tuple(map(holders.of, held))

    def listed_own_sharers_of(self, uuid: str) -> list[Holder]:
        """Return this user's sharers of a device that the kernel's list shows."""
        with self._one_look() as holders:
            return [*map(holders.of, self._listed_by_name(_share_prefix(uuid), os.geteuid()))]

    def tickets(self, besides: Collection[str] = ()) -> list[Ticket]:
        """Return the living tickets of those who wait, the first one first; under the mutex."""
        tickets = [self.holders.ticket(name) for name in self._living(QUEUE, besides)]
        return in_order(tickets) if tickets else []

    def listed_tickets(self) -> list[Ticket]:
        """Return the tickets that the kernel's list shows; it decides nothing."""
        with self._one_look() as holders:
            names = filter(holders.lists, holders.user_files(QUEUE))
            return in_order(map(holders.ticket, filter(self._is_living, names)))

    def listed_users_tickets(self) -> list[Ticket]:
        """Return the tickets of users whom the kernel's list shows; it decides nothing."""
        with self._one_look() as holders:
            uids = holders.listed_uids()
            names = [name for uid in uids for name in self._listed_by_name(QUEUE, uid)]
            return in_order(map(holders.ticket, names))

    def _listed_by_name(self, prefix: str, uid: int) -> list[str]:
        """Return a user's files that the kernel's list shows; it may miss some.

        Their names are tried one by one, from the first: anybody may have made so many files that
        to list the directory takes long.
        """
        names = _first_names(prefix, uid)
        there = list(takewhile(lambda name: files.status_of(self.descriptor, name), names))
        if there == names:  # another user may have made them, and this user has others
            there = self.holders.user_files(prefix, uid)
        owned = (name for name in there if files.sole_owner(self.descriptor, name) == uid)
        return [name for name in owned if self.holders.lists(name) and self._is_living(name)]

    @property
    def holders(self) -> Holders:
        """Return the reader of holders; under the mutex one is enough, as others change nothing."""
        return self._holders or Holders(self.path, self.descriptor, self._device)

    @contextmanager
    def _one_look(self) -> Iterator[Holders]:
        """Read the kernel's list and the directory at most once, also without the mutex."""
        before, self._holders = self._holders, self.holders
        try:
            yield self._holders
        finally:
            self._holders = before

    def _living(self, prefix: str, besides: Collection[str] = ()) -> Iterator[str]:
        for name in self.holders.user_files(prefix):
            if name not in besides and self._is_living(name):
                yield name

    def _is_living(self, name: str) -> bool:
        """Return whether the owner of a file has it locked.

        A flock(2) of another user is ignored. Older versions lock the file with flock(2) alone.
        Such a lock counts if a living process of the owner has it. The kernel's list names the
        process that took the lock, whose number may be another process's by now. If it names none,
        as for another PID namespace, the lock counts if an older version has written the record.
        """
        descriptor = files.open_to_look(self.descriptor, name)
        if descriptor is None:
            return False
        with files.closing(descriptor):
            if is_write_locked(descriptor):
                return True
            if flock(descriptor, f"{self.path}/{name}"):
                return False
            record, owner = read_record(descriptor), os.fstat(descriptor).st_uid
        if record.write_locked:
            return False
        holders = self.holders
        if pid := holders.of(name).listed_pid:
            # If its open files can't be seen, only its start time tells, to CLOCK_S.
            is_sure = procfs.shows_files(pid) or record.since is not None
            return is_sure and procfs.uid_of(pid) == owner
        return record.since is not None and not holders.lists(name)

    def _is_held(self, name: str, path: str | None = None) -> bool:
        """Tell whether somebody has the file locked: the lock decides, not the kernel's list.

        path: with it LockError is raised where something stands there that nobody can lock.
        """
        descriptor = files.open_to_look(self.descriptor, name, path)
        if descriptor is None:
            return False
        with files.closing(descriptor):
            if files.is_current(self.descriptor, MUTEX, descriptor):
                if path:
                    raise LockError(_second_name(path, MUTEX, os.fstat(descriptor)))
                return False
            if flock(descriptor, f"{self.path}/{name}"):
                return False
        problem = self._problem(name)
        if problem and path:
            raise LockError(problem)
        return problem is None

    def _problem(self, name: str) -> str | None:
        """Return the reason to distrust the lock on a device's file, or None.

        Every user can write to such a file, and so link it to the name of a device that has no file
        yet. Both names are then locked. The user who holds a device has a record file of it locked
        as well, which shows by which name.
        """
        status = files.status_of(self.descriptor, name)
        if status is None or status.st_nlink == 1:
            return None
        holders = Holders(self.path, self.descriptor, self._device)  # this process may hold it
        holder = holders.of(name)
        held = self._recorded(holders, holder.uid)
        if name in held:
            return None
        others = [other for other in holders.listing() if self._is_other_name(other, name, status)]
        path = f"{self.path}/{name}"
        if other := next((each for each in others if each == MUTEX or each in held), None):
            return _second_name(path, other, status)
        return _unclear(path, others[0], holder.listed_pid) if others else None

    def _is_other_name(self, other: str, name: str, status: os.stat_result) -> bool:
        """Return whether a device's file also has this other name."""
        if other == name or has_owner(other) or not other.endswith(".lock"):
            return False
        there = files.status_of(self.descriptor, other)
        return there is not None and os.path.samestat(there, status)

    def _recorded(self, holders: Holders, uid: int | None) -> set[str]:
        """Return the lock files of the devices of which a user has locked a record file."""
        names = [name for name in holders.names if RECORD in name] if uid is not None else []
        own = (name for name in names if files.sole_owner(self.descriptor, name) == uid)
        return {lock_name(device_of(name)) for name in own if self._is_living(name)}


def _own_name(prefix: str, uid: int, number: int) -> str:
    # Older versions look for the devices of all files that end in ".lock".
    return f"{prefix}-{uid}-{number}{'' if prefix.endswith(RECORD) else '.lock'}"


def _random_number() -> int:
    # The module `secrets` would load OpenSSL.
    return int.from_bytes(os.urandom(8), "big") % MOST_NUMBERS


def _first_names(prefix: str, uid: int) -> list[str]:
    """Return the names that this user's files get first."""
    start, _, end = _own_name(prefix, uid, 0).rpartition("0")
    return [f"{start}{number}{end}" for number in range(2 * MOST_OF_ONE_USER)]


def _by_number(name: str) -> tuple[int, str, str]:
    number = name.rpartition("-")[2].removesuffix(".lock")
    return len(number), number, name


def device_of(name: str) -> str:
    """Return the device that a lock file belongs to, by what its name begins with."""
    return name.partition(SHARE)[0].partition(RECORD)[0].removesuffix(".lock")


def lock_name(uuid: str) -> str:
    """Return the name of the file that a whole device's holder has locked."""
    return f"{uuid.replace('/', '_')}.lock"  # MIG instances had slashes before driver 470


def default_path() -> str:
    """Return the lock directory: the one that was set, else in the first place open to all.

    Raises LockError. A relative path would be another directory for every working directory.
    """
    configured = os.path.expanduser(os.environ.get(settings.LOCK_DIRECTORY, ""))
    if configured and not os.path.isabs(configured):
        where = f"{settings.LOCK_DIRECTORY}={sanitize(configured)!r}"
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


def _second_name(path: str, other: str, status: os.stat_result) -> str:
    owner = procfs.user_name(status.st_uid)
    run = shell_line(f"rm {path}")
    return f"its lock file, which belongs to {owner}, is a second name of {other}. Run: {run}"


def _unclear(path: str, other: str, pid: int | None) -> str:
    run = shell_line(f"rm {path}")
    return (
        f"its lock file is also named {other}, and {_process(pid)} has locked one of the two. When "
        f"that process has ended, run: {run}"
    )


def _process(pid: int | None) -> str:
    if pid is None:
        return "a process that can't be seen from here"
    return f"process {pid} of {procfs.user_of(pid) or 'an unknown user'}"


def _share_prefix(uuid: str) -> str:
    return f"{lock_name(uuid).removesuffix('.lock')}{SHARE}"


def _record_prefix(uuid: str) -> str:
    return f"{lock_name(uuid).removesuffix('.lock')}{RECORD}"


def _mutex_message(pid: int | None, waited_s: float) -> str:
    text = (
        f"Other reservations have been under way for {waited_s:.0f} s, by {_process(pid)}. "
        "Try again."
    )
    if waited_s < LONG_S:
        return text
    return (
        f"{text} If that does not help, the NVIDIA driver hangs in that process, which must end "
        "before anybody can reserve a GPU."
    )
