"""Ask another process that holds devices to release them, or to exit.

Other users might be able to write a lock file's record, so the record is not used to identify the
process. The process is identified only by data from the operating system (pid, start time, user,
locked files, command and environment) and by its own reply. A process that accepts requests has a
Unix socket (https://man7.org/linux/man-pages/man7/unix.7.html) in its user's socket directory (see
socket_directory.py). SO_PEERCRED identifies the process that replies.
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

ANSWER_S = 5.0  # seconds to wait for a reply; only a stopped process should take longer
ROOT = 0  # the uid of root
DONE = (Answer.RELEASED, Answer.ENDED, Answer.GONE)


class Choice(NamedTuple):
    """A reservation that a user has selected for release.

    Attributes:
        reserved: The reservation.
        rows: The selected devices. The process must still hold at least one of them.
        notebook: The name of the selected notebook, which the process must confirm; None if the
            user did not select a notebook.
        is_unproven: Whether another user could have faked the evidence that the process holds these
            devices. If so, the process must confirm the devices, and is never sent a signal.
    """

    reserved: Reserved
    rows: tuple[DeviceStatus, ...]
    notebook: str | None = None
    is_unproven: bool = False


# -- identifying the process -----------------------------------------------------------------------


def reservations_of_user() -> list[Reserved]:
    """Return this user's reservations on this machine.

    Raises:
        LockError: The lock directory can't be read.
    """
    return [identified(each) for each in _listed() if snapshot.is_own(each.holder)]


def all_reservations() -> list[Reserved]:
    """Return the reservations of all users, as far as /proc/locks lists them.

    Raises:
        LockError: The lock directory can't be read.
    """
    return [identified(each) for each in _listed()]


def _listed() -> list[Reserved]:
    return [each for each in Reserved.among(status.reserved_rows()) if each.holder.seen]


def identified(reserved: Reserved) -> Reserved:
    """Return the reservation with a command and a notebook name that other users can't fake.

    If other users can write the holder's record, the command comes from /proc, and the notebook's
    name comes from the environment variable that Jupyter sets. Child processes inherit that
    variable, so the notebook's name is dropped if the process is not a Jupyter kernel.

    Args:
        reserved: The reservation of another process.
    """
    holder = reserved.holder
    pid, process, is_kept = (
        holder.listed_pid or 0,
        holder.record.who,
        kept_reservation_of(holder) is not None,
    )
    began, words = procfs.start_time_boot(pid), process_identity.read_texts(pid, "cmdline")
    if not has_own_record(holder):
        path = process_identity.session_name(process_identity.environ_of(pid))
        notebook = os.path.basename(path)[: untrusted.TEXT_LIMIT]
        # A lock keeper holds the locks on a kernel's behalf, so show the kernel instead.
        command = "kernel" if is_kept else process_identity.command(words, _directory(pid))
        process = process._replace(notebook=notebook or None, command=command)
    if not is_kept and process_identity.KERNEL_MODULE not in words:
        process = process._replace(notebook=None)
    record = holder.record._replace(who=process)
    return Reserved(holder._replace(record=record), reserved.rows, began_boot=began)


def has_own_record(holder: Holder) -> bool:
    """Return whether only the holder's user can write the holder's record."""
    uid = holder.record_owner
    return uid is not None and uid == holder.uid and _is_of(holder.listed_pid or 0, uid)


def pids_of(holder: Holder) -> set[int | None]:
    """Return the pids that a user can enter to select a holder.

    While a kernel is restarting, these are the kernel's pid and its lock keeper's pid, because the
    status shows the kernel's pid first and the lock keeper's pid later.
    """
    left = kept_reservation_of(holder)
    return {holder.listed_pid, *((left.lock_keeper, left.kernel) if left else ())} - {None}


def kept_reservation_of(holder: Holder) -> restart_handover.KeptReservation | None:
    """Return the reservation that is kept while the holder's kernel restarts, or None.

    The lock keeper must hold the lock on the holder's file. The kernel's pid alone is not enough,
    because it might belong to another process by now.
    """
    pid, files = holder.listed_pid, {holder.file or ""}
    kept = restart_handover.kept_reservations(uid=procfs.uid_of(pid or 0))
    matches = (left for left in kept if pid in (left.lock_keeper, left.kernel))
    return next((left for left in matches if _has_locked(left.lock_keeper, files)), None)


def is_proven(reserved: Reserved, row: DeviceStatus) -> bool:
    """Return whether there is proof, which no other user can fake, that the process holds a device.

    Another user might be able to write the holder's record, which is the only source of a device's
    number if the driver does not list the device. The owner of a lock file or of the lock directory
    can also give the file another device's name. But a process that is using the device, or whose
    environment selects the device's number, is proven to hold the device.

    Args:
        reserved: The reservation of the process.
        row: The device.
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
        or any(procfs.is_descendant(process.pid, {pid}) for process in row.processes)
        or (environ.get(cuda_environment.ORDER) == "PCI_BUS_ID" and device.entry in visible)
    )


