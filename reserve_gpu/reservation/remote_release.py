"""Asks, from elsewhere, a process that holds devices to release them, or to end.

Another user may have written what a lock file says. So only the kernel's facts, and what the
process itself answers, decide which process that is: its pid and start time, its user, the locked
file that it has open, its command and its environment. A process that listens has a socket
(https://man7.org/linux/man-pages/man7/unix.7.html) in a folder of its user (socket_directory.py).
The kernel tells which process answers (SO_PEERCRED).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from reserve_gpu.allocation import snapshot
from reserve_gpu.gpus import cuda_environment
from reserve_gpu.locks import files
from reserve_gpu.locks.directory import default_path, device_of
from reserve_gpu.model import untrusted
from reserve_gpu.model.devices import Device
from reserve_gpu.model.holders import Answer, DeviceStatus, Holder, Reserved
from reserve_gpu.reservation import restart_handover, socket_directory, status
from reserve_gpu.system import process_identity, procfs, watchdog
from reserve_gpu.system.shutdown import LONGEST_S, STOP_S

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ANSWER_S = 5.0  # in which a process that is not stopped answers
ROOT = 0
DONE = (Answer.RELEASED, Answer.ENDED, Answer.GONE)


class Choice(NamedTuple):
    """A reservation that a user has named.

    rows: The devices that were named, or all: the process has to hold one of them still.
    notebook: The name of its notebook, if that was named: a process that answers confirms it.
    is_unproven: Another user can have made it look as if the process had these devices. Then it is
        asked for a confirmation, and never gets a signal.
    """

    reserved: Reserved
    rows: tuple[DeviceStatus, ...]
    notebook: str | None = None
    is_unproven: bool = False


# -- which process it is ---------------------------------------------------------------------------


def of_user() -> list[Reserved]:
    """Return this user's reservations on this machine. Raises LockError."""
    return [identified(each) for each in _listed() if snapshot.is_own(each.holder)]


def of_anybody() -> list[Reserved]:
    """Return all reservations that the kernel's list of locks shows. Raises LockError."""
    return [identified(each) for each in _listed()]


def _listed() -> list[Reserved]:
    return [each for each in Reserved.among(status.reserved_rows()) if each.holder.seen]


def identified(reserved: Reserved) -> Reserved:
    """Return the reservation with names that only the user of its process can have given it.

    Without a record that only its user can write, its command is what the kernel shows, and its
    notebook what Jupyter has set in its environment. Its children inherit that, so only a kernel of
    Jupyter's has a notebook.
    """
    holder = reserved.holder
    pid, who, is_kept = holder.listed_pid or 0, holder.record.who, left_of(holder) is not None
    began, words = procfs.began_boot(pid), process_identity.texts(pid, "cmdline")
    if not has_own_record(holder):
        path = process_identity.session_name(process_identity.environ_of(pid))
        notebook = os.path.basename(path)[: untrusted.TEXT_LIMIT]
        # a lock keeper, which keeps it, has no name of its own.
        command = "kernel" if is_kept else process_identity.command(words, _directory(pid))
        who = who._replace(notebook=notebook or None, command=command)
    if not is_kept and process_identity.KERNEL_MODULE not in words:
        who = who._replace(notebook=None)
    return Reserved(
        holder._replace(record=holder.record._replace(who=who)), reserved.rows, began_boot=began
    )


def has_own_record(holder: Holder) -> bool:
    """Return whether only the user of the holder's process can write its record."""
    uid = holder.record_owner
    return uid is not None and uid == holder.uid and _is_of(holder.listed_pid or 0, uid)


def pids_of(holder: Holder) -> set[int | None]:
    """Return the numbers that mean a holder: its own, and those of the kernel and the lock keeper.

    While a kernel restarts, first it and then its lock keeper is said to be the holder.
    """
    left = left_of(holder)
    return {holder.listed_pid, *((left.lock_keeper, left.kernel) if left else ())} - {None}


def left_of(holder: Holder) -> restart_handover.Left | None:
    """Return what is kept for the restart of the holder's kernel; None for nothing.

    The lock keeper has the holder's file locked: the number of the kernel may be another process's.
    """
    pid, files = holder.listed_pid, {holder.file or ""}
    every = restart_handover.all_left(uid=procfs.uid_of(pid or 0))
    lefts = (left for left in every if pid in (left.lock_keeper, left.kernel))
    return next((left for left in lefts if _has_locked(left.lock_keeper, files)), None)


