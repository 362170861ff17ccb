"""Parse the memory sizes, durations and times that users type."""

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
_DURATION = rf"({_NUMBER})\s*(s(?:ec(?:ond)?s?)?|m(?:in(?:ute)?s?)?|h(?:(?:ou)?rs?)?|d(?:ays?)?)\s*"
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}  # by the first letter of the unit
LONGEST_S = 3e9  # maximum duration in seconds: about a century, still valid for time.sleep()
_SIZE = rf"({_NUMBER})\s*(?:([kmgt])(i?)b?)?"
_DATE, _DAY = r"(?P<date>[0-9]{4}-[0-9]{1,2}-[0-9]{1,2})", r"(?P<day>[a-z]{2,9})"
_CLOCK = (
    r"(?P<clock>(?:[01]?[0-9]|2[0-3]):[0-5][0-9]|(?:0?[1-9]|1[0-2])(?::[0-5][0-9])?\s*(?:am|pm))"
)
_MOMENT = rf"(?=.)(?:{_DATE}|{_DAY})?(?:(?:^|\s+|(?<=[0-9])t){_CLOCK})?"
_DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
FIRST_MINUTE, LAST_MINUTE = "0:00", "23:59"  # first and last minute of a day
_NEAR_DAYS = {"yesterday": -1, "today": 0, "tomorrow": 1}  # offsets from today, in days
_EPOCH = r"@([0-9]{1,12})"  # seconds since the epoch, in the syntax of `date -d`


def parse_size(text: str | float) -> float:
    """Parse a memory size such as `16GB`, `16GiB` or `16000`.

    Args:
        text: The size. A number without a unit is in MiB.

    Returns:
        The size in MiB.

    Raises:
        RequestError: The size is invalid.
    """
    number, unit = size_and_unit(text)
    return number * UNITS[unit or "MiB"] / MIB


def size_and_unit(text: str | float) -> tuple[float, str | None]:
    """Split a memory size into a number and a unit.

    Args:
        text: The size, such as `16GB`, `16GiB` or `16000`.

    Returns:
        The number and the unit, such as `(16.0, "GB")`. The unit is None if the size has none.

    Raises:
        RequestError: The size is invalid.
    """
    match = re.fullmatch(_SIZE, str(text).strip(), re.IGNORECASE | re.ASCII)
    if not match:
        typed = repr(sanitize(str(text)))
        raise RequestError(f"{typed} is not a valid size. Examples: 16GB, 16GiB, 16000 (MiB).")
    unit = f"{match[2].upper()}{match[3].lower()}B" if match[2] else None
    return float(match[1]), unit


def parse_percent(text: object) -> float | None:
    """Parse a percentage such as `50%`.

    Args:
        text: The percentage.

    Returns:
        The percentage, which is above 0 and at most 100, or None if the text does not end in `%`.

    Raises:
        RequestError: The percentage is invalid or out of range.
    """
    typed = str(text).strip()
    if not typed.endswith("%"):
        return None
    match = re.fullmatch(rf"({_NUMBER})\s*%", typed, re.ASCII)
    if match and 0 < float(match[1]) <= 100:
        return float(match[1])
    raise RequestError(
        f"{sanitize(typed)!r} is not a valid part of a GPU. Give a percentage above 0% and "
        "up to 100%, such as 50%."
    )


def parse_duration(text: object, *, hint: str = "") -> float:
    """Parse a duration such as `90s`, `10m` or `1h30m`.

    Args:
        text: The duration. A Python number is a number of seconds, and True means no limit. A
            string needs a unit, because users who type a number alone usually mean minutes or
            hours.
        hint: Text to append to the error message.

    Returns:
        The duration in seconds.

    Raises:
        RequestError: The duration is invalid or has no unit.
    """
    if text is True:
        return math.inf
    if isinstance(text, (int, float)) and not isinstance(text, bool) and text >= 0:
        return float(min(text, LONGEST_S))
    typed = str(text).strip()
    if re.fullmatch(_NUMBER, typed, re.ASCII):
        units = f"{typed}s, {typed}m, {typed}h or {typed}d"
        raise RequestError(f"The duration {typed} has no unit. Use {units}.{hint}")
    flags = re.IGNORECASE | re.ASCII
    if not re.fullmatch(f"(?:{_DURATION})+", typed, flags):
        raise RequestError(
            f"{sanitize(typed)!r} is not a valid duration. Examples: 90s, 10m, 2h, 1h30m.{hint}"
        )
    parts = re.findall(_DURATION, typed, flags)
    return min(sum(float(n) * _SECONDS[unit[0].lower()] for n, unit in parts), LONGEST_S)