def _files_of(reserved: Reserved, rows: Sequence[DeviceStatus]) -> set[str]:
    """Return the names of the lock files that the process holds for these devices."""
    pid = reserved.holder.listed_pid
    holders = [holder for row in rows for holder in row.holders]
    return {each.file for each in holders if each.file and each.listed_pid == pid}


def _owners(files: set[str]) -> set[int]:
    """Return the uids of users who can rename at least one of these lock files."""
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
    """Return whether a process runs only as the given user, unlike a set-UID program like `su`."""
    return any(procfs.own_processes((), [pid], uid))


def _has_locked(pid: int, files: set[str]) -> bool:
    """Return whether a process holds the lock on one of these files.

    The process must have opened the file under the given name, because any user can create a hard
    link to a lock file under another device's name.
    """
    directory = default_path()
    for file in files & _opened_names(pid):
        with suppress(OSError):
            file_status = os.stat(f"{directory}/{file}", follow_symlinks=False)
            if procfs.has_locked(pid, file_status):
                return True
    return False


def _opened_names(pid: int) -> set[str]:
    """Return the names of a process's open files, or an empty set if they can't be listed."""
    names = set()
    with suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                names.add(os.path.basename(os.readlink(f"/proc/{pid}/fd/{number}")))
    return names


# -- asking the process ----------------------------------------------------------------------------


def release(
    choice: Choice, *, is_end: bool = False, warn: Callable[[Answer], object] = lambda _: None
) -> Answer:
    """Make a process release its devices if nothing is using them, or end the process.

    Args:
        choice: The selected reservation.
        is_end: Whether to end the process. The process is first asked to exit. If it does not
            exit, it is sent SIGTERM and then SIGKILL.
        warn: A function to call before the first signal, with the reason why the request to exit
            was not enough.

    Returns:
        The process's reply, or the outcome if the process did not reply.
    """
    left = kept_reservation_of(choice.reserved.holder)
    if (
        left
        and not choice.is_unproven
        and restart_handover.end_lock_keeper(left, procfs.uid_of(left.lock_keeper))
    ):
        return Answer.RELEASED
    # If the reservation is kept for a restart, its kernel has already exited.
    if is_end and not left:
        return _end(choice, warn)
    return _request(choice, "release")


def _end(choice: Choice, warn: Callable[[Answer], object]) -> Answer:
    try:
        with files.pidfd(choice.reserved.holder.listed_pid or 0) as pidfd:
            return _end_by_pidfd(choice, pidfd, warn)
    except ProcessLookupError:
        return Answer.GONE
    except OSError:  # this Linux kernel or sandbox does not support pidfds
        return Answer.STAYS


