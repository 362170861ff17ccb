"""Sum up the lines of usage histories. All functions are pure."""

import time
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from heapq import nlargest
from typing import NamedTuple

from reserve_gpu.log.log_lines import Kind, LogLine
from reserve_gpu.log.log_reader import Logged

HOUR_S = 3600.0
MOST_IDLE = 5  # number of idle reservations that a report lists
LEAST_IDLE_HOURS = 1.0  # minimum idle time of a listed reservation
QUARTER_S = 900
UNKNOWN = "?"
# Users write their own histories, so there may be a million names and reservations.
MOST_NAMES = 5_000  # maximum number of rows per user
OTHERS = "others"  # name of the row for all further names of a user
MOST_GPUS = 256  # maximum number of GPUs per reservation and per user
MOST_RESERVATIONS = 50_000  # number of reservations kept while looking for the longest idle ones


class Hours(NamedTuple):
    """Sums in GPU-hours. A part of a GPU counts by its share of the memory.

    Attributes:
        reserved: The time for which GPUs were reserved.
        used: The part of the reserved time in which the GPUs were used.
        idle: The part of the reserved time in which the GPUs were not used. For the rest of the
            reserved time, the use is unknown.
        over: The time in which a reservation used more memory than it had reserved, or was past
            its end.
        waited: The time spent in the queue, in hours.
    """

    reserved: float = 0.0
    used: float = 0.0
    idle: float = 0.0
    over: float = 0.0
    waited: float = 0.0

    @property
    def unknown(self) -> float:
        """Return the reserved GPU-hours whose use could not be read."""
        return max(0.0, self.reserved - self.used - self.idle)


class Idle(NamedTuple):
    """The idle time of one reservation.

    Attributes:
        user: The owner of the reservation.
        name: The name of its notebook or command.
        gpus: The UUIDs or labels of its devices.
        since: The start of the reservation, in seconds since the epoch.
        idle_hours: Its idle time in GPU-hours.
    """

    user: str = UNKNOWN
    name: str | None = None
    gpus: tuple[str, ...] = ()
    since: float = 0.0
    idle_hours: float = 0.0


def together(items: Iterable[Hours]) -> Hours:
    """Return the sum of several `Hours`."""
    return Hours(*map(sum, zip(*items, strict=True)))


def hours(entry: LogLine) -> Hours:
    """Return the hours of one history line."""
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
    """Return the local date of a time, such as `2026-11-24`."""
    return _day_of_quarter(int(at // QUARTER_S))


@lru_cache(1 << 16)  # more than the quarter-hours of a year
def _day_of_quarter(quarter: int) -> str:
    """Return the local date of a quarter-hour.

    UTC offsets are multiples of a quarter-hour, so no quarter-hour spans midnight.
    """
    return time.strftime("%Y-%m-%d", time.localtime(quarter * QUARTER_S))


# The row that a history line belongs to. In a report by GPU, a wait has no row, because a waiter
# may get any GPU.
KEYS: dict[str, Callable[[Logged], str | None]] = {
    "user": lambda logged: logged.user,
    "notebook": lambda logged: f"{logged.user}: {logged.entry.name or UNKNOWN}",
    "gpu": lambda logged: None if logged.entry.kind is Kind.WAITED else logged.entry.gpu,
    "day": lambda logged: day(logged.entry.start),
}


class Summary(NamedTuple):
    """The sums of histories.

    Attributes:
        rows: The hours of each user, notebook, GPU or day.
        days: The hours of each day.
        idle: The reservations with the longest idle times.
        labels: The labels of devices in each user's history, by user and UUID.
    """

    rows: Mapping[str, Hours]
    days: Mapping[str, Hours]
    idle: tuple[Idle, ...]
    labels: Mapping[str, Mapping[str, str]]


def summed(lines: Iterable[Logged], by: str = "user") -> Summary:
    """Sum up history lines.

    Args:
        lines: The lines, with their users.
        by: The kind of rows, a key of `KEYS`. If there are several users, the name of a notebook
            row starts with the user's name.
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
    """Sums by name. Each sum is a mutable list, because there may be a million additions."""

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}
        self._new_names: dict[str, int] = {}  # number of further names that a user may add

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
    """The idle time of each reservation, and the UUIDs of its devices."""

    def __init__(self) -> None:
        self._idle: dict[tuple[str, str], Idle] = {}

    def add(self, logged: Logged, idle_hours: float) -> None:
        user, entry = logged
        idle = self._idle.get((user, entry.id))
        if idle is None:
            if len(self._idle) >= 2 * MOST_RESERVATIONS:
                self._idle = dict(self._most(MOST_RESERVATIONS))
            idle = Idle(user, since=entry.since)
        name = idle.name or entry.name  # in VS Code the name is known only later
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