def is_proven(reserved: Reserved, row: DeviceStatus) -> bool:
    """Return whether no other user can have made it look as if the process had that device.

    The number of a device that the driver does not show is in the record alone. And the owner of a
    lock file, or of the directory, can give it the name of another device. But a process that is on
    the device, or was started with its number, has it.
    """
    holder, device = reserved.holder, row.device
    pid = holder.listed_pid or 0
    if holder.uid is None:
        return False
    if has_own_record(holder) and holder.record.label == row.label:
        return True
    if not isinstance(device, Device):
        return False
    environ = process_identity.environ_of(pid)
    visible = environ.get(cuda_environment.VISIBLE, "").split(",")
    return (
        _owners(_files_of(reserved, [row])) <= {ROOT, procfs.uid_of(pid)}
        or any(procfs.is_below(process.pid, {pid}) for process in row.processes)
        or (environ.get(cuda_environment.ORDER) == "PCI_BUS_ID" and device.entry in visible)
    )


def _files_of(reserved: Reserved, rows: Sequence[DeviceStatus]) -> set[str]:
    """Return the names of the files that the process has locked for these devices."""
    pid = reserved.holder.listed_pid
    holders = [holder for row in rows for holder in row.holders]
    return {each.file for each in holders if each.file and each.listed_pid == pid}


def _owners(files: set[str]) -> set[int]:
    """Return the users that can rename one of these lock files."""
    directory, owners = default_path(), set()
    for path in [directory, *(f"{directory}/{file}" for file in files)]:
        with suppress(OSError):
            owners.add(os.stat(path, follow_symlinks=False).st_uid)
    return owners


def _directory(pid: int) -> str | None:
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/cwd")
    return None


def _is_of(pid: int, uid: int) -> bool:
    """Return whether a process runs as that user alone, unlike a set-UID program such as `su`."""
    return any(procfs.own_processes((), [pid], uid))


def _has_locked(pid: int, files: set[str]) -> bool:
    """Return whether a process has one of these lock files open, and locked by that opening.

    It opened the file by that name: any user can link the name of another device to it.
    """
    directory = default_path()
    for file in files & _opened_names(pid):
        with suppress(OSError):
            there = os.stat(f"{directory}/{file}", follow_symlinks=False)
            if procfs.has_locked(pid, there):
                return True
    return False


def _opened_names(pid: int) -> set[str]:
    """Return the names of the files that a process has open, if this process may see them."""
    names = set()
    with suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                names.add(os.path.basename(os.readlink(f"/proc/{pid}/fd/{number}")))
    return names


# -- what is asked of it ---------------------------------------------------------------------------


def release(
    choice: Choice, *, is_end: bool = False, warn: Callable[[Answer], object] = lambda _: None
) -> Answer:
    """Have a process release what it holds, as far as nothing uses it.

    is_end: End the process: as it ends by itself, else by SIGTERM and SIGKILL.
    warn: Called before the first signal, with the reason why the process was not asked to end.
    """
    left = left_of(choice.reserved.holder)
    if (
        left
        and not choice.is_unproven
        and restart_handover.end(left, procfs.uid_of(left.lock_keeper))
    ):
        return Answer.RELEASED
    # What is kept is a kernel's that has ended already.
    if is_end and not left:
        return _end(choice, warn)
    return _asked(choice, "release")


def _end(choice: Choice, warn: Callable[[Answer], object]) -> Answer:
    """End the process itself."""
    try:
        with files.pidfd(choice.reserved.holder.listed_pid or 0) as process:
            return _ended(choice, process, warn)
    except ProcessLookupError:
        return Answer.GONE
    except OSError:  # this kernel or sandbox has no pidfds
        return Answer.STAYS


def _ended(choice: Choice, process: int, warn: Callable[[Answer], object]) -> Answer:
    """End the process that has this pidfd, if it is the one that was chosen."""
    pid = choice.reserved.holder.listed_pid or 0
    is_seen = procfs.shows_files(pid)
    if not _is_same(choice, process) or (is_seen and not _holds(choice)):
        return Answer.GONE
    answer = _asked(choice, "end")
    if answer is Answer.ENDED:  # it does so by itself, after what is called before
        return answer if watchdog.ends_within(process, LONGEST_S + 3 * STOP_S) else Answer.STAYS
    if answer in (Answer.ANOTHER, Answer.GONE):
        return answer
    if choice.is_unproven:
        return Answer.ANOTHER
    if not _holds(choice) or not _is_same(choice, process):
        return Answer.GONE if is_seen else Answer.STAYS
    if not _is_of_one_user(pid):
        return Answer.STAYS
    warn(answer)
    return _signalled(choice, process)


