"""The lock directory, which all users of a machine share.

It contains these files. UUID identifies a device, UID identifies a user, and N is a number.

    UUID.lock                    locked by the process that has reserved the whole device
    UUID.record-UID-N            describes that process to other users
    UUID.share-UID-N.lock        locked by a process that shares the device
    queue-UID-N.lock             locked by a waiter
    mutex.lock                   locked by a process while it is reading or changing reservations
    mutex.N                      replaces mutex.lock while a killed process can't release it

Every user can write to UUID.lock, mutex.lock and mutex.N. A file with a UID in its name can be
written only by its owner, and counts as locked only if its owner has locked it
(`file_control.write_lock`).

A lock file is never deleted while its lock counts, because other processes can't see a lock on a
deleted file.
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
    has_joined_reservation,
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
from reserve_gpu.system.file_control import (
    has_write_locks,
    is_file_locked,
    is_read_locked,
    is_write_locked,
    read_lock,
    write_lock,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from typing_extensions import Self

    from reserve_gpu.model.clocks import Instant
    from reserve_gpu.model.queue import Ticket
    from reserve_gpu.model.requests import TicketAhead

NAME = "reserve_gpu"
# Directories that all users share, in order of preference. /tmp comes last, because a systemd
# service with PrivateTmp has its own /tmp.
PLACES = ("/run/lock", "/dev/shm", "/tmp")  # noqa: S108 - their contents are never trusted

MUTEX = "mutex.lock"
# The mutex's files, in order (`LockDirectory.mutex`). Older versions treat every unknown file whose
# name ends in ".lock" as a device's lock file.
MUTEXES = (MUTEX, *(f"mutex.{number}" for number in range(1, 8)))
MUTEX_LIMIT_S = 30.0
BRIEF_LIMIT_S = 1.0  # mutex timeout for brief checks, for example after each cell
MUTEX_POLL_S = 0.01
MUTEX_LOOK_S = 0.25  # seconds between checks whether the mutex's holder is dying
MUTEX_LONG_LOOK_S = 1.0  # the same, after a wait of this many seconds
FEW = 128  # testing the locks of more files is slower than reading /proc/locks
LONG_S = 10.0  # if the mutex is held for more seconds than this, the driver has probably hung
REPLACED_LIMIT = 10  # maximum attempts to lock a file that other processes keep replacing
MOST_LOST = 256  # maximum number of lock files to check for lost devices; any user can add files
MOST_NUMBERS = 10**10
OTHERS_MODE, OWN_MODE = 0o666, 0o644
NEW_MODE = 0o600  # mode of a user's new file until the user has locked it


class LockDirectory:
    """The machine's lock directory, as a context manager that opens and closes it.

    Entering the context creates the directory for all users if it does not exist, and raises
    LockError if the directory can't be used.

    Args:
        path: The directory's absolute path. Defaults to `default_path()`.

    Raises:
        LockError: The platform is not Linux, or no usable path was found.
    """

    def __init__(self, path: str | None = None) -> None:
        platform: str = sys.platform
        if platform != "linux":
            raise LockError(f"Reservations need Linux or WSL2; this is {platform}.")
        self.path = path or default_path()
        self._holders: Holders | None = None
        self._device: str | None = None  # device number in /proc/locks, once known

    def __enter__(self) -> Self:
        self.descriptor = files.open_directory(self.path)
        return self

    def __exit__(self, *_: object) -> None:
        files.close(self.descriptor)

    def follow(self) -> None:
        """Reopen the directory if its path no longer refers to the open directory.

        This happens when a cleanup program has deleted the directory.

        Raises:
            LockError: The directory can't be used.
        """
        if not files.is_current(files.NONE, self.path, self.descriptor):
            previous, self.descriptor = self.descriptor, files.open_directory(self.path)
            self._device = None
            files.close(previous)

    @contextmanager
    def mutex(self, limit_s: float = MUTEX_LIMIT_S, *, reads_only: bool = False) -> Iterator[None]:
        """Hold the machine-wide mutex during the `with` block.

        A process that is killed while its thread hangs in the driver keeps its locks, but runs none
        of its code again (`procfs.is_dying`). So the mutex has several files. A process has the
        mutex if it has locked one of them and has checked, after that:

        - A dying process has locked each earlier file.
        - No other process has locked a later file, except dying ones.

        Two processes can't have the mutex at the same time. Suppose that A has the mutex through a
        later file than B. When A checked B's file, a dying process had locked that file. So B has
        locked it since, and has then checked A's file, and found it locked.

        Args:
            limit_s: The timeout in seconds.
            reads_only: Whether to accept a mutex file that this process can read but not write.

        Raises:
            MutexHeldError: Another process still held the mutex when the timeout expired.
            LockError: The mutex can't be locked.
        """
        start, file, look_at = time.monotonic(), 0, 0.0
        while (mutex := self._lock_mutex(file, reads_only=reads_only)) is None:
            now = time.monotonic()
            if not look_at and not self._later_mutexes(0):
                look_at = now + MUTEX_LOOK_S
            if now >= look_at:
                file = self._dying_holders()
                # All processes that wait for the mutex read /proc/locks, so they do it less often
                # after a while, unless a dying process holds the mutex.
                is_long = not file and now - start > MUTEX_LONG_LOOK_S
                look_at = now + (MUTEX_LONG_LOOK_S if is_long else MUTEX_LOOK_S)
            if now - start >= limit_s:
                raise MutexHeldError(_mutex_message(self._mutex_pid(), now - start))
            executor.sleep(MUTEX_POLL_S)
        try:
            self._device = kernel_device(mutex.descriptor)
            self._holders = Holders(self.path, self.descriptor, self._device)
            yield
        finally:
            self._holders = None
            mutex.release()

    def _lock_mutex(self, file: int, *, reads_only: bool) -> Lock | None:
        """Lock one of the mutex's files, or return None if that does not give the mutex.

        Args:
            file: The file's index in `MUTEXES`. Dying processes have locked the earlier files.
            reads_only: Whether to accept a file that this process can read but not write.

        Raises:
            LockError: The mutex can't be locked.
        """
        if file == len(MUTEXES):
            return None
        lock = self._lock_mutex_file(MUTEXES[file], reads_only=reads_only)
        if lock is None:
            return None
        with ExitStack() as stack:
            stack.callback(lock.release)
            if file:
                # Any user can link the name to a device's lock file, which is locked for long. So
                # this lock, which no device's holder takes, marks the file as the mutex's.
                is_marked = read_lock(lock.descriptor)
                if not is_marked or self._dying_holders() < file:
                    return None
            if self._is_later_mutex_held(file):
                return None
            stack.pop_all()
        return lock

    def _dying_holders(self) -> int:
        """Return how many of the mutex's files, from the first one on, dying processes lock."""
        holders = self.holders
        return sum(1 for _ in takewhile(lambda n: procfs.is_dying(holders.taker(n)), MUTEXES))

    def _is_later_mutex_held(self, file: int) -> bool:
        """Return whether a process that is not dying has locked a later file of the mutex."""
        return any(map(self._is_mutex_held, self._later_mutexes(file)))

    def _later_mutexes(self, file: int) -> list[str]:
        """Return the names of the mutex's later files. Usually, none exist."""
        return [name for name in MUTEXES[file + 1 :] if files.status_of(self.descriptor, name)]

    def _is_mutex_held(self, name: str) -> bool:
        """Return whether a process that is not dying has the mutex through a later file."""
        descriptor = files.open_to_read(self.descriptor, name)
        if descriptor is None:  # its owner might have changed its mode
            taker = self.holders.taker(name)
            return taker is not None and not procfs.is_dying(taker)
        with files.closing(descriptor):
            is_held = is_read_locked(descriptor) and is_file_locked(descriptor)
            return is_held and not procfs.is_dying(self.holders.taker(name))

    def _mutex_pid(self) -> int | None:
        """Return the PID of the process that has the mutex, if it is visible."""
        later = filter(self._is_mutex_held, self._later_mutexes(0))
        return self.holders.taker(next(later, MUTEX))

    def _lock_mutex_file(self, name: str, *, reads_only: bool) -> Lock | None:
        """Lock a file of the mutex, or return None if another process has locked it.

        With `reads_only`, a file that this process can only read is also accepted, because flock(2)
        does not require write permission.

        Raises:
            LockError: The first file can't be locked.
        """
        try:
            return self.acquire(name)
        except LockError:
            path = f"{self.path}/{name}"
            descriptor = files.open_to_read(self.descriptor, name) if reads_only else None
            if descriptor is None:
                if name != MUTEX:
                    return None  # the error about the first file's holder is more useful
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
        """Lock a file in the directory, creating the file if it does not exist.

        With `OWN_MODE`, the file is also locked with `write_lock` if the system supports that.

        Args:
            name: The file's name.
            mode: The mode for a new file.
            taken: The time when the original lock was taken, if this lock replaces it. Defaults to
                now.

        Returns:
            The lock, or None if another process has locked the file. With `OWN_MODE`, the result is
            also None if other users can write to the file.

        Raises:
            LockError: The file can't be opened or locked.
        """
        path = f"{self.path}/{name}"
        if "/" in name or name.startswith("."):  # the driver could report any string as a UUID
            raise LockError(f"{sanitize(name)!r} is not a valid lock file name.")
        is_own = mode == OWN_MODE
        for _ in range(REPLACED_LIMIT):
            lock = None
            # Other users can lock any file that they can read, so keep a new file unreadable.
            new_mode = NEW_MODE if is_own else mode
            descriptor = files.open_to_lock(self.descriptor, name, path, new_mode)
            try:
                status = os.fstat(descriptor)
                if name != MUTEX and files.is_same(self.descriptor, MUTEX, status):
                    raise LockError(_hard_link_message(path, MUTEX, status))
                if is_own and files.is_open_to_others(status):  # other processes would not trust it
                    return None
                if RECORD not in name and not flock(descriptor, path):
                    return None
                is_owners = is_own and write_lock(descriptor)
                if is_own and not is_owners and has_write_locks(descriptor):
                    return None
                # Another process might have replaced the file before this process locked it.
                if files.is_current(self.descriptor, name, descriptor):
                    if is_own:
                        files.finish(descriptor, path, mode)
                    lock = Lock(descriptor, path, taken)
                    lock.is_write_locked = is_owners
                    return lock
            finally:
                if lock is None:
                    files.close(descriptor)
        raise LockError(f"Other processes keep replacing {path}. Try again.")

    def lock_device(
        self,
        uuid: str,
        *,
        share: bool,
        held: Lock | None = None,
        taken: Instant | None = None,
        has_record: bool = True,
    ) -> Lock | Holder:
        """Lock a whole device, or become one of its sharers. The caller must hold the mutex.

        Args:
            uuid: The device's UUID.
            share: Whether to share the device.
            held: This process's existing lock on the device, which does not count as a conflict.
            taken: The time when the original lock was taken, if this lock replaces it. Defaults to
                now.
            has_record: Whether to also lock a record file for a whole device. If not, call
                `lock_record` before the mutex is released, unless the lock is released first.

        Returns:
            The lock, or a holder that prevents this process from locking the device.

        Raises:
            LockError: The lock file can't be used.
        """
        name, prefix = lock_name(uuid), _share_prefix(uuid)
        held_names = {held.name} if held else set()
        if name in held_names:  # this process holds the whole device, and will share it
            return self.acquire_any_user_file(prefix, taken)
        device_lock = self.acquire(name, taken=taken)
        if device_lock is None:
            if problem := self._problem(name):
                raise LockError(problem)
            return self.holders.of(name)
        with ExitStack() as stack:
            stack.callback(device_lock.release)
            if share:
                return self.acquire_any_user_file(prefix, taken)
            sharers = map(self.holders.of, self._owner_locked(prefix, held_names))
            # Processes that joined the original reservation don't conflict with its replacement.
            own_times = () if taken is None else (taken.wall,)
            other_sharers = (
                each for each in sharers if not has_joined_reservation(each, own_times)
            )
            if (other := next(other_sharers, None)) is not None:
                return other
            if has_record:
                self.lock_record(uuid, device_lock)
            stack.pop_all()
            return device_lock

    def acquire_again(self, name: str, taken: Instant) -> Lock | None:
        """Lock a device's file after another of this user's processes has released it.

        The caller must hold the mutex.

        Args:
            name: The file's name.
            taken: The time when the released lock was taken.

        Returns:
            The lock, or None if another process has locked the file.

        Raises:
            LockError: The file can't be used.
        """
        if SHARE in name:
            return self.acquire_user_file(name, taken)
        lock = self.acquire(name, OTHERS_MODE, taken)
        if lock:
            self.lock_record(device_of(name), lock)
        return lock

    def lock_record(self, uuid: str, device_lock: Lock) -> None:
        """Lock a record file for the holder of a whole device, if possible.

        The caller must hold the mutex.

        Args:
            uuid: The device's UUID.
            device_lock: The lock on the whole device.
        """
        with suppress(LockError):
            if has_write_locks(device_lock.descriptor):
                prefix = _record_prefix(uuid)
                device_lock.owned = self.acquire_any_user_file(prefix, device_lock.taken)

    def acquire_joined(self, uuid: str, taken: Instant) -> Lock:
        """Lock a sharer's file for a process that is joining a reservation.

        The caller must hold the mutex.

        Args:
            uuid: The device's UUID.
            taken: The time when the reservation's lock was taken.

        Returns:
            The lock.

        Raises:
            LockError: No file can be locked.
        """
        return self.acquire_any_user_file(_share_prefix(uuid), taken)

    def acquire_any_user_file(
        self, prefix: str, taken: Instant | None = None, avoided: Sequence[str] = ()
    ) -> Lock:
        """Lock the first available file of this user, named `PREFIX-UID-N.lock`.

        The caller must hold the mutex. Other users' files are skipped, even if their names contain
        this user's UID. If another user has locked one of this user's files, the file is replaced.

        Args:
            prefix: The part of the name before the UID.
            taken: The time when the original lock was taken, if this lock replaces it. Defaults to
                now.
            avoided: The names of files to lock only if no other file is available.

        Returns:
            The lock.

        Raises:
            LockError: No file can be locked, for example because this user has too many locks.
        """
        living = 0
        for name in self._user_file_names(prefix):
            if living + len(avoided) >= MOST_OF_ONE_USER:
                break
            if name in avoided or files.is_taken(self.descriptor, name):
                continue
            if lock := self.acquire_user_file(name, taken):
                return lock
            living += 1
        if lock := self.acquire_first(avoided):
            return lock
        raise LockError(
            f"You already have {living} locks ({self.path}/{prefix}-...), and can't have more. "
            "End one of the processes that hold them."
        )

    def _user_file_names(self, prefix: str) -> Iterator[str]:
        """Yield possible names for a file of this user.

        The usual names come first. The names of this user's other files and random names follow, in
        case other users have taken all the usual names.
        """
        uid = os.geteuid()
        first = _first_names(prefix, uid)
        yield from first
        other_names = (name for name in self.holders.user_files(prefix, uid) if name not in first)
        random_names = (_user_file_name(prefix, uid, _random_number()) for _ in first)
        yield from chain(other_names, random_names)

    def acquire_user_file(self, name: str, taken: Instant | None = None) -> Lock | None:
        """Lock one of this user's files by name. The caller must hold the mutex.

        Args:
            name: The file's name.
            taken: The time when the original lock was taken, if this lock replaces it. Defaults to
                now.

        Returns:
            The lock, or None if another of this user's processes has locked the file, or if another
            user has created a file with that name.

        Raises:
            LockError: The file can't be opened or locked.
        """
        try:
            lock = self.acquire(name, OWN_MODE, taken)
            if lock is None and not self._is_owner_locked(name):
                # The process that had locked the file may have just exited.
                lock = self.acquire(name, OWN_MODE, taken)
                if lock is None:
                    # Another user has locked the file, which requires only read permission.
                    with suppress(OSError):
                        os.unlink(name, dir_fd=self.descriptor)
                    lock = self.acquire(name, OWN_MODE, taken)
        except LockError:
            if not files.is_taken(self.descriptor, name):
                raise
            return None  # another user created the file first
        if lock:
            self.holders.add(name)
        return lock

    def acquire_first(self, names: Iterable[str]) -> Lock | None:
        """Lock the first available file of this user, or return None if none is available.

        Args:
            names: The names of the files to try, in order.

        Raises:
            LockError: A file can't be opened, or a system error prevents locking it.
        """
        return next(filter(None, map(self.acquire_user_file, names)), None)

    def left_tickets(self, for_s: float) -> list[Ticket]:
        """Return the tickets of this user's processes that recently left the queue.

        The caller must hold the mutex. When a waiter gets its devices, its file becomes empty, and
        its ticket is no longer returned. The time since a waiter left is computed from the file's
        ctime, so setting the wall clock can hide a ticket.

        Args:
            for_s: The maximum time since a waiter left, in seconds.
        """
        prefix = f"{QUEUE}-{os.geteuid()}-"
        names = _first_names(QUEUE, os.geteuid())
        if any(files.is_taken(self.descriptor, name) for name in names):
            # Another user has taken a usual name, so this user's tickets might have other names.
            names = [name for name in self.holders.listing() if name.startswith(prefix)]
        return sorted(
            map(self.holders.ticket, (n for n in names if self._is_left_ticket(n, for_s)))
        )

    def _is_left_ticket(self, name: str, for_s: float) -> bool:
        status = files.status_of(self.descriptor, name)
        if status is None or not status.st_size or files.is_taken(self.descriptor, name):
            return False
        return abs(time.time() - status.st_ctime) < for_s and not self._is_owner_locked(name)

    def read_left_ticket(self, ahead: TicketAhead) -> tuple[int, float] | None:
        """Return the owner of a ticket whose waiter left the queue, and the time since it left.

        Args:
            ahead: The ticket, as listed by another waiter.

        Returns:
            The owner's UID and the time in seconds, or None if the ticket file has changed or other
            users can write to it.
        """
        status = files.status_of(self.descriptor, ahead.name) if is_waiters(ahead.name) else None
        if status is None or not status.st_size or status.st_mtime_ns != ahead.number:
            return None
        is_safe = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
        if not is_safe or files.is_open_to_others(status):
            return None
        return status.st_uid, abs(time.time() - status.st_ctime)

    def is_served(self, name: str) -> bool:
        """Return whether a ticket's file is empty, which means that its waiter got its devices."""
        status = files.status_of(self.descriptor, name)
        return status is not None and not status.st_size

    def holders_of(self, uuid: str) -> tuple[Holder, ...]:
        """Return the holders of a device. The caller must hold the mutex.

        Only a shared device can have several holders.

        Raises:
            LockError: The lock file can't be used, so the holders are unknown.
        """
        name = lock_name(uuid)
        whole_device = [self.holders.of(name)] if self._is_held(name, f"{self.path}/{name}") else []
        return (*whole_device, *self.sharers_of(uuid))

    def sharers_of(self, uuid: str, excluded: Collection[str] = ()) -> tuple[Holder, ...]:
        """Return the holders that share a device. The caller must hold the mutex.

        Args:
            uuid: The device's UUID.
            excluded: The names of files to ignore.
        """
        return tuple(map(self.holders.of, self._owner_locked(_share_prefix(uuid), excluded)))

    def holders_of_other_devices(self, uuids: Collection[str]) -> tuple[Holder, ...]:
        """Return the holders of all devices except the given ones. The caller must hold the mutex.

        The other devices might be lost GPUs. Any user can create a lock file for a device that does
        not exist, so use the result only for display.

        Args:
            uuids: The UUIDs of the devices to exclude.

        Raises:
            LockError: The directory can't be listed.
        """
        devices = [lock_name(uuid).removesuffix("lock") for uuid in uuids]
        known = (*devices, MUTEX, QUEUE)
        names = [name for name in self.holders.possibly_locked if name.endswith(".lock")]
        others = sorted(name for name in names if not name.startswith(known))[:MOST_LOST]
        held = filter(
            lambda n: self._is_owner_locked(n) if has_owner(n) else self._is_held(n), others
        )
        return tuple(map(self.holders.of, held))

    def listed_numbers(self) -> dict[str, list[Claim]]:
        """Return the claims on whole GPUs, grouped by each GPU's label when it was reserved.

        Only holders in this process's mount namespace and batch job are included, because they
        number the GPUs in the same way as this process. Each label comes from a record that only
        the holder's user can write. Some holders might be missing, because /proc/locks might not
        show them.
        """
        mounts, job = procfs.mount_namespace(), process_identity.job()
        holders_by_owner: dict[int, list[Holder]] = {}
        for owner, file in self._locked_by_owner():
            is_held = is_sharers(file) or self._is_held(file)
            holder = self.holders.of(file) if is_held else Holder()
            record, owned = holder.record, holders_by_owner.setdefault(owner, [])
            is_whole = record.index is not None and record.label == f"GPU{record.index}"
            is_here = (record.who.mounts, record.who.job) == (mounts, job)
            if holder.record_owner == owner and is_whole and is_here:
                owned.append(holder)
        claims: dict[str, list[Claim]] = {}
        for owned in holders_by_owner.values():
            # Count a user's claims on a device only once, so that false claims block few devices.
            by_device = {device_of(holder.file or ""): holder for holder in owned}
            for device, holder in by_device.items():
                claim = Claim(holder, device, tuple(by_device))
                claims.setdefault(holder.record.label or "", []).append(claim)
        return claims

    def _locked_by_owner(self) -> dict[tuple[int, str], None]:
        """Return the name of each file that its owner has locked, paired with the owner's UID.

        For a record file, the pair contains the name of the device's lock file instead. Any user
        can lock any number of files, so the number of files per owner is limited. Files with low
        numbers are preferred.
        """
        locked: dict[tuple[int, str], None] = {}
        checked: Counter[int] = Counter()
        living: Counter[int] = Counter()
        names = filter(has_owner, self.holders.possibly_locked)
        for name in sorted(names, key=_by_number):
            owner = files.sole_owner(self.descriptor, name)
            if owner is None or checked[owner] >= MANY or living[owner] >= MOST_OF_ONE_USER:
                continue
            checked[owner] += 1
            if self._is_owner_locked(name):
                living[owner] += 1
                locked[owner, name if is_sharers(name) else f"{device_of(name)}.lock"] = None
        return locked

    def is_number_recorded(self, index: int, uuid: str) -> bool:
        """Return whether a process might have reserved another GPU under this GPU's number.

        If not, `claims_on_other_devices` is empty, which is known without reading /proc/locks. If
        there are too many files to test their locks, the result is True.

        Args:
            index: The GPU's number.
            uuid: The UUID of the GPU that has this number now.
        """
        own_device, own_label = device_of(lock_name(uuid)), f"GPU{index}"
        labels = self._locked_labels()
        return labels is None or any(
            label == own_label and device != own_device for device, label in labels
        )

    def _locked_labels(self) -> list[tuple[str, str | None]] | None:
        """Return the device and the GPU label of each record whose owner has locked the file.

        The result is None if there are many records, because reading /proc/locks is then faster.
        """
        holders = self.holders
        if holders.locked_labels is None:
            names = [name for name in holders.names if has_owner(name)]
            if len(names) > FEW:
                return None
            locked = filter(self._is_owner_locked, names)
            holders.locked_labels = [(device_of(name), holders.label(name)) for name in locked]
        return holders.locked_labels

    def claims_on_other_devices(
        self, index: int, uuid: str, numbers: Mapping[str, Sequence[Claim]]
    ) -> list[Claim]:
        """Return the claims on other GPUs that had this number when they were reserved.

        Args:
            index: The GPU's number.
            uuid: The UUID of the GPU that has this number now.
            numbers: The result of `listed_numbers`.
        """
        own_device, own_pid = device_of(lock_name(uuid)), os.getpid()
        return [
            claim
            for claim in numbers.get(f"GPU{index}", ())
            if claim.device != own_device and claim.holder.listed_pid != own_pid
        ]

    def holders_by(
        self, uid: int, uuids: Collection[str], excluded: Collection[str] = ()
    ) -> tuple[Holder, ...]:
        """Return a user's processes that hold any of these devices.

        The caller must hold the mutex. A whole device is attributed to the user of the process that
        /proc/locks shows, or to no user if that process is in another PID namespace. The owner of a
        whole device's lock file does not matter, because any user can create that file. A sharer is
        attributed to its file's owner, because only the owner's lock on that file counts.

        Args:
            uid: The user's UID.
            uuids: The devices' UUIDs.
            excluded: The names of files to ignore.
        """
        names = [name for uuid in uuids for name in self._device_files(uuid)]
        names.sort(key=lambda name: not is_sharers(name) and self._problem(name) is not None)
        ordered = (MUTEX, *excluded, *names)
        statuses = {name: files.status_of(self.descriptor, name) for name in ordered}
        # Any user can create hard links to a file, so only the first name of each file counts.
        by_file = {(s.st_dev, s.st_ino): name for name, s in reversed(statuses.items()) if s}
        holders = [
            self._holder_by(uid, name)
            for name in reversed(by_file.values())
            if name not in (MUTEX, *excluded)
        ]
        return tuple(holder for holder in holders if holder)

    def _device_files(self, uuid: str) -> list[str]:
        return [lock_name(uuid), *self.holders.user_files(_share_prefix(uuid))]

    def _holder_by(self, uid: int, name: str) -> Holder | None:
        if is_sharers(name):
            is_owner = files.sole_owner(self.descriptor, name) == uid
            return self.holders.of(name) if is_owner and self._is_owner_locked(name) else None
        if not self.holders.lists(name) and not self._is_held(name):
            return None
        holder = self.holders.of(name)
        return holder if holder.uid == uid else None

    def unlisted(self, names: Collection[str]) -> set[str] | None:
        """Return the names of the files that are not locked according to /proc/locks.

        This is a cheap hint that a lock might have been released. Never base a decision on it.

        Args:
            names: The names of files in the directory.

        Returns:
            The names, or None if /proc/locks does not show all locks.
        """
        with self._cached_holders() as holders:
            return {n for n in names if not holders.lists(n)} if holders.shows_all_locks else None

    def are_listed(self, names: Collection[str], by: int) -> bool:
        """Return whether /proc/locks shows that a process took all of these locks.

        Args:
            names: The lock files' names.
            by: The process's PID.
        """
        with self._cached_holders() as holders:
            return all(holders.lists(name, by) for name in names)

    def listed_holders_of(self, uuid: str) -> tuple[Holder, ...]:
        """Return the holders of a device according to /proc/locks.

        Some holders might be missing, so never base a decision on the result.
        """
        with self._cached_holders() as holders:
            names = filter(holders.lists, self._device_files(uuid))
            held = [
                name
                for name in names
                if (self._is_owner_locked(name) if is_sharers(name) else not self._problem(name))
            ]
            return tuple(map(holders.of, held))

    def listed_own_sharers_of(self, uuid: str) -> list[Holder]:
        """Return this user's processes that share a device according to /proc/locks."""
        with self._cached_holders() as holders:
            return [*map(holders.of, self._listed_by_name(_share_prefix(uuid), os.geteuid()))]

    def tickets(self, excluded: Collection[str] = (), *, finds_pids: bool = True) -> list[Ticket]:
        """Return all waiters' tickets in queue order. The caller must hold the mutex.

        Args:
            excluded: The names of tickets to ignore.
            finds_pids: Whether to find the waiters' PIDs. See `Holders.ticket`.
        """
        names = self._owner_locked(QUEUE, excluded)
        return in_order(self.holders.ticket(name, finds_pid=finds_pids) for name in names)

    def listed_tickets(self) -> list[Ticket]:
        """Return the tickets that are locked according to /proc/locks, in queue order.

        Some tickets might be missing, so never base a decision on the result.
        """
        with self._cached_holders() as holders:
            names = filter(holders.lists, holders.user_files(QUEUE))
            return in_order(map(holders.ticket, filter(self._is_owner_locked, names)))

    def listed_users_tickets(self) -> list[Ticket]:
        """Return the tickets of all users that have locks in /proc/locks, in queue order.

        Unlike `listed_tickets`, this method usually does not list the directory. Some tickets might
        be missing, so never base a decision on the result.
        """
        with self._cached_holders() as holders:
            uids = holders.listed_uids()
            names = [name for uid in uids for name in self._listed_by_name(QUEUE, uid)]
            return in_order(map(holders.ticket, names))

    def _listed_by_name(self, prefix: str, uid: int) -> list[str]:
        """Return the names of a user's files that are locked according to /proc/locks.

        The result might be incomplete, because only the usual names are tried unless all of them
        exist. Listing the directory is slow when a user has created a huge number of files.
        """
        names = _first_names(prefix, uid)
        existing = list(takewhile(lambda name: files.status_of(self.descriptor, name), names))
        if existing == names:  # other users might have taken some of these names
            existing = self.holders.user_files(prefix, uid)
        owned = (name for name in existing if files.sole_owner(self.descriptor, name) == uid)
        return [name for name in owned if self.holders.lists(name) and self._is_owner_locked(name)]

    @property
    def holders(self) -> Holders:
        """Return a reader that identifies the holders of locks.

        The same reader is returned as long as this process holds the mutex, because other processes
        don't lock devices without the mutex.
        """
        return self._holders or Holders(self.path, self.descriptor, self._device)

    @contextmanager
    def _cached_holders(self) -> Iterator[Holders]:
        """Use the same `Holders` reader throughout the `with` block, even without the mutex.

        The reader caches what it has read from /proc/locks and the directory.
        """
        previous, self._holders = self._holders, self.holders
        try:
            yield self._holders
        finally:
            self._holders = previous

    def _owner_locked(self, prefix: str, excluded: Collection[str] = ()) -> Iterator[str]:
        for name in self.holders.user_files(prefix):
            if name not in excluded and self._is_owner_locked(name):
                yield name

    def _is_owner_locked(self, name: str) -> bool:
        """Return whether a file has been locked by its owner.

        Other users can lock the file with flock(2), but not with `write_lock`. Older versions of
        this program used only flock(2). Such a lock counts if /proc/locks shows the PID of one of
        the owner's processes, even though that PID might have been reused. If /proc/locks shows no
        PID, for example because the process is in another PID namespace, the lock counts if an
        older version wrote the record.
        """
        descriptor = files.open_to_read(self.descriptor, name)
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
            # If the process's open files are not visible, only its start time can identify it. The
            # start time is reliable only if the file has a record.
            is_sure = procfs.shows_files(pid) or record.since is not None
            return is_sure and procfs.uid_of(pid) == owner
        return record.since is not None and not holders.lists(name)

    def _is_held(self, name: str, path: str | None = None) -> bool:
        """Return whether a process has locked a device's file.

        This method tests the lock itself and does not rely on /proc/locks. If `path` is given, the
        method also raises LockError when the file can't be a device's lock file.
        """
        descriptor = files.open_to_read(self.descriptor, name, path)
        if descriptor is None:
            return False
        with files.closing(descriptor):
            if files.is_current(self.descriptor, MUTEX, descriptor):
                if path:
                    raise LockError(_hard_link_message(path, MUTEX, os.fstat(descriptor)))
                return False
            if flock(descriptor, f"{self.path}/{name}"):
                return False
        problem = self._problem(name)
        if problem and path:
            raise LockError(problem)
        return problem is None

    def _problem(self, name: str) -> str | None:
        """Return the reason not to trust the lock on a device's file, or None if it can be trusted.

        Any user can write to a device's lock file, and can therefore create a hard link to it that
        looks like the lock file of another device. Both devices then appear to be locked. The
        holder's record file shows which device is really held.
        """
        status = files.status_of(self.descriptor, name)
        if status is None or status.st_nlink == 1:
            return None
        # Use a new reader, because this process might have just taken the lock.
        holders = Holders(self.path, self.descriptor, self._device)
        holder = holders.of(name)
        held_names = self._held_by_record(holders, holder.uid)
        if name in held_names:
            return None
        others = [other for other in holders.listing() if self._is_other_name(other, name, status)]
        path = f"{self.path}/{name}"
        if other := next((each for each in others if each == MUTEX or each in held_names), None):
            return _hard_link_message(path, other, status)
        return _unclear_lock_message(path, others[0], holder.listed_pid) if others else None

    def _is_other_name(self, other: str, name: str, status: os.stat_result) -> bool:
        """Return whether `other` is another name for a device's lock file."""
        if other == name or has_owner(other) or not other.endswith(".lock"):
            return False
        return files.is_same(self.descriptor, other, status)

    def _held_by_record(self, holders: Holders, uid: int | None) -> set[str]:
        """Return the lock file names of the devices for which a user has locked a record file."""
        names = [name for name in holders.names if RECORD in name] if uid is not None else []
        owned = (name for name in names if files.sole_owner(self.descriptor, name) == uid)
        return {lock_name(device_of(name)) for name in owned if self._is_owner_locked(name)}


