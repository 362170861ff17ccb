"""Who waits for what this process holds, and who else uses it: the holder is told."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from reserve_gpu import proc
from reserve_gpu.errors import LockError
from reserve_gpu.gpus.usage import DESKTOP_MIB
from reserve_gpu.locks.directory import LockDirectory
from reserve_gpu.model import GRAPHICS, Device, Process, Row, State, Ticket
from reserve_gpu.notices import Notice, UsedByOthers

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

EVERY_S = 600.0  # at most so often somebody is told
MUTEX_LIMIT_S = 0.2
SLOW_S = 0.25  # a look at the queue that takes longer is not made after each cell
PATIENCE = 100  # times as long as such a look has taken, until the next one


def first_of(devices: Sequence[Device], told: Collection[tuple[str, int]]) -> Ticket | None:
    """Return the first in the queue who could use one of the devices, if that is somebody new.

    told: those of whom the holder was told already.
    """
    with suppress(LockError), LockDirectory() as directory:
        for ticket in others(_tickets(directory), devices):
            if key(ticket) not in told:
                return ticket._replace(holder=proc.with_user(ticket.holder))
    return None


def others(tickets: Iterable[Ticket], devices: Sequence[Device]) -> Iterator[Ticket]:
    """Yield the tickets of other processes that could use one of the devices."""
    for ticket in tickets:
        could_use = any(ticket.could_use(device.uuid) for device in devices)
        if could_use and ticket.holder.listed_pid != os.getpid():
            yield ticket


def key(ticket: Ticket) -> tuple[str, int]:
    """Return what tells this waiter from all others, before and after."""
    return ticket.name, ticket.number


def waited_s(ticket: Ticket) -> float:
    """Return for how long somebody waits."""
    return max(0.0, (proc.boot_clock_ns() - ticket.number) / 1e9)


def _tickets(directory: LockDirectory) -> list[Ticket]:
    if proc.sees_all_locks():
        return directory.listed_users_tickets()
    with directory.mutex(MUTEX_LIMIT_S):
        return directory.tickets()


def strangers(
    listed: Mapping[Device, Sequence[Process]], told: set[tuple[str, int]]
) -> list[Notice]:
    """Return a notice for each device on which another user has begun to use gigabytes.

    listed: what is on each device that is held. told: which of them are known; grows by the others.
    """
    notices: list[Notice] = []
    for device, processes in listed.items():
        new = [
            process
            for process in processes
            if process.kind != GRAPHICS
            and (process.memory_mib or 0) > DESKTOP_MIB
            and (device.uuid, process.pid) not in told
            and proc.uid_of(process.pid) != os.geteuid()
            and not proc.is_below(process.pid, {os.getpid()})
        ]
        told |= {(device.uuid, process.pid) for process in new}
        if new:  # whose they are is slow to find out
            known = tuple(map(proc.identified, new))
            row = Row(device, State.RESERVED, processes=known, use_state=State.BUSY)
            notices.append(UsedByOthers(row))
    return notices
