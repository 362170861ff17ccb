"""A lock directory with several waiters of the test process, and a counter of function calls."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from reserve_gpu.locks.directory import LockDirectory
from reserve_gpu.locks.lock import Lock
from reserve_gpu.locks.queue import STOPPED_S, QueueEntry
from reserve_gpu.model.holders import Record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from reserve_gpu.model.queue import Ticket

UUIDS = [f"GPU-0000000{number}-0000-4000-8000-000000000000" for number in range(2)]
LONG_S = 600


class Queue:
    """A lock directory with waiters, whose files are numbered in the order of their joining."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.path, self._stack = path, stack
        self._joined = 0
        self.directory = stack.enter_context(LockDirectory(str(path)))

    def join(
        self, *wants: str, stopped_s: float = STOPPED_S, back_s: float = LONG_S, **about: Any
    ) -> QueueEntry:
        """Add a waiter, by default with a unique command, and with these fields of its record."""
        self._joined += 1
        command = f"python {self._joined}.py"
        fields = {"user": "somebody", "asks": "a GPU", "command": command, **about}
        record = Record.from_dict(fields)
        place = QueueEntry(self.directory, wants or UUIDS, record, stopped_s, back_s)
        self._stack.enter_context(place)
        self.rejoin(place)
        return place

    def rejoin(self, place: QueueEntry) -> None:
        with self.directory.mutex():
            place.join()

    def ahead(self, place: QueueEntry) -> list[str]:
        """Return the names of the tickets ahead of a waiter, in order."""
        with self.directory.mutex():
            return [ticket.name for ticket in place.ahead()]

    def tickets(self) -> list[Ticket]:
        with self.directory.mutex():
            return self.directory.tickets()

    def file(self, number: int, uid: int | None = None) -> Path:
        """Return the path of a ticket, by default of this user."""
        return self.path / f"queue-{os.geteuid() if uid is None else uid}-{number}.lock"


@contextmanager
def locked_gpu(queue: Queue, *, share: bool = False) -> Iterator[Lock]:
    """Lock the first GPU in the queue's lock directory."""
    with queue.directory.mutex():
        lock = queue.directory.lock_device(UUIDS[0], share=share)
    assert isinstance(lock, Lock)
    try:
        yield lock
    finally:
        lock.release()


@contextmanager
def counting(*functions: Callable[..., Any]) -> Iterator[list[None]]:
    """Yield a list with an entry for each call of the functions, by default of any function."""
    calls: list[None] = []
    codes = [function.__code__ for function in functions]

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call" and (not codes or frame.f_code in codes):
            calls.append(None)

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)
