"""The first-come, first-served queue of processes that are waiting for a device.

Each waiter locks a file, which is called its ticket. Other processes see a ticket only while it is
locked, so a ticket disappears when its waiter dies. A ticket is ahead of a waiter if the ticket was
already locked when that waiter joined the queue. File times don't decide the order, because a
file's owner can set them.
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
    from reserve_gpu.model.clocks import Instant
    from reserve_gpu.model.devices import Device

RETURN_LIMIT_S = 120.0  # seconds within which a process can return to its position in the queue
STOPPED_S = 5.0  # a waiter is skipped after this many seconds without a heartbeat
# Maximum time, in seconds, for which a user's waiters for several devices can keep one device free.
KEEP_FREE_S = 1800.0
EMPTY_RECORD = Record()


class QueueEntry(AbstractContextManager["QueueEntry"]):
    """This process's position in the queue, as a context manager that leaves the queue on exit.

    Until the process joins the queue, its position is behind all waiters.

    The ticket's number is the boot-clock time when the process joined the queue. The number only
    distinguishes successive tickets in the same file. It is stored as the file's mtime, because the
    mtime can be set even when the disk is full and the record can't be written. Each heartbeat sets
    the same mtime again, which updates the file's ctime. Users can't set a ctime. `Holders.ticket`
    reads both times.

    A process that leaves the queue can return to its position within `back_s` seconds. When it
    returns, it is ahead of the waiters whose records list its ticket, and behind all others.

    Args:
        directory: The lock directory.
        wants: The UUIDs of the devices that this process could use.
        record: The record that describes this process and its request to other users.
        stopped_s: The number of seconds without a heartbeat after which a waiter is skipped.
        back_s: The number of seconds within which a process that left the queue without a device
            can return to its position.

    Attributes:
        is_served: Whether this process has its devices and therefore won't return to the queue.
        passes_at: The time.monotonic() value at which the next waiter is skipped unless it takes a
            device, or infinity if unknown.
    """

    def __init__(
        self,
        directory: LockDirectory,
        wants: Collection[str] = (),
        record: Record = EMPTY_RECORD,
        stopped_s: float = STOPPED_S,
        back_s: float = RETURN_LIMIT_S,
    ) -> None:
        self._back_s = back_s
        self._start = procfs.now()
        self._directory = directory
        self._stopped_s = stopped_s
        self._record = _wanting(record, wants)
        self.is_served = self._is_recorded = False
        self._lock: Lock | None = None
        self._number: float = math.inf
        # When each heartbeat was first seen, keyed by the ticket's name and ctime.
        self._heartbeats: dict[tuple[str, int], float] = {}
        # Offers, keyed by UID and device UUID. An offer is kept as long as every check finds its
        # device free.
        self._offers: dict[tuple[int | None, str], Offer] = {}
        self._first_check = self._last_check = 0.0
        self.passes_at = math.inf
        self._ahead: list[Ticket] = []
        # The tickets ahead of this process, keyed by name. None until this process joins the queue.
        self._before: dict[str, RememberedTicket] | None = None

    def __exit__(self, *_: object) -> None:
        if self._lock:
            self._lock.release(keeps_record=not self.is_served)

    @property
    def has_joined(self) -> bool:
        """Return whether this process has joined the queue."""
        return self._lock is not None

    @property
    def keeps_place(self) -> bool:
        """Return whether this process can return to its position after it has left the queue."""
        return self.has_joined and self._is_recorded and not self.is_served

    @property
    def waited_s(self) -> float:
        """Return the seconds for which this process has waited.

        A process that has returned to its position has waited since it joined the queue for the
        first time. Other processes compute the same duration from its record.
        """
        start = self._lock.taken if self._lock else self._start
        return max(0.0, procfs.now().boot - start.boot)

    @property
    def earlier_s(self) -> float:
        """Return the part of `waited_s` that had passed before this object was created."""
        return max(0.0, self._start.boot - self._lock.taken.boot) if self._lock else 0.0

    def is_valid(self) -> bool:
        """Return whether the ticket is locked and other processes can see it."""
        return self._lock is not None and self._lock.is_valid()

    def join(self) -> None:
        """Join the queue, or return to an earlier position. The caller must hold the mutex.

        There is an earlier position if the same program recently left the queue with the same
        request, or if another process has deleted this process's ticket file.

        Raises:
            LockError: No ticket can be locked.
        """
        left = self._directory.left_tickets(self._back_s)
        returning = {
            ticket.name: ticket for ticket in left if self._is_own_request(ticket.holder.record)
        }
        lock = None if self._lock else self._directory.acquire_first(returning)
        old = returning[lock.name] if lock else None
        if lock is None:
            lock = self._directory.acquire_any_user_file(
                QUEUE, avoided=[each.name for each in left]
            )
        try:
            self._take(lock, old)
        except BaseException:
            lock.release(keeps_record=True)
            raise

    def _take(self, lock: Lock, old: Ticket | None) -> None:
        """Join the queue with a locked ticket.

        Args:
            lock: The lock on the ticket.
            old: The ticket that the same program left in this file earlier, or None.
        """
        tickets = self._directory.tickets(excluded=[lock.name])
        lost = self._own_ticket(self._lock.name) if self._lock else None
        if lost and all(each.key != lost.key for each in tickets):  # other processes can't see it
            old = lost
        self._number = old.number if old else procfs.boot_clock_ns()
        self._before = {**self._earlier(lock.name, tickets, old), **(self._before or {})}
        if self._lock:
            self._lock.release()
        self._lock = lock
        self._record = _behind(self._record, self._before)
        lock.taken = _began(self._number)
        self._is_recorded = lock.write(self._record) is None
        self.heartbeat()
        # Read the number as other processes see it, because some file systems round times.
        self._number = os.fstat(lock.descriptor).st_mtime_ns

    def _own_ticket(self, name: str) -> Ticket:
        behind = self._record.asks.tickets_ahead if self._record.asks else None
        return Ticket(int(self._number), name, None, Holder(), tickets_ahead=behind)

    def _earlier(
        self, name: str, tickets: Sequence[Ticket], old: Ticket | None
    ) -> dict[str, RememberedTicket]:
        """Return the tickets that are ahead of this process when it joins the queue.

        Args:
            name: The name of this process's ticket.
            tickets: All other tickets.
            old: This process's earlier ticket if the process is returning to its position, or None.
        """
        behind = _all_behind(tickets, old) if old else set()
        in_front = [ticket for ticket in tickets if ticket.key not in behind]
        # Waiters also list the tickets of processes that have left the queue and might return.
        listed: dict[int | None, set[str]] = {None: set(old.lines_ahead) if old else set()}
        for ticket in in_front:
            listed.setdefault(ticket.holder.uid, set()).update(ticket.lines_ahead)
        earlier: dict[str, RememberedTicket] = {}
        names = {name, *(ticket.name for ticket in tickets)}
        for uid, listing in listed.items():
            for ahead in map(TicketAhead.parse, sorted(listing)[:MANY]):
                if (
                    ahead
                    and ahead.name not in names
                    and (left := self._remember_left(ahead, uid)) is not None
                ):
                    before = earlier.get(ahead.name, left)
                    earlier[ahead.name] = min(before, left, key=lambda each: each.left or 0.0)
        for ticket in in_front:
            pid = ticket.holder.listed_pid
            earlier[ticket.name] = RememberedTicket(
                ticket.number, pid, self._directory.holders.device_files(pid)
            )
        return earlier

    def _remember_left(self, ahead: TicketAhead, uid: int | None) -> RememberedTicket | None:
        """Return a ticket whose waiter left the queue, or None if that waiter can't return.

        Users could list any of their own files as tickets. If a ticket is listed by a waiter of the
        ticket's own user, it therefore counts only for that user's processes.

        Args:
            ahead: The ticket, as listed by a waiter.
            uid: The UID of the waiter that lists the ticket, or None if it is this process.
        """
        owner_and_age = self._directory.read_left_ticket(ahead)
        if owner_and_age is None or (owner_and_age[0] == uid and uid != os.geteuid()):
            return None
        now = procfs.now().boot
        left = max(0.0, now - owner_and_age[1]) if ahead.left is None else min(ahead.left, now)
        return RememberedTicket(ahead.number, left=left) if now - left < self._back_s else None

    def _is_own_request(self, left: Record) -> bool:
        """Return whether a record was written by this program for the same request."""
        old, new = (
            (record.who._replace(pid=None), record.asks and record.asks.text)
            for record in (left, self._record)
        )
        return old == new

    def want(self, wants: Collection[str]) -> None:
        """Change the devices that this process is waiting for, and keep its position.

        The caller must hold the mutex.

        Args:
            wants: The UUIDs of the devices that this process could use.
        """
        record = _wanting(self._record, wants)
        if self._lock and record != self._record:
            self._record = record
            self._lock.write(record)
            self.heartbeat()

    def heartbeat(self) -> None:
        """Let other processes see that this process is running and not suspended (SIGSTOP)."""
        if self._lock:
            self._lock.stamp(int(self._number))

    def ahead(self) -> list[Ticket]:
        """Return the tickets ahead of this process in order, except those of stopped waiters.

        The tickets contain their waiters' PIDs only if this process has joined the queue. The
        caller must hold the mutex. A process that has been stopped, for example with Ctrl-Z or
        because its container is paused, can't take a device. It is skipped until it continues, but
        it keeps its position.
        """
        before = self._tickets_before()
        now = time.monotonic()
        heartbeats = [(ticket.name, ticket.heartbeat) for ticket in before]
        # Forget the offers for devices that were not free at the last check.
        self._offers = {
            key: offer
            for key, offer in self._offers.items()
            if offer.counted_at >= self._last_check
        }
        self._first_check, self._last_check = self._first_check or now, now
        self.passes_at = math.inf
        self._heartbeats = {key: self._heartbeats.get(key, now) for key in heartbeats}
        self._ahead = [
            t for t in before if now - self._heartbeats[t.name, t.heartbeat] < self._stopped_s
        ]
        return self._ahead

    def _tickets_before(self) -> list[Ticket]:
        """Return the tickets ahead of this process, and forget expired tickets."""
        if self._lock is None or self._before is None:
            return self._directory.tickets(finds_pids=False)
        tickets = self._directory.tickets(excluded=[self._lock.name])
        by_name = {ticket.name: ticket for ticket in tickets}
        # If a process has to create its ticket again, the new file might have another name.
        by_process = {(ticket.holder.listed_pid, ticket.number): ticket for ticket in tickets}
        own_key = self._own_ticket(self._lock.name).key
        before: dict[str, RememberedTicket] = {}
        for name, earlier in self._before.items():
            ticket = by_name.get(name)
            if ticket is None or ticket.number != earlier.number:  # now used by another waiter
                ticket = by_process.get((earlier.pid, earlier.number)) if earlier.pid else None
            if ticket and own_key in ticket.keys_ahead:
                continue
            if updated := self._update_remembered(name, earlier, ticket):
                before[ticket.name if ticket else name] = updated
        self._before, self._record = before, _behind(self._record, before)
        self._lock.write(self._record)  # the user might have edited the file
        self.heartbeat()
        present = {name for name, earlier in before.items() if earlier.left is None}
        return [ticket for ticket in tickets if ticket.name in present]

    def _update_remembered(
        self, name: str, earlier: RememberedTicket, ticket: Ticket | None
    ) -> RememberedTicket | None:
        """Return the new state of a remembered ticket, or None if it has lost its position.

        A ticket loses its position when its process gets a device, or `back_s` seconds after its
        process left the queue. Except in a container, /proc/locks shows whether the process has
        locked a device.

        Args:
            name: The ticket's name.
            earlier: The ticket's state at the last check.
            ticket: The current ticket of the same process, or None if it left the queue.
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
        # A process that returned in time might be noticed slightly late.
        limit_s = self._back_s + (self._stopped_s if ticket else 0.0)
        if now - left >= limit_s:
            return None
        if ticket is None:
            return earlier._replace(left=left)
        return RememberedTicket(ticket.number, pid, devices(pid))

    @property
    def is_behind_several(self) -> bool:
        """Return whether any of the tickets that `ahead` returned needs several devices."""
        return any(ticket.needs > 1 for ticket in self._ahead)

    def first_ahead(
        self,
        uuid: str,
        *,
        is_open: bool,
        is_free: Callable[[Ticket], bool],
        is_possible: Callable[[Ticket], bool],
    ) -> Ticket | None:
        """Return the first ticket that prevents this process from taking a device.

        Only the tickets that `ahead` returned are checked. A user's waiters are skipped if none of
        them has taken the device although it has been free for `stopped_s` seconds, because they
        evidently can't use it, whatever their tickets say. Waiters that also need other devices are
        skipped after `KEEP_FREE_S` seconds.

        These times are counted per user, not per ticket, and for all users simultaneously. Each
        user gets `stopped_s / 2` seconds more than the user ahead.

        Args:
            uuid: The device's UUID.
            is_open: Whether this process could take the device now.
            is_free: A function that returns whether a ticket's waiter could take the device now,
                together with all other devices that the waiter needs.
            is_possible: A function that returns whether a ticket's waiter could ever get the
                device, together with all other devices that the waiter needs.

        Returns:
            The ticket, or None if no ticket prevents this process from taking the device.
        """
        wanting = [t for t in self._ahead if t.could_use(uuid) and is_possible(t)]
        if not is_open:
            return self._with_pid(wanting[0]) if wanting else None
        now, ranks = time.monotonic(), self._count_offers(uuid, wanting, is_free)
        for ticket in wanting:
            uid = ticket.holder.uid
            offer, patience_s = self._offers[uid, uuid], self._stopped_s * (1 + ranks[uid] / 2)
            if offer.offered_s >= patience_s or offer.kept_s >= KEEP_FREE_S:
                continue
            left_s = patience_s - offer.offered_s if offer.is_offered else math.inf
            first_seen = self._heartbeats[ticket.name, ticket.heartbeat]
            if first_seen == self._first_check:  # no new heartbeat yet
                left_s = min(left_s, first_seen + self._stopped_s - now)
            self.passes_at = min(self.passes_at, now + left_s)
            return self._with_pid(ticket)
        return None

    def _with_pid(self, ticket: Ticket) -> Ticket:
        """Return a ticket with its waiter's PID, which `ahead` doesn't find for a new request."""
        return ticket if self._lock else self._directory.holders.ticket(ticket.name)

    def _count_offers(
        self, uuid: str, wanting: Sequence[Ticket], is_free: Callable[[Ticket], bool]
    ) -> dict[int | None, int]:
        """Count how long each user has kept a device free, and return each user's rank.

        This includes any time when a user's tickets briefly ask for other devices.
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
        for (uid, device), offer in self._offers.items():
            if device == uuid:
                is_offered = uid in offered if uid in ranks else offer.is_offered
                offer.count(now, is_present=uid in present, is_offered=is_offered)
        return ranks


class Offer:
    """The time for which one user's waiters have kept a free device from this process.

    Args:
        now: The current time, by time.monotonic().

    Attributes:
        offered_s: The number of seconds for which one of the waiters could have taken the device.
        kept_s: The total number of seconds, including any time when none of the waiters could have
            taken the device.
        is_offered: Whether one of the waiters could have taken the device at the last check.
        counted_at: The time of the last check, by time.monotonic().
    """

    def __init__(self, now: float) -> None:
        self.offered_s = self.kept_s = 0.0
        self.is_offered = False
        self.counted_at = now

    def count(self, now: float, *, is_present: bool, is_offered: bool) -> None:
        """Add the time since the last check if the user has a ticket in the queue."""
        if is_present:
            passed_s = now - self.counted_at
            self.kept_s += passed_s
            self.offered_s += passed_s if self.is_offered else 0.0
        self.counted_at, self.is_offered = now, is_offered


class EndOfQueue(QueueEntry):
    """The position of a request that does not wait. It is behind all waiters and has no ticket."""

    def is_valid(self) -> bool:
        """Return True, because this position has no ticket that another process could delete."""
        return True


def wait_for_news(
    until: float,
    is_news: Callable[[], bool],
    between: Callable[[], object] = executor.checkpoint,
) -> bool:
    """Wait until a given time, or until a lock might have changed.

    Args:
        until: The time to stop waiting, by time.monotonic().
        is_news: A cheap check of /proc/locks. It is called repeatedly, but not in a container,
            because /proc/locks does not show all locks there.
        between: A function that is called repeatedly during the wait. It can end the wait by
            raising an exception.

    Returns:
        Whether `is_news` returned True.
    """
    shows_all_locks = procfs.sees_all_locks()
    while True:
        between()  # call this at least once
        left_s = until - time.monotonic()
        if left_s <= 0:
            return False
        time.sleep(min(left_s, executor.POLL_S))
        if shows_all_locks and is_news():
            return True


def _wanting(record: Record, wants: Collection[str]) -> Record:
    request = record.asks or WaitRequest()
    return record._replace(asks=request._replace(wants=frozenset(wants)))


def _all_behind(tickets: Sequence[Ticket], old: Ticket) -> set[str]:
    """Return the keys of an old ticket and of all tickets behind it, directly or indirectly.

    Each ticket lists the tickets that it is behind, and a waiter gains nothing by listing too many.
    Tickets from older versions have no such list, so they are ordered by number. This user's
    tickets can't put another user's ticket behind the old ticket.
    """
    behind, new, new_by_others, uid = {old.key}, {old.key}, {old.key}, os.geteuid()
    rest = [
        (each, set(each.keys_ahead))
        for each in tickets
        if each.tickets_ahead is not None or each.number > old.number
    ]
    while more := [
        each
        for each, ahead in rest
        if each.tickets_ahead is None
        or not ahead.isdisjoint(new if each.holder.uid == uid else new_by_others)
    ]:
        new = {each.key for each in more}
        new_by_others = {each.key for each in more if each.holder.uid != uid}
        behind |= new
        rest = [(each, ahead) for each, ahead in rest if each.key not in behind]
    return behind


def _behind(record: Record, before: Mapping[str, RememberedTicket]) -> Record:
    request = record.asks or WaitRequest()
    listed = (TicketAhead(name, each.number, each.left) for name, each in before.items())
    return record._replace(asks=request._replace(tickets_ahead="\n".join(map(str, listed))))


def identified(ticket: Ticket) -> Ticket:
    """Return a ticket with its waiter's user, and with the time when it joined the queue.

    This is a separate step, because looking up a user can take a long time. The waiter's user can
    write any time into the record, but no process can have waited since before it started, or
    since before this machine was booted.
    """
    holder, now = procfs.with_owner(ticket.holder), procfs.now()
    began = procfs.start_time_boot(holder.listed_pid) if holder.listed_pid else None
    earliest = math.floor(now.wall - now.boot + (began or 0.0))
    if holder.since is not None and holder.since < earliest:
        record = holder.record._replace(since=earliest)
        holder = holder._replace(record=record, clock_set_s=0.0)
    return ticket._replace(holder=holder)


def _began(number: float) -> Instant:
    """Return the time at which this process's wait began, given its ticket's number.

    If this program returns to a position that an earlier process left, the wait of this process
    began when the process started.
    """
    now = procfs.now()
    return now.later(max(number / 1e9, procfs.start_time_boot(os.getpid()) or 0.0) - now.boot)


def other_tickets(tickets: Iterable[Ticket], devices: Sequence[Device]) -> Iterator[Ticket]:
    """Yield the tickets of other processes that could use any of the devices."""
    for ticket in tickets:
        could_use = any(ticket.could_use(device.uuid) for device in devices)
        if could_use and ticket.holder.listed_pid != os.getpid():
            yield ticket
