"""The queue of those who wait for a device: first come, first served.

A waiter holds a ticket, a lock file of its own, which others see as long as it is locked: the
ticket of a process that dies is gone with it. No time decides the order, because the owner of a
file can set its times. A ticket is ahead of a waiter if it was there when that waiter joined.
"""

from __future__ import annotations

import math
import os
import time
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from reserve_gpu.locks.holders import MANY, QUEUE
from reserve_gpu.model.holders import Holder, Record
from reserve_gpu.model.queue import RememberedTicket, Ticket
from reserve_gpu.model.requests import TicketAhead, WaitRequest
from reserve_gpu.system import executor, procfs

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from reserve_gpu.locks.directory import LockDirectory
    from reserve_gpu.locks.lock import Lock
    from reserve_gpu.model.devices import Device

BACK_S = 120.0  # within which a process that left the queue without a device finds its old place
STOPPED_S = 5.0  # without a sign of life; a waiter gives one each second
# For so long the waiters of one user keep others from a free device that is too little for them.
KEEP_FREE_S = 1800.0
NOBODY = Record()


class QueueEntry(AbstractContextManager["QueueEntry"]):
    """The place of this process in the queue; a context manager that leaves the queue at its end.

    Until it has joined it comes after all who have.

    wants: UUIDs of the devices that would do. record: what others may read of this process, and of
    what it asks for.
    stopped_s: who gives no sign of life for so long is passed over.
    back_s: for so long who has left the queue without a device finds the old place.

    The ticket's number is the machine's clock since boot when it joined. The file's mtime keeps
    it, as that can be set on a full disk too, where the record is lost. To set it again, to the
    same value, is the heartbeat: it changes the file's ctime, which nobody can set.
    `Holders.ticket` reads both. The number only tells one ticket of a file from the next one.

    A process that leaves the queue may come back to its old place for `back_s`. It is then ahead of
    the waiters whose own records list its ticket, and behind all others.
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
        # By user and device, for as long as the device is free at each look.
        self._offers: dict[tuple[int | None, str], Offer] = {}
        self._first_look = self._last_look = 0.0
        # When the next ticket of the last look is passed over, by time.monotonic(), if its owner
        # takes nothing until then; inf if that is unknown, or later than `stopped_s`.
        self.passes_at = math.inf
        self._ahead: list[Ticket] = []
        # By name, the tickets that come before; None until this process has joined.
        self._before: dict[str, RememberedTicket] | None = None

    def __exit__(self, *_: object) -> None:
        if self._lock:
            self._lock.release(keeps_record=not self.is_served)

    @property
    def has_joined(self) -> bool:
        """Tell whether this process has been in the queue."""
        return self._lock is not None

    def is_valid(self) -> bool:
        """Tell whether the ticket is there, for others to see."""
        return self._lock is not None and self._lock.is_valid()

    def join(self) -> None:
        """Join the queue, or take the old place again.

        Somebody may have deleted the ticket, or this program has left the queue a moment ago, to
        ask the same again. Under the mutex. Raises LockError.
        """
        left = self._directory.left_tickets(self._back_s)
        own = {ticket.name: ticket for ticket in left if self._is_own(ticket.holder.record)}
        lock = None if self._lock else self._directory.acquire_first(own)
        old = own[lock.name] if lock else None
        if lock is None:
            lock = self._directory.acquire_own(QUEUE, besides=[each.name for each in left])
        try:
            self._take(lock, old)
        except BaseException:
            lock.release(keeps_record=True)
            raise

    def _take(self, lock: Lock, old: Ticket | None) -> None:
        """Join the queue with a ticket that is locked.

        Args:
            lock: The ticket.
            old: The ticket as it was left, if this program takes an old place again.
        """
        tickets = self._directory.tickets(besides=[lock.name])
        lost = self._own_ticket(self._lock.name) if self._lock else None
        if lost and all(each.key != lost.key for each in tickets):  # there is no copy of it
            old = lost
        self._number = old.number if old else procfs.boot_clock_ns()
        self._before = {**self._earlier(lock.name, tickets, old), **(self._before or {})}
        if self._lock:
            self._lock.release()
        self._lock = lock
        self._record = _behind(self._record, self._before)
        lock.write(self._record)
        self.heartbeat()
        # As others will read it: some file systems keep less of the time than is set.
        self._number = os.fstat(lock.descriptor).st_mtime_ns

    def _own_ticket(self, name: str) -> Ticket:
        behind = self._record.asks.tickets_ahead if self._record.asks else None
        return Ticket(int(self._number), name, None, Holder(), tickets_ahead=behind)

    def _earlier(
        self, name: str, tickets: Sequence[Ticket], old: Ticket | None
    ) -> dict[str, RememberedTicket]:
        """Return the tickets that are ahead of this process when it joins.

        Args:
            name: The name of its ticket.
            tickets: All other tickets.
            old: The ticket that it has left or lost and now takes again, or None.
        """
        behind = _all_behind(tickets, old) if old else set()
        there = [ticket for ticket in tickets if ticket.key not in behind]
        # Other waiters list the tickets that were there before them. Their owners may come back.
        listed: dict[int | None, set[TicketAhead]] = {
            None: set(old.tickets_ahead or ()) if old else set()
        }
        for ticket in there:
            listed.setdefault(ticket.holder.uid, set()).update(ticket.tickets_ahead or ())
        earlier: dict[str, RememberedTicket] = {}
        names = {name, *(ticket.name for ticket in tickets)}
        for uid, listing in listed.items():
            for ahead in sorted(listing, key=lambda each: each.key)[:MANY]:
                if ahead.name not in names and (left := self._left(ahead, uid)) is not None:
                    before = earlier.get(ahead.name, left)
                    earlier[ahead.name] = min(before, left, key=lambda each: each.left or 0.0)
        for ticket in there:
            pid = ticket.holder.listed_pid
            earlier[ticket.name] = RememberedTicket(
                ticket.number, pid, self._directory.holders.device_files(pid)
            )
        return earlier

    def _left(self, ahead: TicketAhead, uid: int | None) -> RememberedTicket | None:
        """Return a ticket that was left, or None if its owner can't take it again.

        Users can list any files of their own, so only what other users list counts for others.

        Args:
            ahead: The ticket as a waiter lists it.
            uid: The user of that waiter; None for this process.
        """
        found = self._directory.left_by(ahead)
        if found is None or (found[0] == uid and uid != os.geteuid()):
            return None
        now = procfs.now().boot
        left = max(0.0, now - found[1]) if ahead.left is None else min(ahead.left, now)
        return RememberedTicket(ahead.number, left=left) if now - left < self._back_s else None

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
        before = self._tickets_before()
        now = time.monotonic()
        signs = [(ticket.name, ticket.heartbeat) for ticket in before]
        # Offers of a device that was not free at the last look start again.
        self._offers = {
            key: offer for key, offer in self._offers.items() if offer.counted_at >= self._last_look
        }
        self._first_look, self._last_look = self._first_look or now, now
        self.passes_at = math.inf
        self._heartbeats = {heartbeat: self._heartbeats.get(heartbeat, now) for heartbeat in signs}
        self._ahead = [
            t for t in before if now - self._heartbeats[t.name, t.heartbeat] < self._stopped_s
        ]
        return self._ahead

    def _tickets_before(self) -> list[Ticket]:
        """Return the tickets ahead of this process, and remove the expired ones."""
        if self._lock is None or self._before is None:
            return self._directory.tickets()
        tickets = self._directory.tickets(besides=[self._lock.name])
        by_name = {ticket.name: ticket for ticket in tickets}
        # If a process has to create its ticket again, the file may get another name.
        by_process = {(ticket.holder.listed_pid, ticket.number): ticket for ticket in tickets}
        before: dict[str, RememberedTicket] = {}
        for name, earlier in self._before.items():
            ticket = by_name.get(name)
            if ticket is None or ticket.number != earlier.number:  # another waiter has the file
                ticket = by_process.get((earlier.pid, earlier.number)) if earlier.pid else None
            if ticket and ticket.is_behind({(self._lock.name, int(self._number))}):
                continue
            if seen := self._seen(name, earlier, ticket):
                before[ticket.name if ticket else name] = seen
        self._before, self._record = before, _behind(self._record, before)
        self._lock.write(self._record)  # if the user has edited it
        self.heartbeat()
        here = {name for name, earlier in before.items() if earlier.left is None}
        return [ticket for ticket in tickets if ticket.name in here]

    def _seen(
        self, name: str, earlier: RememberedTicket, ticket: Ticket | None
    ) -> RememberedTicket | None:
        """Update an earlier ticket. Returns None if it has lost its place.

        That happens after `back_s`, or if its process has got a device. The kernel's list shows
        that the process has locked one, except in a container.

        Args:
            name: The name of the ticket.
            earlier: The ticket as it was at the last look.
            ticket: The ticket that is locked now, or None.
        """
        pid = ticket.holder.listed_pid if ticket else None
        if ticket and earlier.left is None and pid in (None, earlier.pid):
            return earlier
        now, devices = procfs.now().boot, self._directory.holders.device_files
        left = now if earlier.left is None else earlier.left
        if earlier.left is None:
            is_served = ticket is None and self._directory.is_served(name)
            if is_served or devices(earlier.pid) - earlier.devices:
                return None
        # A process that came back in time may be seen a little later.
        limit_s = self._back_s + (self._stopped_s if ticket else 0.0)
        if now - left >= limit_s:
            return None
        if ticket is None:
            return earlier._replace(left=left)
        return RememberedTicket(ticket.number, pid, devices(pid))

    @property
    def is_behind_several(self) -> bool:
        """Tell whether one of the tickets of `ahead` is for several devices at once."""
        return any(ticket.needs > 1 for ticket in self._ahead)

    def first_ahead(
        self,
        uuid: str,
        *,
        is_open: bool,
        is_free: Callable[[Ticket], bool],
        is_possible: Callable[[Ticket], bool],
    ) -> Ticket | None:
        """Return the first of the tickets of `ahead` that keeps this process from the device.

        The waiters of a user who leave a free device alone for `stopped_s` can't use it, whatever
        their tickets say, and are passed over. If the device alone is too little for them, they are
        passed over after `KEEP_FREE_S`. The time counts for a user, not for a ticket. The times of
        all users run at once, and each user has half of `stopped_s` more than the one before.

        Args:
            uuid: The device.
            is_open: Whether this process could have it now.
            is_free: Returns whether a waiter could have it now, with as many others as it needs.
            is_possible: Returns whether a waiter could ever have that.
        """
        wanting = [t for t in self._ahead if t.could_use(uuid) and is_possible(t)]
        if not is_open:
            return wanting[0] if wanting else None
        now, ranks = time.monotonic(), self._count_offers(uuid, wanting, is_free)
        for ticket in wanting:
            uid = ticket.holder.uid
            offer, patience_s = self._offers[uid, uuid], self._stopped_s * (1 + ranks[uid] / 2)
            if offer.offered_s >= patience_s or offer.kept_s >= KEEP_FREE_S:
                continue
            left_s = patience_s - offer.offered_s if offer.is_offered else math.inf
            first_seen = self._heartbeats[ticket.name, ticket.heartbeat]
            if first_seen == self._first_look:  # without a new heartbeat it may be stopped
                left_s = min(left_s, first_seen + self._stopped_s - now)
            self.passes_at = min(self.passes_at, now + left_s)
            return ticket
        return None

    def _count_offers(
        self, uuid: str, wanting: Sequence[Ticket], is_free: Callable[[Ticket], bool]
    ) -> dict[int | None, int]:
        """Count the time in which each user keeps a free device, and return the users' order.

        A user whose ticket wants another device for a moment still keeps the first one.
        """
        now, present = time.monotonic(), {ticket.holder.uid for ticket in self._ahead}
        ranks: dict[int | None, int] = {}
        offered: set[int | None] = set()
        for ticket in wanting:
            uid = ticket.holder.uid
            ranks.setdefault(uid, len(ranks))
            self._offers.setdefault((uid, uuid), Offer(now))
            if uid not in offered and is_free(ticket):
                offered.add(uid)
        for (uid, of), offer in self._offers.items():
            if of == uuid:
                is_offered = uid in offered if uid in ranks else offer.is_offered
                offer.count(now, is_present=uid in present, is_offered=is_offered)
        return ranks


class Offer:
    """The time in which the waiters of a user have kept a free device from this process.

    Attributes:
        offered_s: The seconds in which one of them could have taken it.
        kept_s: The seconds in all.
        is_offered: Whether one of them could have taken it at the last look.
        counted_at: The time of that look, by time.monotonic().
    """

    def __init__(self, now: float) -> None:
        """Begin to count. now: This moment, by time.monotonic()."""
        self.offered_s = self.kept_s = 0.0
        self.is_offered = False
        self.counted_at = now

    def count(self, now: float, *, is_present: bool, is_offered: bool) -> None:
        """Count the time since the last look, if the user has a ticket in the queue."""
        if is_present:
            passed_s = now - self.counted_at
            self.kept_s += passed_s
            self.offered_s += passed_s if self.is_offered else 0.0
        self.counted_at, self.is_offered = now, is_offered


class EndOfQueue(QueueEntry):
    """The place of a request that does not wait: it comes after all waiters, and joins nothing."""

    def is_valid(self) -> bool:
        """Return True: a ticket that was never made cannot be missing."""
        return True


def wait_for_news(
    until: float,
    is_news: Callable[[], bool],
    between: Callable[[], object] = executor.checkpoint,
) -> bool:
    """Return at that moment, by time.monotonic(), or before it when there is news: True.

    is_news: a cheap look into the kernel's list of locks, made again and again where that shows all
    of them; elsewhere, as in a container, it says too little. between: called likewise; may raise.
    """
    is_told = procfs.sees_all_locks()
    while True:
        between()  # at least once, as it may be that moment already
        left_s = until - time.monotonic()
        if left_s <= 0:
            return False
        time.sleep(min(left_s, executor.POLL_S))
        if is_told and is_news():
            return True


def _wanting(record: Record, wants: Collection[str]) -> Record:
    asks = record.asks or WaitRequest()
    return record._replace(asks=asks._replace(wants=frozenset(wants)))


def _all_behind(tickets: Sequence[Ticket], old: Ticket) -> set[tuple[str, int]]:
    """Return the tickets that are behind a ticket that was left, also behind those behind it.

    The lists in the tickets decide. A waiter gains nothing if it lists too many. For older versions
    the numbers decide. This user's own tickets put no ticket of another user behind it.
    """
    behind, by_others, own = {old.key}, {old.key}, os.geteuid()
    rest = [each for each in tickets if each.tickets_ahead is not None or each.number > old.number]
    while more := [
        each
        for each in rest
        if each.tickets_ahead is None
        or each.is_behind(behind if each.holder.uid == own else by_others)
    ]:
        behind.update(each.key for each in more)
        by_others.update(each.key for each in more if each.holder.uid != own)
        rest = [each for each in rest if each.key not in behind]
    return behind


def _behind(record: Record, before: Mapping[str, RememberedTicket]) -> Record:
    asks = record.asks or WaitRequest()
    listed = (TicketAhead(name, each.number, each.left) for name, each in before.items())
    return record._replace(asks=asks._replace(tickets_ahead=frozenset(listed)))


def others(tickets: Iterable[Ticket], devices: Sequence[Device]) -> Iterator[Ticket]:
    """Yield the tickets of other processes that could use one of the devices."""
    for ticket in tickets:
        could_use = any(ticket.could_use(device.uuid) for device in devices)
        if could_use and ticket.holder.listed_pid != os.getpid():
            yield ticket
