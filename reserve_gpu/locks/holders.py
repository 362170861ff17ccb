"""Name the holder of a lock: by the kernel's list of locks, and by the record in the file.

Neither decides anything. The list is no snapshot and may miss a lock; it shows nothing of other PID
namespaces. Another process has written the record, so it is read with suspicion.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from reserve_gpu import proc
from reserve_gpu.errors import TOO_MANY_FILES, LockError
from reserve_gpu.locks import descriptors, files
from reserve_gpu.locks import record as records
from reserve_gpu.model import Asks, Holder, Record, Ticket

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from reserve_gpu.clocks import Instant

SHARE = ".share"  # in the name of a sharer's file: UUID.share-UID-N.lock
# A file that was changed no later than this after its record was only written: no cell has ended.
WRITING_S = 1.0
CLOCK_S = 2.0  # by which the moment at which a process began may be wrong


class Holders:
    """Who has what locked in one lock directory, as it is when first asked.

    path, directory: its path and its descriptor.
    device: what the kernel's list calls the file system, None for what stat(2) calls it.
    """

    def __init__(self, path: str, directory: int, device: str | None = None) -> None:
        self._path = path
        self._directory = directory
        self._device = device
        # Not functools.cached_property: before Python 3.12 it has a lock, which a child that is
        # forked meanwhile finds taken for ever.
        self._names: set[str] | None = None
        self._pids: dict[str, int] | None = None

    @property
    def names(self) -> set[str]:
        """Return the names of all files there. Raises LockError."""
        if self._names is None:
            try:
                self._names = set(os.listdir(f"/proc/self/fd/{self._directory}"))
            except OSError as error:
                text = f"{self._path} can't be listed: {error.strerror}."
                is_full = error.errno == errno.EMFILE
                raise LockError(TOO_MANY_FILES if is_full else text) from error
        return self._names

    def of(self, name: str) -> Holder:
        """Return the holder of a file that is known to be locked, as far as it can be seen."""
        record, status = self._record(name)
        if status is None:
            return Holder(file=name)
        if is_sharers(name):
            return self._holder(record, status)._replace(uid=status.st_uid, file=name)
        # Anybody may write into the file of a whole device.
        holder = self._holder(_of_nothing_shared(record), status)
        uid = proc.uid_of(holder.listed_pid) if holder.listed_pid else None
        return holder._replace(uid=uid, file=name)

    def ticket(self, name: str) -> Ticket:
        """Return the ticket in a file that a waiter has locked."""
        record, status = self._record(name)
        if status is None:
            return Ticket(0, name, None, Holder())
        asks = record.asks or Asks()
        holder = self._holder(_of_nothing_shared(record), status)  # who waits holds nothing
        return Ticket(
            number=status.st_mtime_ns,  # see queue.Place
            name=name,
            wants=asks.wants,
            holder=holder._replace(last_cell=None),  # and runs no cell
            asks=asks.text,
            heartbeat=status.st_ctime_ns,
            needs=max(1, asks.needs),
            part_mib=record.promise.part_mib,
        )

    def lists(self, name: str, by: int | None = None) -> bool:
        """Tell whether the kernel's list names a process that has the file of that name locked.

        by: that process, which may have ended and left the lock to its children; None for any.
        """
        status = files.status_of(self._directory, name)
        pid = status and self._pid(status)
        return pid is not None and by in (None, pid)

    def listed_uids(self) -> set[int]:
        """Return the users of the processes that the kernel's list names, whatever they have."""
        uids = map(proc.uid_of, {*self._listed.values()})
        return {uid for uid in uids if uid is not None}

    def _holder(self, record: Record, status: os.stat_result) -> Holder:
        pid = self._pid(status)
        if pid is None and proc.sees_all_locks():  # the list was no snapshot, and has missed it
            self._pids = None
            pid = self._pid(status)
        keeper = _keeper(pid, status, record.written_boot) if pid else None
        return named(record, keeper, status.st_mtime)

    def fields(self, name: str) -> dict[str, Any]:
        """Return the fields of a record, unchecked; none if the file can't be opened."""
        descriptor = files.open_to_look(self._directory, name)
        if descriptor is None:
            return {}
        with descriptors.closing(descriptor):
            return records.fields(descriptor)

    def _record(self, name: str) -> tuple[Record, os.stat_result | None]:
        descriptor = files.open_to_look(self._directory, name)
        if descriptor is None:
            return Record(), None
        with descriptors.closing(descriptor):
            return records.read(descriptor), os.fstat(descriptor)

    def _pid(self, status: os.stat_result) -> int | None:
        device = self._device or f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
        return self._listed.get(f"{device}:{status.st_ino}")

    @property
    def _listed(self) -> dict[str, int]:
        if self._pids is None:
            self._pids = _locking_pids()
        return self._pids


def is_sharers(name: str) -> bool:
    """Tell whether that is the name of a sharer's file, which only its owner can write."""
    return SHARE in name


