"""The line of those who wait for a device: first come, first served.

A waiter holds a ticket: a lock file of its own in the lock directory, with a number one above all
the others' and the devices that it could use. A ticket is alive while its file is locked, so one
whose holder dies is gone with it. Files are kept and used again by later waiters.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

from reserve_gpu.device import Holder, Ticket

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from reserve_gpu.locks import Lock, LockDirectory

MOST_WANTED = 1024  # devices that a ticket may name; one that names more was not written by us


def tickets(directory: LockDirectory) -> list[Ticket]:
    """The living tickets in the order of their numbers; to be asked under the mutex alone."""
    found = []
    for place in count():
        name = _file_name(place)
        if not directory.exists(name):
            break
        if holder := directory.holder(name):
            found.append(_ticket(directory.record(name), holder))
    return sorted(found, key=lambda ticket: ticket.number)


def join(
    directory: LockDirectory, wants: Collection[str], about: Mapping[str, Any]
) -> tuple[Lock, int]:
    """Take the ticket behind all others; returns the lock that keeps it alive, and its number.

    wants: UUIDs of the devices that the waiter could use. about: what others may read of it.
    """
    with directory.mutex():
        number = 1 + max((ticket.number for ticket in tickets(directory)), default=0)
        for place in count():
            lock = directory.acquire(_file_name(place))
            if not isinstance(lock, Holder):
                lock.write({**about, "number": number, "wants": sorted(wants)})
                return lock, number
    raise AssertionError  # unreachable: there is always one more place


def ahead(directory: LockDirectory, number: float) -> list[Ticket]:
    """The living tickets before number, which is infinite for those who don't wait."""
    return [ticket for ticket in tickets(directory) if ticket.number < number]


def _ticket(record: Mapping[str, Any], holder: Holder) -> Ticket:
    """What a ticket says, as far as it can be what we wrote; rubbish waits for nothing."""
    number, wants = record.get("number"), record.get("wants")
    return Ticket(
        number=number if type(number) is int and 0 < number < 1 << 53 else 0,
        wants=frozenset(uuid for uuid in wants[:MOST_WANTED] if isinstance(uuid, str))
        if isinstance(wants, list)
        else frozenset(),
        holder=holder,
    )


def _file_name(place: int) -> str:
    return f"line-{place}.ticket"
