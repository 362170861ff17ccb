"""Write a reservation's remaining events after `reserve-gpu run` has become the command.

The command can't write these events itself, so a small separate process does. That process holds no
lock, has no terminal, is not a child of the command, and exits when the locks are released.
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

WARNING_LEADS_S = (600.0, 60.0)  # times of the warnings, in seconds before the end time
POLL_S = 1.0  # seconds between lock checks while the command is running
ENDED_POLL_S = 0.1  # seconds between lock checks after the command has exited
READER_LIMIT_S = 1.0  # seconds to wait for a slow reader before dropping an important event


class Sender:
    """Writes events to a file descriptor, and counts the events dropped because of a slow reader.

    Attributes:
        descriptor: The file descriptor. The caller must keep it open.
        lost: The number of events dropped since the last successful write.
    """

    def __init__(self, descriptor: int, lost: int = 0, rest: str = "") -> None:
        """Create a sender.

        Args:
            descriptor: The file descriptor to write to.
            lost: The number of events dropped by an earlier sender.
            rest: The unwritten remainder of an event that an earlier sender wrote only partly.

        Raises:
            OSError: The file descriptor is not writable.
        """
        self.descriptor, self.lost = descriptor, lost
        self._writer = Writer(descriptor, rest.encode())

    @property
    def rest(self) -> str:
        """Return the unwritten remainder of an event that was written only partly."""
        return self._writer.rest.decode()

    def send(self, event: str, patience_s: float = 0.0, /, **values: Any) -> None:
        """Write an event, or drop it if the reader is too slow.

        Args:
            event: The event's name.
            patience_s: Seconds to wait for a slow reader.
            values: The event's other fields.
        """
        header = {"version": VERSION, "event": event, "time": time.time()}
        lost = {"lost": self.lost} if self.lost else {}
        line = f"{json.dumps({**header, **lost, **values})}\n".encode()
        self.lost = 0 if self._writer.write(line, patience_s) else self.lost + 1


def start(sender: Sender, held: Holding) -> None:
    """Start the process that writes the remaining events.

    Args:
        sender: The sender that has written the events so far.
        held: The reservation that the command will hold.

    Raises:
        OSError: The process can't be started.
    """
    # The new process has a different stderr, so duplicate the descriptor even if it is stderr.
    out = os.dup(sender.descriptor)
    state = {"out": out, "lost": sender.lost, "rest": sender.rest}
    try:
        exec_handover.start_follower(__name__, held, state, (out,))
    finally:
        os.close(out)


def main(text: str) -> None:
    """Write the remaining events until the locks are released.

    Args:
        text: The state that `start` passes, as JSON.
    """
    state: dict[str, Any] = json.loads(text)
    sender = Sender(state["out"], state["lost"], state["rest"])
    held = exec_handover.deserialize(state)
    _, left_s = _end(held.lease)
    leads = [lead_s for lead_s in WARNING_LEADS_S if left_s > lead_s] if left_s != inf else []
    while exec_handover.are_still_locked(state):
        until, left_s = _end(held.lease)
        if leads and left_s <= leads[0]:
            del leads[0]
            sender.send("ending", at=until, left_s=round(left_s))
        # While the command is running, ends_within() waits up to POLL_S. After the command has
        # exited, ends_within() returns immediately.
        if watchdog.ends_within(state["process"], POLL_S):
            time.sleep(ENDED_POLL_S)
    sender.send("released", READER_LIMIT_S, devices=[each.label for each in held.devices])


def _end(lease: Lease) -> tuple[float, float]:
    """Return a lease's end time, in seconds since the epoch, and the number of seconds left."""
    now = procfs.now()
    until = lease.at(now).until
    return (inf, inf) if until is None else (until, until - now.wall)
