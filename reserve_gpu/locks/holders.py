"""Identify the holders of locks from /proc/locks and from the records in lock files.

/proc/locks is the Linux kernel's list of locks. It is not a snapshot and might miss a lock, and it
does not show locks from other PID namespaces.

Records are untrusted. A record is attributed to the holder's user only if that user owns the file
and no other user can write to it (`Holder.record_owner`).
"""

from __future__ import annotations

import errno
import os
import re
from collections import Counter
from contextlib import contextmanager, suppress
from itertools import islice
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

QUEUE = "queue"  # prefix of waiters' file names: queue-UID-N.lock
SHARE = ".share"  # part of sharers' file names: UUID.share-UID-N.lock
RECORD = ".record"  # part of record file names: UUID.record-UID-N
# A pattern for the rest of these file names. `re` compiles this string only when such files exist.
NUMBERED = r"-([0-9]{1,10})-([0-9]{1,10})(?:\.lock)?"
MANY = 1000  # if the directory has more files than this, a user might be flooding it
MOST_LISTED = 10_000  # maximum number of files to list when searching for previous holders
MOST_OF_ONE_USER = 64  # maximum sharers of a device, and maximum waiters, per user
# A file's mtime marks the end of a cell only if it differs from the time in the file's record by
# more than this many seconds.
WRITING_S = 1.0
PAGE_SIZE = 4096  # maximum number of bytes that one read(2) of /proc/locks returns
# Maximum number of bytes to read from /proc/locks (about 5,000 locks). Each page is slower to read
# than the previous one.
LIST_LIMIT = 1 << 18
RECORD_DIGITS = 3  # maximum digits of N in names of record files that /proc/locks misses
CLOCK_S = 2.0  # maximum error of a process's start time, in seconds


