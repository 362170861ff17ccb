"""Say whom to ask for a device, and which one is likeliest to come free.

This is a guess from what is seen and from what holders say. It decides nothing.
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any

from reserve_gpu.model.devices import State
from reserve_gpu.model.errors import own_line
from reserve_gpu.model.holders import DeviceStatus, Holder, Reserved
from reserve_gpu.render import durations, layout, phrases, reservation_list
from reserve_gpu.render.phrases import MARK, STRONG, TYPED, Line, listed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reserve_gpu.render.frontends import Frontend


def yourself(
    rows: Sequence[DeviceStatus], now: float, user: str | None, frontend: Frontend, at: str = ""
) -> list[Line]:
    """Return what the user who reads it holds in other processes, and how to release it.

    A program is not told: it would type that, and so end what another one has begun.

    `You hold GPU0 and GPU1 yourself, in mine.ipynb, idle for 3 h: reserve-gpu release 4321`
    Another user may have written the name, but not the pid.
    at: `ssh lab1 ` of another machine.
    """
    if user is None or frontend.is_for_program:
        return []
    own = [
        each
        for each in Reserved.among(_others(rows))
        if phrases.is_of(each.holder, user) and not (each.holder.is_kept(now) or each.holder.beside)
    ]
    return [
        (
            f"You hold {phrases.labels(each.rows)} yourself, in ",
            (phrases.name_of(each.holder), STRONG),
            *reservation_list.idle(each, now),
            ": ",
            (own_line(f"release {each.holder.pid}", at), TYPED),
        )
        for each in own[: phrases.NAMED_IDLE]
    ]


def whom(rows: Sequence[DeviceStatus], now: float, user: str | None = None) -> Line:
    """Return whom to ask: holders of idle devices, the longest idle first, then overdue ones.

    Each is named once, with all that they could release. The reader, `user`, is left out.
    """
    if user:
        rows = [
            row._replace(
                holders=tuple(each for each in row.holders if not phrases.is_of(each, user))
            )
            for row in rows
            if not all(phrases.is_of(holder, user) for holder in row.holders)
        ]
    idle = _longest_idle(rows, now)
    late = [row for row in _others(rows) if row not in idle and _overdue(row, now)]
    groups: dict[tuple[str, ...], list[DeviceStatus]] = {}
    for row in [*idle, *late]:
        groups.setdefault(tuple(map(_user, _asked(row, now))), []).append(row)
    left_alone = [
        those for those in groups.values() if any(_is_left_alone(row, now) for row in those)
    ]
    named = left_alone[: phrases.NAMED_IDLE] or [*groups.values()][:1]
    lines = [_request([row for row in rows if row in those], now) for those in named]
    return tuple(part for line in lines for part in (" ", *line))[1:]


def _request(rows: Sequence[DeviceStatus], now: float) -> Line:
    """Return `Ask bob (a.ipynb) for GPU1, idle for 2 h, and GPU3, overdue since 18:00.`."""
    asked = [holder for row in rows for holder in _asked(row, now)]
    users = [*dict.fromkeys(map(_user, asked))][: phrases.NAMED_SHARERS]
    people = [phrases.person(*(each for each in asked if _user(each) == user)) for user in users]
    line: Line = ("Ask ", (listed(people), STRONG), " for ")
    for place, why in enumerate(dict.fromkeys(_why(row, now) for row in rows)):
        those = [row for row in rows if _why(row, now) == why]
        line += (f"{', and ' if place else ''}{phrases.ranges(those)}", *why)
    return (*line, ".")


def _why(row: DeviceStatus, now: float) -> Line:
    """Return `, idle for 2 h, overdue since 18:00`, as far as that is so."""
    line: Line = (f", {durations.idle(layout.idle_s(row, now))}",) if row.is_unused else ()
    since = [durations.overdue_since(holder, now) or now for holder in _overdue(row, now)]
    return (
        (*line, ", ", (f"overdue since {durations.moment(min(since), now)}", MARK))
        if since
        else line
    )


def _user(holder: Holder) -> str:
    return holder.user or phrases.person(holder)


def _asked(row: DeviceStatus, now: float) -> Sequence[Holder]:
    """Return those who are asked for a device: who is overdue, else all who have it."""
    return _overdue(row, now) or row.holders


def _is_left_alone(row: DeviceStatus, now: float) -> bool:
    """Tell whether a device is overdue, or idle for so long that nobody may need it."""
    return bool(_overdue(row, now)) or (layout.idle_s(row, now) or 0.0) >= layout.NEW_S


def likeliest(rows: Sequence[DeviceStatus], now: float) -> Line:
    """Return `GPU3, reserved until 18:00`: what ends first, else what is idle the longest."""
    ending = [(*last, row) for row in _others(rows) if (last := last_end(row, now))]
    if not ending:
        return next(((_seen(row, now),) for row in _longest_idle(rows, now)), ())
    at, holder, row = min(ending, key=lambda each: each[0])
    if holder.is_kept(now):
        return (row.label, *phrases.lease_end(holder, now))
    if at < now:
        return (_seen(row, now), *phrases.lease_end(holder, now))
    if at == durations.end(holder, now):
        return (f"{row.label}, reserved until {durations.moment(at, now)}",)
    idle = durations.time_limit(holder.lease.idle_s or 0.0)
    return (f"{_seen(row, now)}, released after {idle} idle",)


def last_end(row: DeviceStatus, now: float) -> tuple[float, Holder] | None:
    """Return when a device's last holder is expected to release it, and who; None without an end.

    If the moment is past, the holder is overdue, or releases it once somebody waits.
    """
    ends = [(_end(holder, row, now), holder) for holder in row.holders]
    known = [(at, holder) for at, holder in ends if at is not None]
    return max(known, key=lambda each: each[0]) if known and len(known) == len(ends) else None


def first_end(rows: Sequence[DeviceStatus], now: float) -> dict[str, Any] | None:
    """Return for programs which device is expected to come free first, and when."""
    ends = [{"label": row.label, "at": end[0]} for row in rows if (end := last_end(row, now))]
    return min(ends, key=itemgetter("at"), default=None)


def _end(holder: Holder, row: DeviceStatus, now: float) -> float | None:
    """Return when a holder's reservation ends: at its set time, or after its idle limit."""
    moments = [
        durations.end(holder, now),
        holder.record.kept_until if holder.is_kept(now) else None,
    ]
    idle_s, limit_s = layout.idle_s(row, now), holder.lease.idle_s
    if idle_s is not None and limit_s is not None:
        moments.append(now - idle_s + limit_s)
    return min((at for at in moments if at is not None), default=None)


def _others(rows: Sequence[DeviceStatus]) -> list[DeviceStatus]:
    """Return the devices that others use, without those that nobody gets after them."""
    return [row for row in rows if not row.is_mine and row.state is not State.DRAINED]


def _longest_idle(rows: Sequence[DeviceStatus], now: float) -> list[DeviceStatus]:
    """Return the reserved devices of others on which nothing runs, the longest idle first."""
    unused = [
        row
        for row in _others(rows)
        if row.is_unused and row.holders and layout.state(row, now) is not State.KEPT
    ]
    return sorted(unused, key=lambda row: -(layout.idle_s(row, now) or 0.0))


def _overdue(row: DeviceStatus, now: float) -> list[Holder]:
    """Return the holders of a device who are past their own end."""
    return [holder for holder in row.holders if durations.overdue_since(holder, now) is not None]


def _seen(row: DeviceStatus, now: float) -> str:
    """Return `GPU3, idle for 2 h`, or `GPU3` alone if its holders run something on it."""
    return f"{row.label}, {durations.idle(layout.idle_s(row, now))}" if row.is_unused else row.label
