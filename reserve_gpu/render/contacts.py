"""Suggest which users to ask for a device, and which device will probably be free next.

Both suggestions are guesses based on the snapshot and the holders' records. No decision depends on
them.
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any

from reserve_gpu.model.devices import State
from reserve_gpu.model.errors import command_line
from reserve_gpu.model.holders import DeviceStatus, Holder, Reserved
from reserve_gpu.render import durations, layout, phrases
from reserve_gpu.render.phrases import MARK, STRONG, TYPED, Line, listed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reserve_gpu.render.frontends import Frontend


def own_reservations(
    rows: Sequence[DeviceStatus], now: float, user: str | None, frontend: Frontend, at: str = ""
) -> list[Line]:
    """Return a line for each reservation that the user holds in another process, idle ones first.

    Each line ends with the command that releases the reservation:
    `GPU0 has been idle for 3 h in your mine.ipynb (pid 4321). To release it: reserve-gpu release
    4321`

    The command uses the pid that the Linux kernel reports, rather than the notebook's name, which
    another user might have written. A program gets no lines, because it might run the command
    and end a reservation that it did not start.

    Args:
        rows: All devices.
        now: The current time, in seconds since the epoch.
        user: The user who reads the lines. If this is None, no lines are returned.
        frontend: The frontend that shows the lines.
        at: A prefix for the command, such as `ssh lab1 ` for another machine.
    """
    if user is None or frontend.is_for_program:
        return []
    reservations = [
        each
        for each in Reserved.among(_other_rows(rows))
        if phrases.is_of(each.holder, user)
        and not (each.holder.is_kept(now) or each.holder.beside or each.holder.is_dying)
    ]
    reservations.sort(key=lambda each: -(_idle_s(each, now) or 0.0))
    reservations.sort(key=lambda each: not _is_idle(each, now))
    return [
        (
            *_own(each, now),
            f". To release {'it' if len(each.rows) == 1 else 'them'}: ",
            (command_line(f"release {each.holder.pid}", at), TYPED),
        )
        for each in reservations[: phrases.NAMED_IDLE]
    ]


def _own(reserved: Reserved, now: float) -> Line:
    """Return `GPU0 has been idle for 3 h in your mine.ipynb`, or `You hold GPU0 in mine.ipynb`."""
    holder, labels = reserved.holder, phrases.labels(reserved.rows)
    name = (phrases.name_of(holder), STRONG)
    if not _is_idle(reserved, now):
        return f"You hold {labels} in ", name
    count, seconds = len(reserved.rows), _idle_s(reserved, now)
    verb = phrases.be(count)
    if seconds is not None and seconds >= durations.MINUTE_S:
        verb = "has been" if count == 1 else "have been"
    where = " in your " if holder.name else " in "
    return f"{labels} {verb} ", (durations.idle(seconds), MARK), where, name


def _is_idle(reserved: Reserved, now: float) -> bool:
    """Return whether all devices of a reservation are idle and none was reserved recently."""
    return all(row.is_unused for row in reserved.rows) and not _is_new(reserved.holder, now)


def _idle_s(reserved: Reserved, now: float) -> float | None:
    """Return how many seconds a reservation's devices have all been idle, or None if unknown."""
    known = [layout.idle_s(row, now) for row in reserved.rows]
    return min((each for each in known if each is not None), default=None)


def _is_new(holder: Holder, now: float) -> bool:
    """Return whether a holder reserved its device recently, and might not have started to use it.

    Args:
        holder: The holder.
        now: The current time, in seconds since the epoch.
    """
    held_s = None if holder.since is None else durations.time_since(holder.since, now)
    return held_s is not None and held_s < layout.NEW_S


def users_to_ask(rows: Sequence[DeviceStatus], now: float, user: str | None = None) -> Line:
    """Return a line that suggests which users to ask for a device.

    Holders of idle devices come first, starting with the device that has been idle longest.
    Overdue holders come next. Devices with the same holders are listed together. A device is not
    called idle during the first ten minutes of its reservation.

    Args:
        rows: All devices.
        now: The current time, in seconds since the epoch.
        user: The user who reads the line. The line does not suggest asking this user.
    """
    rows = [row for row in rows if not any(holder.is_dying for holder in row.holders)]
    if user:
        rows = [
            row._replace(
                holders=tuple(each for each in row.holders if not phrases.is_of(each, user))
            )
            for row in rows
            if not all(phrases.is_of(holder, user) for holder in row.holders)
        ]
    idle = [
        row
        for row in _longest_idle(rows, now)
        if not all(_is_new(holder, now) for holder in row.holders)
    ]
    overdue = [row for row in _other_rows(rows) if row not in idle and _overdue(row, now)]
    groups: dict[tuple[str, ...], list[DeviceStatus]] = {}
    for row in [*idle, *overdue]:
        groups.setdefault(tuple(map(_user, _holders_to_ask(row, now))), []).append(row)
    abandoned = [
        group for group in groups.values() if any(_is_abandoned(row, now) for row in group)
    ]
    named = abandoned[: phrases.NAMED_IDLE] or [*groups.values()][:1]
    lines = [_request([row for row in rows if row in group], now) for group in named]
    return tuple(part for line in lines for part in (" ", *line))[1:]


