"""Asks, from elsewhere, a process that holds devices to release them, or to end.

A process that listens has a socket (https://man7.org/linux/man-pages/man7/unix.7.html) whose name
has its pid. It is in a folder that only this user and root can enter (folders.py), so that nobody
else can keep it busy. The kernel tells who answers (SO_PEERCRED): nobody else's answer is believed.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from reserve_gpu import alarm, foreign, proc
from reserve_gpu.core import folders, kept
from reserve_gpu.core.process_end import LONGEST_S, STOP_S
from reserve_gpu.locks import descriptors
from reserve_gpu.locks.directory import device_of
from reserve_gpu.model import Answer, Device, Holder, Reserved

if TYPE_CHECKING:
    from collections.abc import Collection

ANSWER_S = 5.0  # in which a process that is not stopped answers
LIMIT = 1 << 16  # bytes of a message
DONE = (Answer.RELEASED, Answer.ENDED, Answer.GONE)


def release(reserved: Reserved, *, is_end: bool = False, by_name: bool = False) -> Answer:
    """Have a process release what it holds, as far as nothing uses it.

    is_end: end the process: as it ends by itself, else by SIGTERM and SIGKILL. by_name: it was
        chosen by its notebook's name, which another user may have written: only a process that
        answers is ended.
    """
    left = left_of(reserved.holder)
    if left and kept.end(left, proc.uid_of(left.heir)):
        return Answer.RELEASED
    # What is kept is a kernel's that has ended already.
    return _end(reserved, by_name) if is_end and not left else _asked(reserved, "release")


def pids_of(holder: Holder) -> set[int | None]:
    """Return the numbers that mean a holder: its own, and those of the kernel and the heir.

    While a kernel restarts, first it and then its heir is said to be the holder.
    """
    left = left_of(holder)
    return {holder.pid, *((left.heir, left.kernel) if left else ())}


def left_of(holder: Holder) -> kept.Left | None:
    """Return what is kept for the restart of the holder's kernel; None for nothing.

    Whatever its record says of that: anybody may have written it.
    """
    every = kept.all_left(uid=proc.uid_of(holder.pid or 0))
    return next((left for left in every if holder.pid in (left.heir, left.kernel)), None)


def _end(reserved: Reserved, by_name: bool) -> Answer:  # noqa: FBT001
    """End the process itself."""
    with suppress(OSError), descriptors.process(reserved.holder.pid or 0) as process:
        return _ended(reserved, process, by_name)
    return Answer.GONE


def _ended(reserved: Reserved, process: int, by_name: bool) -> Answer:  # noqa: FBT001
    """End the process that has this pidfd, if it still has the reservation."""
    pid = reserved.holder.pid or 0
    try:
        if not _has_open(pid, {holder.file for row in reserved.rows for holder in row.holders}):
            return Answer.GONE  # and the number may be another process's
        answer = _asked(reserved, "end")
        if answer is Answer.ANOTHER or (by_name and answer is Answer.PROGRAM):
            return Answer.ANOTHER
        if answer is Answer.ENDED:  # it does so by itself, after what is called before
            return answer if alarm.ends_within(process, LONGEST_S + 3 * STOP_S) else Answer.STAYS
        for number in (signal.SIGTERM, signal.SIGKILL):
            alarm.send(process, number)
            alarm.send(process, signal.SIGCONT)
            if alarm.ends_within(process, STOP_S):
                return Answer.ENDED
    except PermissionError:
        return Answer.STAYS
    except OSError:  # it has ended
        return Answer.ENDED
    return Answer.STAYS


def _asked(reserved: Reserved, what: str) -> Answer:
    holder = reserved.holder
    devices = sorted(_devices_of(reserved))
    until = time.time() + ANSWER_S  # after which it has been told that there is no answer
    request = {"do": what, "notebook": holder.notebook, "devices": devices, "until": until}
    try:
        answer = ask(holder.pid or 0, os.geteuid() if holder.uid is None else holder.uid, request)
    except TimeoutError:
        return Answer.SILENT
    if answer is None:
        return Answer.PROGRAM
    return Answer.__members__.get(str(answer.get("answer")), Answer.SILENT)


def _devices_of(reserved: Reserved) -> set[str]:
    """Return the UUIDs of the devices that a process holds.

    The names of the lock files contain them, even if the driver does not show a device.
    """
    holders = [holder for row in reserved.rows for holder in row.holders]
    files = {each.file for each in holders if each.file and each.pid == reserved.holder.pid}
    shown = {row.device.uuid for row in reserved.rows if isinstance(row.device, Device)}
    return shown | {device_of(file) for file in files}


def _has_open(pid: int, names: Collection[str | None]) -> bool:
    """Tell whether a process has one of these lock files open."""
    with suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if os.path.basename(os.readlink(f"/proc/{pid}/fd/{number}")) in names:
                    return True
    return False


def ask(pid: int, uid: int, request: dict[str, Any]) -> dict[str, Any] | None:
    """Ask a process of a user; returns its answer, None if it does not listen.

    Raises TimeoutError if it does not answer.
    """
    for folder in folders.of_process(pid, uid):
        inside = f"/proc/self/fd/{folder}"
        for name in folders.names_in(folder):
            if not name.startswith(folders.sockets_of(pid)):
                continue
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
                connection.settimeout(ANSWER_S)
                try:
                    connection.connect(f"{inside}/{name}")
                    if folders.peer(connection) != (pid, uid):
                        continue
                    connection.sendall(json.dumps(request).encode())
                    answer = foreign.parsed(connection.recv(LIMIT))
                except TimeoutError:
                    raise
                except (OSError, ValueError):  # of a program before this one
                    continue
                if isinstance(answer, dict):
                    return answer
    return None
