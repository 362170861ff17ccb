"""The line of those who wait for a device: first come, first served.

A waiter holds a ticket: a lock file of its own in the lock directory, with a number one above all
the others' and the devices that it could use. A ticket is alive while its file is locked, so one
whose holder dies is gone with it. Files are kept and used again by later waiters. What is written
in them anybody could have written: rubbish waits for nothing.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from reserve_gpu import myself
from reserve_gpu.device import Holder, Value
from reserve_gpu.errors import LockError
from reserve_gpu.files import TICKET

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from reserve_gpu.locks import Lock, LockDirectory

MOST = 1 << 53  # the highest number; who comes after it goes by the place
MOST_WANTED = 1024  # devices that a ticket may name; one that names more was not written by us
PLACES = 10_000


class Ticket(Value):
    """A place in the line, by number.

    wants: UUIDs of the devices that its holder could use. asks: the request in its own words.
    """

    number: int
    place: int
    wants: frozenset[str]
    holder: Holder
    asks: str | None = None


def tickets(
    directory: LockDirectory, look: Callable[[str], Holder | None] | None = None
) -> list[Ticket]:
    """The living tickets in the order of their numbers.

    look: says who holds a ticket's file; the default one is to be asked under the mutex alone.
    """
    look = look or directory.holder
    found = []
    for name in directory.names():
        if match := re.fullmatch(rf"line-(0|[1-9][0-9]{{0,3}})\{TICKET}", name):
            with suppress(LockError):  # what is no lock file is no ticket
                if holder := look(name):
                    found.append(_ticket(directory.holders.record(name), int(match[1]), holder))
    return sorted(found, key=lambda ticket: (ticket.number, ticket.place))


def join(
    directory: LockDirectory, wants: Collection[str], about: Mapping[str, Any], deadline: float
) -> tuple[Lock, Ticket]:
    """Take the ticket behind all others; returns the lock that keeps it alive, and the ticket.

    wants: UUIDs of the devices that the waiter could use. about: what others may read of it.
    deadline: when to give up on the mutex, by time.monotonic(), in seconds.
    """
    with directory.mutex(until=deadline):
        number = min(MOST, 1 + max((t.number for t in tickets(directory)), default=0))
        for place in range(PLACES):
            with suppress(LockError):  # what stands there is no lock file: the next one
                lock = directory.acquire(file_name(place))
                if not isinstance(lock, Holder):
                    lock.write({**about, "number": number, "wants": sorted(wants)})
                    return lock, Ticket(number, place, frozenset(wants), Holder())
    raise LockError(f"There is no place in the line in {directory.path}.")


def file_name(place: int) -> str:
    """The lock file of the ticket at that place."""
    return f"line-{place}{TICKET}"


def ahead(directory: LockDirectory, own: Ticket | None) -> list[Ticket]:
    """The living tickets before one's own; all of them for who does not wait."""
    found = tickets(directory)
    if own is None:
        return found
    return [
        t for t in found if (t.number, t.place) < (own.number, own.place) and t.place != own.place
    ]


def _ticket(record: Mapping[str, Any], place: int, holder: Holder) -> Ticket:
    number, wants = record.get("number"), record.get("wants")
    if type(number) is not int or not 0 < number <= MOST or not isinstance(wants, list):
        return Ticket(0, place, frozenset(), holder)
    wanted = frozenset(uuid for uuid in wants[:MOST_WANTED] if isinstance(uuid, str))
    asks = record.get("asks")
    asks = asks[: myself.TEXT_LIMIT] if isinstance(asks, str) else None
    return Ticket(number, place, wanted, holder, asks)