def _request(rows: Sequence[DeviceStatus], now: float) -> Line:
    """Return the suggestion to ask the holders of these devices.

    For example, `Ask bob (a.ipynb) for GPU1, idle for 2 h, and GPU3, overdue since 18:00.`
    """
    holders = [holder for row in rows for holder in _holders_to_ask(row, now)]
    users = [*dict.fromkeys(map(_user, holders))][: phrases.NAMED_SHARERS]
    people = [phrases.person(*(each for each in holders if _user(each) == user)) for user in users]
    line: Line = ("Ask ", (listed(people), STRONG), " for ")
    for place, reason in enumerate(dict.fromkeys(_reason(row, now) for row in rows)):
        group = [row for row in rows if _reason(row, now) == reason]
        line += (f"{', and ' if place else ''}{phrases.ranges(group)}", *reason)
    return (*line, ".")


def _reason(row: DeviceStatus, now: float) -> Line:
    """Return `, idle for 2 h, overdue since 18:00`, or just the part that applies."""
    line: Line = (f", {durations.idle(layout.idle_s(row, now))}",) if row.is_unused else ()
    since = [durations.overdue_since(holder, now) or now for holder in _overdue(row, now)]
    return (
        (*line, ", ", (f"overdue since {durations.moment(min(since), now)}", MARK))
        if since
        else line
    )


def _user(holder: Holder) -> str:
    return holder.user or phrases.person(holder)


def _holders_to_ask(row: DeviceStatus, now: float) -> Sequence[Holder]:
    """Return the device's overdue holders, or all of its holders if none are overdue."""
    return _overdue(row, now) or row.holders


def _is_abandoned(row: DeviceStatus, now: float) -> bool:
    """Return whether a device is overdue, or has been idle for at least `layout.NEW_S` seconds."""
    return bool(_overdue(row, now)) or (layout.idle_s(row, now) or 0.0) >= layout.NEW_S


def next_free(rows: Sequence[DeviceStatus], now: float) -> Line:
    """Return the device that will probably be free next, such as `GPU3, reserved until 18:00`.

    A device becomes free when the last of its reservations ends. If no end time is known, the
    result is the device that has been idle longest.
    """
    ending = [(*last, row) for row in _other_rows(rows) if (last := last_end(row, now))]
    if not ending:
        return next(((_label_with_idle_time(row, now),) for row in _longest_idle(rows, now)), ())
    at, holder, row = min(ending, key=lambda each: each[0])
    if holder.is_kept(now):
        return (row.label, *phrases.lease_end(holder, now))
    if at < now:
        return (_label_with_idle_time(row, now), *phrases.lease_end(holder, now))
    if at == durations.end(holder, now):
        return (f"{row.label}, reserved until {durations.moment(at, now)}",)
    limit = durations.time_limit(holder.lease.idle_s or 0.0)
    return (f"{_label_with_idle_time(row, now)}, released after {limit} idle",)


def last_end(row: DeviceStatus, now: float) -> tuple[float, Holder] | None:
    """Return the time when the last of a device's reservations is expected to end, and its holder.

    If the end time is in the past, the holder is overdue, or will release the device once another
    process is waiting for it. Return None if any of the device's reservations has no known end
    time.
    """
    ends = [(_end(holder, row, now), holder) for holder in row.holders]
    known = [(at, holder) for at, holder in ends if at is not None]
    return max(known, key=lambda each: each[0]) if known and len(known) == len(ends) else None


def first_end(rows: Sequence[DeviceStatus], now: float) -> dict[str, Any] | None:
    """Return the device that is expected to be free first, with the time, as JSON data."""
    ends = [{"label": row.label, "at": end[0]} for row in rows if (end := last_end(row, now))]
    return min(ends, key=itemgetter("at"), default=None)


def _end(holder: Holder, row: DeviceStatus, now: float) -> float | None:
    """Return the time at which a reservation is expected to end.

    This is the reservation's end time, the time when its idle limit is reached, or its restart
    deadline, whichever comes first.
    """
    moments = [
        durations.end(holder, now),
        holder.record.kept_until if holder.is_kept(now) else None,
    ]
    idle_s, limit_s = layout.idle_s(row, now), holder.lease.idle_s
    if idle_s is not None and limit_s is not None:
        moments.append(now - idle_s + limit_s)
    return min((at for at in moments if at is not None), default=None)


def _other_rows(rows: Sequence[DeviceStatus]) -> list[DeviceStatus]:
    """Return the devices that this process does not hold, excluding drained devices."""
    return [row for row in rows if not row.is_mine and row.state is not State.DRAINED]


def _longest_idle(rows: Sequence[DeviceStatus], now: float) -> list[DeviceStatus]:
    """Return the idle devices that other processes have reserved, longest idle first."""
    unused = [
        row
        for row in _other_rows(rows)
        if row.is_unused and row.holders and layout.state(row, now) is not State.KEPT
    ]
    return sorted(unused, key=lambda row: -(layout.idle_s(row, now) or 0.0))


def _overdue(row: DeviceStatus, now: float) -> list[Holder]:
    """Return the device's overdue holders."""
    return [holder for holder in row.holders if durations.overdue_since(holder, now) is not None]


def _label_with_idle_time(row: DeviceStatus, now: float) -> str:
    """Return `GPU3, idle for 2 h` if the device is idle, or just `GPU3` otherwise."""
    return f"{row.label}, {durations.idle(layout.idle_s(row, now))}" if row.is_unused else row.label
