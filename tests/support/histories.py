"""Usage histories: reservations, the lines that they leave, and the directory of the lines."""

from __future__ import annotations

import os
import random
import time
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from reserve_gpu.log import log_writer
from reserve_gpu.log.log_lines import Kind, LogLine
from reserve_gpu.model.requests import End

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

HOUR_S, DAY_S = 3600, 86400
GPUS, PEOPLE, DAYS, HOURS_A_DAY = 8, 20, 260, 8
FIRST_UID = 70001


class Stay(NamedTuple):
    """One reservation of a whole GPU.

    Attributes:
        person: The number of the user.
        gpu: The index of the GPU.
        start: The start time, in seconds since the epoch.
        seconds: The length of the reservation.
        used: The fraction of the time during which the GPU was in use.
        unknown: The fraction of the time for which the use is unknown.
        how: The reason why the reservation ended.
    """

    person: int
    gpu: int
    start: int
    seconds: int
    used: float = 1.0
    unknown: float = 0.0
    how: End = End.EXIT

    @property
    def uuid(self) -> str:
        return f"GPU-0000000{self.gpu}-0000-4000-8000-000000000000"

    @property
    def notebook(self) -> str:
        return f"projects/person{self.person:02}.ipynb"

    def lines(self) -> Iterator[LogLine]:
        """Yield the history lines: one for each hour of the clock."""
        at, end = self.start, self.start + self.seconds
        while at < end:
            until = min(end, at - at % HOUR_S + HOUR_S)
            seconds = float(until - at)
            yield LogLine(
                Kind.RESERVED,
                f"{self.person:04x}{self.gpu:04x}{self.start % (1 << 32):08x}",
                float(self.start), float(at), float(until), seconds,
                used_s=seconds * self.used,
                idle_s=seconds * (1 - self.used - self.unknown),
                gpu=self.uuid, label=f"GPU{self.gpu}", share=1.0, mib=12345.678,
                percent=67.123, name=self.notebook, note="for the thesis",
                how=self.how if until == end else None,
            )  # fmt: skip
            at = until


def year(now: float, people: int = PEOPLE, days: int = DAYS) -> list[Stay]:
    """Return the stays of a lab in a year: eight hours per user and day, with some restarts."""
    dice = random.Random(7)  # noqa: S311 - not a secret
    midnight = int(now) - int(now) % DAY_S
    working = [day for day in range(364, 0, -1) if day % 7 not in (0, 1)][-days:]
    stays = []
    for day in working:
        for person in range(people):
            start = midnight - day * DAY_S + 9 * HOUR_S
            gpu = dice.randrange(GPUS)
            cuts = sorted(dice.sample(range(60, HOURS_A_DAY * 60 - 60), 3))
            minutes = [0, *cuts, HOURS_A_DAY * 60]
            for first, last in pairwise(minutes):
                used = dice.choice((0.0, 0.25, 0.75))
                how = End.EXIT if last == minutes[-1] else End.RESTART
                stays.append(
                    Stay(person, gpu, start + first * 60, (last - first) * 60, used, 0.125, how=how)
                )
    return stays


class Histories:
    """A history directory, with one folder per user."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.folder.mkdir(mode=0o700)
        self.folder.chmod(0o1733)

    def of(self, uid: int | None = None) -> Path:
        """Return the folder of a user, by default of the current user."""
        own = self.folder / str(os.geteuid() if uid is None else uid)
        own.mkdir(mode=0o700, exist_ok=True)
        return own

    def write(self, entries: Iterable[LogLine], uid: int | None = None) -> None:
        """Append lines to a user's history; only root can write other users' histories."""
        folder = self.of(uid)
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            log_writer.append(descriptor, [*entries])
        finally:
            os.close(descriptor)
        self.give(uid)

    def page(self, entries: Iterable[LogLine]) -> log_writer.Page:
        """Write lines to the page of a reservation that has not ended."""
        page = log_writer.Page.new(os.open(self.of(), os.O_RDONLY))
        page.write([*entries])
        return page

    def size(self) -> int:
        """Return the number of bytes in all files."""
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())

    def give(self, uid: int | None) -> None:
        """Make a user the owner of a folder and of the files in it."""
        if uid is not None and uid != os.geteuid():
            folder = self.of(uid)
            for path in (*folder.iterdir(), folder):
                os.chown(path, uid, uid)


def write_year(histories: Histories, stays: Iterable[Stay]) -> int:
    """Write the stays, per user if root runs the tests, and return the number of lines."""
    of: dict[int, list[LogLine]] = {}
    for stay in stays:
        of.setdefault(stay.person, []).extend(stay.lines())
    for person, entries in of.items():
        histories.write(entries, None if os.geteuid() else FIRST_UID + person)
    return sum(map(len, of.values()))


def month_file(folder: Path, at: float) -> Path:
    """Return the file that has a user's lines of the month."""
    return folder / time.strftime("%Y-%m.jsonl", time.localtime(at))
