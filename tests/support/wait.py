"""Helpers of tests: wait."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from reserve_gpu.locks.directory import LockDirectory

if TYPE_CHECKING:
    from reserve_gpu.model.queue import Ticket
    from tests.support.here import Here


def queued(here: Here) -> list[Ticket]:
    with LockDirectory(str(here.locks)) as directory, directory.mutex():
        return directory.tickets()


class Terminal(io.StringIO):
    """A terminal, as far as Python asks."""

    def isatty(self) -> bool:
        return True