class Holders:
    """Reads the holders of the locks in a lock directory, and caches what it reads.

    Args:
        path: The lock directory's path.
        directory: The lock directory's descriptor.
        device: The device number that /proc/locks shows for the directory's file system. Defaults
            to the number from stat(2).
    """

    def __init__(self, path: str, directory: int, device: str | None = None) -> None:
        self._path = path
        self._directory = directory
        self._device = device
        # Don't use functools.cached_property. Before Python 3.12, it acquires a lock, which would
        # stay locked in a child that is forked at that moment.
        self._names: set[str] | None = None
        self._inodes: dict[str, int] = {}  # keyed by name
        self._by_prefix: dict[str, list[str]] = {}
        self.locked_labels: list[tuple[str, str | None]] | None = None  # set by LockDirectory
        self._by_pid: dict[int, set[int]] | None = None
        self._locks: KernelList | None = None
        self._has_reread = False
        self._files: procfs.LockedFiles | None = None
        self._open: dict[tuple[int, int], int] | None = None

    def listing(self) -> list[str]:
        """Return the names of all files in the directory.

        Raises:
            LockError: The directory can't be listed.
        """
        with self._scan() as entries:
            return [entry.name for entry in entries]

    @property
    def names(self) -> set[str]:
        """Return the names of the files that might be locked.

        Any user can create any number of files. If there are many, files that no process can have
        locked are skipped: /proc/locks shows which files are locked, but it might miss some, so a
        waiter's file might be missing from the result. A locked sharer's file is always included if
        it has a usual name, because such a file is listed whenever its user has a running process.
        It might have another name if other users have taken that user's usual names. Such a file is
        missing only if, in addition, other users have created more than `MANY` sharers' files, and
        /proc/locks misses the lock twice in a row. Testing the locks of a few files is faster than
        reading /proc/locks, for which the Linux kernel stops all other locking on the machine for
        about 10 ms (an RCU grace period).

        Raises:
            LockError: The directory can't be listed.
        """
        if self._names is None:
            # Don't call a function for each of possibly 100,000 files.
            with self._scan() as entries:
                inodes = {
                    name: entry.inode()
                    for entry in entries
                    if (name := entry.name).endswith(".lock") or RECORD in name
                }
            self._inodes = inodes if len(inodes) <= MANY else self._without_unlocked(inodes)
            self._names = set()
            for name in self._inodes:
                self.add(name)
        return self._names

    def _without_unlocked(self, inodes: dict[str, int]) -> dict[str, int]:
        """Return the inodes of the files that processes might have locked, keyed by name."""
        locked = self._locked_inodes
        kept = {name: inode for name, inode in inodes.items() if inode in locked}
        uids = procfs.all_uids() if procfs.sees_all_locks() else None
        if not self.shows_all_locks:
            others = [name for name in inodes if name not in kept and _may_be_locked(name, uids)]
            return kept | {name: inodes[name] for name in others}
        others = [name for name in inodes if SHARE in name and name not in kept]
        if len(others) > MANY:
            listed = KernelList().inodes
            kept |= {name: inodes[name] for name in others if inodes[name] in listed}
            usual = {f"{number}.lock" for number in range(2 * MOST_OF_ONE_USER)}
            others = [name for name in others if name.rpartition("-")[2] in usual]
        return kept | {n: inodes[n] for n in others if uids is None or _split(n)[1] in uids}

    def add(self, name: str) -> None:
        """Add a file that this process might have created since the directory was listed."""
        names = self.names
        if name not in names:
            names.add(name)
            self._by_prefix.setdefault(_split(name)[0], []).append(name)

    @property
    def shows_all_locks(self) -> bool:
        """Return whether /proc/locks was read to its end and covers all PID namespaces."""
        return procfs.sees_all_locks() and self._kernels_list.is_whole

    @property
    def possibly_locked(self) -> set[str]:
        """Return the names of the files in /proc/locks, or `names` if /proc/locks might miss some.

        Raises:
            LockError: The directory can't be listed.
        """
        names = self.names  # also sets `_inodes`
        if not self.shows_all_locks:
            return names
        return {name for name, inode in self._inodes.items() if inode in self._locked_inodes}

    def label(self, name: str) -> str | None:
        """Return the GPU label in the record of a file, such as `GPU0`."""
        return self._record(name)[0].label

    @contextmanager
    def _scan(self) -> Iterator[Iterator[os.DirEntry[str]]]:
        """Open an iterator over the files in the directory.

        Raises:
            LockError: The directory can't be listed.
        """
        try:
            with os.scandir(f"/proc/self/fd/{self._directory}") as entries:
                yield entries
        except OSError as error:
            text = f"{self._path} can't be listed: {error.strerror}."
            is_full = error.errno == errno.EMFILE
            raise LockError(TOO_MANY_FILES if is_full else text) from error

    def user_files(self, prefix: str, uid: int | None = None) -> list[str]:
        """Return the existing files named `PREFIX-UID-N.lock`, up to a limit per owner.

        The limit applies to the files' owner, not to the UID in their names, because a container
        with a user namespace has different UIDs and any user can choose any name. For each UID in
        the names, the search stops as soon as enough files really belong to that user.

        Args:
            prefix: The part of the names before the UID.
            uid: The owner's UID. Defaults to all owners.
        """
        groups: dict[int, list[tuple[int, str]]] = {}
        start = prefix if uid is None else f"{prefix}-{uid}-"
        names = self._by_prefix.get(prefix, ()) if self.names else ()
        for name in [name for name in names if name.startswith(start)]:
            if match := re.fullmatch(NUMBERED, name[len(prefix) :]):
                groups.setdefault(int(match[1]), []).append((int(match[2]), name))
        # In a user namespace, all unmapped users' files appear to belong to this UID.
        unmapped_uid = procfs.unmapped_uid() if groups else None
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
            for _, name in (owned if owner == unmapped_uid else sorted(owned)[:MOST_OF_ONE_USER])
        ]

    def of(self, name: str) -> Holder:
        """Return the holder of a locked file, with whatever details this process can see.

        Args:
            name: The file's name. The file must be locked.
        """
        record, status = self._record(name)
        if status is None:
            return Holder(file=name)
        if has_owner(name):
            uid, holder = status.st_uid, self._holder(record, status)
            # A process of another user can't have taken this lock, so the owner's process must have
            # sent it the descriptor.
            if procfs.uid_of(holder.listed_pid or 0) not in (None, uid):
                holder = holder._replace(listed_pid=None)
            return holder._replace(uid=uid, file=name, record_owner=uid)
        taker = self._listed_pid(status)
        pid = self.keeper(taker, status) if taker else None
        owned = self._owned_record(name, procfs.uid_of(pid) if pid else None, {pid, taker})
        # The record file is missing if an older version or an unrelated program took the lock, or
        # if write locks are not supported.
        record, record_status = owned or (record, status)
        if owned and taker and not pid:
            pid = self.keeper(taker, status, record.written_boot)
        # A process can send the locked descriptor to another user's process. If a process did not
        # take the lock itself, it is attributed to its user only if that user has also locked a
        # record file.
        user = procfs.uid_of(pid) if pid and (owned or pid == taker) else None
        holder = named(_without_sharing(record), pid, record_status.st_mtime)
        is_owners = owned is not None and user in (None, record_status.st_uid)
        owner = record_status.st_uid if is_owners else None
        return holder._replace(uid=user, file=name, record_owner=owner)

    def previous(self, devices: Collection[str]) -> dict[str, list[Holder]]:
        """For each device, return the processes that have released it or exited, the latest first.

        Only records that no other user can write count. A process that exits leaves its record in
        the unlocked file. The mutex is not required, because no lock is tested.

        If there are more than `MOST_LISTED` files, some or all of these processes are missing.

        Args:
            devices: The devices, in the form used in lock file names.

        Raises:
            LockError: The directory can't be listed.
        """
        names: dict[str, list[str]] = {device: [] for device in devices}
        with self._scan() as entries:
            for name in (entry.name for entry in islice(entries, MOST_LISTED)):
                device, kind, _ = name.partition(SHARE if SHARE in name else RECORD)
                if kind and device in names:
                    names[device].append(name)
        return {device: self._previous(sorted(group, key=len)) for device, group in names.items()}

    def _previous(self, names: Sequence[str]) -> list[Holder]:
        """Return the previous holders according to one device's files, the latest first."""
        known: list[Holder] = []
        checked: Counter[int] = Counter()
        now_boot = procfs.now().boot
        for name in names[:MANY]:  # any user can add files; those with low numbers are used first
            owner = files.sole_owner(self._directory, name)
            if owner is None or checked[owner] >= MOST_OF_ONE_USER:
                continue
            checked[owner] += 1
            record, status = self._record(name)
            pid, is_here = record.who.pid, record.who.namespace == procfs.pid_namespace()
            is_past = (record.written_boot or 0.0) <= now_boot  # a user can write any time
            if not (status and pid and is_here and is_past):
                continue
            if record.released or procfs.has_exited(pid):
                holder = named(record, None, status.st_mtime)
                known.append(holder._replace(uid=owner, record_owner=owner, file=name))
        return sorted(known, key=lambda holder: -(holder.record.written_boot or 0.0))

    def _owned_record(
        self, name: str, uid: int | None, pids: set[int | None]
    ) -> tuple[Record, os.stat_result] | None:
        """Return a whole device's record, and the record file's stat result.

        The result is None if the process that holds the device has no record.

        Args:
            name: The name of the device's lock file.
            uid: The holder's UID. If None, a record counts only if there is no other.
            pids: The PIDs of the holder and of the process that took the lock. An unknown PID is
                None. Records of other processes in this PID namespace are ignored.
        """
        records: list[tuple[Record, os.stat_result]] = []
        for record_file in self.user_files(f"{name.removesuffix('.lock')}{RECORD}", uid):
            descriptor = files.open_to_read(self._directory, record_file)
            if descriptor is None:
                continue
            with files.closing(descriptor):
                record = read_record(descriptor) if is_write_locked(descriptor) else None
                if record and (pids == {None} or _is_by(record, pids)):
                    records.append((record, os.fstat(descriptor)))
        records.sort(key=lambda pair: -(pair[0].since or 0.0))
        return records[0] if len(records) == 1 or (records and uid is not None) else None

    def ticket(self, name: str, *, finds_pid: bool = True) -> Ticket:
        """Return a waiter's ticket.

        Args:
            name: The name of the ticket file.
            finds_pid: Whether to find the waiter's PID, which means reading its open files.
        """
        record, status = self._record(name)
        if status is None:
            return Ticket(0, name, None, Holder())
        request = record.asks or WaitRequest()
        shown = _without_sharing(record)  # a waiter holds no device
        holder = self._holder(shown, status) if finds_pid else named(shown, None, status.st_mtime)
        owner = status.st_uid
        return Ticket(
            number=status.st_mtime_ns,  # see QueueEntry
            name=name,
            wants=request.wants,
            holder=holder._replace(last_cell=None, uid=owner, record_owner=owner, file=name),
            asks=request.text,
            heartbeat=status.st_ctime_ns,
            needs=max(1, request.needs),
            memory_limit_mib=record.terms.memory_limit_mib,
            tickets_ahead=request.tickets_ahead,
        )

    def lists(self, name: str, by: int | None = None) -> bool:
        """Return whether /proc/locks shows that a process has locked a file.

        Args:
            name: The lock file's name.
            by: The PID of the process that must have taken the lock. That process might have
                exited and left the lock to its children. Defaults to any process.
        """
        status = files.status_of(self._directory, name)
        if status is None:
            return False
        pid = self._listed_taker(status)
        return by in (None, pid) if pid else self._unlisted_opener(status) is not None

    def taker(self, name: str) -> int | None:
        """Return the PID of the process that took the lock on a file, according to /proc/locks.

        Another process might keep the lock (see `keeper`), and the PID might have been reused.

        Args:
            name: The lock file's name.
        """
        status = files.status_of(self._directory, name)
        return None if status is None else self._listed_taker(status)

    def device_files(self, pid: int | None) -> frozenset[int]:
        """Return the inodes of the devices' lock files that a process has locked.

        The result is empty if /proc/locks does not show all locks.
        """
        if self._by_pid is None:
            self._by_pid = {}
            for name in self.possibly_locked if self.shows_all_locks else ():
                status = None if name.startswith(QUEUE) else files.status_of(self._directory, name)
                if status and (taker := self._listed_taker(status)):
                    self._by_pid.setdefault(taker, set()).add(status.st_ino)
        return frozenset(self._by_pid.get(pid or 0, ()))

    @property
    def device_pids(self) -> Collection[int]:
        """Return the pids of the processes that have locked devices' lock files.

        The result is empty if /proc/locks does not show all locks.
        """
        self.device_files(None)  # sets `_by_pid`
        return (self._by_pid or {}).keys()

    def listed_uids(self) -> set[int]:
        """Return the UIDs of the users whose processes are in /proc/locks."""
        uids = map(procfs.uid_of, {*self._listed.values()})
        return {uid for uid in uids if uid is not None}

    def _holder(self, record: Record, status: os.stat_result) -> Holder:
        """Return the holder of a locked file, given the file's record and stat result."""
        pid = self._listed_pid(status)
        keeper = self.keeper(pid, status, record.written_boot) if pid else None
        return named(record, keeper, status.st_mtime)

    def _listed_pid(self, status: os.stat_result) -> int | None:
        pid = self._pid(status)
        if pid is None and not self._has_reread and self.shows_all_locks:
            # /proc/locks is not a snapshot and might have missed this lock, so read it again. Do so
            # only once, because a lock on another user's file might never be shown.
            self._has_reread = True
            self._locks = self._files = self._open = None
            pid = self._pid(status)
        return pid

    def keeper(
        self, pid: int, file: os.stat_result, written_boot: float | None = None
    ) -> int | None:
        """Return the PID of the process that keeps a lock.

        This is the process that took the lock, or a process that it started. For example, a command
        started by `reserve-gpu run` might leave background processes that inherited the lock. The
        PID of the process that took the lock might then be reused by an unrelated process.

        If the open files of the process with that PID are visible, they show whether it keeps the
        lock. Otherwise, its start time is compared with the file's ctime, because a process that
        started after the lock was taken can't have taken it. The ctime is no older than the lock,
        because the holder was the last to change the file and users can't set a ctime back.

        In case the wall clock was set forward, the start time is also compared with the boot-clock
        time in the record. A user gains nothing by forging that time, because the same user could
        also update the ctime.

        Args:
            pid: The PID of the process that took the lock.
            file: The locked file's stat result.
            written_boot: The boot-clock time at which the record was written, according to the
                record.

        Returns:
            The PID, or None if the process that keeps the lock is not visible.
        """
        is_keeper = self._open_files.has(pid, file)
        if is_keeper is None:
            began, began_boot = procfs.start_time(pid), procfs.start_time_boot(pid)
            is_keeper = _is_before(began, file.st_ctime) or _is_before(began_boot, written_boot)
        if is_keeper:
            return pid
        return self._opener(file) or (None if procfs.start_time(pid) else pid)

    def _opener(self, file: os.stat_result) -> int | None:
        """Return the PID of the process that locks a file, if its open files are visible."""
        if self._open is None:  # read once, because other users might have any number of locks
            self._open = self._open_files.holders()
        return self._open.get((file.st_dev, file.st_ino))

    @property
    def _open_files(self) -> procfs.LockedFiles:
        if self._files is None:
            inodes = self._locked_inodes
            if not self._kernels_list.is_whole:
                with self._scan() as entries:
                    inodes = inodes.union(entry.inode() for entry in entries)
            self._files = procfs.LockedFiles(inodes)
        return self._files

    @property
    def _locked_inodes(self) -> set[int]:
        """Return the inodes of all locked files in /proc/locks, on any file system."""
        return self._kernels_list.inodes

    def _record(self, name: str) -> tuple[Record, os.stat_result | None]:
        descriptor = files.open_to_read(self._directory, name)
        if descriptor is None:
            return Record(), None
        with files.closing(descriptor):
            return read_record(descriptor), os.fstat(descriptor)

    def _pid(self, status: os.stat_result) -> int | None:
        return self._listed_taker(status) or self._unlisted_opener(status)

    def _unlisted_opener(self, status: os.stat_result) -> int | None:
        """Return the PID of the process that locks a file, if /proc/locks is too long to read."""
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
    """Return whether this is the name of a sharer's file or of a record file.

    Such a name contains a UID, and only the file's owner can write to the file.
    """
    return SHARE in name or RECORD in name


