"""The queue of those who wait for a device: first come, first served.

A waiter holds a ticket, a lock file of its own, which others see as long as it is locked: the
ticket of a process that dies is gone with it. Its place goes by the time at which it joined.
"""

from __future__ import annotations

import math
import os
import time
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from reserve_gpu import calls, proc
from reserve_gpu.locks.directory import QUEUE, LockDirectory
from reserve_gpu.model import Asks, Device, Record, Ticket

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from reserve_gpu.locks.lock import Lock

BACK_S = 120.0
STOPPED_S = 5.0  # without a sign of life; a waiter gives one each second
NOBODY = Record()


class Place(AbstractContextManager["Place"]):
    """The place of this process in the queue; a context manager that leaves the queue at its end.

    Until it has joined it comes after all who have.

    wants: UUIDs of the devices that would do. record: what others may read of this process, and of
    what it asks for.
    stopped_s: who gives no sign of life for so long is passed over.
    back_s: for so long who has left the queue without a device finds the old place.

    The ticket's number is the machine's clock since boot when it joined. The file's mtime keeps
    it, as that can be set on a full disk too, where the record is lost. To set it again, to the
    same value, is the heartbeat: it changes the file's ctime, which nobody can set.
    `Holders.ticket` reads both.
    """

    def __init__(
        self,
        directory: LockDirectory,
        wants: Collection[str] = (),
        record: Record = NOBODY,
        stopped_s: float = STOPPED_S,
        back_s: float = BACK_S,
    ) -> None:
        self._back_s = back_s
        self._directory = directory
        self._stopped_s = stopped_s
        self._record = _wanting(record, wants)
        self.is_served = False  # then there is nothing to come back for
        self._lock: Lock | None = None
        self._number: float = math.inf
        # When each heartbeat of those ahead was first seen; it is a file's name and its ctime.
        self._heartbeats: dict[tuple[str, int], float] = {}
        # Since when a waiter ahead could have had a device, by the ticket's name and the UUID: as
        # found by this look, and by the one before.
        self._offers: dict[tuple[str, str], float] = {}
        self._last_offers: dict[tuple[str, str], float] = {}
        self._ahead: list[Ticket] = []

    def __exit__(self, *_: object) -> None:
        if self._lock:
            self._lock.release(keeps_record=not self.is_served)

    @property
    def has_joined(self) -> bool:
        """Tell whether this process has been in the queue."""
        return self._lock is not None

    def stands(self) -> bool:
        """Tell whether the ticket is there, for others to see."""
        return self._lock is not None and self._lock.stands()

    def join(self) -> None:
        """Join the queue, or take the old place again.

        Somebody may have deleted the ticket, or this program has left the queue a moment ago, to
        ask the same again. Under the mutex. Raises LockError.
        """
        left = self._directory.left_tickets(self._back_s)
        own = [ticket.name for ticket in left if self._is_own(ticket.holder.record)]
        lock = None if self._lock else self._directory.acquire_first(own)
        if lock:
            self._number = os.fstat(lock.descriptor).st_mtime_ns
        else:
            lock = self._directory.acquire_own(QUEUE, besides=[each.name for each in left])
            self._number = self._number if self._lock else proc.boot_clock_ns()
        if self._lock:
            self._lock.release()
        self._lock = lock
        lock.write(self._record)
        self.heartbeat()
        # As others will read it: some file systems keep less of the time than is set.
        self._number = os.fstat(lock.descriptor).st_mtime_ns

    def _is_own(self, left: Record) -> bool:
        """Tell whether a ticket is of the same program, which has asked for the same."""
        both = [
            (each.who._replace(pid=None), each.asks and each.asks.text)
            for each in (left, self._record)
        ]
        return both[0] == both[1]

    def want(self, wants: Collection[str]) -> None:
        """Ask for other devices from now on, at the same place; under the mutex."""
        record = _wanting(self._record, wants)
        if self._lock and record != self._record:
            self._record = record
            self._lock.write(record)
            self.heartbeat()

    def heartbeat(self) -> None:
        """Show others that this process is not stopped."""
        if self._lock:
            self._lock.stamp(int(self._number))

    def ahead(self) -> list[Ticket]:
        """Return the tickets ahead, the first one first, without stopped waiters; under the mutex.

        A process that was stopped by Ctrl-Z, or with its container, can't take what is offered to
        it. It is passed over until it goes on, and keeps its place.
        """
        own = self._lock.name if self._lock else ""
        tickets = self._directory.tickets(besides=[own])
        before = [t for t in tickets if (t.number, t.name) < (self._number, own)]
        now = time.monotonic()
        signs = [(ticket.name, ticket.heartbeat) for ticket in before]
        self._heartbeats = {heartbeat: self._heartbeats.get(heartbeat, now) for heartbeat in signs}
        self._last_offers, self._offers = self._offers, {}
        self._ahead = [
            t for t in before if now - self._heartbeats[t.name, t.heartbeat] < self._stopped_s
        ]
        return self._ahead

    @property
    def is_behind_several(self) -> bool:
        """Tell whether one of the tickets of `ahead` is for several devices at once."""
        return any(ticket.needs > 1 for ticket in self._ahead)

    def first_for(self, uuid: str, *, is_free: Callable[[Ticket], bool]) -> Ticket | None:
        """Return the first of the tickets of `ahead` that keeps this process from the device.

        A waiter who leaves a free device alone for `stopped_s` can't use it, whatever the ticket
        says, and is passed over. is_free: tells whether a waiter could have the device now, with as
        many others as that one needs.
        """
        now = time.monotonic()
        for ticket in self._ahead:
            if not ticket.could_use(uuid):
                continue
            if not is_free(ticket):
                return ticket
            key = ticket.name, uuid
            self._offers[key] = since = self._last_offers.get(key, now)
            if now - since < self._stopped_s:
                return ticket
        return None


def wait_for_news(
    until: float,
    is_news: Callable[[], bool],
    between: Callable[[], object] = calls.checkpoint,
) -> bool:
    """Return at that moment, by time.monotonic(), or before it when there is news: True.

    is_news: a cheap look into the kernel's list of locks, made again and again where that shows all
    of them; elsewhere, as in a container, it says too little. between: called likewise; may raise.
    """
    is_told = proc.sees_all_locks()
    while True:
        between()  # at least once, as it may be that moment already
        left_s = until - time.monotonic()
        if left_s <= 0:
            return False
        time.sleep(min(left_s, calls.POLL_S))
        if is_told and is_news():
            return True


def _wanting(record: Record, wants: Collection[str]) -> Record:
    asks = record.asks or Asks()
    return record._replace(asks=asks._replace(wants=frozenset(wants)))


def others(tickets: Iterable[Ticket], devices: Sequence[Device]) -> Iterator[Ticket]:
    """Yield the tickets of other processes that could use one of the devices."""
    for ticket in tickets:
        could_use = any(ticket.could_use(device.uuid) for device in devices)
        if could_use and ticket.holder.listed_pid != os.getpid():
            yield ticket
