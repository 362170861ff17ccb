"""Tells the holder, after a cell, who waits for what lies idle here, and who else uses it."""

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


SWITCH = "RESERVE_GPU_TELL_WAITERS"  # "0": no
EVERY_S = 600.0  # between two messages to the holder
IDLE_S = 600.0  # since the reservation and the last use; before that no GPU is called idle
MUTEX_LIMIT_S = 0.2
PAUSE_S = 5.0  # a cell is no reason to ask the driver again at once
QUICK_S = 0.05  # a look that takes longer is made again so much later


class WaiterNotices(Feature):
    """Tells of each of those who wait once, and of each stranger on a device.

    pause_s: between two looks; longer after a slow one. idle_s: see IDLE_S.
    """

    def __init__(self, owner: Owner, pause_s: float = PAUSE_S, idle_s: float = IDLE_S) -> None:
        super().__init__(owner)
        self._pause_s, self._idle_s = pause_s, idle_s
        self._used_at = -inf  # as far as is known; by time.monotonic()
        self._known: set[tuple[str, int]] = set()  # who waits, or uses a device, and was told of
        self._tell_at = 0.0  # who waits, at the earliest; by time.monotonic()
        self._seen: int | None = None  # the reservation whose devices were looked at
        self._look_at = 0.0  # at the earliest, by time.monotonic()

    def cell_ended(self, look: Callable[[], Mapping[Device, list[Process]]]) -> list[str]:
        """Return who has come to the devices; shows who waits for them, mostly nobody."""
        held, began = self.owner.held, time.monotonic()
        if held is None:
            return []
        is_new = held.number != self._seen
        if began < self._look_at and not is_new:
            return []
        self._seen = held.number
        is_part = held.terms.memory_limit_mib is not None
        is_known = is_new and held.were_idle  # nobody uses them yet
        rows = [] if is_part or is_known else strangers(look(), self._known)
        if text := self.tell(held, frontends.is_watched):
            with no_fork:
                from reserve_gpu.render import pictures  # most cells show nothing

            pictures.tell(pictures.of_line(text))
        took_s = time.monotonic() - began
        self._look_at = began + took_s + self._pause_s * max(1.0, took_s / QUICK_S)
        return [] if is_new else [*map(used_by_others, rows)]  # it was told of the others

    def tell(self, held: Holding, is_watched: Callable[[], bool]) -> str | None:
        """Return what to tell of those who wait for what lies idle here, not too often.

        is_watched: tells whether a person reads it.
        """
        now = time.monotonic()
        if os.environ.get(SWITCH) == "0" or now < self._tell_at or self._may_be_used(held, now):
            return None
        first = first_of(held.devices, self._known)
        if first is None or not is_watched():
            return None
        if activity.is_used(held, min(cells().began, time.time() - self._idle_s)):
            self._used_at = now
            return None
        if self.owner.held is not held:  # it has ended meanwhile
            return None
        self._tell_at = now + EVERY_S
        self._known.add(key(first))
        return somebody_waits(first, held.devices, is_late=cuda_environment.cuda_started())

    def _may_be_used(self, held: Holding, now: float) -> bool:
        """Return whether the devices were reserved, or seen in use, a short time ago."""
        look = self.owner.last_look
        if look and look.is_used:
            self._used_at = max(self._used_at, look.at)
        held_s = procfs.now().boot - held.since.boot
        return min(held_s, now - self._used_at) < self._idle_s


def first_of(devices: Sequence[Device], known: Collection[tuple[str, int]]) -> Ticket | None:
    """Return the first in the queue who could use one of the devices, if that is somebody new.

    known: those of whom the holder was told already.
    """
    with suppress(LockError), LockDirectory() as directory:
        for ticket in queue.others(_tickets(directory), devices):
            if key(ticket) not in known:
                return ticket._replace(holder=procfs.with_user(ticket.holder))
    return None


def key(ticket: Ticket) -> tuple[str, int]:
    """Return what tells this waiter from all others, before and after."""
    return ticket.name, ticket.number


def _tickets(directory: LockDirectory) -> list[Ticket]:
    if directory.holders.shows_all_locks:
        return directory.listed_users_tickets()
    with directory.mutex(MUTEX_LIMIT_S):
        return directory.tickets()


def strangers(
    listed: Mapping[Device, Sequence[Process]], told: set[tuple[str, int]]
) -> list[DeviceStatus]:
    """Return a row for each device on which another user has begun to use gigabytes.

    listed: what uses each device that is held; graphics processes are listed only if they hold
    more than a desktop. told: which of them are known; grows by the others.
    """
    rows: list[DeviceStatus] = []
    for device, processes in listed.items():
        new = [
            process
            for process in processes
            if (process.kind == GRAPHICS or (process.memory_mib or 0) > DESKTOP_MIB)
            and (device.uuid, process.pid) not in told
            and procfs.uid_of(process.pid) != os.geteuid()
            and not procfs.is_below(process.pid, {os.getpid()})
        ]
        told |= {(device.uuid, process.pid) for process in new}
        if new:  # whose they are is slow to find out
            known = tuple(map(procfs.identified, new))
            rows.append(DeviceStatus(device, State.RESERVED, processes=known, use_state=State.BUSY))
    return rows


def somebody_waits(ticket: Ticket, devices: Sequence[Device], *, is_late: bool) -> str:
    """Tell the holder of idle devices who waits for one. is_late: CUDA has started here."""
    who, them = sanitize(ticket.holder.user or "Another user"), "them"
    if phrases.is_of(ticket.holder, procfs.user_of(os.getpid())):
        them = phrases.one_of(ticket.holder, ticket.holder.user)
        who = them[:1].upper() + them[1:]
    note = f' ("{sanitize(ticket.holder.note)}")' if ticket.holder.note else ""
    what = sanitize(ticket.asks or "a GPU")
    how = f"%reserve_gpu --release gives it to {them}."
    if is_late:
        how = f"%reserve_gpu --release and a restart of this kernel give it to {them}."
    waited = durations.duration(_waited_s(ticket))
    idle = f"{phrases.labels(devices)} {phrases.be(len(devices))} idle here"
    return f"{who} has waited {waited} for {what}{note}. {idle}: {how}"


def _waited_s(ticket: Ticket) -> float:
    """Return the seconds since a waiter joined the queue.

    The time of a ticket is its owner's word, so the start of the process limits it.
    """
    now = procfs.now().boot
    began = procfs.began_boot(ticket.holder.listed_pid) if ticket.holder.listed_pid else None
    return max(0.0, now - max(ticket.number / 1e9, (began or 0.0) - queue.BACK_S))
