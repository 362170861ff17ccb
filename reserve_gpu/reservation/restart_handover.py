"""Devices that are kept for a kernel: what another process has left to it, and how it gets that.

That process is the kernel before it, which restarts, or one that has prepared it by ssh. It leaves
its locks to a lock keeper (system/lock_keeper.py), a process that has the descriptors and waits.
The next kernel of the same user with the same connection file ends that process and takes the
locks, under the machine's mutex, so no other process can take them in between. What is written in
the lock files decides nothing: the lock keeper is found among this user's own processes, by its
program and its arguments, and its environment holds what was left.
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
from reserve_gpu.gpus.nvml import Nvml
from reserve_gpu.locks import files
from reserve_gpu.locks.directory import LockDirectory
from reserve_gpu.model import untrusted
from reserve_gpu.model.devices import State
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

LIMIT = 200_000  # bytes of what was left
ENDS_S = 2.0  # for a process that was killed, and for the kernel that has left its locks to it
POLL_S = 0.01


class Left(NamedTuple):
    """What a kernel has left to its next one.

    lock_keeper: The process that keeps it. kernel: The process that has ended. The driver may take
    seconds to free its memory. kernel_stamp: Its `procfs.stamp`, None if an older version left it.
    connection_file: of the next one.
    until: The end of that time, in seconds since the epoch, by the clock as it is set now.
    directory: of the locks. names: of the lock files, and since when each is locked.
    held: the rest.
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
        """Return whether a process is the kernel that left this. It may have ended meanwhile."""
        if pid != self.kernel:
            return False
        return self.kernel_stamp is None or procfs.stamp(pid) in (self.kernel_stamp, str(pid))


def leave(owner: Owner, connection_file: str, seconds: float) -> None:
    """Leave what is held to the next kernel with that connection file, for so long.

    connection_file: without it no kernel comes. For a kernel that is started by ssh its name, which
        is no path.
    What is overdue is not left. Raises OSError, LockError.
    """
    held = owner.held
    if held is None or held.overdue is not None or (held.joined and joining.is_left(held)):
        return
    now = procfs.now()
    until = min(now.wall + seconds, held.lease.at(now).until or inf)
    end = now.later(until - now.wall)
    locks = [held.locks[device.uuid] for device in held.devices]
    left = {
        "kernel": os.getpid(),
        "kernel_stamp": procfs.stamp(os.getpid()),
        "until": end.wall,
        "until_boot": end.boot,
        "directory": os.path.dirname(locks[0].path),
        "since": [lock.taken.wall for lock in locks],
        "since_boot": [lock.taken.boot for lock in locks],
        **exec_handover.described(held),
    }
    numbers = [each.descriptor for lock in locks for each in (lock, lock.owned) if each]
    words = [*lock_keeper.WORDS, connection_file, repr(end.wall - now.wall)]
    subprocesses.leave(words, numbers, {lock_keeper.LEFT: json.dumps(left)})
    owner.set_holding(held._replace(kept_until=end.wall))


def take_over(owner: Owner, connection_file: str | None) -> list[str]:
    """Hold what the kernel before this one has left for its restart; returns what to tell of it.

    connection_file: of the kernel that this process is, or becomes.
    The kernel that has left them is no stranger: the driver may take seconds to free its memory.
    Raises LockError.
    """
    for left in all_left(connection_file) if connection_file and not owner.held else ():
        with LockDirectory() as directory:
            if left.directory != directory.path or cuda_environment.cuda_started():
                continue
            with directory.mutex():
                if held := _taken(left, directory):
                    owner.set_holding(held._replace(is_back=True), renew_lease=True)
        if owner.held:
            return [*refresh(owner).notices, *_cautions(owner.held, left)]
    return []


def _cautions(held: Holding | None, left: Left) -> list[str]:
    """Return warnings about processes on the kept devices.

    Args:
        held: What this kernel has got back.
        left: What the kernel before this one has left. The driver may take seconds to free its
            memory.
    """
    if held is None or held.terms.memory_limit_mib is not None:  # those with parts share the device
        return []
    with suppress(DriverError), Nvml(DRIVER_LIMIT_S) as gpus:
        if gpus.sees_all:  # else a pid may be another process's in this PID namespace
            listed = gpus.processes_of(held.devices)
            return [each for device in listed for each in _users(gpus, device, listed, left)]
    return []


