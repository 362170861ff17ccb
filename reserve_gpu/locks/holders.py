"""Name the holder of a lock: by the kernel's list of locks, and by the record in a file.

The list is not a snapshot and may miss a lock. It shows nothing of other PID namespaces. Records
are untrusted: what a record says about its writer counts only if the file belongs to the user whose
process has the lock, and if no other user can write to it (`Holder.record_owner`).
"""

from __future__ import annotations

import errno
import os
import re
from contextlib import suppress
from typing import TYPE_CHECKING

from reserve_gpu.locks import files
from reserve_gpu.locks.lock import KINDS, read_record
from reserve_gpu.model.errors import TOO_MANY_FILES, LockError
from reserve_gpu.model.holders import Holder, Record
from reserve_gpu.model.queue import Ticket
from reserve_gpu.model.requests import WaitRequest
from reserve_gpu.system import procfs
from reserve_gpu.system.file_control import is_write_locked

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence
    from io import RawIOBase

    from reserve_gpu.model.clocks import Instant

QUEUE = "queue"  # the start of a waiter's file: queue-UID-N.lock
SHARE = ".share"  # in the name of a sharer's file: UUID.share-UID-N.lock
RECORD = ".record"  # in the name of the file with a whole device's record: UUID.record-UID-N
# After those. Text, which `re` compiles at its first use: mostly there is no such file.
NUMBERED = r"-([0-9]{1,10})-([0-9]{1,10})(?:\.lock)?"
MANY = 1000  # files in a lock directory; honest users make a few
MOST_OF_ONE_USER = 64  # sharers of a device, and waiters; each takes time to read
# A file that was changed no later than this after its record was only written: no cell has ended.
WRITING_S = 1.0
PAGE_SIZE = 4096  # bytes: the most that one read(2) returns from /proc/locks
# Bytes of the kernel's list, about 5,000 locks. Each page takes longer than the one before it.
LIST_LIMIT = 1 << 18
RECORD_DIGITS = 3  # in the number of a record whose lock the kernel's list does not show
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
        self._locked_names: set[str] = set()
        self._by_prefix: dict[str, list[str]] = {}
        self._by_pid: dict[int, set[int]] | None = None
        self._locks: KernelList | None = None
        self._has_read_again = False
        self._files: procfs.LockedFiles | None = None
        self._open: dict[tuple[int, int], int] | None = None

    def listing(self) -> list[str]:
        """Return the names of all files there. Raises LockError."""
        return [entry.name for entry in self._entries()]

    @property
    def names(self) -> set[str]:
        """Return the names of the files there that may be locked, as far as is known.

        Every user can make as many files as they like, so only those are looked at that may count.
        The kernel's list shows which ones are locked, but it may miss one. A waiter may be missed
        in one look. A holder is not, because its file has a UID of which there is a process.
        Raises LockError.
        """
        if self._names is None:
            entries, locked = list(self._entries()), self._locked_inodes
            uids = procfs.all_uids() if len(entries) > MANY and procfs.sees_all_locks() else None
            is_complete = self.shows_all_locks
            self._names = set()
            for entry in entries:
                name = entry.name
                is_locked = entry.inode() in locked
                if is_locked:
                    self._locked_names.add(name)
                elif is_complete and SHARE not in name:  # most of them, so without a call
                    continue
                if _may_count(name, uids, is_locked=is_locked, is_complete=is_complete):
                    self.add(name)
        return self._names

    def add(self, name: str) -> None:
        """Count a file, which this process may have made since the directory was listed."""
        names = self.names
        if name not in names:
            names.add(name)
            self._by_prefix.setdefault(_split(name)[0], []).append(name)

    @property
    def shows_all_locks(self) -> bool:
        """Return whether the kernel's list is read to its end, and shows all PID namespaces."""
        return procfs.sees_all_locks() and self._kernels_list.is_whole

    @property
    def possibly_locked(self) -> set[str]:
        """Return the names of the files that may be locked, as far as is known.

        Those are the files that the kernel's list shows, if it shows all. Raises LockError.
        """
        names = self.names  # sets `_locked_names` too
        return self._locked_names if self.shows_all_locks else names

    def _entries(self) -> Iterator[os.DirEntry[str]]:
        try:
            with os.scandir(f"/proc/self/fd/{self._directory}") as entries:
                yield from entries
        except OSError as error:
            text = f"{self._path} can't be listed: {error.strerror}."
            is_full = error.errno == errno.EMFILE
            raise LockError(TOO_MANY_FILES if is_full else text) from error

    def user_files(self, prefix: str, uid: int | None = None) -> list[str]:
        """Return the names `PREFIX-UID-N.lock`, the first ones of each owner.

        The files are counted by their owner, not by the UID in their names: a container with a
        user namespace has other UIDs, and every user can choose any name. But if a file belongs
        to the user in its name, only so many files of that name are looked at.

        Args:
            prefix: The start of the names.
            uid: The owner, if only the files of one user are asked for.
        """
        groups: dict[int, list[tuple[int, str]]] = {}
        start = prefix if uid is None else f"{prefix}-{uid}-"
        names = self._by_prefix.get(prefix, ()) if self.names else ()
        for name in [name for name in names if name.startswith(start)]:
            if match := re.fullmatch(NUMBERED, name[len(prefix) :]):
                groups.setdefault(int(match[1]), []).append((int(match[2]), name))
        # The files of all users that this user namespace does not know have this one owner.
        strangers = procfs.unmapped_uid() if groups else None
        by_owner: dict[int, list[tuple[int, str]]] = {}
        for named, numbered in groups.items():
            count = 0
            for number, name in sorted(numbered):
                owner = files.sole_owner(self._directory, name)
                if owner is None or uid not in (None, owner):
                    continue
                by_owner.setdefault(owner, []).append((number, name))
                count += owner == named
                if count == MOST_OF_ONE_USER:
                    break
        return [
            name
            for owner, owned in by_owner.items()
            for _, name in (owned if owner == strangers else sorted(owned)[:MOST_OF_ONE_USER])
        ]

    def of(self, name: str) -> Holder:
        """Return the holder of a file that is known to be locked, as far as it can be seen."""
        record, status = self._record(name)
        if status is None:
            return Holder(file=name)
        if has_owner(name):
            uid, holder = status.st_uid, self._holder(record, status)
            if procfs.uid_of(holder.listed_pid or 0) not in (
                None,
                uid,
            ):  # it was sent the descriptor
                holder = holder._replace(listed_pid=None)
            return holder._replace(uid=uid, file=name, record_owner=uid)
        taker = self._listed_pid(status)
        pid = self.keeper(taker, status) if taker else None
        found = self._owned_record(name, procfs.uid_of(pid) if pid else None, {pid, taker})
        # Else an older version has it locked, or a program of another kind.
        record, own = found or (record, status)
        if found and taker and not pid:
            pid = self.keeper(taker, status, record.written_boot)
        # A process can send the locked descriptor to a process of another user. So the user of one
        # that did not take the lock counts only with a record that this user has locked.
        user = procfs.uid_of(pid) if pid and (found or pid == taker) else None
        holder = named(_of_nothing_shared(record), pid, own.st_mtime)
        is_owners = found is not None and user in (None, own.st_uid)
        owner = own.st_uid if is_owners else None
        return holder._replace(uid=user, file=name, record_owner=owner)

    def _owned_record(
        self, name: str, uid: int | None, pids: set[int | None]
    ) -> tuple[Record, os.stat_result] | None:
        """Return the record of a whole device's holder, and the status of the file it is in.

        Args:
            name: The lock file of the device.
            uid: The user whose process has the device. If that is not known, a record counts only
                if there is no other one.
            pids: The process that has the device, and the one that took it, as far as known. A
                record of another one counts only if its writer has other numbers for them.
        """
        found: list[tuple[Record, os.stat_result]] = []
        for own in self.user_files(f"{name.removesuffix('.lock')}{RECORD}", uid):
            descriptor = files.open_to_look(self._directory, own)
            if descriptor is None:
                continue
            with files.closing(descriptor):
                record = read_record(descriptor) if is_write_locked(descriptor) else None
                if record and (pids == {None} or _is_by(record, pids)):
                    found.append((record, os.fstat(descriptor)))
        found.sort(key=lambda read: -(read[0].since or 0.0))
        return found[0] if len(found) == 1 or (found and uid is not None) else None

    def ticket(self, name: str) -> Ticket:
        """Return the ticket in a file that a waiter has locked."""
        record, status = self._record(name)
        if status is None:
            return Ticket(0, name, None, Holder())
        asks = record.asks or WaitRequest()
        holder = self._holder(_of_nothing_shared(record), status)  # who waits holds nothing
        owner = status.st_uid
        return Ticket(
            number=status.st_mtime_ns,  # see queue.Place
            name=name,
            wants=asks.wants,
            holder=holder._replace(last_cell=None, uid=owner, record_owner=owner, file=name),
            asks=asks.text,
            heartbeat=status.st_ctime_ns,
            needs=max(1, asks.needs),
            memory_limit_mib=record.terms.memory_limit_mib,
            tickets_ahead=asks.tickets_ahead,
        )

    def lists(self, name: str, by: int | None = None) -> bool:
        """Tell whether the kernel's list names a process that has the file of that name locked.

        by: that process, which may have ended and left the lock to its children; None for any.
        """
        status = files.status_of(self._directory, name)
        if status is None:
            return False
        pid = self._listed_taker(status)
        return by in (None, pid) if pid else self._unlisted_opener(status) is not None

    def device_files(self, pid: int | None) -> frozenset[int]:
        """Return the inodes of the files of devices that a process has locked.

        Nothing if the kernel's list does not show all locks.
        """
        if self._by_pid is None:
            self._by_pid = {}
            for name in self.possibly_locked if self.shows_all_locks else ():
                status = None if name.startswith(QUEUE) else files.status_of(self._directory, name)
                if status and (taker := self._listed_taker(status)):
                    self._by_pid.setdefault(taker, set()).add(status.st_ino)
        return frozenset(self._by_pid.get(pid or 0, ()))

    def listed_uids(self) -> set[int]:
        """Return the users of the processes that the kernel's list names, whatever they have."""
        uids = map(procfs.uid_of, {*self._listed.values()})
        return {uid for uid in uids if uid is not None}

    def _holder(self, record: Record, status: os.stat_result) -> Holder:
        """Return the holder of a locked file, which has that record and that status."""
        pid = self._listed_pid(status)
        keeper = self.keeper(pid, status, record.written_boot) if pid else None
        return named(record, keeper, status.st_mtime)

    def _listed_pid(self, status: os.stat_result) -> int | None:
        pid = self._pid(status)
        if pid is None and not self._has_read_again and self.shows_all_locks:
            # The list is not a snapshot and may have missed it. Another user's files may never be
            # in it, so it is read again only once.
            self._has_read_again = True
            self._locks = self._files = self._open = None
            pid = self._pid(status)
        return pid

    def keeper(
        self, pid: int, file: os.stat_result, written_boot: float | None = None
    ) -> int | None:
        """Return the process that keeps a lock: the one that took it, or one that it left running.

        Args:
            pid: The process that took it.
            file: The status of the file.
            written_boot: When the record was written, by the boot clock, as its writer says.

        What a command of `reserve-gpu run` leaves in the background has its descriptors. By then
        the number of the one that took it may be another process's. What a process has open tells,
        where that can be seen; else one that has begun after the lock is another: the file was
        changed last by its holder, and its ctime can't be set back. After the wall clock was set
        forward only the record is left: a user who can write another time into it can also renew
        the ctime.
        """
        is_keeper = self._open_files.has(pid, file)
        if is_keeper is None:
            began, began_boot = procfs.began(pid), procfs.began_boot(pid)
            is_keeper = _is_before(began, file.st_ctime) or _is_before(began_boot, written_boot)
        if is_keeper:
            return pid
        return self._opener(file) or (None if procfs.began(pid) else pid)

    def _opener(self, file: os.stat_result) -> int | None:
        """Return a process that has a file locked, if this user can see its open files."""
        if self._open is None:  # once: another user may have left any number of such locks
            self._open = self._open_files.holders()
        return self._open.get((file.st_dev, file.st_ino))

    @property
    def _open_files(self) -> procfs.LockedFiles:
        if self._files is None:
            inodes = self._locked_inodes
            if not self._kernels_list.is_whole:
                inodes = inodes.union(entry.inode() for entry in self._entries())
            self._files = procfs.LockedFiles(inodes)
        return self._files

    @property
    def _locked_inodes(self) -> set[int]:
        """Return the inodes of the files that the kernel's list shows, of all file systems."""
        return self._kernels_list.inodes

    def _record(self, name: str) -> tuple[Record, os.stat_result | None]:
        descriptor = files.open_to_look(self._directory, name)
        if descriptor is None:
            return Record(), None
        with files.closing(descriptor):
            return read_record(descriptor), os.fstat(descriptor)

    def _pid(self, status: os.stat_result) -> int | None:
        return self._listed_taker(status) or self._unlisted_opener(status)

    def _unlisted_opener(self, status: os.stat_result) -> int | None:
        """Return a process that has a file locked where the kernel's list is too long to read."""
        return None if self._kernels_list.is_whole else self._opener(status)

    def _listed_taker(self, status: os.stat_result) -> int | None:
        device = self._device or f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
        return self._listed.get(f"{device}:{status.st_ino}")

    @property
    def _listed(self) -> dict[str, int]:
        return self._kernels_list.pids

    @property
    def _kernels_list(self) -> KernelList:
        if self._locks is None:
            self._locks = KernelList()
        return self._locks


