"""The waiters' tickets and the order of the queue."""

from collections.abc import Collection, Iterable
from heapq import heappop, heappush
from typing import NamedTuple

from reserve_gpu.model.holders import Holder
from reserve_gpu.model.requests import TicketAhead


class Ticket(NamedTuple):
    """A ticket, which represents a waiter's position in the queue.

    Attributes:
        number: The time at which the waiter joined the queue, in nanoseconds since boot. It is read
            from the ticket file.
        name: The ticket file's name.
        wants: The UUIDs of the devices that the waiter could use, or None for any device.
        holder: The waiting process.
        asks: The request in words, as the waiter wrote it.
        heartbeat: A value that changes regularly while the waiter is running.
        needs: The number of devices that the waiter needs at the same time.
        memory_limit_mib: The memory in MiB that the waiter needs on each device, or None if it
            needs whole devices.
        tickets_ahead: The tickets that the waiter lists as being ahead of this one.
    """

    number: int
    name: str
    wants: frozenset[str] | None
    holder: Holder
    asks: str | None = None
    heartbeat: int = 0
    needs: int = 1
    memory_limit_mib: float | None = None
    tickets_ahead: frozenset[TicketAhead] | None = None

    @property
    def key(self) -> tuple[str, int]:
        """Return the file name and the number, which together identify the ticket.

        If the file name is used again, the new ticket has a different number.
        """
        return self.name, self.number

    def is_behind(self, keys: Collection[tuple[str, int]]) -> bool:
        """Return whether the waiter lists any of these tickets as being ahead of its own."""
        return any(ahead.key in keys for ahead in self.tickets_ahead or ())

    def could_use(self, uuid: str) -> bool:
        """Return whether the waiter could use the device with this UUID."""
        return self.wants is None or uuid in self.wants


def in_order(tickets: Iterable[Ticket]) -> list[Ticket]:
    """Return the tickets in queue order.

    A ticket comes after all tickets that it lists as being ahead of it, so a waiter gains nothing
    by listing more tickets. If neither of two tickets lists the other, or if both do, the ticket
    with the lower number comes first.
    """
    waiting = {ticket.key: ticket for ticket in sorted(tickets)}
    ahead = {
        key: waiting.keys() & {each.key for each in ticket.tickets_ahead or ()} - {key}
        for key, ticket in waiting.items()
    }
    followers: dict[tuple[str, int], list[tuple[str, int]]] = {}
    for key, before in ahead.items():
        for each in before:
            followers.setdefault(each, []).append(key)
    free = [ticket for key, ticket in waiting.items() if not ahead[key]]
    ordered: list[Ticket] = []
    while waiting:
        first = heappop(free) if free else next(iter(waiting.values()))
        if waiting.pop(first.key, None) is None:  # already placed by number to break a cycle
            continue
        ordered.append(first)
        for key in followers.get(first.key, ()):
            ahead[key].discard(first.key)
            if key in waiting and not ahead[key]:
                heappush(free, waiting[key])
    return ordered


class RememberedTicket(NamedTuple):
    """The details that a waiter remembers about a ticket ahead of its own.

    Attributes:
        number: The ticket's number.
        pid: The pid of the process that owns the ticket, or None if unknown.
        devices: The inode numbers of the device lock files that the process had already locked when
            last checked.
        left: The time at which the waiter left the queue, in seconds since boot, or None if it was
            still in the queue when last checked.
    """

    number: int
    pid: int | None = None
    devices: frozenset[int] = frozenset()
    left: float | None = None
