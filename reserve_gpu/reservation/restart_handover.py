"""Keep a Jupyter kernel's devices reserved for the next kernel with the same connection file.

A restarting kernel leaves its locks to a lock keeper (system/lock_keeper.py), which is a process
that inherits the lock files' descriptors and waits. A process that reserves devices for a kernel
that will be started over ssh also leaves its locks to a lock keeper. The user's next kernel ends
the lock keeper and acquires the locks. Meanwhile, the kernel holds the machine-wide mutex, so that
no other process can acquire the locks first.

The contents of lock files are not trusted for this handover. The next kernel finds the lock keeper
among the user's own processes, by its program and arguments. The lock keeper's environment contains
the reservation's data.
"""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from reserve_gpu.allocation import snapshot
from reserve_gpu.gpus import cuda_environment
from reserve_gpu.gpus.bindings import DeviceError
from reserve_gpu.gpus.nvml import Nvml
from reserve_gpu.gpus.usage import has_no_memory
from reserve_gpu.locks import files
from reserve_gpu.locks.directory import LockDirectory
from reserve_gpu.model import untrusted
from reserve_gpu.model.devices import Device, State
from reserve_gpu.model.errors import DriverError
from reserve_gpu.model.holders import DeviceStatus, Holder, Record
from reserve_gpu.render.notices import left_running, used_by_others
from reserve_gpu.reservation import exec_handover, joining
from reserve_gpu.reservation.activity import DRIVER_LIMIT_S
from reserve_gpu.reservation.refresh import refresh
from reserve_gpu.system import executor, lock_keeper, procfs, subprocesses, watchdog

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from reserve_gpu.gpus.nvml import Place
    from reserve_gpu.locks.lock import Lock
    from reserve_gpu.model.clocks import Instant
    from reserve_gpu.model.devices import Process
    from reserve_gpu.reservation.feature import Owner
    from reserve_gpu.reservation.holding import Holding

LIMIT = 200_000  # maximum size of a lock keeper's environment in bytes
ENDS_S = 2.0  # seconds to wait for a killed lock keeper or an exiting kernel to free its locks
POLL_S = 0.01  # seconds between attempts to lock a file


class KeptReservation(NamedTuple):
    """A reservation that a kernel has left with a lock keeper, for the next kernel to take over.

    Attributes:
        lock_keeper: The pid of the lock keeper.
        kernel: The pid of the kernel, which might have exited. The driver can take a few seconds to
            free an exited kernel's memory.
        kernel_stamp: The kernel's pid and start time, from `procfs.stamp`. None if an older version
            wrote the data.
        connection_file: The path of the next kernel's connection file, or the id of a kernel that
            is started over ssh.
        until: When the lock keeper stops waiting, in seconds since the epoch, corrected for wall
            clock changes.
        directory: The lock directory.
        names: The name of each lock file, and the time when it was locked.
        held: The reservation, without its locks.
    """

    lock_keeper: int
    kernel: int
    kernel_stamp: str | None
    connection_file: str
    until: float
    directory: str
    names: tuple[tuple[str, Instant], ...]
    held: Holding

    def is_of(self, pid: int) -> bool:
        """Return whether a pid still belongs to the kernel that handed over the reservation."""
        if pid != self.kernel:
            return False
        return self.kernel_stamp is None or procfs.stamp(pid) in (self.kernel_stamp, str(pid))


def leave_to_lock_keeper(owner: Owner, connection_file: str, seconds: float) -> None:
    """Leave the reservation to a lock keeper.

    Nothing happens if no device is held, if the reservation is overdue, or if this process has
    joined a holder that no longer holds the devices.

    Args:
        owner: The session of this process.
        connection_file: The path of the next kernel's connection file, or the id of a kernel that
            is started over ssh. The lock keeper exits if the connection file is deleted.
        seconds: The maximum time in seconds that the lock keeper waits for the next kernel.

    Raises:
        OSError: The lock keeper can't be started.
        LockError: The lock directory can't be used.
    """
    held = owner.held
    if held is None or held.overdue is not None or (held.joined and joining.has_lost_holder(held)):
        return
    now = procfs.now()
    until = min(now.wall + seconds, held.lease.at(now).until or inf)
    end = now.later(until - now.wall)
    locks = [held.locks[device.uuid] for device in held.devices]
    data = {
        "kernel": os.getpid(),
        "kernel_stamp": procfs.stamp(os.getpid()),
        "until": end.wall,
        "until_boot": end.boot,
        "directory": os.path.dirname(locks[0].path),
        "since": [lock.taken.wall for lock in locks],
        "since_boot": [lock.taken.boot for lock in locks],
        **exec_handover.serialize(held),
    }
    descriptors = [each.descriptor for lock in locks for each in (lock, lock.owned) if each]
    words = [*lock_keeper.WORDS, connection_file, repr(end.wall - now.wall)]
    subprocesses.start_background(words, descriptors, {lock_keeper.LEFT: json.dumps(data)})
    owner.set_holding(held._replace(kept_until=end.wall))


def take_over(owner: Owner, connection_file: str | None) -> list[str]:
    """Take over the reservation that is kept for this kernel, if there is one.

    Args:
        owner: The session of this process.
        connection_file: The connection file of the kernel that this process is, or is about to
            become. None if there is no such kernel.

    Returns:
        Notices about the devices and about other processes that are using them.

    Raises:
        LockError: The lock directory can't be used.
    """
    for left in kept_reservations(connection_file) if connection_file and not owner.held else ():
        with LockDirectory() as directory:
            if left.directory != directory.path or cuda_environment.cuda_started():
                continue
            with directory.mutex():
                if held := _take_from_keeper(left, directory):
                    owner.set_holding(held._replace(is_back=True), renew_lease=True)
        if owner.held:
            return [*refresh(owner).notices, *_cautions(owner.held, left)]
    return []


