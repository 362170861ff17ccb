"""After a cell, tell the holder if others are waiting for its idle devices or using its devices."""

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
from reserve_gpu.render import frontends, phrases
from reserve_gpu.render.messages import pronoun
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


SWITCH = "RESERVE_GPU_TELL_WAITERS"  # "0" turns off messages about waiters
EVERY_S = 600.0  # minimum seconds between messages about waiters
# A device is idle this many seconds after it was reserved or last used, whichever is later.
IDLE_S = 600.0
MUTEX_LIMIT_S = 0.2  # timeout for acquiring the mutex, in seconds
PAUSE_S = 5.0  # minimum seconds between checks, however often cells end
QUICK_S = 0.05  # if a check takes longer than this many seconds, the pause grows in proportion


class WaiterNotices(Feature):
    """Reports every waiter, and every process of another user on a held device, only once."""

    def __init__(self, owner: Owner, pause_s: float = PAUSE_S, idle_s: float = IDLE_S) -> None:
        """Create the feature.

        Args:
            owner: This process's session.
            pause_s: The minimum time between checks, in seconds. It grows after a slow check.
            idle_s: The time after which an unused device counts as idle, in seconds.
        """
        super().__init__(owner)
        self._pause_s, self._idle_s = pause_s, idle_s
        self._used_at = -inf  # `time.monotonic()` at the last known use
        self._known: set[tuple[str, int]] = set()  # waiters and processes already reported
        self._tell_at = 0.0  # earliest `time.monotonic()` for the next message about a waiter
        self._seen: int | None = None  # number of the last reservation checked
        self._look_at = 0.0  # earliest `time.monotonic()` for the next check

    def cell_ended(self, look: Callable[[], Mapping[Device, list[Process]]]) -> list[str]:
        """Show a message about a new waiter, and return warnings about other users of the devices.

        Args:
            look: A function that returns the processes on each device.
        """
        held, began = self.owner.held, time.monotonic()
        if held is None:
            return []
        is_new = held.number != self._seen
        if began < self._look_at and not is_new:
            return []
        if is_new:  # a kernel that has restarted counts from its own first cell
            self._used_at = began
        self._seen = held.number
        is_part = held.terms.memory_limit_mib is not None
        is_unused = is_new and held.were_idle
        rows = [] if is_part or is_unused else new_users(look(), self._known)
        if text := self.tell(held, frontends.is_watched):
            with no_fork:
                from reserve_gpu.render import pictures  # most cells don't need this module

            pictures.tell(pictures.of_text(text))
        took_s = time.monotonic() - began
        self._look_at = began + took_s + self._pause_s * max(1.0, took_s / QUICK_S)
        return [] if is_new else [*map(used_by_others, rows)]  # %reserve_gpu has already warned

    def tell(self, held: Holding, is_watched: Callable[[], bool]) -> str | None:
        """Return a message about a new waiter for idle devices, at most once every EVERY_S seconds.

        Args:
            held: The reservation.
            is_watched: A function that returns whether a person will read the message.

        Returns:
            The message, or None if there is nothing to report.
        """
        now = time.monotonic()
        if os.environ.get(SWITCH) == "0" or now < self._tell_at or self._may_be_used(held, now):
            return None
        waiter = first_waiter(held.devices, self._known)
        if waiter is None or not is_watched():
            return None
        period_s = max(time.time() - cells().began, self._idle_s)
        if activity.is_used(held, procfs.now().later(-period_s)):
            self._used_at = now
            return None
        if self.owner.held is not held:  # the reservation changed during the check
            return None
        self._tell_at = now + EVERY_S
        self._known.add(key(waiter))
        return waiter_message(waiter, held.devices, is_late=cuda_environment.cuda_started())

    def _may_be_used(self, held: Holding, now: float) -> bool:
        """Return whether the devices were reserved or used too recently to count as idle."""
        look = self.owner.last_look
        if look and look.is_used:
            self._used_at = max(self._used_at, look.at)
        held_s = procfs.now().boot - held.since.boot
        return min(held_s, now - self._used_at) < self._idle_s


def first_waiter(devices: Sequence[Device], known: Collection[tuple[str, int]]) -> Ticket | None:
    """Return the ticket of the first unreported waiter that could use one of the devices.

    Args:
        devices: The held devices.
        known: The keys of waiters that have already been reported.
    """
    with suppress(LockError), LockDirectory() as directory:
        for ticket in queue.other_tickets(_tickets(directory), devices):
            if key(ticket) not in known:
                return queue.identified(ticket)
    return None


def key(ticket: Ticket) -> tuple[str, int]:
    """Return a waiter's key, which is never reused for another waiter.

    Args:
        ticket: The waiter's ticket.
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
    """Return a row for each device that another user's process has started to use.

    Processes that use no more memory than a desktop are ignored. Graphics processes below that
    limit have already been left out of `listed`.

    Args:
        listed: The processes on each held device.
        known: The device UUID and pid of each process that has already been reported. This
            function adds the new processes.
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
    """Return a message that tells the holder of idle devices about a waiter.

    Args:
        ticket: The waiter's ticket.
        devices: The held devices.
        is_late: Whether CUDA has started in this process. If so, only a restart frees the GPU
            memory.
    """
    recipient = sanitize(ticket.holder.user or "another user")
    subject = recipient if ticket.holder.user else "Another user"
    if phrases.is_of(ticket.holder, procfs.user_of(os.getpid())):
        recipient = phrases.owner_or_own_process(ticket.holder, ticket.holder.user)
        subject = recipient[:1].upper() + recipient[1:]
    note = f' ("{sanitize(ticket.holder.note)}")' if ticket.holder.note else ""
    waits = phrases.plain(phrases.wait(ticket.holder, time.time(), ticket.asks))
    idle = f"{phrases.labels(devices)} {phrases.be(len(devices))} idle here"
    it = pronoun(devices)
    give = f"To give {it} to {recipient}"
    advice = f"{give}, release {it} and restart this kernel" if is_late else give
    return f"{subject}{waits}{note}. {idle}. {advice}:\n%reserve_gpu --release"