def _user_file_name(prefix: str, uid: int, number: int) -> str:
    # Older versions treat every file whose name ends in ".lock" as a device's lock file.
    return f"{prefix}-{uid}-{number}{'' if prefix.endswith(RECORD) else '.lock'}"


def _random_number() -> int:
    # Don't use `secrets`, because importing it loads OpenSSL.
    return int.from_bytes(os.urandom(8), "big") % MOST_NUMBERS


def _first_names(prefix: str, uid: int) -> list[str]:
    """Return the usual names for a user's files."""
    start, _, end = _user_file_name(prefix, uid, 0).rpartition("0")
    return [f"{start}{number}{end}" for number in range(2 * MOST_OF_ONE_USER)]


def _by_number(name: str) -> tuple[int, str, str]:
    number = name.rpartition("-")[2].removesuffix(".lock")
    return len(number), number, name


def device_of(name: str) -> str:
    """Return the part of a lock file's name that identifies the device."""
    return name.partition(SHARE)[0].partition(RECORD)[0].removesuffix(".lock")


def lock_name(uuid: str) -> str:
    """Return the name of a device's lock file."""
    return f"{uuid.replace('/', '_')}.lock"  # before driver 470, MIG UUIDs contained slashes


def default_path() -> str:
    """Return the path of the configured lock directory, or the first usable default path.

    Raises:
        LockError: The configured path is relative, or no default path is usable.
    """
    configured = os.path.expanduser(os.environ.get(settings.LOCK_DIRECTORY, ""))
    if configured and not os.path.isabs(configured):
        where = f"{settings.LOCK_DIRECTORY}={sanitize(configured)!r}"
        # A relative path would refer to a different directory in each working directory.
        raise LockError(f"{where} must be an absolute path.")
    if configured:
        return os.path.normpath(configured)
    for place in PLACES:
        with suppress(OSError):
            mode = os.stat(place).st_mode
            if stat.S_ISDIR(mode) and mode & stat.S_ISVTX and mode & stat.S_IWOTH:
                return f"{place}/{NAME}"
    raise LockError(
        f"None of {', '.join(PLACES)} is a directory that every user can write to (mode 1777). "
        f"{files.SET_ANOTHER}"
    )


