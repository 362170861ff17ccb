"""Who has a lock, in names: by the kernel's list of locks, and by the record in the file.

Nothing is decided by either. The list is no snapshot and may miss a lock; it shows nothing of other
PID namespaces. The record was written by somebody else, and is read with suspicion.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import Any

from reserve_gpu import host
from reserve_gpu.errors import LockError
from reserve_gpu.locks import descriptors, files
from reserve_gpu.locks.lock import RECORD_LIMIT, TEXT_LIMIT
from reserve_gpu.model import UNITS, Holder, Terms, Ticket

SHARE = ".share"  # in the name of a sharer's file, which only its owner can write
MOST_WANTED = 1024  # devices in a ticket; one that names more was not written by us
PIDS = 1 << 31
MOST_MIB = 1e9  # no device has more memory than that
LATEST_S = 1e11  # no time since the epoch is later
# A file that was changed no later than this after its record was only written: no cell has ended.
WRITING_S = 1.0


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
        """Of all files there. Raises LockError."""
        if self._names is None:
            try:
                self._names = set(os.listdir(f"/proc/self/fd/{self._directory}"))
            except OSError as error:
                raise LockError(f"{self._path} can't be listed: {error.strerror}.") from error
        return self._names

    def of(self, name: str) -> Holder:
        """Who has the file of that name locked, as far as that is known: somebody has."""
        record, status = self._record(name)
        holder = Holder() if status is None else self._holder(record, status)
        # Anybody may write into the file of a whole device, and who has that has no part.
        part_mib = holder.part_mib if SHARE in name else None
        return holder._replace(file=name, part_mib=part_mib)

    def ticket(self, name: str) -> Ticket:
        """The ticket in the file of that name, which somebody who waits has locked."""
        record, status = self._record(name)
        if status is None:
            return Ticket(0, name, None, Holder())
        wants, needs = record.get("wants"), record.get("needs")
        return Ticket(
            number=status.st_mtime_ns,  # see queue.Place
            name=name,
            wants=_uuids(wants) if isinstance(wants, list) else None,
            holder=self._holder(record, status)._replace(last_cell=None, part_mib=None),
            asks=_text(record.get("asks")),
            beat=status.st_ctime_ns,
            needs=needs if type(needs) is int and needs > 0 else 1,
            part_mib=read_part(record.get("part_mib")),
        )

    def lists(self, name: str) -> bool:
        """Whether the kernel's list names a process that has the file of that name locked."""
        status = files.status_of(self._directory, name)
        return status is not None and self._pid(status) is not None

    def _holder(self, record: dict[str, Any], status: os.stat_result) -> Holder:
        pid = self._pid(status)
        return merge(record, pid and _keeper(pid, status), status.st_mtime)

    def _record(self, name: str) -> tuple[dict[str, Any], os.stat_result | None]:
        descriptor = files.open_to_look(self._directory, name)
        if descriptor is None:
            return {}, None
        try:
            return read_record(descriptor), os.fstat(descriptor)
        finally:
            descriptors.close(descriptor)

    def _pid(self, status: os.stat_result) -> int | None:
        if self._pids is None:
            self._pids = _locking_pids()
        device = self._device or f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
        return self._pids.get(f"{device}:{status.st_ino}")


def read_record(descriptor: int) -> dict[str, Any]:
    """The record in an open lock file, empty if it is none of ours: truncated, binary, too long."""
    with suppress(OSError, ValueError, RecursionError):
        data = os.pread(descriptor, RECORD_LIMIT + 1, 0)
        record = json.loads(data) if len(data) <= RECORD_LIMIT else None
        if isinstance(record, dict):
            return record
    return {}


def merge(record: dict[str, Any], pid: int | None, changed: float = 0.0) -> Holder:
    """What is known of a holder: the kernel says which pid, the record says the rest.

    changed: the time stamp of the record's file, which the extension renews after each cell.
    """
    claimed, since, written = record.get("pid"), record.get("since"), record.get("written")
    index = record.get("index")
    is_renewed = isinstance(written, (int, float)) and 0 < written < changed - WRITING_S
    return Holder(
        pid=pid or (claimed if type(claimed) is int and 0 < claimed < PIDS else None),
        user=_text(record.get("user")),
        notebook=_text(record.get("notebook")),
        note=_text(record.get("note")),
        since=read_moment(since),
        last_cell=changed if is_renewed else None,
        label=_text(record.get("label")),
        index=index if type(index) is int else None,
        visible=_text(record.get("visible")),
        command=_text(record.get("command")),
        cwd=_text(record.get("cwd")),
        part_mib=read_part(record.get("part_mib")),
        part_unit=read_unit(record.get("part_unit")),
        terms=read_terms(record),
        overdue=read_moment(record.get("overdue")),
        seen=pid is not None,
        confirmed=pid is not None and pid == claimed,
        elsewhere=pid is None and record.get("namespace") not in (None, host.pid_namespace()),
    )


def _uuids(wants: list[object]) -> frozenset[str]:
    return frozenset(uuid for uuid in wants[:MOST_WANTED] if isinstance(uuid, str))


def read_part(value: Any) -> float | None:
    """A promise of memory, in MiB. What makes no sense is none: whoever wrote it may use it all."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 < value < MOST_MIB else None


def read_moment(value: Any) -> float | None:
    """Seconds since the epoch, None for what makes no sense."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 < value < LATEST_S else None


def read_terms(record: dict[str, Any]) -> Terms:
    """Until when somebody holds what they have, by their own word; none for what makes no sense."""
    return Terms(
        until=read_moment(record.get("until")),
        idle_s=read_moment(record.get("idle_s")),
        if_wanted=record.get("if_wanted") is True,
        end_kernel=record.get("end_kernel") is True,
        is_strict=record.get("is_strict") is True,
    )


def read_unit(value: Any) -> str:
    """The unit that a promise was asked for in; of what is none GiB."""
    return value if isinstance(value, str) and value in UNITS else "GiB"


def _text(value: object) -> str | None:
    return value[:TEXT_LIMIT] if isinstance(value, str) else None


def _locking_pids() -> dict[str, int]:
    """The first process that has a file locked, by what the kernel calls the file."""
    pids: dict[str, int] = {}
    with suppress(OSError, ValueError), open("/proc/locks", encoding="utf-8") as locks:
        for line in locks:  # `1: FLOCK  ADVISORY  WRITE 4321 00:19:47 0 EOF`
            fields = line.split()
            if fields[1] == "FLOCK" and int(fields[4]) > 0:  # one who waits for it has "->" there
                pids.setdefault(fields[5], int(fields[4]))
    return pids


def _keeper(pid: int, file: os.stat_result) -> int:
    """The process that keeps a lock: the one that took it, or one that this has left running.

    What a command of `reserve-gpu run` leaves in the background has its descriptors.
    """
    if os.path.exists(f"/proc/{pid}"):
        return pid
    for other in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):  # it has ended, or is another user's
            for number in os.listdir(f"/proc/{other}/fd"):
                status = os.stat(f"/proc/{other}/fd/{number}")
                if os.path.samestat(status, file):
                    with open(f"/proc/{other}/fdinfo/{number}", encoding="utf-8") as info:
                        if "FLOCK" in info.read():  # it has not only looked
                            return int(other)
    return pid
