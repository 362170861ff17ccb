"""A terminal that records its text, and the tickets in the queue, for tests of waits."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from reserve_gpu.locks.directory import LockDirectory

if TYPE_CHECKING:
    from reserve_gpu.model.queue import Ticket
    from tests.support.here import Here


def queued(here: Here) -> list[Ticket]:
    """Return the tickets in the queue."""
    with LockDirectory(str(here.locks)) as directory, directory.mutex():
        return directory.tickets()


class Terminal(io.StringIO):
    """A text file that says that it is a terminal."""

    def isatty(self) -> bool:
        return True