def has_owner(name: str) -> bool:
    """Return whether only one user can write to the file of a holder: it has a UID in its name."""
    return SHARE in name or RECORD in name


def _split(name: str) -> tuple[str, str, str]:
    """Return the prefix, the UID and the rest of a name `PREFIX-UID-REST`."""
    head, _, number = name.rpartition("-")
    prefix, _, uid = head.rpartition("-")
    return prefix, uid, number


def _may_count(
    name: str, uids: Collection[str] | None, *, is_locked: bool, is_complete: bool
) -> bool:
    """Return whether a file with this name may be a locked file of this program.

    Args:
        name: The name of the file.
        uids: The users that have a process, None if they are not known.
        is_locked: Whether the kernel's list shows the file.
        is_complete: Whether the list shows all locks.
    """
    is_waiters, is_record = name.startswith(QUEUE), RECORD in name
    if not (is_waiters or has_owner(name)):
        return name.endswith(".lock")
    if is_locked:
        return True
    if is_complete and is_waiters:
        return False
    _, uid, number = _split(name)
    # A missing record changes no decision, so only the usual names count.
    is_usual = not is_record or len(number) <= RECORD_DIGITS
    return is_usual and (uids is None or uid in uids)


def is_sharers(name: str) -> bool:
    """Tell whether that is the name of a sharer's file, which only its owner can write."""
    return SHARE in name


