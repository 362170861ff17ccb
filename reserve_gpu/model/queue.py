"""The queue: the tickets of its waiters, and the order in which they are served."""

from collections.abc import Collection, Iterable
from heapq import heappop, heappush
from typing import NamedTuple

from reserve_gpu.model.holders import Holder
from reserve_gpu.model.requests import TicketAhead


class Ticket(NamedTuple):
    """A place in the queue."""

    number: int  # the clock since boot when its holder joined, in ns, as its file says
    name: str  # of its file
    wants: frozenset[str] | None  # UUIDs of the devices that its holder could use, None for any
    holder: Holder
    asks: str | None = None  # the request in words, as its holder wrote it
    heartbeat: int = 0  # its holder's last sign of life; only whether it changes means anything
    needs: int = 1  # devices at once
    memory_limit_mib: float | None = None  # of each; None for all of it
    tickets_ahead: frozenset[TicketAhead] | None = None  # tickets ahead of it, as its owner wrote

    @property
    def key(self) -> tuple[str, int]:
        """Return the identity of the ticket. A later ticket in the same file has another number."""
        return self.name, self.number

    def is_behind(self, keys: Collection[tuple[str, int]]) -> bool:
        """Return whether it lists one of these tickets as ahead of it."""
        return any(ahead.key in keys for ahead in self.tickets_ahead or ())

    def could_use(self, uuid: str) -> bool:
        """Tell whether its holder waits for that device too."""
        return self.wants is None or uuid in self.wants


def in_order(tickets: Iterable[Ticket]) -> list[Ticket]:
    """Return the tickets in the order of the queue.

    A ticket follows all tickets that it lists as ahead of it. An owner gains nothing by listing
    more. If neither of two tickets lists the other, or each lists the other, the numbers decide.
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
        if waiting.pop(first.key, None) is None:  # the numbers have decided
            continue
        ordered.append(first)
        for key in followers.get(first.key, ()):
            ahead[key].discard(first.key)
            if key in waiting and not ahead[key]:
                heappush(free, waiting[key])
    return ordered


class RememberedTicket(NamedTuple):
    """A ticket ahead of a waiter, as the waiter remembers it.

    number: The number of the ticket.
    pid: The process that waits, or None if it is not visible.
    devices: The inodes of the device files that this process has locked while it waits.
    left: As in `TicketAhead`.
    """

    number: int
    pid: int | None = None
    devices: frozenset[int] = frozenset()
    left: float | None = None
