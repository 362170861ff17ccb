"""Compute totals from usage history lines. All functions are pure."""

import time
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from heapq import nlargest
from typing import NamedTuple

from reserve_gpu.log.log_lines import Kind, LogLine
from reserve_gpu.log.log_reader import Logged

HOUR_S = 3600.0
MOST_IDLE = 5  # maximum number of idle reservations in a report
LEAST_IDLE_HOURS = 1.0  # minimum idle time of a listed reservation, in GPU-hours
QUARTER_S = 900
UNKNOWN = "?"
# Users write their own histories, so a history might contain a million names and reservations.
MOST_NAMES = 5_000  # maximum number of rows per user
OTHERS = "others"  # row that totals a user's names beyond the first MOST_NAMES
MOST_GPUS = 256  # maximum number of GPUs per reservation and per user
MOST_RESERVATIONS = 50_000  # number of reservations kept while searching for the most idle ones


class Hours(NamedTuple):
    """Totals in GPU-hours. A part of a GPU counts in proportion to its share of the memory.

    Attributes:
        reserved: The time during which GPUs were reserved.
        used: The reserved time during which the GPUs were in use.
        idle: The reserved time during which the GPUs were idle. For the rest of the reserved time,
            it is unknown whether the GPUs were in use.
        over: The time during which reservations used more memory than they had reserved, or were
            past their end times.
        waited: The time spent in the queue, in hours.
    """

    reserved: float = 0.0
    used: float = 0.0
    idle: float = 0.0
    over: float = 0.0
    waited: float = 0.0

    @property
    def unknown(self) -> float:
        """Return the reserved GPU-hours for which it is unknown whether the GPUs were in use."""
        return max(0.0, self.reserved - self.used - self.idle)


class Idle(NamedTuple):
    """The idle time of one reservation.

    Attributes:
        user: The reservation's owner.
        name: The name of the notebook or command that reserved the devices.
        gpus: The UUIDs or labels of the reserved devices.
        since: The reservation's start time, in seconds since the epoch.
        idle_hours: The reservation's idle time, in GPU-hours.
    """

    user: str = UNKNOWN
    name: str | None = None
    gpus: tuple[str, ...] = ()
    since: float = 0.0
    idle_hours: float = 0.0


def together(items: Iterable[Hours]) -> Hours:
    """Add up several `Hours` tuples."""
    return Hours(*map(sum, zip(*items, strict=True)))


def hours(entry: LogLine) -> Hours:
    """Return the GPU-hours that one history line adds to a total."""
    if entry.kind is Kind.WAITED:
        return Hours(waited=entry.seconds / HOUR_S)
    factor = entry.share / HOUR_S
    return Hours(
        entry.seconds * factor,
        (entry.used_s or 0.0) * factor,
        (entry.idle_s or 0.0) * factor,
        (entry.over_s or 0.0) * factor,
    )


def day(at: float) -> str:
    """Convert a time in seconds since the epoch to a local date such as `2026-11-24`."""
    return _day_of_quarter(int(at // QUARTER_S))


@lru_cache(1 << 16)  # more than the number of quarter-hours in a year
def _day_of_quarter(quarter: int) -> str:
    """Return the local date of a quarter-hour, given its number since the epoch.

    UTC offsets are multiples of a quarter-hour, so no quarter-hour spans midnight.
    """
    return time.strftime("%Y-%m-%d", time.localtime(quarter * QUARTER_S))


# Functions that return the name of the row to which a history line is added. In a report by GPU,
# time in the queue has no row, because a waiter might get any GPU.
KEYS: dict[str, Callable[[Logged], str | None]] = {
    "user": lambda logged: logged.user,
    "notebook": lambda logged: f"{logged.user}: {logged.entry.name or UNKNOWN}",
    "gpu": lambda logged: None if logged.entry.kind is Kind.WAITED else logged.entry.gpu,
    "day": lambda logged: day(logged.entry.start),
}


class Summary(NamedTuple):
    """Totals from usage histories.

    Attributes:
        rows: The hours for each user, notebook, GPU, or day.
        days: The hours for each day.
        idle: The reservations with the longest idle times.
        labels: The device labels from each user's history, by user and UUID.
    """

    rows: Mapping[str, Hours]
    days: Mapping[str, Hours]
    idle: tuple[Idle, ...]
    labels: Mapping[str, Mapping[str, str]]


def summed(lines: Iterable[Logged], by: str = "user") -> Summary:
    """Add up history lines.

    Args:
        lines: The history lines, each with its user.
        by: How the rows are grouped, as a key of `KEYS`. If there are several users, the name of a
            notebook's row starts with the user's name.
    """
    key, rows, days, idle = KEYS[by], _Sums(), _Sums(), _IdleTimes()
    labels: dict[str, dict[str, str]] = {}
    for logged in lines:
        user, entry = logged
        added = hours(entry)
        if (name := key(logged)) is not None:
            rows.add(user, name, added)
        days.add(user, day(entry.start), added)
        user_labels = labels.setdefault(user, {})
        if entry.gpu and entry.label and len(user_labels) < MOST_GPUS:
            user_labels[entry.gpu] = entry.label
        if added.idle:
            idle.add(logged, added.idle)
    sums = rows.all()
    if by == "notebook" and len(labels) == 1:
        sums = {name.partition(": ")[2]: each for name, each in sums.items()}
    return Summary(sums, days.all(), idle.longest(labels), labels)


class _Sums:
    """Totals by row name, as mutable lists, because there might be a million additions."""

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}
        self._new_names: dict[str, int] = {}  # maximum number of additional names per user

    def add(self, user: str, name: str, added: Hours) -> None:
        total = self._sums.get(name)
        if total is None:
            available = self._new_names.get(user, MOST_NAMES)
            self._new_names[user] = available - bool(available)
            row = name if available else f"{user}: {OTHERS}"
            total = self._sums.setdefault(row, [0.0] * len(added))
        for kind, number in enumerate(added):
            total[kind] += number

    def all(self) -> dict[str, Hours]:
        return {name: Hours(*each) for name, each in self._sums.items()}


class _IdleTimes:
    """Each reservation's idle time, and the UUIDs of its devices."""

    def __init__(self) -> None:
        self._idle: dict[tuple[str, str], Idle] = {}

    def add(self, logged: Logged, idle_hours: float) -> None:
        user, entry = logged
        idle = self._idle.get((user, entry.id))
        if idle is None:
            if len(self._idle) >= 2 * MOST_RESERVATIONS:
                self._idle = dict(self._most(MOST_RESERVATIONS))
            idle = Idle(user, since=entry.since)
        name = idle.name or entry.name  # VS Code does not provide the name at first
        gpus = idle.gpus
        if entry.gpu and entry.gpu not in gpus and len(gpus) < MOST_GPUS:
            gpus += (entry.gpu,)
        total = idle.idle_hours + idle_hours
        self._idle[user, entry.id] = Idle(user, name, gpus, idle.since, total)

    def longest(self, labels: Mapping[str, Mapping[str, str]]) -> tuple[Idle, ...]:
        return tuple(
            idle._replace(gpus=tuple(sorted(labels[idle.user].get(gpu, gpu) for gpu in idle.gpus)))
            for _, idle in self._most(MOST_IDLE)
            if idle.idle_hours >= LEAST_IDLE_HOURS
        )

    def _most(self, count: int) -> list[tuple[tuple[str, str], Idle]]:
        return nlargest(count, self._idle.items(), key=lambda item: item[1].idle_hours)
