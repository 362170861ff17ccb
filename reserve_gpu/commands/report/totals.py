"""What the lines of histories sum up to. Pure functions of values."""

import time
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from heapq import nlargest
from typing import NamedTuple

from reserve_gpu.log.log_lines import Kind, LogLine
from reserve_gpu.log.log_reader import Logged

HOUR_S = 3600.0
MOST_IDLE = 5  # reservations that are named
LEAST_IDLE_HOURS = 1.0  # of one that is named
QUARTER_S = 900
UNKNOWN = "?"
# Names and reservations are what users have written, so there may be a million of them.
MOST_NAMES = 5_000  # of one user
OTHERS = "others"  # what further names are counted for
MOST_GPUS = 256  # of one reservation, and of one user
MOST_RESERVATIONS = 50_000  # among which the longest idle ones are looked for


class Hours(NamedTuple):
    """Sums in GPU-hours; a part of a GPU counts by its share of the memory. waited is in hours.

    used, idle: of the reserved ones; the rest could not be read. over: used more than was promised,
    or for longer.
    """

    reserved: float = 0.0
    used: float = 0.0
    idle: float = 0.0
    over: float = 0.0
    waited: float = 0.0

    @property
    def unknown(self) -> float:
        """Return the reserved hours of which nobody could read whether they were used."""
        return max(0.0, self.reserved - self.used - self.idle)


class Idle(NamedTuple):
    """A reservation that lay idle for long: whose, what it is called, of which GPUs, since when."""

    user: str = UNKNOWN
    name: str | None = None
    gpus: tuple[str, ...] = ()
    since: float = 0.0
    idle_hours: float = 0.0


def together(every: Iterable[Hours]) -> Hours:
    """Return the sums of each kind of hours."""
    return Hours(*map(sum, zip(*every, strict=True)))


def hours(entry: LogLine) -> Hours:
    """Return what one line adds."""
    if entry.kind is Kind.WAITED:
        return Hours(waited=entry.seconds / HOUR_S)
    whole = entry.share / HOUR_S
    return Hours(
        entry.seconds * whole,
        (entry.used_s or 0.0) * whole,
        (entry.idle_s or 0.0) * whole,
        (entry.over_s or 0.0) * whole,
    )


def day(at: float) -> str:
    """Return the day of that moment, in local time."""
    return _day_of_quarter(int(at // QUARTER_S))


@lru_cache(1 << 16)  # more than a year has
def _day_of_quarter(quarter: int) -> str:
    """Return the day of a quarter of an hour: all time zones differ by whole ones."""
    return time.strftime("%Y-%m-%d", time.localtime(quarter * QUARTER_S))


# What a line counts for; None for a wait, which may be for any device.
KEYS: dict[str, Callable[[Logged], str | None]] = {
    "user": lambda logged: logged.user,
    "notebook": lambda logged: f"{logged.user}: {logged.entry.name or UNKNOWN}",
    "gpu": lambda logged: None if logged.entry.kind is Kind.WAITED else logged.entry.gpu,
    "day": lambda logged: day(logged.entry.start),
}


class Summary(NamedTuple):
    """What histories come to.

    rows: by what was asked for. days: by day. idle: the reservations that lay idle for longest.
    labels: what each user calls devices, by UUID.
    """

    rows: Mapping[str, Hours]
    days: Mapping[str, Hours]
    idle: tuple[Idle, ...]
    labels: Mapping[str, Mapping[str, str]]


def summed(lines: Iterable[Logged], by: str = "user") -> Summary:
    """Sum up the lines. by: one of KEYS; of several users notebooks are named with their user."""
    key, rows, days, idle = KEYS[by], _Sums(), _Sums(), _IdleTimes()
    labels: dict[str, dict[str, str]] = {}
    for logged in lines:
        user, entry = logged
        added = hours(entry)
        if (name := key(logged)) is not None:
            rows.add(user, name, added)
        days.add(user, day(entry.start), added)
        own = labels.setdefault(user, {})
        if entry.gpu and entry.label and len(own) < MOST_GPUS:
            own[entry.gpu] = entry.label
        if added.idle:
            idle.add(logged, added.idle)
    sums = rows.all()
    if by == "notebook" and len(labels) == 1:
        sums = {name.partition(": ")[2]: each for name, each in sums.items()}
    return Summary(sums, days.all(), idle.longest(labels), labels)


class _Sums:
    """Sums by name; a sum is a list while it grows, as there may be a million of additions."""

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}
        self._left: dict[str, int] = {}  # how many more names each user may bring in

    def add(self, user: str, name: str, added: Hours) -> None:
        before = self._sums.get(name)
        if before is None:
            left = self._left.get(user, MOST_NAMES)
            self._left[user] = left - bool(left)
            known = name if left else f"{user}: {OTHERS}"
            before = self._sums.setdefault(known, [0.0] * len(added))
        for kind, number in enumerate(added):
            before[kind] += number

    def all(self) -> dict[str, Hours]:
        return {name: Hours(*each) for name, each in self._sums.items()}


class _IdleTimes:
    """For how long each reservation lay idle, and on which devices, by their UUIDs."""

    def __init__(self) -> None:
        self._idle: dict[tuple[str, str], Idle] = {}

    def add(self, logged: Logged, idle_hours: float) -> None:
        user, entry = logged
        before = self._idle.get((user, entry.id))
        if before is None:
            if len(self._idle) >= 2 * MOST_RESERVATIONS:
                self._idle = dict(self._most(MOST_RESERVATIONS))
            before = Idle(user, since=entry.since)
        name = before.name or entry.name  # named later, in VS Code
        gpus = before.gpus
        if entry.gpu and entry.gpu not in gpus and len(gpus) < MOST_GPUS:
            gpus += (entry.gpu,)
        lain = Idle(user, name, gpus, before.since, before.idle_hours + idle_hours)
        self._idle[user, entry.id] = lain

    def longest(self, labels: Mapping[str, Mapping[str, str]]) -> tuple[Idle, ...]:
        return tuple(
            idle._replace(gpus=tuple(sorted(labels[idle.user].get(gpu, gpu) for gpu in idle.gpus)))
            for _, idle in self._most(MOST_IDLE)
            if idle.idle_hours >= LEAST_IDLE_HOURS
        )

    def _most(self, count: int) -> list[tuple[tuple[str, str], Idle]]:
        return nlargest(count, self._idle.items(), key=lambda item: item[1].idle_hours)