def _split(name: str) -> tuple[str, str, str]:
    """Split a name of the form `PREFIX-UID-REST` into its three parts."""
    head, _, number = name.rpartition("-")
    prefix, _, uid = head.rpartition("-")
    return prefix, uid, number


def _may_be_locked(name: str, uids: Collection[str] | None) -> bool:
    """Return whether a process might have locked a file that /proc/locks does not show.

    Args:
        name: The file's name.
        uids: The UIDs of all running processes, or None if unknown.
    """
    if not (name.startswith(QUEUE) or has_owner(name)):
        return True
    _, uid, number = _split(name)
    # No decision depends on a missing record, so only record files with usual names count.
    is_usual = RECORD not in name or len(number) <= RECORD_DIGITS
    return is_usual and (uids is None or uid in uids)


def is_sharers(name: str) -> bool:
    """Return whether this is the name of a sharer's file."""
    return SHARE in name


def is_waiters(name: str) -> bool:
    """Return whether this is the name of a waiter's file."""
    return name.startswith(QUEUE) and bool(re.fullmatch(NUMBERED, name[len(QUEUE) :]))


def with_hosts(holders: Sequence[Holder]) -> tuple[Holder, ...]:
    """Return a device's holders, and label each joined process with the holder that it joined.

    Each joined process's memory use is added to the memory use of the holder that it joined.
    """
    known = list(holders)
    for index, joined in enumerate(holders):
        position = host_index(joined.record.guest_of, joined.uid, holders)
        if position is not None:
            host = known[position]
            uses = (host.used_mib, joined.used_mib)
            used_mib = None if None in uses else sum(use or 0.0 for use in uses)
            known[position] = host._replace(used_mib=used_mib)
            known[index] = joined._replace(beside=host.name or "a process")
    return tuple(known)


