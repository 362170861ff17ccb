"""Writes the events of a reservation after `reserve-gpu run` has become the command.

The command knows nothing of this package, so a small process of its own writes the other events.
It holds no lock and no terminal, it is not a child of the command, and it ends when the locks are
released.
"""

from __future__ import annotations

import json
import os
import time
from math import inf
from typing import TYPE_CHECKING, Any

from reserve_gpu.model.errors import VERSION
from reserve_gpu.reservation import exec_handover
from reserve_gpu.system import procfs, watchdog
from reserve_gpu.system.nonblocking import Writer

if TYPE_CHECKING:
    from reserve_gpu.model.requests import Lease
    from reserve_gpu.reservation.holding import Holding

BEFORE_S = (600.0, 60.0)  # before an end, when an event warns of it
LOOK_S, LEFT_S = 1.0, 0.1  # between two looks at the locks, and once the command has ended
READER_LIMIT_S = 1.0  # for the reader of an important event to make room for it


class Sender:
    """Writes events to a descriptor, and counts the events dropped for lack of room.

    Attributes:
        descriptor: The descriptor, which has to stay open.
        lost: The number of events dropped since the last one that was written.
    """

    def __init__(self, descriptor: int, lost: int = 0, rest: str = "") -> None:
        """Open the sender. Raises OSError for a descriptor that can't be written."""
        self.descriptor, self.lost = descriptor, lost
        self._writer = Writer(descriptor, rest.encode())

    @property
    def rest(self) -> str:
        """Return the end of an event that was written only in part."""
        return self._writer.rest.decode()

    def tell(self, event: str, patience_s: float = 0.0, /, **values: Any) -> None:
        """Write an event. patience_s: seconds to wait for the reader."""
        about = {"version": VERSION, "event": event, "time": time.time()}
        lost = {"lost": self.lost} if self.lost else {}
        line = f"{json.dumps({**about, **lost, **values})}\n".encode()
        self.lost = 0 if self._writer.write(line, patience_s) else self.lost + 1


def start(sender: Sender, held: Holding) -> None:
    """Leave a process that follows this one, and goes on with the events. Raises OSError."""
    out = os.dup(sender.descriptor)  # its own stderr is another one
    told = {"out": out, "lost": sender.lost, "rest": sender.rest}
    try:
        exec_handover.follow(__name__, held, told, (out,))
    finally:
        os.close(out)


def main(text: str) -> None:
    """Write each event until the locks are released. text: The JSON that `start` passes."""
    about: dict[str, Any] = json.loads(text)
    sender = Sender(about["out"], about["lost"], about["rest"])
    held = exec_handover.held_of(about)
    _, left_s = _end(held.lease)
    leads = [lead_s for lead_s in BEFORE_S if left_s > lead_s] if left_s != inf else []
    while exec_handover.are_locked(about):
        until, left_s = _end(held.lease)
        if leads and left_s <= leads[0]:
            del leads[0]
            sender.tell("ending", at=until, left_s=round(left_s))
        if watchdog.ends_within(about["process"], LOOK_S):  # then it returns at once from now on
            time.sleep(LEFT_S)
    sender.tell("released", READER_LIMIT_S, devices=[each.label for each in held.devices])


def _end(lease: Lease) -> tuple[float, float]:
    """Return the end of a lease, in seconds since the epoch, and the seconds until then."""
    now = procfs.now()
    until = lease.at(now).until
    return (inf, inf) if until is None else (until, until - now.wall)
