"""The waiters' tickets and the order of the queue."""

from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from typing import NamedTuple

from reserve_gpu.model.holders import Holder
from reserve_gpu.model.untrusted import split_lines


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
        tickets_ahead: The tickets that the waiter lists as being ahead of this one, one per line.
            See `WaitRequest`.
    """

    number: int
    name: str
    wants: frozenset[str] | None
    holder: Holder
    asks: str | None = None
    heartbeat: int = 0
    needs: int = 1
    memory_limit_mib: float | None = None
    tickets_ahead: str | None = None

    @property
    def key(self) -> str:
        """Return the file name and the number, which together identify the ticket.

        Other waiters list the ticket in this form (`TicketAhead`). If the file name is used again,
        the new ticket has a different number.
        """
        return f"{self.name} {self.number}"

    @property
    def lines_ahead(self) -> list[str]:
        """Return the lines of `tickets_ahead`."""
        return split_lines(self.tickets_ahead)

    @property
    def keys_ahead(self) -> list[str]:
        """Return the keys of the listed tickets, without the times when their waiters left."""
        lines = self.lines_ahead
        if (self.tickets_ahead or "").count(" ") <= len(lines):  # usually, no line contains a time
            return lines
        return [line if line.count(" ") < 2 else line.rpartition(" ")[0] for line in lines]

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
    # Each waiting ticket is either in this heap or among the followers of a ticket that it lists.
    # Usually, a ticket has a higher number than all that it lists, so it is rarely put back.
    heap = list(waiting.values())
    followers: dict[str, list[Ticket]] = {}
    ahead: dict[str, Iterator[str]] = {}  # for each ticket, the listed ones that are still waiting
    ordered: list[Ticket] = []
    while waiting:
        first = heappop(heap) if heap else None
        if first is None:
            first = next(iter(waiting.values()))  # every ticket lists another: break the cycle
        elif first.key not in waiting:  # placed to break a cycle
            continue
        else:
            if first.key not in ahead:
                listed = (waiting.keys() & first.keys_ahead) - {first.key}
                ahead[first.key] = filter(waiting.__contains__, listed)
            if blocker := next(ahead[first.key], None):
                followers.setdefault(blocker, []).append(first)
                continue
        ordered.append(waiting.pop(first.key))
        for follower in followers.pop(first.key, ()):
            heappush(heap, follower)
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
