"""Helpers of tests: offers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

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

    from tests.support.here import Here

UUIDS = [f"GPU-0000000{number}-0000-4000-8000-000000000000" for number in range(2)]
STOPPED_S = 0.1
TICK_S = 0.02  # in which the kernel's clock for files moves on, whatever its HZ
LOOKS = 300  # far more than an offer lasts, at TICK_S each


class Waiters:
    """Those who wait in one lock directory, all of them well."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self._stack = stack
        self.directory = stack.enter_context(LockDirectory(str(path)))
        self.places: list[QueueEntry] = []

    def join(self, *wants: str, **about: Any) -> QueueEntry:
        """Let one more join the queue."""
        entry = QueueEntry(self.directory, wants or UUIDS, Record.from_dict(about), STOPPED_S)
        self.places.append(self._stack.enter_context(entry))
        with self.directory.mutex():
            entry.join()
        return entry

    def look(self, entry: QueueEntry, uuid: str = UUIDS[0], *, is_free: bool = True) -> int | None:
        """Look once at a device: the number of the one who comes first, None for nobody."""
        (number,) = self.look_at_all(entry, [uuid], is_free=is_free)
        return number

    def look_at_all(
        self,
        entry: QueueEntry,
        uuids: Sequence[str],
        *,
        is_free: bool = True,
        is_enough: bool = True,
    ) -> list[int | None]:
        """Look once at several devices. is_enough: Whether the device is enough for a waiter."""
        self.heartbeat()
        with self.directory.mutex():
            ahead = [ticket.name for ticket in entry.ahead()]
            assert len(ahead) == self.places.index(entry)  # nobody is passed over as stopped
            first = [
                entry.first_ahead(
                    uuid, is_open=is_free, is_free=lambda _: is_enough, is_possible=lambda _: True
                )
                for uuid in uuids
            ]
        return [ahead.index(ticket.name) if ticket else None for ticket in first]

    def heartbeat(self) -> None:
        """Let all give a sign of life."""
        time.sleep(TICK_S)
        for entry in self.places:
            entry.heartbeat()


class EnoughError(Exception):
    """Enough was waited."""


def asking_for_gpu0(gpus: Nvml, directory: LockDirectory) -> AttemptContext:
    return AttemptContext(
        parse("0"), gpus, directory, dict.fromkeys(cuda_environment.VARIABLES), {}
    )


def attempts(here: Here, waiters: Waiters) -> Iterator[Granted | Denied]:
    """Look for GPU 0 again and again, as one who waits behind others that are well."""
    entry = waiters.join()
    with Nvml() as gpus:
        context = asking_for_gpu0(gpus, waiters.directory)
        for _ in range(LOOKS):
            waiters.heartbeat()
            outcome = attempt(context, entry=entry)
            yield outcome
            if isinstance(outcome, Granted):
                return