def is_waiters(name: str) -> bool:
    """Return whether this is the name of a waiter's file."""
    return name.startswith(QUEUE) and bool(re.fullmatch(NUMBERED, name[len(QUEUE) :]))


def with_hosts(holders: Sequence[Holder]) -> tuple[Holder, ...]:
    """Return the holders of a device; a joined process names the holder that it joined.

    What joined processes use is counted as used by that one, too.
    """
    known = list(holders)
    for place, joined in enumerate(holders):
        at = place_of_host(joined.record.guest_of, joined.uid, holders)
        if at is not None:
            host = known[at]
            uses = (host.used_mib, joined.used_mib)
            used_mib = None if None in uses else sum(use or 0.0 for use in uses)
            known[at] = host._replace(used_mib=used_mib)
            known[place] = joined._replace(beside=host.name or "a process")
    return tuple(known)


def without_joined(holders: Sequence[Holder], since: Collection[float] = ()) -> list[Holder]:
    """Return the holders of a device without the joined processes of those who are there.

    A joined process has no part of its own, as long as the holder that it has joined is there.
    since: when others, who are not among them, have taken the device.
    """
    known = with_hosts(holders)
    return [each for each in known if not each.beside and not has_joined_own(each, since)]


def has_joined_own(holder: Holder, since: Collection[float]) -> bool:
    """Return whether this user's process has joined what was taken at one of these times."""
    return holder.record.guest_of in since and holder.uid == os.geteuid()


