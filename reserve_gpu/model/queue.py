"""The tickets of the waiters in the queue, and the order in which they are served."""

from collections.abc import Collection, Iterable
from heapq import heappop, heappush
from typing import NamedTuple

from reserve_gpu.model.holders import Holder
from reserve_gpu.model.requests import TicketAhead


class Ticket(NamedTuple):
    """A waiter's place in the queue.

    Attributes:
        number: The time since boot at which the waiter joined, in nanoseconds, from its file.
        name: The name of the ticket's file.
        wants: The UUIDs of the devices that the waiter could use, or None for any device.
        holder: The waiting process.
        asks: The request as text, written by the waiter.
        heartbeat: A value that the waiter changes regularly while it is running.
        needs: The number of devices that the waiter needs at once.
        memory_limit_mib: The memory in MiB that it needs on each device, or None for all of it.
        tickets_ahead: The tickets ahead of this one, as the waiter lists them.
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
        """Return the identity of the ticket: the file name and the number.

        A later ticket in the same file has a different number.
        """
        return self.name, self.number

    def is_behind(self, keys: Collection[tuple[str, int]]) -> bool:
        """Return whether the waiter lists any of these tickets as ahead of its own."""
        return any(ahead.key in keys for ahead in self.tickets_ahead or ())

    def could_use(self, uuid: str) -> bool:
        """Return whether the waiter could use the device with this UUID."""
        return self.wants is None or uuid in self.wants


def in_order(tickets: Iterable[Ticket]) -> list[Ticket]:
    """Return the tickets in the order of the queue.

    A ticket comes after all tickets that it lists as ahead of it, so a waiter gains nothing from a
    longer list. If neither of two tickets lists the other, or each lists the other, the lower
    number comes first.
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
        if waiting.pop(first.key, None) is None:  # already placed by its number, to break a cycle
            continue
        ordered.append(first)
        for key in followers.get(first.key, ()):
            ahead[key].discard(first.key)
            if key in waiting and not ahead[key]:
                heappush(free, waiting[key])
    return ordered


class RememberedTicket(NamedTuple):
    """A ticket that a waiter has seen ahead of its own.

    Attributes:
        number: The number of the ticket.
        pid: The pid of the ticket's process, or None if it is not visible.
        devices: The inodes of the devices' lock files that the ticket's process already had locked.
        left: The time at which the ticket was removed, in seconds since boot, or None if it was
            still there when last checked.
    """

    number: int
    pid: int | None = None
    devices: frozenset[int] = frozenset()
    left: float | None = None
