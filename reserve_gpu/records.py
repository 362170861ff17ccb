"""What is known of the process that holds a lock: by the kernel's word, and by its own.

The kernel's list of locks says which process it is. The rest is a record in the lock file that
everybody can write to: it is read with suspicion, for people alone.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from reserve_gpu.device import Holder

if TYPE_CHECKING:
    from collections.abc import Mapping

INITIAL_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO of the kernel's include/linux/proc_ns.h
TEXT_LIMIT = 300  # characters of each text
LIMIT = 1 << 16  # bytes; what is longer was not written by us


def parse(data: bytes) -> dict[str, Any]:
    """The record in a lock file, empty if it is none of ours: truncated, binary, too large."""
    if len(data) > LIMIT:
        return {}
    with suppress(ValueError, RecursionError):
        record = json.loads(data)
        if isinstance(record, dict):
            return record
    return {}


def bounded(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with its texts cut to what a reader takes."""
    return {
        name: value[:TEXT_LIMIT] if isinstance(value, str) else value
        for name, value in record.items()
    }


def merge(record: dict[str, Any], pid: int | None) -> Holder:
    """What is known of a holder: the kernel says which pid, the record says the rest."""
    said, since = record.get("pid"), record.get("since")
    texts = {name: record.get(name) for name in ("user", "notebook", "note")}
    return Holder(
        pid=pid or (said if type(said) is int and 0 < said < 1 << 31 else None),
        since=float(since) if isinstance(since, (int, float)) and 0 < since < 1e11 else None,
        seen=pid is not None,
        confirmed=pid is not None and pid == said,
        elsewhere=pid is None and record.get("namespace") not in (None, pid_namespace()),
        **{
            name: text[:TEXT_LIMIT] if isinstance(text, str) else None
            for name, text in texts.items()
        },
    )


def locking_pid(file: os.stat_result) -> int | None:
    """The process that has the file locked with flock, None where the kernel does not show it."""
    device = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    with suppress(OSError, ValueError), open("/proc/locks", encoding="utf-8") as locks:
        for line in locks:
            fields = line.split()
            if "->" not in fields and fields[1] == "FLOCK" and fields[5] == device:
                return int(fields[4]) or None
    return None


def pid_namespace() -> int | None:
    """The inode of this process's PID namespace, None where there are none."""
    with suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
    return None


def with_user(holder: Holder) -> Holder:
    """The holder with its user: whose process it is, the system says rather than the record."""
    user = user_of(holder.pid) if holder.seen and holder.pid else None
    return holder.replace(user=user or holder.user)


def user_of(pid: int) -> str | None:
    """The user that runs a process, by the system's word, None if it can't be seen from here."""
    with suppress(OSError):
        uid = os.stat(f"/proc/{pid}").st_uid
        try:
            import pwd

            return pwd.getpwuid(uid).pw_name
        except (ImportError, KeyError):
            return f"uid {uid}"
    return None