def place_of_host(since: float | None, uid: int | None, holders: Sequence[Holder]) -> int | None:
    """Return the index of the holder that a process joined, or None if there is none.

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
    now = procfs.now()
    is_elsewhere = pid is None and record.who.namespace not in (None, procfs.pid_namespace())
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
    terms = record.terms._replace(size=None)
    return record._replace(terms=terms, guest_of=None)


class KernelList:
    """The kernel's list of locks, as far as it is read.

    Every user can make it as long as they like, so no more than `LIST_LIMIT` bytes are read.

    Attributes:
        pids: The first process that has each file locked with flock(2). The files go by what the
            kernel calls them.
        inodes: The inodes of all locked files.
        is_whole: Whether the list ended before the limit.
    """

    def __init__(self) -> None:
        self.pids: dict[str, int] = {}
        self.inodes: set[int] = set()
        self.is_whole = True
        with suppress(OSError, ValueError):
            for line in self._lines():  # `1: FLOCK  ADVISORY  WRITE 4321 00:19:47 0 EOF`
                fields = line.split()
                if fields[1] not in KINDS:  # a process that waits for a lock has "->" there
                    continue
                self.inodes.add(int(fields[5].rpartition(":")[2]))
                if fields[1] == "FLOCK" and int(fields[4]) > 0:
                    self.pids.setdefault(fields[5], int(fields[4]))

    def _lines(self) -> Iterable[str]:
        """Return the lines of the list, each once. Raises OSError.

        The kernel returns one page at a time, and skips a lock if an earlier one is released
        between two pages. A longer list is therefore read twice.
        """
        text = b""
        with open("/proc/locks", "rb", buffering=0) as locks:
            text, self.is_whole = _read(locks)
            if len(text) >= PAGE_SIZE and self.is_whole:
                locks.seek(0)
                again, self.is_whole = _read(locks)
                text += again
        return dict.fromkeys(text.decode().splitlines())


def _read(file: RawIOBase) -> tuple[bytes, bool]:
    """Return the whole lines of a file up to the limit, and whether those are all."""
    text = b""
    while page := file.read(PAGE_SIZE):
        text += page
        if len(text) > LIST_LIMIT:
            return text[: text.rfind(b"\n") + 1], False
    return text, True


def _is_by(record: Record, pids: Collection[int | None]) -> bool:
    """Return whether one of these processes of this PID namespace may have written a record."""
    return record.who.namespace != procfs.pid_namespace() or record.who.pid in pids


def _is_before(began: float | None, at: float | None) -> bool:
    """Return whether a process began before a moment of the same clock; False if not known."""
    return began is not None and at is not None and began <= at + CLOCK_S