def _signalled(choice: Choice, process: int) -> Answer:
    """Send SIGTERM to the process of a pidfd, and SIGKILL if it does not end."""
    pid = choice.reserved.holder.listed_pid or 0
    for number in (signal.SIGTERM, signal.SIGKILL):
        if not _is_of_one_user(pid) and _is_same(choice, process):
            return Answer.STAYS  # it has become a set-UID program
        try:
            watchdog.send(process, number)
            watchdog.send(process, signal.SIGCONT)
        except PermissionError:
            return Answer.STAYS
        except OSError:
            return Answer.ENDED
        if watchdog.ends_within(process, STOP_S):
            return Answer.ENDED
    return Answer.STAYS


def _is_same(choice: Choice, process: int) -> bool:
    """Return whether a pidfd is of the process that was chosen, which lives.

    Until the process is reaped, /proc/PID is about it. The fdinfo of the pidfd has its pid in the
    PID namespace that /proc shows.
    """
    pid = choice.reserved.holder.listed_pid or 0
    if procfs.began_boot(pid) != choice.reserved.began_boot:
        return False
    with suppress(OSError), open(f"/proc/self/fdinfo/{process}", encoding="utf-8") as info:
        return f"Pid:\t{pid}\n" in info
    return False


def _holds(choice: Choice) -> bool:
    """Return whether the process has one of the devices locked."""
    pid = choice.reserved.holder.listed_pid or 0
    return _has_locked(pid, _files_of(choice.reserved, choice.rows))


def _is_of_one_user(pid: int) -> bool:
    """Return whether a process runs as one user alone, unlike a set-UID program such as `su`."""
    uid = procfs.uid_of(pid)
    return uid is not None and _is_of(pid, uid)


def _asked(choice: Choice, what: str) -> Answer:
    holder = choice.reserved.holder
    pid, uid = holder.listed_pid or 0, procfs.uid_of(holder.listed_pid or 0)
    if uid is None:
        return Answer.GONE
    lost = [row for row in choice.rows if not isinstance(row.device, Device)]
    until = time.time() + ANSWER_S  # after which it has been told that there is no answer
    request = {
        "do": what,
        "notebook": choice.notebook,
        "labels": [row.label for row in lost] if choice.is_unproven else [],
        "devices": sorted(_devices_of(choice)),
        "until": until,
    }
    try:
        answer = ask(pid, uid, request)
    except TimeoutError:
        return Answer.SILENT
    if answer is None:
        return Answer.PROGRAM
    return Answer.__members__.get(str(answer.get("answer")), Answer.SILENT)


def _devices_of(choice: Choice) -> set[str]:
    """Return the UUIDs of the devices that were named.

    The names of the lock files contain them, even if the driver does not show a device.
    """
    shown = {row.device.uuid for row in choice.rows if isinstance(row.device, Device)}
    return shown | {device_of(file) for file in _files_of(choice.reserved, choice.rows)}


def ask(pid: int, uid: int, request: dict[str, Any]) -> dict[str, Any] | None:
    """Ask a process of a user; returns its answer, None if it does not listen.

    Raises TimeoutError if it does not answer.
    """
    for folder in socket_directory.of_process(pid, uid):
        inside = f"/proc/self/fd/{folder}"
        for name in socket_directory.names_in(folder):
            if not name.startswith(socket_directory.sockets_of(pid)):
                continue
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
                connection.settimeout(ANSWER_S)
                try:
                    connection.connect(f"{inside}/{name}")
                    if socket_directory.peer(connection) != (pid, uid):
                        continue
                    connection.sendall(json.dumps(request).encode())
                    answer = untrusted.parsed(connection.recv(socket_directory.MESSAGE_LIMIT))
                except TimeoutError:
                    raise
                except (OSError, ValueError):  # an older socket
                    continue
                if isinstance(answer, dict):
                    return answer
    return None
