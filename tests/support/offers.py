"""A queue of waiters in the test process, on a clock that only the test advances."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any
from unittest import mock

from reserve_gpu.allocation.attempt import AttemptContext, Denied, Granted, attempt
from reserve_gpu.allocation.request import parse
from reserve_gpu.gpus import cuda_environment
from reserve_gpu.gpus.nvml import Nvml
from reserve_gpu.locks.directory import LockDirectory
from reserve_gpu.locks.queue import QueueEntry
from reserve_gpu.model.holders import Record

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import ExitStack
    from pathlib import Path

    from reserve_gpu.model.requests import Request
    from tests.support.here import Here

UUIDS = [f"GPU-0000000{number}-0000-4000-8000-000000000000" for number in range(2)]
STOPPED_S = 8.0  # on the clock of the test
ATTEMPTS = 20  # one in each second of that clock, so many more than an offer lasts
TICK_S = 0.02  # real time after which a file gets another ctime, at any kernel's HZ


class Waiters:
    """The waiters in one lock directory, which all run, and the clock that they use.

    Args:
        path: The lock directory.
        stack: What ends the waiters' entries, and gives time.monotonic() back.
    """

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self._stack = stack
        self.now_s = 1000.0
        stack.enter_context(mock.patch.object(time, "monotonic", self.read_clock))
        self.directory = stack.enter_context(LockDirectory(str(path)))
        self.entries: list[QueueEntry] = []

    def read_clock(self) -> float:
        """Return the time in seconds, in place of time.monotonic()."""
        return self.now_s

    def pass_time(self, seconds: float) -> None:
        """Advance the clock."""
        self.now_s += seconds

    def join(self, *wants: str, **about: Any) -> QueueEntry:
        """Add a waiter at the end of the queue, whose record contains these fields."""
        entry = QueueEntry(self.directory, wants or UUIDS, Record.from_dict(about), STOPPED_S)
        self.entries.append(self._stack.enter_context(entry))
        with self.directory.mutex():
            entry.join()
        return entry

    def check(self, entry: QueueEntry, uuid: str = UUIDS[0], *, is_open: bool = True) -> int | None:
        """Check one device; return the index of the waiter that comes first, None if none does."""
        (index,) = self.check_all(entry, [uuid], is_open=is_open)
        return index

    def check_all(
        self,
        entry: QueueEntry,
        uuids: Sequence[str],
        *,
        is_open: bool = True,
        is_enough: bool = True,
    ) -> list[int | None]:
        """Check several devices. is_enough: Whether a waiter ahead could use the devices now."""
        self.heartbeat()
        with self.directory.mutex():
            ahead = [ticket.name for ticket in entry.ahead()]
            assert len(ahead) == self.entries.index(entry)  # none is skipped as stopped
            first = [
                entry.first_ahead(
                    uuid, is_open=is_open, is_free=lambda _: is_enough, is_possible=lambda _: True
                )
                for uuid in uuids
            ]
        return [ahead.index(ticket.name) if ticket else None for ticket in first]

    def heartbeat(self) -> None:
        """Let all waiters show that they run."""
        time.sleep(TICK_S)
        for entry in self.entries:
            entry.heartbeat()


class EnoughError(Exception):
    """Raised by a progress callback to end a wait."""


def request_context(request: Request | str, gpus: Nvml, directory: LockDirectory) -> AttemptContext:
    """Return the context of attempts at a request, or at the device that the text names."""
    request = parse(request) if isinstance(request, str) else request
    return AttemptContext(request, gpus, directory, dict.fromkeys(cuda_environment.VARIABLES), {})


def attempts(
    here: Here, waiters: Waiters, request: Request | str = "0"
) -> Iterator[Granted | Denied]:
    """Attempt a request once in each second, behind the other waiters, until it is granted."""
    entry = waiters.join()
    with Nvml() as gpus:
        context = request_context(request, gpus, waiters.directory)
        for _ in range(ATTEMPTS):
            waiters.pass_time(1.0)
            waiters.heartbeat()
            outcome = attempt(context, entry=entry)
            yield outcome
            if isinstance(outcome, Granted):
                for locked in outcome.locked:
                    locked.lock.release()
                return