def _cautions(held: Holding | None, left: KeptReservation) -> list[str]:
    """Return warnings about processes that are using the kept devices without a reservation.

    Args:
        held: The reservation that this kernel has taken over.
        left: The kept reservation. The kernel that left it causes no warning, because the driver
            can take a few seconds to free that kernel's memory.
    """
    if held is None or held.terms.memory_limit_mib is not None:  # other users may share the device
        return []
    with suppress(DriverError), Nvml(DRIVER_LIMIT_S) as gpus:
        if gpus.sees_all:  # otherwise, pids might belong to another PID namespace
            listed = gpus.processes_of(held.devices)
            return [each for device in listed for each in _users(gpus, device, listed, left)]
    return []


def _users(
    gpus: Nvml, device: Place, listed: Mapping[Place, Sequence[Process]], left: KeptReservation
) -> Iterator[str]:
    """Yield notices about this user's processes on a device, and about those of other users."""
    processes = [process for process in listed[device] if not left.is_of(process.pid)]
    if isinstance(device, Device) and any(process.memory_mib == 0 for process in processes):
        mode = None
        with suppress(DeviceError):
            mode = gpus.usage(device).mode
        processes = [process for process in processes if not has_no_memory(process, mode)]
    known = snapshot.identify_processes(gpus, processes, [Holder(listed_pid=os.getpid())])
    unreserved = [process for process in known if not process.has_reserved]
    own_processes = tuple(p for p in unreserved if procfs.uid_of(p.pid) == os.geteuid())
    others = tuple(p for p in unreserved if p not in own_processes)
    row = DeviceStatus(device, State.RESERVED, use_state=State.BUSY)
    if own_processes:
        yield left_running(row._replace(processes=own_processes))
    if others:
        yield used_by_others(row._replace(processes=others))


def kept_reservations(
    connection_file: str | None = None, uid: int | None = None
) -> Iterator[KeptReservation]:
    """Yield the reservations that a user's lock keepers hold.

    Args:
        connection_file: The next kernel's connection file; None for any kernel.
        uid: The user's uid; None for the current user. Only root can read another user's lock
            keepers.
    """
    for pid, arguments in procfs.own_processes(lock_keeper.WORDS, uid=uid):
        if arguments and connection_file in (None, arguments[0]):
            # The process might have exited, or might be another program with the same arguments.
            with suppress(OSError, *exec_handover.ERRORS):
                yield _read(pid, arguments[0])


def _take_from_keeper(left: KeptReservation, directory: LockDirectory) -> Holding | None:
    """End the lock keeper and acquire its locks. The caller must hold the mutex.

    Returns:
        The reservation, or None if the lock keeper no longer holds the locks. The kernel might have
        released them, or a lock file might have been deleted.

    Raises:
        LockError: A lock file can't be used.
    """
    statuses = [files.status_of(directory.descriptor, name) for name, _ in left.names]
    is_kept = all(status and procfs.has_locked(left.lock_keeper, status) for status in statuses)
    if not end_lock_keeper(left) or not is_kept:
        return None
    return left.held.with_locks(_acquire(directory, name, taken) for name, taken in left.names)


def end_lock_keeper(left: KeptReservation, uid: int | None = None) -> bool:
    """Kill a lock keeper to free its locks, and return whether it was running and has exited.

    Args:
        left: The reservation that the lock keeper holds.
        uid: The uid of the lock keeper's user; None for the current user. Only root can kill
            another user's lock keeper.
    """
    # Opening the pidfd raises OSError if the lock keeper has already exited.
    with suppress(OSError), files.pidfd(left.lock_keeper) as pidfd:
        # The pid might have been reused before the pidfd was opened, so check the process again.
        if any(procfs.own_processes(lock_keeper.WORDS, [left.lock_keeper], uid)):
            watchdog.send(pidfd, signal.SIGKILL)
            return watchdog.ends_within(pidfd, ENDS_S)
    return False


def _acquire(directory: LockDirectory, name: str, taken: Instant) -> Lock | None:
    """Lock a file, retrying briefly because the previous kernel might still be exiting."""
    return executor.wait_for(lambda: directory.acquire_again(name, taken), ENDS_S, POLL_S)


def _read(pid: int, connection_file: str) -> KeptReservation:
    """Read the reservation that a lock keeper holds.

    Raises:
        OSError: The process has exited.
        ValueError, TypeError, KeyError, AttributeError: The data is invalid.
    """
    mark = f"{lock_keeper.LEFT}=".encode()
    with open(f"/proc/{pid}/environ", "rb") as environ:
        variables = environ.read(LIMIT).split(b"\0")
    (left,) = (variable for variable in variables if variable.startswith(mark))
    fields = untrusted.parsed(left[len(mark) :])
    names = [os.path.basename(name) for _, name, *_ in fields["locks"]]
    now = procfs.now()
    boots = fields.get("since_boot") or [None] * len(names)  # missing in data from older versions
    taken = (
        Record(since=untrusted.number(wall), since_boot=boot and untrusted.number(boot)).taken(now)
        or now
        for wall, boot in zip(fields["since"], boots, strict=True)
    )
    until, until_boot = untrusted.number(fields["until"]), fields.get("until_boot")
    return KeptReservation(
        lock_keeper=pid,
        kernel=untrusted.pid(fields["kernel"]),
        kernel_stamp=untrusted.Fields(fields).text("kernel_stamp"),
        connection_file=connection_file,
        until=until + now.clock_set_s(until, until_boot and untrusted.number(until_boot)),
        directory=untrusted.text(fields["directory"], LIMIT),
        names=tuple(zip(names, taken, strict=True)),
        held=exec_handover.deserialize(fields),
    )