def _end_by_pidfd(choice: Choice, pidfd: int, warn: Callable[[Answer], object]) -> Answer:
    """End the process that a pidfd refers to, if it is the selected process."""
    pid = choice.reserved.holder.listed_pid or 0
    is_visible = procfs.shows_files(pid)
    if not _is_same(choice, pidfd) or (is_visible and not _holds(choice)):
        return Answer.GONE
    answer = _request(choice, "end")
    if answer is Answer.ENDED:  # the process runs its before_end() functions and then exits
        return answer if watchdog.ends_within(pidfd, LONGEST_S + 3 * STOP_S) else Answer.STAYS
    if answer in (Answer.ANOTHER, Answer.GONE):
        return answer
    if choice.is_unproven:
        return Answer.ANOTHER
    if not _holds(choice) or not _is_same(choice, pidfd):
        return Answer.GONE if is_visible else Answer.STAYS
    if not _is_of_one_user(pid):
        return Answer.STAYS
    warn(answer)
    return _send_signals(choice, pidfd)


def _send_signals(choice: Choice, pidfd: int) -> Answer:
    """Send SIGTERM to the process that a pidfd refers to, then SIGKILL if it does not exit."""
    pid = choice.reserved.holder.listed_pid or 0
    for number in (signal.SIGTERM, signal.SIGKILL):
        if not _is_of_one_user(pid) and _is_same(choice, pidfd):
            return Answer.STAYS  # the process is now running a set-UID program
        try:
            watchdog.send(pidfd, number)
            watchdog.send(pidfd, signal.SIGCONT)
        except PermissionError:
            return Answer.STAYS
        except OSError:
            return Answer.ENDED
        if watchdog.ends_within(pidfd, STOP_S):
            return Answer.ENDED
    return Answer.STAYS


def _is_same(choice: Choice, pidfd: int) -> bool:
    """Return whether a pidfd refers to the selected process, and that process still exists.

    /proc/PID refers to the same process until that process is reaped. The pidfd's fdinfo contains
    the pid in the PID namespace of /proc.
    """
    pid = choice.reserved.holder.listed_pid or 0
    if procfs.start_time_boot(pid) != choice.reserved.began_boot:
        return False
    with suppress(OSError), open(f"/proc/self/fdinfo/{pidfd}", encoding="utf-8") as info:
        return f"Pid:\t{pid}\n" in info
    return False


def _holds(choice: Choice) -> bool:
    """Return whether the process still holds the lock of at least one selected device."""
    pid = choice.reserved.holder.listed_pid or 0
    return _has_locked(pid, _files_of(choice.reserved, choice.rows))


def _is_of_one_user(pid: int) -> bool:
    """Return whether a process runs as a single user, unlike a set-UID program such as `su`."""
    uid = procfs.uid_of(pid)
    return uid is not None and _is_of(pid, uid)


def _request(choice: Choice, action: str) -> Answer:
    holder = choice.reserved.holder
    pid, uid = holder.listed_pid or 0, procfs.uid_of(holder.listed_pid or 0)
    if uid is None:
        return Answer.GONE
    lost = [row for row in choice.rows if not isinstance(row.device, Device)]
    until = time.time() + ANSWER_S  # the process ignores the request after this time
    request = {
        "do": action,
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
    """Return the UUIDs of the selected devices.

    If the driver does not list a device, the UUID is taken from the name of the device's lock file.
    """
    listed = {row.device.uuid for row in choice.rows if isinstance(row.device, Device)}
    return listed | {device_of(file) for file in _files_of(choice.reserved, choice.rows)}


def ask(pid: int, uid: int, request: dict[str, Any]) -> dict[str, Any] | None:
    """Send a request to another process and return its reply.

    Args:
        pid: The other process's pid.
        uid: The other process's uid.
        request: The request, as values that JSON can represent.

    Returns:
        The reply, or None if the process does not listen for requests.

    Raises:
        TimeoutError: The process did not reply in time.
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
                except (OSError, ValueError):  # a leftover socket
                    continue
                if isinstance(answer, dict):
                    return answer
    return None
