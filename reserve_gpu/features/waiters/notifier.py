"""Tell the holder, after a cell, about waiters for idle devices and about use by other users."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING

from reserve_gpu.gpus import cuda_environment
from reserve_gpu.gpus.usage import DESKTOP_MIB
from reserve_gpu.locks import queue
from reserve_gpu.locks.directory import LockDirectory
from reserve_gpu.model.devices import GRAPHICS, Device, Process, State
from reserve_gpu.model.errors import LockError
from reserve_gpu.model.holders import DeviceStatus
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.render import durations, frontends, phrases
from reserve_gpu.render.notices import used_by_others
from reserve_gpu.reservation import activity
from reserve_gpu.reservation.feature import Feature, Owner
from reserve_gpu.system import procfs
from reserve_gpu.system.forks import no_fork
from reserve_gpu.system.jupyter_kernel import cells

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from reserve_gpu.model.queue import Ticket
    from reserve_gpu.reservation.holding import Holding


SWITCH = "RESERVE_GPU_TELL_WAITERS"  # "0" turns messages about waiters off
EVERY_S = 600.0  # seconds between two messages about waiters
IDLE_S = 600.0  # a device is idle this many seconds after it was reserved or last used
MUTEX_LIMIT_S = 0.2  # timeout for the mutex in seconds
PAUSE_S = 5.0  # shortest time between two checks in seconds, however often cells end
QUICK_S = 0.05  # duration of a check in seconds above which the pause grows in proportion


class WaiterNotices(Feature):
    """Reports each waiter, and each process of another user on a held device, once."""

    def __init__(self, owner: Owner, pause_s: float = PAUSE_S, idle_s: float = IDLE_S) -> None:
        """Create the feature.

        Args:
            owner: The session of this process.
            pause_s: The seconds between two checks, extended after a slow check.
            idle_s: The seconds without use after which a device is idle.
        """
        super().__init__(owner)
        self._pause_s, self._idle_s = pause_s, idle_s
        self._used_at = -inf  # the last known use, by time.monotonic()
        self._known: set[tuple[str, int]] = set()  # the waiters and processes that were reported
        self._tell_at = 0.0  # time of the next message about a waiter, by time.monotonic()
        self._seen: int | None = None  # the number of the reservation that was checked last
        self._look_at = 0.0  # earliest time of the next check, by time.monotonic()

    def cell_ended(self, look: Callable[[], Mapping[Device, list[Process]]]) -> list[str]:
        """Return warnings about other users on the devices, and show a message about a waiter.

        Args:
            look: Returns the processes on each device.
        """
        held, began = self.owner.held, time.monotonic()
        if held is None:
            return []
        is_new = held.number != self._seen
        if began < self._look_at and not is_new:
            return []
        self._seen = held.number
        is_part = held.terms.memory_limit_mib is not None
        is_unused = is_new and held.were_idle
        rows = [] if is_part or is_unused else new_users(look(), self._known)
        if text := self.tell(held, frontends.is_watched):
            with no_fork:
                from reserve_gpu.render import pictures  # most cells don't need it

            pictures.tell(pictures.of_line(text))
        took_s = time.monotonic() - began
        self._look_at = began + took_s + self._pause_s * max(1.0, took_s / QUICK_S)
        return [] if is_new else [*map(used_by_others, rows)]  # %reserve_gpu has warned already

    def tell(self, held: Holding, is_watched: Callable[[], bool]) -> str | None:
        """Return a message about a new waiter for idle devices, at most one every EVERY_S seconds.

        Args:
            held: The reservation.
            is_watched: Returns whether a person reads the message.

        Returns:
            The message, or None if there is nothing to report.
        """
        now = time.monotonic()
        if os.environ.get(SWITCH) == "0" or now < self._tell_at or self._may_be_used(held, now):
            return None
        waiter = first_waiter(held.devices, self._known)
        if waiter is None or not is_watched():
            return None
        if activity.is_used(held, min(cells().began, time.time() - self._idle_s)):
            self._used_at = now
            return None
        if self.owner.held is not held:  # the reservation has ended during the check
            return None
        self._tell_at = now + EVERY_S
        self._known.add(key(waiter))
        return waiter_message(waiter, held.devices, is_late=cuda_environment.cuda_started())

    def _may_be_used(self, held: Holding, now: float) -> bool:
        """Return whether the devices were reserved or used too recently to be idle."""
        look = self.owner.last_look
        if look and look.is_used:
            self._used_at = max(self._used_at, look.at)
        held_s = procfs.now().boot - held.since.boot
        return min(held_s, now - self._used_at) < self._idle_s


def first_waiter(devices: Sequence[Device], known: Collection[tuple[str, int]]) -> Ticket | None:
    """Return the ticket of the first unreported waiter that could use one of the devices.

    Args:
        devices: The held devices.
        known: The keys of waiters that were reported already.
    """
    with suppress(LockError), LockDirectory() as directory:
        for ticket in queue.other_tickets(_tickets(directory), devices):
            if key(ticket) not in known:
                return ticket._replace(holder=procfs.with_owner(ticket.holder))
    return None


def key(ticket: Ticket) -> tuple[str, int]:
    """Return a key that identifies a waiter among all past and future waiters.

    Args:
        ticket: The ticket of the waiter.
    """
    return ticket.name, ticket.number


def _tickets(directory: LockDirectory) -> list[Ticket]:
    if directory.holders.shows_all_locks:
        return directory.listed_users_tickets()
    with directory.mutex(MUTEX_LIMIT_S):
        return directory.tickets()


def new_users(
    listed: Mapping[Device, Sequence[Process]], known: set[tuple[str, int]]
) -> list[DeviceStatus]:
    """Return a row for each device that a process of another user has started to use.

    A process that uses no more memory than a desktop does is ignored. Graphics processes are only
    listed if they use more.

    Args:
        listed: The processes on each held device.
        known: The processes that were reported already, by device UUID and pid. The function adds
            the new ones.
    """
    rows: list[DeviceStatus] = []
    for device, processes in listed.items():
        new = [
            process
            for process in processes
            if (process.kind == GRAPHICS or (process.memory_mib or 0) > DESKTOP_MIB)
            and (device.uuid, process.pid) not in known
            and procfs.uid_of(process.pid) != os.geteuid()
            and not procfs.is_descendant(process.pid, {os.getpid()})
        ]
        known |= {(device.uuid, process.pid) for process in new}
        if new:
            named = tuple(map(procfs.with_identity, new))  # slow, so only for new processes
            rows.append(DeviceStatus(device, State.RESERVED, processes=named, use_state=State.BUSY))
    return rows


def waiter_message(ticket: Ticket, devices: Sequence[Device], *, is_late: bool) -> str:
    """Return the message to the holder of idle devices about a waiter.

    Args:
        ticket: The ticket of the waiter.
        devices: The held devices.
        is_late: Whether CUDA has started in this process, so that only a restart frees memory.
    """
    subject, recipient = sanitize(ticket.holder.user or "Another user"), "them"
    if phrases.is_of(ticket.holder, procfs.user_of(os.getpid())):
        recipient = phrases.owner_or_own_process(ticket.holder, ticket.holder.user)
        subject = recipient[:1].upper() + recipient[1:]
    note = f' ("{sanitize(ticket.holder.note)}")' if ticket.holder.note else ""
    request = sanitize(ticket.asks or "a GPU")
    restart = " and restart this kernel" if is_late else ""
    waited = durations.duration(_waited_s(ticket))
    idle = f"{phrases.labels(devices)} {phrases.be(len(devices))} idle here"
    advice = f"Run %reserve_gpu --release{restart} to give it to {recipient}."
    return f"{subject} has waited {waited} for {request}{note}. {idle}. {advice}"


def _waited_s(ticket: Ticket) -> float:
    """Return the seconds since a waiter joined the queue.

    The waiter's user can write any time into the ticket. The result therefore assumes that the
    waiter joined at most `RETURN_LIMIT_S` before its process started.
    """
    now = procfs.now().boot
    began = procfs.start_time_boot(ticket.holder.listed_pid) if ticket.holder.listed_pid else None
    return max(0.0, now - max(ticket.number / 1e9, (began or 0.0) - queue.RETURN_LIMIT_S))