def without_joined(holders: Sequence[Holder], since: Collection[float] = ()) -> list[Holder]:
    """Return a device's holders, except for processes that joined a reservation.

    A joined process has no memory share of its own as long as the holder that it joined exists.

    Args:
        holders: The device's holders.
        since: The lock times of reservations whose joined processes are always excluded.
    """
    known = with_hosts(holders)
    return [each for each in known if not each.beside and not has_joined_reservation(each, since)]


def has_joined_reservation(holder: Holder, since: Collection[float]) -> bool:
    """Return whether a holder has joined one of this user's reservations.

    Args:
        holder: The holder.
        since: The times when the reservation's locks were taken.
    """
    return holder.record.guest_of in since and holder.uid == os.geteuid()


def host_index(since: float | None, uid: int | None, holders: Sequence[Holder]) -> int | None:
    """Return the index of the holder that a process joined, or None if that holder is gone.

    Args:
        since: The time when the joined holder took its lock.
        uid: The joined holder's UID.
        holders: The device's holders.
    """
    if since is None or uid is None:
        return None
    hosts = ((each.record.guest_of, each.record.since, each.uid) for each in holders)
    return next((index for index, host in enumerate(hosts) if host == (None, since, uid)), None)


def named(record: Record, pid: int | None, changed: float = 0.0) -> Holder:
    """Describe a holder, given its record and PID.

    Args:
        record: The holder's record.
        pid: The holder's PID, or None if it is unknown.
        changed: The mtime of the file with the record, which is updated after each cell.
    """
    now = procfs.now()
    is_other_namespace = pid is None and record.who.namespace not in (None, procfs.pid_namespace())
    return Holder(
        record.at(now),
        pid,
        is_other_namespace=is_other_namespace,
        last_cell=_last_cell(record, changed, now),
        clock_set_s=0.0
        if record.since is None
        else now.clock_set_s(record.since, record.since_boot),
    )


