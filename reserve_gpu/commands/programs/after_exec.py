"""Tells what becomes of a reservation once `reserve-gpu run` has become the command.

The command knows nothing of this package. So a small process of its own writes the events that
are left: it holds no lock and no terminal, is no child of the command, and is gone when nobody has
the locks any more.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Any

from reserve_gpu import alarm, proc
from reserve_gpu.core import handover
from reserve_gpu.errors import VERSION

if TYPE_CHECKING:
    from reserve_gpu.core.held import Held
    from reserve_gpu.model import Lease

BEFORE_S = (600.0, 60.0)  # of an end, at which it is told
LOOK_S, LEFT_S = 1.0, 0.1  # between two looks at the locks, and once the command has ended


def start(descriptor: int, held: Held) -> None:
    """Leave a process that follows this one. descriptor: for its events. Raises OSError."""
    out = os.dup(descriptor)  # its own stderr is another one
    try:
        handover.follow(__name__, held, {"out": out}, (out,))
    finally:
        os.close(out)


def main(text: str) -> None:
    """Tell each event until nobody has the locks any more. text: what `start` says of it."""
    about: dict[str, Any] = json.loads(text)
    held = handover.held_of(about)
    _, left_s = _end(held.lease)
    leads = [lead_s for lead_s in BEFORE_S if left_s > lead_s] if left_s != inf else []
    while handover.are_locked(about):
        until, left_s = _end(held.lease)
        if leads and left_s <= leads[0]:
            del leads[0]
            tell(about["out"], "ending", at=until, left_s=round(left_s))
        if alarm.ends_within(about["process"], LOOK_S):  # then it returns at once from now on
            time.sleep(LEFT_S)
    tell(about["out"], "released", devices=[each.label for each in held.devices])


def _end(lease: Lease) -> tuple[float, float]:
    """Return the end of a lease, in seconds since the epoch, and the seconds until then."""
    now = proc.now()
    until = lease.at(now).until
    return (inf, inf) if until is None else (until, until - now.wall)


def tell(descriptor: int, event: str, **values: Any) -> None:
    """Write an event."""
    about = {"version": VERSION, "event": event, "time": time.time()}
    with suppress(OSError):
        os.write(descriptor, f"{json.dumps({**about, **values})}\n".encode())
