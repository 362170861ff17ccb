"""Format durations and times of day, and determine when a reservation ends."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from reserve_gpu.model.parsing import LONGEST_S

if TYPE_CHECKING:
    from reserve_gpu.model.holders import Holder

MINUTE_S = 60
CLOCK_SKEW_S = 60  # maximum tolerated clock difference, in seconds
NEAR_S = 600  # seconds; shorter remaining times are shown to the second
SIX_DAYS_S = 6 * 86400  # seconds; a time closer than this can be identified by its weekday


def duration(seconds: float) -> str:
    """Format a duration, such as `45 s`, `12 min`, `2 h 10 min`, `2 h` or `3 d 4 h`."""
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if days:
        return f"{days} d {hours % 24} h".removesuffix(" 0 h")
    if hours:
        return f"{hours} h {minutes % 60} min".removesuffix(" 0 min")
    return f"{minutes} min" if minutes else f"{int(seconds)} s"


def idle(seconds: float | None) -> str:
    """Return `idle for 2 h`, or just `idle` if the time is unknown or less than a minute."""
    return "idle" if seconds is None or seconds < MINUTE_S else f"idle for {duration(seconds)}"


def time_since(moment: float, now: float) -> float | None:
    """Return the number of seconds since a recorded time, or None if it is in the future.

    A time that is less than `CLOCK_SKEW_S` seconds in the future counts as now.
    """
    return max(0.0, now - moment) if moment < now + CLOCK_SKEW_S else None


def moment(at: float, now: float) -> str:
    """Format a local time as `18:00`, `Fri 18:00` or `2026-12-01 18:00`.

    A time today is shown without a date, and a time within six days is shown with its weekday.
    """
    then, today = time.localtime(at), time.localtime(now)
    if then[:3] == today[:3]:
        return time.strftime("%H:%M", then)
    is_near = abs(at - now) < SIX_DAYS_S
    return time.strftime("%a %H:%M" if is_near else "%Y-%m-%d %H:%M", then)


def end(holder: Holder, now: float) -> float | None:
    """Return the time at which a reservation ends, or None if its record has no end time.

    For an overdue reservation, this is the time at which it should have ended. An end time before
    the reservation began, or in the distant future, is ignored.
    """
    if holder.since is None:
        return None
    ends = (holder.record.overdue, holder.lease.until)
    return next((at for at in ends if at and holder.since <= at <= now + LONGEST_S), None)


def overdue_since(holder: Holder, now: float) -> float | None:
    """Return the time at which an overdue reservation should have ended.

    Return None for a reservation that is not overdue. If a reservation ends only when another
    process is waiting, it counts as overdue only if its record says so.
    """
    at = end(holder, now)
    is_over = at is not None and at < now
    return at if is_over and (holder.record.overdue or not holder.lease.if_wanted) else None


def time_limit(seconds: float) -> str:
    """Format a duration that a user typed, without rounding: `90 s`, `2 min 30 s` or `0.2 s`."""
    if seconds < 1:
        return f"{seconds:.2g} s"
    if seconds < 2 * MINUTE_S:
        return f"{seconds:.3g} s" if seconds % MINUTE_S else duration(seconds)
    rest = int(seconds % MINUTE_S)
    return f"{duration(seconds - rest)} {rest} s" if rest else duration(seconds)


def remaining(seconds: float) -> str:
    """Format a remaining time, rounded to minutes unless it is less than ten minutes."""
    if seconds >= NEAR_S:
        return duration(seconds + MINUTE_S / 2)
    minutes, rest = divmod(int(seconds), MINUTE_S)
    return f"{minutes} min {rest} s".removeprefix("0 min ").removesuffix(" 0 s") or "0 s"
