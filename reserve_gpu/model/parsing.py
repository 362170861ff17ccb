"""Parse sizes of memory, durations and times that users type."""

from __future__ import annotations

import math
import re
import time
from typing import TYPE_CHECKING

from reserve_gpu.model.devices import MIB
from reserve_gpu.model.errors import RequestError
from reserve_gpu.model.requests import UNITS
from reserve_gpu.model.untrusted import sanitize

if TYPE_CHECKING:
    from datetime import datetime

_NUMBER = r"[0-9]{1,12}(?:\.[0-9]{1,12})?"
_DURATION = rf"({_NUMBER})\s*(s|m|min|h|d)\s*"
_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
LONGEST_S = 3e9  # a century, for which Python can still sleep
_SIZE = rf"({_NUMBER})\s*(?:([kmgt])(i?)b?)?"
_DATE, _DAY = r"(?P<date>[0-9]{4}-[0-9]{1,2}-[0-9]{1,2})", r"(?P<day>[a-z]{2,9})"
_CLOCK = (
    r"(?P<clock>(?:[01]?[0-9]|2[0-3]):[0-5][0-9]|(?:0?[1-9]|1[0-2])(?::[0-5][0-9])?\s*(?:am|pm))"
)
_MOMENT = rf"(?=.)(?:{_DATE}|{_DAY})?(?:(?:^|\s+|(?<=[0-9])t){_CLOCK})?"
_DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
FIRST_MINUTE, LAST_MINUTE = "0:00", "23:59"  # of a day
_NEAR_DAYS = {"yesterday": -1, "today": 0, "tomorrow": 1}
_EPOCH = r"@([0-9]{1,12})"  # as `date` has it


def parse_size(text: str | float) -> float:
    """Parse a size of memory in MiB: `16GB`, `16GiB`, `16000` (MiB). Raises RequestError."""
    number, unit = size_and_unit(text)
    return number * UNITS[unit or "MiB"] / MIB


def size_and_unit(text: str | float) -> tuple[float, str | None]:
    """Parse a size as a number and its unit, None where none was given. Raises RequestError."""
    match = re.fullmatch(_SIZE, str(text).strip(), re.IGNORECASE | re.ASCII)
    if not match:
        raise RequestError(f"{sanitize(str(text))!r} is no size. Give 16GB, 16GiB or 16000 (MiB).")
    unit = f"{match[2].upper()}{match[3].lower()}B" if match[2] else None
    return float(match[1]), unit


def parse_percent(text: object) -> float | None:
    """Parse `50%`; None for what is no percentage at all. Raises RequestError."""
    typed = str(text).strip()
    if not typed.endswith("%"):
        return None
    match = re.fullmatch(rf"({_NUMBER})\s*%", typed, re.ASCII)
    if match and 0 < float(match[1]) <= 100:
        return float(match[1])
    raise RequestError(
        f"{sanitize(typed)!r} is no part of a GPU. Give 50%: more than 0%, up to 100%."
    )


def parse_duration(text: object, *, hint: str = "") -> float:
    """Parse a time in seconds: `90s`, `10m`, `1h30m`, True for ever. Raises RequestError.

    A number is in seconds; one that somebody typed is not, as most mean hours or minutes.
    hint: what more to say to one that is none.
    """
    if text is True:
        return math.inf
    if isinstance(text, (int, float)) and not isinstance(text, bool) and text >= 0:
        return float(min(text, LONGEST_S))
    typed = str(text).strip()
    if re.fullmatch(_NUMBER, typed, re.ASCII):
        raise RequestError(f"{typed} what? Give {typed}s, {typed}m, {typed}h or {typed}d.{hint}")
    flags = re.IGNORECASE | re.ASCII
    if not re.fullmatch(f"(?:{_DURATION})+", typed, flags):
        raise RequestError(f"{sanitize(typed)!r} is no duration. Give 90s, 10m, 2h or 1h30m.{hint}")
    parts = re.findall(_DURATION, typed, flags)
    return min(sum(float(n) * _SECONDS[unit.lower()] for n, unit in parts), LONGEST_S)


def parse_moment(text: object, now: float) -> float:
    """Parse a moment to come, as `18:00`, `Fri`, `2026-12-01`, `tomorrow 9am`, in epoch seconds.

    In local time. A time of day alone is the next one; a day without one lasts until 23:59.
    now: in seconds since the epoch. Raises RequestError.
    """
    moment = _moment(str(text), now)
    if moment is None:
        raise RequestError(
            f"{sanitize(str(text))!r} is no time. Give 18:00, 6pm, Fri, tomorrow, 2026-12-01 or "
            "'Fri 18:00'."
        )
    if moment <= now:
        here = time.strftime("%Y-%m-%d %H:%M", time.localtime(now))
        raise RequestError(f"{sanitize(str(text))!r} is over: here it is {here}.")
    if moment > now + LONGEST_S:
        raise RequestError(f"{sanitize(str(text))!r} is more than a century away.")
    return moment


