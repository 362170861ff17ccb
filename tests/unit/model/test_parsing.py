"""The sizes, durations and times that users type."""

from __future__ import annotations

import calendar
import math
import threading
import time

import pytest

from reserve_gpu.model import parsing
from reserve_gpu.model.errors import RequestError

# -- sizes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "mib"),
    [
        (16000, 16000),
        (" 16 gib ", 16384),
        ("1.5G", 1430.511),
        ("2TiB", 2097152),
        ("500mb", 476.837),
        ("1024KiB", 1),
        ("0GB", 0),
    ],
)
def test_a_size_is_in_mib(text: str | float, mib: float) -> None:
    """GB are powers of ten, GiB are powers of two, and a number without a unit is in MiB."""
    assert parsing.parse_size(text) == pytest.approx(mib)


INVALID_NUMBERS = ["", "-1", "1e3", "\u0661"]


@pytest.mark.parametrize(
    "text",
    [*INVALID_NUMBERS, *("GB", "1.GB", "16B", "16GBs")],
)
def test_an_invalid_size_is_refused(text: str) -> None:
    with pytest.raises(RequestError):
        parsing.parse_size(text)


# -- durations -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (90, 90),
        (0, 0),
        ("1d 1h1m 1s", 90061),
        ("0s", 0),
        (" 10 M ", 600),
        ("1hr 1 minute", 3660),
        ("1Day30secs", 86430),
        (True, math.inf),
    ],
)
def test_a_duration_is_in_seconds(text: str | float, seconds: float) -> None:
    """A number is in seconds, the parts of a text are added, and True means no limit."""
    assert parsing.parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("longest", [math.inf, "999999999999d"])
def test_python_can_sleep_for_the_longest_duration(longest: str | float) -> None:
    assert 1e9 < parsing.parse_duration(longest) <= threading.TIMEOUT_MAX


@pytest.mark.parametrize(
    "text",
    [
        *INVALID_NUMBERS,
        "3",  # without a unit
        *("m", "1h30", "10minx", "5ms", "1w"),
        *(-0.5, math.nan, False, None),
    ],
)
def test_an_invalid_duration_is_refused(text: object) -> None:
    """Text needs a unit, because users who type a number alone mean minutes or hours."""
    with pytest.raises(RequestError):
        parsing.parse_duration(text)


# -- times -----------------------------------------------------------------------------------------

NOW = time.mktime((2026, 11, 23, 15, 0, 0, 0, 0, -1))  # a Monday, in local time


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("18:00", "Mon 23 18:00"),
        ("15:00", "Tue 24 15:00"),  # the current time
        ("6:30 PM", "Mon 23 18:30"),
        ("12am", "Tue 24 00:00"),
        ("12pm", "Tue 24 12:00"),
        ("Fri", "Fri 27 23:59"),
        ("fri 6pm", "Fri 27 18:00"),
        ("Monday", "Mon 23 23:59"),
        ("mon 9:00", "Mon 30 09:00"),
        ("tomorrow", "Tue 24 23:59"),
        ("2026-11-25T18:00", "Wed 25 18:00"),
    ],
)
def test_an_end_time_is_the_next_occurrence(text: str, expected: str) -> None:
    """A time of day is the next one, and a day without a time lasts until its last minute."""
    moment = parsing.parse_moment(text, NOW)
    assert time.strftime("%a %d %H:%M", time.localtime(moment)) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", "soon", "s", "13pm", "24:00", "9", "2026-13-01", "2026-11-23 15:00"),
        *("9998-12-31", "2127-01-01 18:00"),
    ],
)
def test_an_invalid_end_time_is_refused(text: str) -> None:
    """A time in the past or more than a century away is also refused."""
    with pytest.raises(RequestError):
        parsing.parse_moment(text, NOW)


def utc(text: str) -> float:
    """Return a UTC time such as `25 00:30`, in October 2026, or `2027-03-28 01:30`, in seconds."""
    date, _, clock = text.rpartition(" ")
    full = f"2026-10-{date}" if len(date) == 2 else date
    return calendar.timegm(time.strptime(f"{full} {clock}", "%Y-%m-%d %H:%M"))


@pytest.mark.usefixtures("berlin")
@pytest.mark.parametrize(
    ("now", "text", "expected"),
    [
        ("25 00:10", "02:30", "25 00:30"),
        ("25 00:45", "02:30", "25 01:30"),
        ("25 01:45", "02:30", "26 01:30"),
        ("2027-03-28 00:55", "02:30", "2027-03-28 01:30"),
    ],
)
def test_an_end_time_in_the_night_of_a_clock_change(now: str, text: str, expected: str) -> None:
    """A time that occurs twice means the next occurrence; a skipped one is an hour later."""
    assert parsing.parse_moment(text, utc(now)) == utc(expected)


@pytest.mark.usefixtures("berlin")
@pytest.mark.parametrize(
    ("now", "text", "expected"),
    [
        ("25 00:45", "02:30", "25 00:00"),
        ("25 01:45", "02:30", "25 01:00"),
        ("25 12:00", "today", "24 22:00"),
    ],
)
def test_the_start_of_a_report_in_the_night_of_a_clock_change(
    now: str, text: str, expected: str
) -> None:
    """A past time that occurred twice means the last occurrence, from the start of its hour."""
    assert parsing.parse_since(text, utc(now)) == (utc(expected), None)