def _last_cell(record: Record, changed: float, now: Instant) -> float | None:
    """Return the time when the holder's last cell ended, by the current wall clock.

    If the wall clock was set after the record was written, the mtime might date from before or
    after that change. The later of the two possible times is used, so that a holder does not appear
    to have been idle for longer than it has.
    """
    if record.written is None or abs(changed - record.written) <= WRITING_S:
        return None
    set_s = now.clock_set_s(record.written, record.written_boot)
    possible = [at for at in (changed, changed + set_s) if at <= now.wall + WRITING_S]
    return max(possible, default=changed)


def _without_sharing(record: Record) -> Record:
    """Return the record without the fields that only a sharer may set."""
    terms = record.terms._replace(size=None)
    return record._replace(terms=terms, guest_of=None)


class KernelList:
    """The content of /proc/locks, the Linux kernel's list of locks, up to a limit.

    Any user can make the list arbitrarily long, so at most `LIST_LIMIT` bytes are read.

    Attributes:
        pids: For each file that is locked with flock(2), the PID of the first process listed. The
            key is the file's device and inode, in the format of /proc/locks.
        inodes: The inodes of all locked files.
        is_whole: Whether the list was read to its end.
    """

    def __init__(self) -> None:
        self.pids: dict[str, int] = {}
        self.inodes: set[int] = set()
        self.is_whole = True
        with suppress(OSError, ValueError):
            for line in self._lines():  # `1: FLOCK  ADVISORY  WRITE 4321 00:19:47 0 EOF`
                fields = line.split()
                if fields[1] not in KINDS:  # "->" marks a process that is waiting for a lock
                    continue
                self.inodes.add(int(fields[5].rpartition(":")[2]))
                if fields[1] == "FLOCK" and int(fields[4]) > 0:
                    self.pids.setdefault(fields[5], int(fields[4]))

    def _lines(self) -> Iterable[str]:
        """Return the list's lines without duplicates.

        The Linux kernel returns one page at a time. If a lock is released between two pages, the
        kernel might skip another lock, so a list of several pages is read twice.

        Raises:
            OSError: The list can't be read.
        """
        text = b""
        with open("/proc/locks", "rb", buffering=0) as locks:
            text, self.is_whole = _read(locks)
            if len(text) >= PAGE_SIZE and self.is_whole:
                locks.seek(0)
                second_text, self.is_whole = _read(locks)
                text += second_text
        return dict.fromkeys(text.decode().splitlines())


def _read(file: RawIOBase) -> tuple[bytes, bool]:
    """Return a file's complete lines up to `LIST_LIMIT`, and whether the whole file was read."""
    text = b""
    while page := file.read(PAGE_SIZE):
        text += page
        if len(text) > LIST_LIMIT:
            return text[: text.rfind(b"\n") + 1], False
    return text, True


def _is_by(record: Record, pids: Collection[int | None]) -> bool:
    """Return whether one of these processes might have written a record.

    If the writer was in another PID namespace, its PID can't be compared, so the result is True.
    """
    return record.who.namespace != procfs.pid_namespace() or record.who.pid in pids


def _is_before(began: float | None, at: float | None) -> bool:
    """Return whether a process started before a given time, or False if either time is unknown."""
    return began is not None and at is not None and began <= at + CLOCK_S