def parse_moment(text: object, now: float) -> float:
    """Parse a future local time such as `18:00`, `Fri`, `2026-12-01` or `tomorrow 9am`.

    Args:
        text: The time. A time of day without a date means its next occurrence. A date without a
            time of day means 23:59 on that date.
        now: The current time in seconds since the epoch.

    Returns:
        The time in seconds since the epoch.

    Raises:
        RequestError: The time is invalid, in the past, or more than a century away.
    """
    moment = _moment(str(text), now)
    if moment is None:
        raise RequestError(
            f"{sanitize(str(text))!r} is not a valid time. Examples: 18:00, 6pm, Fri, tomorrow, "
            "2026-12-01, 'Fri 18:00'."
        )
    if moment <= now:
        local_time = time.strftime("%Y-%m-%d %H:%M", time.localtime(now))
        raise RequestError(
            f"{sanitize(str(text))!r} is in the past. The local time is {local_time}."
        )
    if moment > now + LONGEST_S:
        raise RequestError(f"{sanitize(str(text))!r} is more than a century away.")
    return moment


def parse_since(text: str, now: float) -> tuple[float, float | None]:
    """Parse the start time of a report, such as `7d`, `2026-11-01 18:00`, `Mon` or `yesterday`.

    Args:
        text: How long ago the report starts, such as `7d`, or a local time in the past. A date
            without a time of day means 0:00 on that date. The name of a weekday means its most
            recent occurrence. A number after `@` is in seconds since the epoch.
        now: The current time in seconds since the epoch.

    Returns:
        The start time in seconds since the epoch, and the duration in seconds. The duration is None
        if the text is a time. The start time is rounded down to the full hour, unless the text
        starts with `@`.

    Raises:
        RequestError: The text is invalid or the time is in the future.
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
            f"{sanitize(text)!r} is not a valid time. Examples: 7d, 12h, yesterday, Mon, "
            "2026-11-01, '2026-11-01 18:00'."
        )
    if moment > now:
        local_time = time.strftime("%Y-%m-%d %H:%M", time.localtime(now))
        raise RequestError(f"{sanitize(text)!r} is in the future. The local time is {local_time}.")
    return max(0.0, moment), lasts_s


def _hour_of(moment: float) -> float:
    """Return the start of the hour in local time, which is not always a full hour in UTC."""
    return moment - time.localtime(moment).tm_min * 60 - moment % 60


def _moment(text: str, now: float, *, is_past: bool = False) -> float | None:
    """Return the next or most recent occurrence of a local time, or None if the text is invalid.

    Args:
        text: The time, such as `Fri 18:00`.
        now: The current time in seconds since the epoch.
        is_past: Whether to return the most recent occurrence instead of the next one. If so, a date
            without a time of day means the start of that date instead of its end.
    """
    from datetime import datetime, timedelta  # imported here because few requests contain a time

    match = re.fullmatch(_MOMENT, text.strip(), re.IGNORECASE | re.ASCII)
    if not match:
        return None
    date, day = match["date"], (match["day"] or "").lower()
    hours, minutes = _clock(match["clock"] or (FIRST_MINUTE if is_past else LAST_MINUTE))
    local_now = datetime.fromtimestamp(now)  # noqa: DTZ006 - users type local times
    try:
        start = datetime.strptime(date, "%Y-%m-%d") if date else local_now  # noqa: DTZ007
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
            stamps = _stamps(moment + timedelta(days=days))
            if not match["clock"]:  # use the first or last minute of the day
                stamps = stamps[:1] if is_past else stamps[-1:]
            matches = [stamp for stamp in stamps if (stamp <= now if is_past else stamp > now)]
            if matches:
                return matches[-1] if is_past else matches[0]
        return stamps[-1]
    except (ValueError, OverflowError, OSError):
        return None


def _stamps(moment: datetime) -> tuple[float, ...]:
    """Return each moment at which local clocks show this time, in seconds since the epoch.

    When daylight saving time ends, some local times occur twice. When it begins, some local times
    are skipped; these are converted with the UTC offset from before the change.
    """
    first, second = (moment.replace(fold=fold).timestamp() for fold in (0, 1))
    return (first, second) if first < second else (first,)


def _clock(text: str) -> tuple[int, int]:
    """Parse a time of day such as `18:00`, `6pm` or `6:30 pm` into hours and minutes."""
    bare = text.lower().rstrip("apm ")
    hours, _, minutes = bare.partition(":")
    if bare == text.lower():
        return int(hours), int(minutes)
    is_afternoon = "p" in text.lower()
    return int(hours) % 12 + 12 * is_afternoon, int(minutes or 0)