def preferred_paths(path: str) -> tuple[str, ...]:
    """Return the default paths that take precedence over this lock directory, then its own path.

    If `/run/lock` is not writable in a container image, the container's default path is in
    `/dev/shm`, but the host might use `/run/lock`.
    """
    if os.environ.get(settings.LOCK_DIRECTORY):
        return (path,)
    paths = tuple(f"{place}/{NAME}" for place in PLACES)
    return paths[: paths.index(path) + 1] if path in paths else (path,)


def _hard_link_message(path: str, other: str, status: os.stat_result) -> str:
    owner = procfs.user_name(status.st_uid)
    run = shell_line(f"rm {path}")
    return f"its lock file, which belongs to {owner}, is a hard link to {other}. Run: {run}"


def _unclear_lock_message(path: str, other: str, pid: int | None) -> str:
    run = shell_line(f"rm {path}")
    return (
        f"its lock file has a second hard link, {other}, and {_process(pid)} has locked the file "
        f"through one of its names. When that process has ended, run: {run}"
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
        f"Other reservations have been in progress for {waited_s:.0f} s; {_process(pid)} is making "
        "the current one"
    )
    if pid is not None and procfs.is_dying(pid):
        return (
            f"{text}, but was killed and has not ended (state D). If this lasts, only the driver "
            "or a reboot can end that process."
        )
    if pid is not None and procfs.is_stopped(pid):
        run = shell_line(f"kill -CONT {pid}")
        return f"{text}, but is stopped (state T). To continue it, its user can run: {run}"
    text += ". Try again."
    if waited_s < LONG_S:
        return text
    return (
        f"{text} If that does not help, the NVIDIA driver has hung in that process. No user can "
        "reserve a GPU until the process has ended."
    )
