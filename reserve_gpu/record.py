"""reserve-gpu record: note once how the whole machine stands, for a timer that runs each minute.

What is reserved its holders note by themselves. This notes who uses a GPU without a reservation,
and which GPUs are free. Each call adds the time since the last one to the lines of the hour.
"""

from __future__ import annotations

import os
import time
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

from reserve_gpu import host, looking
from reserve_gpu.errors import HistoryError
from reserve_gpu.history import places
from reserve_gpu.history.book import MACHINE, Page
from reserve_gpu.history.entries import Entry, Kind
from reserve_gpu.history.totals import UNKNOWN
from reserve_gpu.model import Device, State
from reserve_gpu.reservation.recorder import is_over
from reserve_gpu.reservation.request import rules

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterable, Iterator, Sequence

    from reserve_gpu.model import Row

# After a longer pause, as of a machine that was off, nobody knows how it stood meanwhile.
LONGEST_PAUSE_S = 300.0


class Sample(NamedTuple):
    """How one device stands: free, or used by a user without a reservation. share: of the GPU."""

    kind: Kind
    device: Device
    user: str | None = None
    name: str | None = None
    share: float = 1.0


def record(_arguments: Namespace) -> int:
    """Add one sample of this machine to the history of who calls this; returns the exit code.

    Raises HistoryError, DriverError.
    """
    try:
        folder = places.to_write(rules())
        if folder is None:
            raise HistoryError(_not_kept())
        with closing(Page.of_machine(folder)) as page:
            last = page.written_at()
            seen, now = samples(looking.status().rows), time.time()
            lines = merged(page.read(), seen, last, now)
            if lines and is_over(lines[0]):
                page.turn(lines)
                lines = []
            page.write(lines)
    except OSError as error:
        raise HistoryError(f"The history can't be written: {error.strerror}.") from error
    return 0


def samples(rows: Sequence[Row]) -> Iterator[Sample]:
    """Yield how each device stands that can be read, and is not simply reserved."""
    for row in rows:
        if not isinstance(row.device, Device):
            continue
        strangers = {
            process.user or UNKNOWN: process.command
            for process in row.processes
            if process.has_reserved is False and not process.beside
        }
        if row.state is State.FREE:
            yield Sample(Kind.FREE, row.device)
        elif row.is_unreserved_use:
            strangers = strangers or {UNKNOWN: None}
            for user, name in strangers.items():
                yield Sample(Kind.UNRESERVED, row.device, user, name, 1 / len(strangers))


def merged(before: Sequence[Entry], seen: Iterable[Sample], last: float, now: float) -> list[Entry]:
    """Return the lines with one more sample, which speaks for the time since the last one.

    before: those that stand there. last, now: in seconds since the epoch.
    """
    lines = {_key(entry): entry for entry in before}
    passed_s = now - last if 0 <= now - last <= LONGEST_PAUSE_S else 0.0
    start = min((entry.start for entry in before), default=last if passed_s else now)
    for sample in seen:
        device, user = sample.device, sample.user
        new = Entry(sample.kind, MACHINE, start, start, now, gpu=device.uuid, user=user)
        line = lines.get(_key(new), new._replace(label=device.label, share=sample.share))
        seconds = line.seconds + passed_s
        lines[_key(new)] = line._replace(seconds=seconds, name=sample.name)
    return [line._replace(end=now) for line in lines.values()]


def _key(entry: Entry) -> tuple[Kind, str | None, str | None]:
    return entry.kind, entry.gpu, entry.user


def _not_kept() -> str:
    """Return what to do where no history is kept."""
    if os.geteuid() == places.ROOT:
        command = places.MADE_BY.format(host.history_directory())
        return f"There is no directory for histories. Run: {command}"
    return f"No history of yours is kept. Write this line into {host.user_file()}:\nhistory = true"
