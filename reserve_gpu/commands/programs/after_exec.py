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
from typing import TYPE_CHECKING, Any

from reserve_gpu import alarm
from reserve_gpu.core import handover
from reserve_gpu.errors import VERSION

if TYPE_CHECKING:
    from reserve_gpu.core.held import Held

BEFORE_S = (600.0, 60.0)  # of an end, at which it is told
LOOK_S, LEFT_S = 1.0, 0.1  # between two looks at the locks, and once the command has ended


def start(descriptor: int, held: Held) -> None:
    """Leave a process that follows this one. descriptor: for its events. Raises OSError."""
    out = os.dup(descriptor)  # its own stderr is another one
    try:
        about = {"out": out, "began": time.time(), "until": held.lease.until}
        handover.follow(__name__, held, about, (out,))
    finally:
        os.close(out)


def main(text: str) -> None:
    """Tell each event until nobody has the locks any more. text: what `start` says of it."""
    about: dict[str, Any] = json.loads(text)
    until = about["until"]
    moments = [until - each for each in BEFORE_S if until - each > about["began"]] if until else []
    while handover.are_locked(about):
        if moments and time.time() >= moments[0]:
            del moments[0]
            tell(about["out"], "ending", at=until, left_s=round(until - time.time()))
        if alarm.ends_within(about["process"], LOOK_S):  # then it returns at once from now on
            time.sleep(LEFT_S)
    tell(about["out"], "released", devices=[each.label for each in handover.held_of(about).devices])


def tell(descriptor: int, event: str, **values: Any) -> None:
    """Write an event."""
    about = {"version": VERSION, "event": event, "time": time.time()}
    with suppress(OSError):
        os.write(descriptor, f"{json.dumps({**about, **values})}\n".encode())