def parse_since(text: str, now: float) -> tuple[float, float | None]:
    """Parse since when: `7d`, `2026-11-01`, `2026-11-01 18:00`, `Mon`, `yesterday`, `today`.

    In local time, and from the beginning of that hour. A day begins at 0:00, and its name alone
    means the last one. `@1793750400` is that moment in seconds since the epoch.
    now: in seconds since the epoch. Returns such a moment, and the seconds of a duration.
    Raises RequestError.
    """
    typed = text.strip()
    if epoch := re.fullmatch(_EPOCH, typed, re.ASCII):
        moment, lasts_s = float(epoch[1]), None
    elif re.fullmatch(rf"{_NUMBER}|(?:{_DURATION})+", typed, re.IGNORECASE | re.ASCII):
        lasts_s = parse_duration(typed)
        moment = _hour_of(max(0.0, now - lasts_s))
    elif (day := _moment(typed, now, is_past=True)) is not None:
        moment, lasts_s = _hour_of(day), None
    else:
        raise RequestError(
            f"{sanitize(text)!r} is no time. Give 7d, 12h, yesterday, Mon, 2026-11-01 or "
            "'2026-11-01 18:00'."
        )
    if moment > now:
        here = time.strftime("%Y-%m-%d %H:%M", time.localtime(now))
        raise RequestError(f"{sanitize(text)!r} is still to come: here it is {here}.")
    return max(0.0, moment), lasts_s


def _hour_of(moment: float) -> float:
    """Return when the hour began by the clock on the wall, which may be half an hour off UTC."""
    return moment - time.localtime(moment).tm_min * 60 - moment % 60


def _moment(text: str, now: float, *, is_past: bool = False) -> float | None:
    """Return the next moment that is meant, or the last one; None if there is no such day or time.

    is_past: the last one; a day without a time is then its beginning, else its end.
    """
    from datetime import datetime, timedelta  # which only a moment needs

    match = re.fullmatch(_MOMENT, text.strip(), re.IGNORECASE | re.ASCII)
    if not match:
        return None
    date, day = match["date"], (match["day"] or "").lower()
    hours, minutes = _clock(match["clock"] or (FIRST_MINUTE if is_past else LAST_MINUTE))
    here = datetime.fromtimestamp(now)  # noqa: DTZ006 - people mean the time of their clock
    try:
        start = datetime.strptime(date, "%Y-%m-%d") if date else here  # noqa: DTZ007
        moment = start.replace(hour=hours, minute=minutes, second=0, microsecond=0)
        step = 0
        if day in _NEAR_DAYS:
            moment += timedelta(days=_NEAR_DAYS[day])
        elif day:
            names = [number for number, name in enumerate(_DAYS) if name.startswith(day)]
            if len(names) != 1:
                return None
            moment += timedelta(days=(names[0] - moment.weekday()) % 7)
            step = 7
        elif not date:
            step = 1
        for days in (0, -step if is_past else step):
            found = _stamps(moment + timedelta(days=days))
            if not match["clock"]:  # the first or the last minute of the day
                found = found[:1] if is_past else found[-1:]
            fitting = [at for at in found if (at <= now if is_past else at > now)]
            if fitting:
                return fitting[-1] if is_past else fitting[0]
        return found[-1]
    except (ValueError, OverflowError, OSError):
        return None


def _stamps(moment: datetime) -> tuple[float, ...]:
    """Return the moments of a local time, in epoch seconds.

    There are two if the clock is set back over that time. If it is set forward over it, the one
    moment is as long after midnight as the time says.
    """
    first, second = (moment.replace(fold=fold).timestamp() for fold in (0, 1))
    return (first, second) if first < second else (first,)


def _clock(text: str) -> tuple[int, int]:
    """Return the hours and minutes of `18:00`, `6pm` or `6:30 pm`."""
    bare = text.lower().rstrip("apm ")
    hours, _, minutes = bare.partition(":")
    if bare == text.lower():
        return int(hours), int(minutes)
    is_afternoon = "p" in text.lower()
    return int(hours) % 12 + 12 * is_afternoon, int(minutes or 0)
