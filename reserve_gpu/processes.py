"""Who is behind a process id: by the system's word, and by a record in a lock file.

The only module that imports `psutil`, and only when another process has to be named. The kernel's
list of locks says which process holds one. The rest is a record in the lock file that everybody can
write to: it is read with suspicion, for people alone.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from reserve_gpu.device import Holder
from reserve_gpu.myself import TEXT_LIMIT, held_by, pid_namespace, user_of

if TYPE_CHECKING:
    from reserve_gpu.device import Process

LIMIT = 1 << 16  # bytes; what is longer was not written by us
# A file that was changed no later than this after its record was only written: no cell has ended.
WRITING_S = 1.0


def parse(data: bytes) -> dict[str, Any]:
    """The record in a lock file, empty if it is none of ours: truncated, binary, too large."""
    if len(data) > LIMIT:
        return {}
    with suppress(ValueError, RecursionError):
        record = json.loads(data)
        if isinstance(record, dict):
            return record
    return {}


def record(descriptor: int) -> dict[str, Any]:
    """The record in an open lock file."""
    return parse(os.pread(descriptor, LIMIT + 1, 0))


def merge(record: dict[str, Any], pid: int | None, changed: float = 0.0) -> Holder:
    """What is known of a holder: the kernel says which pid, the record says the rest.

    changed: the time stamp of the record's file, which the extension renews after each cell.
    """
    said, since, written = record.get("pid"), record.get("since"), record.get("written")
    is_renewed = isinstance(written, (int, float)) and 0 < written < changed - WRITING_S
    texts = {name: record.get(name) for name in ("user", "notebook", "note")}
    return Holder(
        pid=pid or (said if type(said) is int and 0 < said < 1 << 31 else None),
        since=float(since) if isinstance(since, (int, float)) and 0 < since < 1e11 else None,
        last_cell=changed if is_renewed else None,
        seen=pid is not None,
        confirmed=pid is not None and pid == said,
        elsewhere=pid is None and record.get("namespace") not in (None, pid_namespace()),
        **{
            name: text[:TEXT_LIMIT] if isinstance(text, str) else None
            for name, text in texts.items()
        },
    )


def locking_pids() -> dict[str, list[int]]:
    """The processes that have a file locked with flock, by `file_key`, as far as they are shown."""
    found: dict[str, list[int]] = {}
    with suppress(OSError, ValueError), open("/proc/locks", encoding="utf-8") as locks:
        for line in locks:
            fields = line.split()
            if fields[1] == "FLOCK" and int(fields[4]) > 0:  # one who waits for it has "->" there
                found.setdefault(fields[5], []).append(int(fields[4]))
    return found


def file_key(file: os.stat_result) -> str:
    """What the kernel's list of locks calls a file."""
    return f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"


def keeper(pid: int, file: os.stat_result) -> int:
    """The process that keeps a lock: the one that took it, or one that this has left running.

    What a command of `reserve-gpu run` leaves in the background has its descriptors.
    """
    if os.path.exists(f"/proc/{pid}"):
        return pid
    for other in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):  # it has ended, or is another user's
            for number in os.listdir(f"/proc/{other}/fd"):
                found = os.stat(f"/proc/{other}/fd/{number}")
                if (found.st_dev, found.st_ino) == (file.st_dev, file.st_ino):
                    with open(f"/proc/{other}/fdinfo/{number}", encoding="utf-8") as info:
                        if "FLOCK" in info.read():  # it has not only looked
                            return int(other)
    return pid


def with_user(holder: Holder) -> Holder:
    """The holder with its user: whose process it is, the system says rather than the record."""
    user = user_of(holder.pid) if holder.seen and holder.pid else None
    return holder.replace(user=user or holder.user)


def lineage(pid: int) -> set[int]:
    """The process and those that it descends from, as far as they live and can be seen."""
    import psutil

    try:
        return {pid, *(parent.pid for parent in psutil.Process(pid).parents())}
    except (psutil.Error, OSError, ValueError):
        return {pid}


def identified(process: Process) -> Process:
    """The process with its user and command, as far as they can be seen from here."""
    import psutil

    try:
        found = psutil.Process(process.pid)
        return process.replace(user=user_of(process.pid), command=found.name())
    except (psutil.Error, OSError, ValueError):
        return process


def ancestors() -> set[int]:
    """The pids of this process and of those that it descends from.

    A command of `reserve-gpu run` too, where what is between has ended, as under tmux.
    """
    return {held_by(), *lineage(os.getpid())} - {0}
