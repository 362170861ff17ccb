"""Helpers of tests: parts_queue."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from reserve_gpu.locks.directory import LockDirectory
from reserve_gpu.locks.queue import QueueEntry
from reserve_gpu.model.holders import Record

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.here import Here


@contextmanager
def waiting(
    here: Here,
    memory_limit_mib: float | None,
    *numbers: str,
    needs: int = 1,
    stopped_s: float = 5.0,
) -> Iterator[QueueEntry]:
    """Let somebody wait for a part of one of the GPUs, or None for all of one."""
    wants = [here.uuid(number) for number in numbers or ("0",)]
    about = {"user": "carol", "part_mib": memory_limit_mib, "needs": needs}
    with (
        LockDirectory(str(here.locks)) as directory,
        QueueEntry(directory, wants, Record.from_dict(about), stopped_s) as entry,
    ):
        with directory.mutex():
            entry.join()
        yield entry