def _users(
    gpus: Nvml, device: Place, listed: Mapping[Place, Sequence[Process]], left: Left
) -> Iterator[str]:
    """Yield a notice for this user's processes on a device, and one for those of others."""
    there = [process for process in listed[device] if not left.is_of(process.pid)]
    known = snapshot.identified(gpus, there, [Holder(listed_pid=os.getpid())])
    without = [process for process in known if not process.has_reserved]
    own = tuple(p for p in without if procfs.uid_of(p.pid) == os.geteuid())
    others = tuple(p for p in without if p not in own)
    row = DeviceStatus(device, State.RESERVED, use_state=State.BUSY)
    if own:
        yield left_running(row._replace(processes=own))
    if others:
        yield used_by_others(row._replace(processes=others))


def all_left(connection_file: str | None = None, uid: int | None = None) -> Iterator[Left]:
    """Yield what kernels of this user have left.

    connection_file: of the kernel that comes, None for any. uid: of another user, for root.
    """
    for pid, arguments in procfs.own_processes(lock_keeper.WORDS, uid=uid):
        if arguments and connection_file in (None, arguments[0]):
            # It may have ended, or be another program that was given the same file.
            with suppress(OSError, *exec_handover.ERRORS):
                yield _read(pid, arguments[0])


def _taken(left: Left, directory: LockDirectory) -> Holding | None:
    """Take what the lock keeper holds, under the mutex; None if it holds nothing any more.

    The kernel may have released it after it had left it, and somebody may have deleted a file: then
    the lock keeper keeps nothing. Raises LockError.
    """
    there = [files.status_of(directory.descriptor, name) for name, _ in left.names]
    is_kept = all(file and procfs.has_locked(left.lock_keeper, file) for file in there)
    if not end(left) or not is_kept:
        return None
    return left.held.with_locks(_acquired(directory, name, taken) for name, taken in left.names)


def end(left: Left, uid: int | None = None) -> bool:
    """End the lock keeper, which frees what it keeps; tells whether it was there.

    uid: of another user, for root.
    """
    with suppress(OSError), files.pidfd(left.lock_keeper) as process:  # else it has ended
        # Its number may have become another process's before the pidfd was opened.
        if any(procfs.own_processes(lock_keeper.WORDS, [left.lock_keeper], uid)):
            watchdog.send(process, signal.SIGKILL)
            return watchdog.ends_within(process, ENDS_S)
    return False


def _acquired(directory: LockDirectory, name: str, taken: Instant) -> Lock | None:
    """Lock the file; the kernel that has left it may be ending just now."""
    return executor.wait_for(lambda: directory.acquire_again(name, taken), ENDS_S, POLL_S)


def _read(pid: int, connection_file: str) -> Left:
    """Return what a lock keeper keeps. Raises OSError, and what comes of text that is not ours."""
    mark = f"{lock_keeper.LEFT}=".encode()
    with open(f"/proc/{pid}/environ", "rb") as environ:
        variables = environ.read(LIMIT).split(b"\0")
    (left,) = (variable for variable in variables if variable.startswith(mark))
    fields = untrusted.parsed(left[len(mark) :])
    names = [os.path.basename(name) for _, name, *_ in fields["locks"]]
    now = procfs.now()
    boots = fields.get("since_boot") or [None] * len(names)  # older versions leave none
    taken = (
        Record(since=untrusted.number(wall), since_boot=boot and untrusted.number(boot)).taken(now)
        or now
        for wall, boot in zip(fields["since"], boots, strict=True)
    )
    until, until_boot = untrusted.number(fields["until"]), fields.get("until_boot")
    return Left(
        lock_keeper=pid,
        kernel=untrusted.pid(fields["kernel"]),
        kernel_stamp=untrusted.Fields(fields).text("kernel_stamp"),
        connection_file=connection_file,
        until=until + now.clock_set_s(until, until_boot and untrusted.number(until_boot)),
        directory=untrusted.text(fields["directory"], LIMIT),
        names=tuple(zip(names, taken, strict=True)),
        held=exec_handover.held_of(fields),
    )