def with_hosts(holders: Sequence[Holder]) -> tuple[Holder, ...]:
    """Return the holders of a device, each guest with the name of the one that it has joined.

    What guests use is counted as used by that one, too.
    """
    known = list(holders)
    for place, guest in enumerate(holders):
        at = place_of_host(guest.record.guest_of, guest.uid, holders)
        if at is not None:
            host = known[at]
            uses = (host.used_mib, guest.used_mib)
            used_mib = None if None in uses else sum(use or 0.0 for use in uses)
            known[at] = host._replace(used_mib=used_mib)
            known[place] = guest._replace(beside=host.name or "a process")
    return tuple(known)


def without_guests(holders: Sequence[Holder], since: Collection[float] = ()) -> list[Holder]:
    """Return the holders of a device without the guests of those who are there.

    A guest has no part of its own, as long as the holder that it has joined is there.
    since: when others, who are not among them, have taken the device.
    """
    known = with_hosts(holders)
    return [each for each in known if not each.beside and not is_own_guest(each, since)]


def is_own_guest(holder: Holder, since: Collection[float]) -> bool:
    """Tell whether it is a guest of this user's, of what was taken at one of these moments."""
    return holder.record.guest_of in since and holder.uid == os.geteuid()


def place_of_host(since: float | None, uid: int | None, holders: Sequence[Holder]) -> int | None:
    """Return which of these a guest has joined; None for no guest, or if that one has gone.

    since, uid: when that one has taken the device, and whose process it is.
    """
    if since is None or uid is None:
        return None
    hosts = ((each.record.guest_of, each.record.since, each.uid) for each in holders)
    return next((at for at, host in enumerate(hosts) if host == (None, since, uid)), None)


def named(record: Record, pid: int | None, changed: float = 0.0) -> Holder:
    """Return what is known of a holder by its record and the pid that the kernel lists.

    changed: the time stamp of the record's file, which the extension renews after each cell.
    """
    now = proc.now()
    is_elsewhere = pid is None and record.who.namespace not in (None, proc.pid_namespace())
    return Holder(
        record.at(now),
        pid,
        elsewhere=is_elsewhere,
        last_cell=_last_cell(record, changed, now),
        clock_set_s=0.0
        if record.since is None
        else now.clock_set_s(record.since, record.since_boot),
    )


def _last_cell(record: Record, changed: float, now: Instant) -> float | None:
    """Return the end of the holder's last cell, by the wall clock as it is set now.

    If that clock was set after the record was written, the stamp may be from before or from after:
    the later one counts, as nothing is to look idle for longer than it is.
    """
    if record.written is None or abs(changed - record.written) <= WRITING_S:
        return None
    set_s = now.clock_set_s(record.written, record.written_boot)
    possible = [at for at in (changed, changed + set_s) if at <= now.wall + WRITING_S]
    return max(possible, default=changed)


def _of_nothing_shared(record: Record) -> Record:
    """Return the record without what only a sharer may say of itself."""
    promise = record.promise._replace(size=None)
    return record._replace(promise=promise, guest_of=None)


def _locking_pids() -> dict[str, int]:
    """Return the first process that has a file locked, by what the kernel calls the file."""
    pids: dict[str, int] = {}
    with suppress(OSError, ValueError), open("/proc/locks", encoding="utf-8") as locks:
        for line in locks:  # `1: FLOCK  ADVISORY  WRITE 4321 00:19:47 0 EOF`
            fields = line.split()
            if fields[1] == "FLOCK" and int(fields[4]) > 0:  # one who waits for it has "->" there
                pids.setdefault(fields[5], int(fields[4]))
    return pids


def _keeper(pid: int, file: os.stat_result, written_boot: float | None = None) -> int | None:
    """Return the process that keeps a lock: the one that took it, or one that it left running.

    written_boot: when the record was written, by the boot clock, as its writer says; None if not.

    What a command of `reserve-gpu run` leaves in the background has its descriptors. By then the
    number of the one that took it may be another process's. What a process has open tells, where
    that can be seen; else one that has begun after the lock is another: the file was changed last
    by its holder, and its ctime can't be set back. After the wall clock was set forward only the
    record is left: a user who can write another time into it can also renew the ctime.
    """
    if proc.shows_files(pid):
        is_keeper = proc.has_locked(pid, file)
    else:
        began, began_boot = proc.began(pid), proc.began_boot(pid)
        is_keeper = _is_before(began, file.st_ctime) or _is_before(began_boot, written_boot)
    if is_keeper:
        return pid
    for other in filter(str.isdecimal, os.listdir("/proc")):
        if proc.has_locked(other, file):
            return int(other)
    return None if proc.began(pid) else pid


def _is_before(began: float | None, at: float | None) -> bool:
    """Return whether a process began before a moment of the same clock; False if not known."""
    return began is not None and at is not None and began <= at + CLOCK_S
